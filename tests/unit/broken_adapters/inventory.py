"""Faults in listings, usage and limits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import anyio.lowlevel

from l2kit.adapter import KeyInfo, Usage
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from tests.unit.broken_adapters.base import BrokenAdapter, PersistentMemory


class ListsTwice(BrokenAdapter):
    """Lists each key twice."""

    caught_by = "test_listing_agrees_with_what_was_stored"

    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        for _ in range(2):
            async for info in super().iter_keys():
                yield info


class ListsPayloadSizes(BrokenAdapter):
    """Lists sizes without the envelope."""

    caught_by = "test_listing_agrees_with_what_was_stored"

    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        async for info in super().iter_keys():
            yield KeyInfo(info.key, info.size - 256)


class CountsReplacedObjectsTwice(BrokenAdapter):
    """Its usage grows with every store, replaced objects included."""

    caught_by = "test_usage_agrees_with_what_was_stored"
    stores = 0

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        self.stores += 1
        return await super().store_one(key, data)

    async def usage(self) -> Usage:
        return Usage(self._used_bytes, self.config.max_bytes, self.stores)


class HasNoLimit(BrokenAdapter):
    """Declares a limit and grows beyond it."""

    caught_by = "test_the_limit_holds"

    def _remove(self, key: ObjectKey) -> bool:
        if len(self._objects) > 8:
            self._used_bytes = 0
            return False
        return super()._remove(key)


class ChecksItsLimitTooEarly(BrokenAdapter):
    """Makes room first and writes later: the stores of one batch share the same room."""

    caught_by = "test_the_limit_holds_for_one_batch"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        payload, limit = b"".join(data), self.config.max_bytes
        if limit is not None:
            while self._used_bytes + len(payload) > limit and self._objects:
                self._remove(next(iter(self._objects)))
            await anyio.lowlevel.checkpoint()
        self._remove(key)
        self._objects[key] = payload
        self._used_bytes += len(payload)
        return StoreStatus.STORED


class StartsCountingAtZero(BrokenAdapter, PersistentMemory):
    """Does not count what it finds when it opens."""

    caught_by = "test_the_limit_holds_for_what_was_there_before"
    capabilities = PersistentMemory.capabilities

    async def open(self) -> None:
        await super().open()
        self._used_bytes = 0


class EvictsForTheImpossible(BrokenAdapter):
    """Evicts everything for an object that cannot fit at all."""

    caught_by = "test_an_object_above_the_whole_limit_is_refused_alone"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        if self.config.max_bytes is not None and sum(map(len, data)) > self.config.max_bytes:
            self._objects.clear()
        return await super().store_one(key, data)


class RemovesTheOldBeforeItDropsTheNew(BrokenAdapter):
    """An object that is dropped for want of room takes the one that it would have replaced with it."""

    caught_by = "test_a_writer_without_room_leaves_old_or_new"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        self._remove(key)
        return await super().store_one(key, data)


class EvictsTheLocked(BrokenAdapter):
    """A locked object that is evicted cannot be loaded any more."""

    caught_by = "test_an_owned_lock_survives_eviction"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        return await super().load_one(key, into) if key in self._objects else None
