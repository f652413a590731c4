"""What a tier says that it holds, and that its limit is one."""

# ruff: noqa: D102 - the names of the tests say what they test

from __future__ import annotations

from l2kit.adapter import L2Adapter
from l2kit.errors import CapacityError
from l2kit.memory import MemoryObj
from l2kit.testing.groups.base import Adapter, Conformance, content, same, source

_OBJECT_BYTES = 64 << 10
_LIMIT_BYTES = 10 * _OBJECT_BYTES


class InventoryTests(Conformance):
    """Listing, usage, capacity and eviction."""

    async def test_listing_agrees_with_what_was_stored(self, adapter: Adapter) -> None:
        if type(adapter).iter_keys is L2Adapter.iter_keys:
            self.skip("an adapter that can list its keys")
        before = {info.key for info in [info async for info in adapter.iter_keys()]}
        objects = {key: content(key, 1000 + number) for number, key in enumerate(self.keys(30))}
        outcomes = await self.store(adapter, objects)
        await adapter.submit_delete_task([self.key(7)])
        sizes = {key: outcome.nbytes for key, outcome in zip(objects, outcomes, strict=True)}
        del sizes[self.key(7)]
        listed = [info async for info in adapter.iter_keys()]
        assert len(listed) == len({info.key for info in listed}), "a key is listed twice"
        assert {info.key: info.size for info in listed if info.key not in before} == sizes

    async def test_usage_agrees_with_what_was_stored(self, adapter: Adapter) -> None:
        if type(adapter).usage is L2Adapter.usage:
            self.skip("an adapter that can report its usage")
        before = await adapter.usage()
        outcomes = await self.store(adapter, {key: content(key, 50_000) for key in self.keys(8)})
        full = await adapter.usage()
        assert full.used_bytes >= before.used_bytes + sum(outcome.nbytes for outcome in outcomes)
        await self.store(adapter, {key: content((key, 2), 50_000) for key in self.keys(8)})
        again = await adapter.usage()
        assert again.objects == full.objects, "a replaced object is counted twice"
        await adapter.submit_delete_task(self.keys(8))
        after = await adapter.usage()
        assert after.used_bytes < full.used_bytes
        if before.objects is not None and full.objects is not None:
            assert full.objects == before.objects + 8
            assert after.objects == before.objects
        if full.max_bytes is not None:
            assert full.used_bytes <= full.max_bytes

    async def test_the_limit_holds(self, url: str) -> None:
        async with await self.tiny(url, _LIMIT_BYTES) as adapter:
            for number in range(40):
                [outcome] = await adapter.submit_store_task([self.key(number)], [self._object(number)])
                if not outcome.present:
                    assert not adapter.capabilities.evicts, f"an adapter that evicts makes room: {outcome}"
                    assert outcome.status == "dropped" or isinstance(outcome.error, CapacityError), outcome
            found = await adapter.submit_lookup_and_lock_task(self.keys(40))
            await adapter.submit_unlock_task([self.key(n) for n, outcome in enumerate(found) if outcome.hit])
            assert 0 < sum(outcome.size for outcome in found) <= _LIMIT_BYTES
            assert found[39 if adapter.capabilities.evicts else 0].hit
            await self.expect(
                adapter,
                {self.key(n): content(n, _OBJECT_BYTES) if found[n].hit else None for n in range(40)},
            )
            if type(adapter).usage is not L2Adapter.usage:
                usage = await adapter.usage()
                assert usage.max_bytes == _LIMIT_BYTES
                assert usage.used_bytes <= _LIMIT_BYTES

    async def test_the_limit_holds_for_one_batch(self, url: str) -> None:
        async with await self.tiny(url, _LIMIT_BYTES) as adapter:
            await adapter.submit_store_task(self.keys(40), [self._object(n) for n in range(40)])
            found = await adapter.submit_lookup_and_lock_task(self.keys(40))
            await adapter.submit_unlock_task(self.keys(40))
            assert 0 < sum(outcome.size for outcome in found) <= _LIMIT_BYTES

    async def test_the_limit_holds_for_what_was_there_before(self, url: str) -> None:
        async with self.open_adapter(url) as adapter:
            if not adapter.capabilities.persistent:
                self.skip("the capability persistent")
            await self.store(adapter, {key: content(key, _OBJECT_BYTES) for key in self.keys(20)})
        async with await self.tiny(self.reopen_url(url), _LIMIT_BYTES) as adapter:
            await adapter.submit_store_task([self.key(99)], [self._object(99)])
            found = await adapter.submit_lookup_and_lock_task([*self.keys(20), self.key(99)])
            await adapter.submit_unlock_task([*self.keys(20), self.key(99)])
            assert sum(outcome.size for outcome in found) <= _LIMIT_BYTES

    async def test_an_object_above_the_whole_limit_is_refused_alone(self, url: str) -> None:
        async with await self.tiny(url, _LIMIT_BYTES) as adapter:
            await self.store(adapter, {self.key(0): content("kept", _OBJECT_BYTES)})
            too_large = source(content("too large", _LIMIT_BYTES))
            [outcome] = await adapter.submit_store_task([self.key(1)], [too_large])
            assert outcome.status == "dropped" or isinstance(outcome.error, CapacityError), outcome
            await self.expect(adapter, {self.key(0): content("kept", _OBJECT_BYTES), self.key(1): None})

    async def test_a_writer_without_room_leaves_old_or_new(self, url: str) -> None:
        async with await self.tiny(url, _LIMIT_BYTES) as adapter:
            old, new = content("old", _OBJECT_BYTES), content("new", _OBJECT_BYTES)
            await self.store(adapter, {self.key(): old})
            too_large = content("too large", _LIMIT_BYTES)
            tasks = [
                adapter.submit_store_task([self.key()], [source(data)]) for data in (new, too_large, new, too_large)
            ]
            outcomes = [outcome for task in tasks for outcome in await task]
            for good, bad in (outcomes[:2], outcomes[2:]):
                assert good.present, good
                assert bad.status == "dropped" or isinstance(bad.error, CapacityError), bad
            [held] = await self.agreed(adapter, [self.key()], _OBJECT_BYTES)
            assert same(held, new if any(outcome.status == "stored" for outcome in outcomes) else old)

    async def test_an_owned_lock_survives_eviction(self, url: str) -> None:
        async with await self.tiny(url, _LIMIT_BYTES) as adapter:
            if adapter.capabilities.lock != "owned" or not adapter.capabilities.evicts:
                self.skip("the capabilities lock='owned' and evicts")
            await self.store(adapter, {self.key(0): content("locked", _OBJECT_BYTES)})
            await adapter.submit_lookup_and_lock_task([self.key(0)])
            for number in range(1, 40):
                await adapter.submit_store_task([self.key(number)], [self._object(number)])
            outcome, received = await self.load(adapter, self.key(0), _OBJECT_BYTES)
            assert outcome.loaded, outcome
            assert same(received, content("locked", _OBJECT_BYTES))
            await adapter.submit_unlock_task([self.key(0)])

    def _object(self, number: int) -> MemoryObj:
        return source(content(number, _OBJECT_BYTES))
