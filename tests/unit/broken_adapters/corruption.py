"""Faults in dealing with damaged objects."""

from __future__ import annotations

from collections.abc import Sequence

from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from tests.unit.broken_adapters.base import BrokenAdapter


class PadsItsObjects(BrokenAdapter):
    """Stores more bytes than it says."""

    caught_by = "test_the_raw_hooks_see_what_is_stored"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        return await super().store_one(key, [*data, memoryview(b"\0")])


class KeepsTheDamaged(BrokenAdapter):
    """A damaged object is present: it is never replaced, nor deleted."""

    caught_by = "test_damaged_bytes_are_corrupt_and_healed"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        return StoreStatus.ALREADY_PRESENT if key in self._objects else await super().store_one(key, data)

    async def delete_one(self, key: ObjectKey) -> bool:
        return False


class TakesTheDamagedForAMiss(BrokenAdapter):
    """Hides damage behind a miss: nobody counts it, and the damaged object stays."""

    caught_by = "test_another_objects_bytes_are_corrupt"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        stored = self._objects.get(key)
        return None if stored is None or key.digest not in stored else await super().load_one(key, into)


class HealsByClearingEverything(BrokenAdapter):
    """Drops all objects where one is damaged."""

    caught_by = "test_a_damaged_object_does_not_fail_its_batch"

    async def delete_one(self, key: ObjectKey) -> bool:
        found = await super().delete_one(key)
        self._objects.clear()
        return found


class RefusesWhatItDidNotWriteLast(BrokenAdapter):
    """Takes a whole, valid object for damaged because an earlier process wrote it."""

    caught_by = "test_an_older_version_put_back_is_a_version"

    async def open(self) -> None:
        await super().open()
        self.last: dict[ObjectKey, bytes] = {}

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        self.last[key] = b"".join(data)
        return await super().store_one(key, data)

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        return await super().load_one(key, into) if self._objects.get(key) == self.last.get(key) else None
