"""Faults in an index beside the objects: lookup and load come to differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import anyio.lowlevel

from l2kit.adapter import Capabilities
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from tests.unit.broken_adapters.base import BrokenAdapter, PersistentMemory


class BelievesItsOwnIndex(BrokenAdapter):
    """Enters an object into its index before it is written: a store that fails leaves the entry."""

    caught_by = "test_lookup_agrees_with_load_after"
    index: dict[ObjectKey, int]

    async def open(self) -> None:
        await super().open()
        self.index = {}

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        self.index[key] = sum(map(len, data))
        await anyio.lowlevel.checkpoint()
        return await super().store_one(key, data)

    async def delete_one(self, key: ObjectKey) -> bool:
        self.index.pop(key, None)
        return await super().delete_one(key)

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        await super().acquire_many(keys)
        return [self.index.get(key) for key in keys]


class RemembersWhatItEvicted(BelievesItsOwnIndex):
    """Its index hears of stores and deletes, not of evictions."""

    caught_by = "test_lookup_agrees_with_load_after_eviction"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        status = await super(BelievesItsOwnIndex, self).store_one(key, data)
        if status is StoreStatus.STORED:
            self.index[key] = sum(map(len, data))
        return status


class LeavesTheDamaged(BrokenAdapter):
    """Finds a damaged object again and again, and fails to load it each time."""

    caught_by = "test_lookup_agrees_with_load_after_damage"

    async def open(self) -> None:
        await super().open()
        self.deletes_damaged = False


class BringsBackWhatWasDeleted(BrokenAdapter, PersistentMemory):
    """Deletes from memory only: reopening brings the object back."""

    caught_by = "test_lookup_agrees_with_load_after_reopening"
    capabilities = PersistentMemory.capabilities

    async def delete_one(self, key: ObjectKey) -> bool:
        return self._remove(key)


class NeverAsksAgain(BrokenAdapter):
    """Answers lookups from what it saw once, whatever other processes do."""

    caught_by = "test_lookup_agrees_with_load_after_another_writer"
    capabilities = Capabilities(persistent=True, shared=True, lock="none", evicts=True)
    everybodys: ClassVar[dict[ObjectKey, bytes]] = {}

    async def open(self) -> None:
        await super().open()
        self._objects = self.everybodys  # type: ignore[assignment]
        self.seen: dict[ObjectKey, int | None] = {}

    async def close(self) -> None:
        """Others go on."""

    def _touch(self, key: ObjectKey) -> None:
        """No order of use."""

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        self.seen.pop(key, None)
        return await super().store_one(key, data)

    async def delete_one(self, key: ObjectKey) -> bool:
        self.seen.pop(key, None)
        return await super().delete_one(key)

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        for key, size in zip(keys, await self.lookup_many(keys), strict=True):
            self.seen.setdefault(key, size)
        return [self.seen[key] for key in keys]

    async def release_many(self, keys: Sequence[ObjectKey]) -> None:
        """There are no locks."""
