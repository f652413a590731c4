"""Faults in outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from l2kit.adapter import Capabilities
from l2kit.errors import ConfigError
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.memory import MemoryObj
from l2kit.outcomes import StoreStatus
from l2kit.task import L2Task
from tests.unit.broken_adapters.base import BrokenAdapter


class RaisesForAMiss(BrokenAdapter):
    """Passes the client's "no such key" on as an error."""

    caught_by = "test_a_miss_is_a_value_and_leaves_the_buffer"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        if key not in self._objects:
            raise KeyError(key)
        return await super().load_one(key, into)


class ScribblesOnAMiss(BrokenAdapter):
    """Writes to the destination before it knows that there is nothing to load."""

    caught_by = "test_a_miss_is_a_value_and_leaves_the_buffer"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        if key not in self._objects:
            into[-1][0] = 0
        return await super().load_one(key, into)


class FindsNothing(BrokenAdapter):
    """A lookup that always says no: nothing is ever loaded, and everything looks well."""

    caught_by = "test_lookup_knows_the_stored_size"

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return [None for _ in keys]


class LosesSecondStores(BrokenAdapter):
    """Keeps the old object and says that it stored the new one."""

    caught_by = "test_a_second_store_replaces_or_keeps_and_says_which"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        return StoreStatus.STORED if key in self._objects else await super().store_one(key, data)


class LeavesTheTailOfTheOld(BrokenAdapter):
    """Writes over the old object in place and does not cut it."""

    caught_by = "test_a_second_store_replaces_or_keeps_and_says_which"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        whole = b"".join(data)
        return await super().store_one(key, [memoryview(whole + self._objects.get(key, b"")[len(whole) :])])


class AlwaysDeletes(BrokenAdapter):
    """Says of everything that it was deleted just now."""

    caught_by = "test_delete"

    async def delete_one(self, key: ObjectKey) -> bool:
        await super().delete_one(key)
        return True


class NeverDeletes(BrokenAdapter):
    """Says that it deleted and keeps the object."""

    caught_by = "test_delete"

    async def delete_one(self, key: ObjectKey) -> bool:
        return key in self._objects


class KeepsTombstones(BrokenAdapter):
    """A key that was deleted once is never stored again."""

    caught_by = "test_a_deleted_object_can_be_stored_again"

    async def open(self) -> None:
        await super().open()
        self.tombstones: set[ObjectKey] = set()

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        return StoreStatus.DROPPED if key in self.tombstones else await super().store_one(key, data)

    async def delete_one(self, key: ObjectKey) -> bool:
        self.tombstones.add(key)
        return await super().delete_one(key)


class FailsEmptyBatches(BrokenAdapter):
    """Refuses a batch without keys."""

    caught_by = "test_empty_batches"

    def submit_delete_task(self, keys: Any) -> Any:
        if not keys:
            raise ConfigError("wrong number of arguments for 'del' command")
        return super().submit_delete_task(keys)


class ZipsItsArguments(BrokenAdapter):
    """Stores as many objects as there are keys and forgets the others."""

    caught_by = "test_lists_of_different_lengths_are_refused"

    def submit_store_task(self, keys: Any, objects: Any, *, deadline: Any = None) -> Any:
        count = min(len(keys), len(objects))
        return super().submit_store_task(keys[:count], objects[:count], deadline=deadline)


class FillsOneDestinationForEachKey(BrokenAdapter):
    """Loads a key that is given twice into its last destination, and says that both are loaded."""

    caught_by = "test_a_key_given_twice_has_two_outcomes"

    def submit_load_task(self, keys: Any, objects: Any, *, deadline: Any = None) -> Any:
        last = {key: index for index, key in enumerate(keys)}
        targets = [
            obj if last[key] == index else MemoryObj.allocate(obj.layout)
            for index, (key, obj) in enumerate(zip(keys, objects, strict=True))
        ]
        return super().submit_load_task(keys, targets, deadline=deadline)


class FailsTheBatchForOneKey(BrokenAdapter):
    """One key that is missing makes the lookup of all others a miss."""

    caught_by = "test_a_partial_batch_has_exact_outcomes_in_key_order"

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        found = await super().acquire_many(keys)
        return found if all(found) else [None for _ in keys]


class AnswersSorted(BrokenAdapter):
    """Answers in the order of the backend's index instead of the keys'."""

    caught_by = "test_a_partial_batch_has_exact_outcomes_in_key_order"

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return await super().acquire_many(sorted(keys))


class TakesTheFirstLayoutForAll(BrokenAdapter):
    """Cuts every object of a batch to the size of the first one."""

    caught_by = "test_one_layout_for_each_key"

    def submit_store_task(self, keys: Any, objects: Any, *, deadline: Any = None) -> Any:
        if objects and all(obj.layout.kind != "raw" and obj.nbytes >= objects[0].nbytes for obj in objects):
            objects = [MemoryObj.wrap(list(obj.segments), objects[0].layout) for obj in objects]
        return super().submit_store_task(keys, objects, deadline=deadline)


class _TellsTwice(L2Task[Any]):
    __slots__ = ()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Any]]:
        async for pair in super().__aiter__():
            yield pair
            yield pair


class ReportsACompletionTwice(BrokenAdapter):
    """Tells the end of each key when it happens, and once more: engines crash at that."""

    caught_by = "test_iterating_gives_each_key_once_with_its_final_outcome"

    def submit_load_task(self, keys: Any, objects: Any, *, deadline: Any = None) -> Any:
        task = super().submit_load_task(keys, objects, deadline=deadline)
        task.__class__ = _TellsTwice
        return task


class LosesKeysBeyond500(BrokenAdapter):
    """Asks for as many keys as one request takes, and takes the rest for missing."""

    caught_by = "test_a_large_batch_of_small_objects"

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return [*await super().acquire_many(keys[:500]), *(None for _ in keys[500:])]


class CountsNothing(BrokenAdapter):
    """Its counters stay at zero: a tier that fails for days looks idle."""

    caught_by = "test_counters_count_what_happened"

    @property
    def counters(self) -> Counter[str]:
        return Counter()


class AnswersAGroupBackwards(BrokenAdapter):
    """Loads several small objects in one call, and gives their answers in the order in which they came."""

    caught_by = "test_a_partial_batch_has_exact_outcomes_in_key_order"
    capabilities = Capabilities(persistent=False, shared=False, lock="owned", evicts=True, group_keys=8)

    async def load_many(self, items: Sequence[LoadItem]) -> Sequence[int | Exception | None]:
        return [*await super().load_many(items)][::-1]


class FailsAGroupForOneOfItsKeys(BrokenAdapter):
    """Loads several small objects in one call, and takes the miss of one for the failure of all."""

    caught_by = "test_a_partial_batch_has_exact_outcomes_in_key_order"
    capabilities = Capabilities(persistent=False, shared=False, lock="owned", evicts=True, group_keys=8)

    async def load_many(self, items: Sequence[LoadItem]) -> Sequence[int | Exception | None]:
        sizes = await super().load_many(items)
        return [None] * len(items) if None in sizes else sizes


class StoresTheFirstOfAGroup(BrokenAdapter):
    """Says of every small object in a call what is true of the first one."""

    caught_by = "test_a_large_batch_of_small_objects"
    capabilities = Capabilities(persistent=False, shared=False, lock="owned", evicts=True, group_keys=8)

    async def store_many(self, items: Sequence[StoreItem]) -> Sequence[StoreStatus | Exception]:
        return [*await super().store_many(items[:1])] * len(items)
