"""Leases: every hit of a lookup holds one, until it is released or the adapter closes."""

# ruff: noqa: D102 - the names of the tests say what they test

from __future__ import annotations

import inspect

from l2kit.testing.groups.base import Adapter, Conformance, content, same


class LockTests(Conformance):
    """Leases, as strong as the capability ``lock`` says."""

    async def test_every_hit_holds_a_lease_until_it_is_released(self, adapter: Adapter) -> None:
        await self.store(adapter, {key: content(key, 100) for key in self.keys(3)})
        await adapter.submit_lookup_and_lock_task(self.keys(5))
        assert adapter.held_leases == 3
        await adapter.submit_lookup_and_lock_task(self.keys(1))
        assert adapter.held_leases == 4, "two lookups of a key hold two leases"
        await adapter.submit_unlock_task(self.keys(3))
        assert adapter.held_leases == 1
        await adapter.submit_unlock_task(self.keys(1))
        assert adapter.held_leases == 0

    async def test_releasing_what_is_not_held_is_a_miss(self, adapter: Adapter) -> None:
        await self.store(adapter, {self.key(): content("unlocked", 100)})
        await adapter.submit_lookup_and_lock_task([self.key()])
        outcomes = await adapter.submit_unlock_task([self.key(), self.key(), self.key(1)])
        assert [outcome.status for outcome in outcomes] == ["deleted", "miss", "miss"]
        await self.expect(adapter, {self.key(): content("unlocked", 100)})

    async def test_an_owned_lock_keeps_a_deleted_object_until_the_last_release(self, adapter: Adapter) -> None:
        self._needs_owned_locks(adapter)
        data = content("locked", 100_000)
        await self.store(adapter, {self.key(): data})
        for _ in range(2):
            await adapter.submit_lookup_and_lock_task([self.key()])
        await adapter.submit_delete_task([self.key()])
        for held in (2, 1):
            assert adapter.held_leases == held
            outcome, received = await self.load(adapter, self.key(), len(data))
            assert outcome.loaded, outcome
            assert same(received, data)
            await adapter.submit_unlock_task([self.key()])
        await self.expect(adapter, {self.key(): None})

    async def test_an_owned_lock_survives_replacement(self, adapter: Adapter) -> None:
        self._needs_owned_locks(adapter)
        old, new = content("old", 100_000), content("new", 100_000)
        await self.store(adapter, {self.key(): old})
        await adapter.submit_lookup_and_lock_task([self.key()])
        await adapter.submit_delete_task([self.key()])
        await self.store(adapter, {self.key(): new})
        outcome, received = await self.load(adapter, self.key(), len(old))
        assert outcome.loaded, outcome
        assert same(received, old) or same(received, new)
        await adapter.submit_unlock_task([self.key()])
        await self.expect(adapter, {self.key(): new})

    async def test_a_lease_does_not_hinder_storing_and_deleting(self, adapter: Adapter) -> None:
        await self.store(adapter, {self.key(): content("first", 100)})
        await adapter.submit_lookup_and_lock_task([self.key()])
        [deleted] = await adapter.submit_delete_task([self.key()])
        assert deleted.status == "deleted"
        await self.store(adapter, {self.key(): content("second", 200)})
        await adapter.submit_unlock_task([self.key()])
        await self.expect(adapter, {self.key(): content("second", 200)})

    async def test_a_server_lock_extends_the_time_to_live(self, adapter: Adapter) -> None:
        if adapter.capabilities.lock != "server":
            self.skip(f"the capability lock='server' (it is {adapter.capabilities.lock!r})")
        await self.store(adapter, {self.key(): content("leased", 100)})
        before = await self._time_to_live_s(adapter)
        await adapter.submit_lookup_and_lock_task([self.key()])
        assert await self._time_to_live_s(adapter) > before, "the lookup's lease did not extend the time to live"
        await adapter.submit_unlock_task([self.key()])
        await self.expect(adapter, {self.key(): content("leased", 100)})

    async def test_closing_releases_every_lease(self, url: str) -> None:
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, {key: content(key, 5000) for key in self.keys(20)})
            await adapter.submit_lookup_and_lock_task(self.keys(20))
            await adapter.submit_lookup_and_lock_task(self.keys(5))
            assert adapter.held_leases == 25
        assert adapter.held_leases == 0

    async def _time_to_live_s(self, adapter: Adapter) -> float:
        try:
            left = self.raw_time_to_live_s(adapter, self.key())
            return await left if inspect.isawaitable(left) else left
        except NotImplementedError:
            self.skip("the hook raw_time_to_live_s, which goes around the adapter")

    def _needs_owned_locks(self, adapter: Adapter) -> None:
        if adapter.capabilities.lock != "owned":
            self.skip(f"the capability lock='owned' (it is {adapter.capabilities.lock!r})")
