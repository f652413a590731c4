"""Batches: one exact outcome for each key, in key order; a miss is a value, and no key pays for another."""

# ruff: noqa: D102 - the names of the tests say what they test

from __future__ import annotations

import pytest

from l2kit.errors import CapacityError, ConfigError
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.testing.groups.base import UNTOUCHED, Adapter, Conformance, content, destination, same, source


class BatchTests(Conformance):
    """Batches and their outcomes."""

    async def test_a_miss_is_a_value_and_leaves_the_buffer(self, adapter: Adapter) -> None:
        outcome, received = await self.load(adapter, self.key(), 5000)
        assert (outcome.status, outcome.nbytes, outcome.error) == ("miss", 0, None)
        assert same(received, bytes([UNTOUCHED]) * 5000)
        [lookup] = await adapter.submit_lookup_and_lock_task([self.key()])
        assert (lookup.status, lookup.size, lookup.error) == ("miss", 0, None)
        [deleted] = await adapter.submit_delete_task([self.key()])
        assert (deleted.status, deleted.error) == ("miss", None)
        assert adapter.held_leases == 0

    async def test_lookup_knows_the_stored_size(self, adapter: Adapter) -> None:
        [stored] = await self.store(adapter, {self.key(): content("size", 5000)})
        [lookup] = await adapter.submit_lookup_and_lock_task([self.key()])
        assert lookup.size == stored.nbytes
        await adapter.submit_unlock_task([self.key()])

    @pytest.mark.parametrize("nbytes", [7000, 5000, 1, 0], ids=["longer", "as long", "shorter", "empty"])
    async def test_a_second_store_replaces_or_keeps_and_says_which(self, adapter: Adapter, nbytes: int) -> None:
        first, second = content("first", 5000), content("second", nbytes)
        await self.store(adapter, {self.key(): first})
        [outcome] = await self.store(adapter, {self.key(): second})
        await self.expect(adapter, {self.key(): second if outcome.status == "stored" else first})

    async def test_delete(self, adapter: Adapter) -> None:
        objects = {key: content(key, 3000) for key in self.keys(3)}
        await self.store(adapter, objects)
        outcomes = await adapter.submit_delete_task([self.key(0), self.key(9), self.key(2)])
        assert [outcome.status for outcome in outcomes] == ["deleted", "miss", "deleted"]
        await self.expect(adapter, {self.key(0): None, self.key(1): objects[self.key(1)], self.key(2): None})

    async def test_a_deleted_object_can_be_stored_again(self, adapter: Adapter) -> None:
        await self.store(adapter, {self.key(): content("first", 3000)})
        await adapter.submit_delete_task([self.key()])
        [outcome] = await self.store(adapter, {self.key(): content("second", 2000)})
        assert outcome.status == "stored"
        await self.expect(adapter, {self.key(): content("second", 2000)})

    async def test_empty_batches(self, adapter: Adapter) -> None:
        assert await adapter.submit_store_task([], []) == []
        assert await adapter.submit_lookup_and_lock_task([]) == []
        assert await adapter.submit_load_task([], []) == []
        assert await adapter.submit_unlock_task([]) == []
        assert await adapter.submit_delete_task([]) == []
        assert [pair async for pair in adapter.submit_load_task([], [])] == []

    async def test_lists_of_different_lengths_are_refused(self, adapter: Adapter) -> None:
        with pytest.raises(ConfigError):
            _ = adapter.submit_store_task(self.keys(2), [source(b"one")])
        with pytest.raises(ConfigError):
            _ = adapter.submit_load_task([self.key()], [destination(1), destination(1)])

    async def test_a_key_given_twice_has_two_outcomes(self, adapter: Adapter) -> None:
        key, other, data = self.key(0), self.key(1), content("twice", 4000)
        stored = await adapter.submit_store_task([key, other, key], [source(data)] * 3)
        assert [outcome.present for outcome in stored] == [True, True, True]
        targets = [destination(len(data)) for _ in range(3)]
        loaded = await adapter.submit_load_task([key, key, other], targets)
        assert [outcome.status for outcome in loaded] == ["loaded"] * 3
        assert same([target.tobytes() for target in targets], [data] * 3)
        looked_up = await adapter.submit_lookup_and_lock_task([key, key, other])
        assert [outcome.status for outcome in looked_up] == ["hit"] * 3
        await adapter.submit_unlock_task([key, other])
        assert adapter.held_leases == 0
        deleted = await adapter.submit_delete_task([other, key, other])
        assert [outcome.status == "deleted" for outcome in deleted].count(True) == 2
        await self.expect(adapter, {key: None, other: None})

    async def test_a_partial_batch_has_exact_outcomes_in_key_order(self, adapter: Adapter) -> None:
        keys = self.keys(60)
        objects = {key: content(key, 100 + 700 * n) for n, key in enumerate(keys) if n % 3}
        await self.store(adapter, objects)
        # Of each three keys the first is missing, the second is loaded, the third has no room.
        targets = [destination(len(objects.get(key, b"?")) - (n % 3 == 2)) for n, key in enumerate(keys)]
        outcomes = await adapter.submit_load_task(keys, targets)
        assert [outcome.status for outcome in outcomes] == ["miss", "loaded", "failed"] * 20
        for key, outcome, target in zip(keys, outcomes, targets, strict=True):
            if outcome.loaded:
                assert same(target.tobytes(), objects[key])
                assert outcome.nbytes == len(objects[key])
            elif outcome.status == "failed":
                assert isinstance(outcome.error, CapacityError)
        found = await adapter.submit_lookup_and_lock_task(keys)
        assert [outcome.status for outcome in found] == ["miss", "hit", "hit"] * 20
        released = await adapter.submit_unlock_task(keys)
        assert [outcome.status for outcome in released] == ["miss", "deleted", "deleted"] * 20

    async def test_one_layout_for_each_key(self, adapter: Adapter) -> None:
        layouts = [Layout.kv(layers=1, tokens=n + 1, kv_heads=1, head_dim=8, dtype="float16") for n in range(12)]
        data = [content(n, layout.nbytes) for n, layout in enumerate(layouts)]
        objects = [MemoryObj.wrap(part, layout) for part, layout in zip(data, layouts, strict=True)]
        await adapter.submit_store_task(self.keys(12), objects)
        targets = [MemoryObj.allocate(layout) for layout in layouts]
        outcomes = await adapter.submit_load_task(self.keys(12), targets)
        assert [outcome.nbytes for outcome in outcomes] == [layout.nbytes for layout in layouts]
        assert same([target.tobytes() for target in targets], data)

    async def test_iterating_gives_each_key_once_with_its_final_outcome(self, adapter: Adapter) -> None:
        keys = self.keys(40)
        objects = {key: content(key, 20_000) for key in keys[::2]}
        await self.store(adapter, objects)
        targets = [destination(20_000) for _ in keys]
        task = adapter.submit_load_task(keys, targets)
        seen = {}
        async for index, outcome in task:
            assert index not in seen, "the same key twice"
            seen[index] = outcome
            if outcome.loaded:  # readable at once, before the batch ends
                assert same(targets[index].tobytes(), objects[keys[index]])
        assert sorted(seen) == list(range(len(keys)))
        assert [seen[index] for index in range(len(keys))] == await task
        assert task.ended

    async def test_a_large_batch_of_small_objects(self, adapter: Adapter) -> None:
        objects = {key: content(key, 512) for key in self.keys(512)}
        await self.store(adapter, objects)
        await self.expect(adapter, {**objects, self.key(1000): None})

    async def test_counters_count_what_happened(self, adapter: Adapter) -> None:
        await self.store(adapter, {self.key(): content("counted", 3000)})
        await self.expect(adapter, {self.key(): content("counted", 3000), self.key(1): None})
        counters = adapter.counters
        assert counters["store.stored"] == 1
        assert (counters["load.loaded"], counters["load.miss"], counters["load.failed"]) == (1, 1, 0)
        assert counters["loaded_bytes"] == 3000
        assert counters["stored_bytes"] >= 3000
