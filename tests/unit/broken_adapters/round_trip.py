"""Faults in what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from l2kit.adapter import Capabilities
from l2kit.errors import BackendError
from l2kit.keys import ObjectKey
from l2kit.layout import KIND_CODES
from l2kit.memory import MemoryObj
from l2kit.outcomes import StoreStatus
from tests.unit.broken_adapters.base import BrokenAdapter


class CutsLargeObjects(BrokenAdapter):
    """Keeps the first mebibyte of an object."""

    caught_by = "test_an_object_of_any_size_comes_back"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        return await super().store_one(key, [memoryview(b"".join(data)[: 1 << 20])])


class DropsTheEmptyObject(BrokenAdapter):
    """Takes an object of 0 bytes for a miss."""

    caught_by = "test_an_object_of_any_size_comes_back"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        return await super().load_one(key, into) if len(into) > 1 else None


class KnowsOnlyOneLayout(BrokenAdapter):
    """Looks into the envelope and drops what is not raw bytes."""

    caught_by = "test_an_object_of_any_layout_comes_back"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        return await super().store_one(key, data) if data[0][16] == KIND_CODES["raw"] else StoreStatus.DROPPED


class TakesOnly1024Segments(BrokenAdapter):
    """Writes no more segments than one system call takes."""

    caught_by = "test_more_segments_than_one_system_call_takes"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        return await super().store_one(key, data[:1024])


class FillsTheFirstSegmentsOnly(BrokenAdapter):
    """Fills two segments of a destination and leaves the others."""

    caught_by = "test_scatter_gather_lists"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        return await super().load_one(key, into[:3])


class WritesInFrontOfMisalignedBuffers(BrokenAdapter):
    """Rounds a destination's address down to a block and writes the whole block."""

    caught_by = "test_misaligned_buffers"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        for segment in into:
            if isinstance(segment.obj, bytearray):
                segment.obj[0] = 0
        return await super().load_one(key, into)


class NeedsWritableSources(BrokenAdapter):
    """Hands the source to a C library that asks for a writable buffer."""

    caught_by = "test_read_only_sources"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        if any(segment.readonly for segment in data[1:]):
            raise TypeError("underlying buffer is not writable")
        return await super().store_one(key, data)


class KeepsTheCallersMemory(BrokenAdapter):
    """Stores references to the source, which the caller then reuses."""

    caught_by = "test_a_store_leaves_its_source_as_it_was"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        self._objects[key] = data  # type: ignore[assignment]
        return StoreStatus.STORED

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        kept = self._objects[key]
        self._objects[key] = b"".join(kept)  # type: ignore[arg-type]
        found = await super().load_one(key, into)
        self._objects[key] = kept
        return found

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return [sum(map(len, self._objects[key])) for key in keys]  # type: ignore[arg-type]


class WorksInItsSource(BrokenAdapter):
    """Swaps bytes in the caller's memory before it sends them."""

    caught_by = "test_a_store_leaves_its_source_as_it_was"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        status = await super().store_one(key, data)
        for segment in data:
            if not segment.readonly:
                segment[::2], segment[1::2] = segment[1::2].tobytes(), segment[::2].tobytes()
        return status


class NeedsTheExactSize(BrokenAdapter):
    """Refuses a destination with room to spare."""

    caught_by = "test_the_stored_length_may_vary"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        if key in self._objects and len(self._objects[key]) != sum(map(len, into)):
            raise BackendError("another size was expected")
        return await super().load_one(key, into)


class DeletesWhatDoesNotFit(BrokenAdapter):
    """Takes an object that is larger than the destination for damaged, and deletes it."""

    caught_by = "test_a_destination_too_short_fails_and_keeps_the_object"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        found = await super().load_one(key, into)
        if found is not None and found > sum(map(len, into)):
            self._remove(key)
        return found


class LoadsNextToReadOnlyMemory(BrokenAdapter):
    """Loads into memory of its own where the destination is read-only, and says that the object is loaded."""

    caught_by = "test_a_read_only_destination_is_refused"

    def submit_load_task(self, keys: Any, objects: Any, *, deadline: Any = None) -> Any:
        writable = [MemoryObj.allocate(obj.layout) if obj.read_only else obj for obj in objects]
        return super().submit_load_task(keys, writable, deadline=deadline)


class FailsTheBatchForALargeObject(BrokenAdapter):
    """One object above the limit fails its whole batch."""

    caught_by = "test_an_object_above_the_limit_fails_and_leaves_nothing"
    capabilities = Capabilities(persistent=False, shared=False, lock="owned", evicts=True, max_object_bytes=1 << 20)

    def submit_store_task(self, keys: Any, objects: Any, *, deadline: Any = None) -> Any:
        largest = max(objects, key=lambda obj: obj.nbytes, default=None)
        if largest is not None and largest.nbytes >= 1 << 20:
            objects = [largest for _ in objects]
        return super().submit_store_task(keys, objects, deadline=deadline)
