"""Adapters that are broken on purpose, each in one way, with the conformance test that must notice it.

All are `memory://` with one fault. `caught_by` names the test; a fault that only shows when the test's fixtures are
torn down (a leak) counts as well.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from l2kit.adapter import Capabilities, KeyInfo, Usage
from l2kit.config import Secret
from l2kit.errors import BackendError
from l2kit.keys import ObjectKey
from l2kit.memory_adapter import MemoryAdapter, MemoryConfig
from l2kit.outcomes import StoreStatus


class BrokenAdapter(MemoryAdapter):
    """What the broken ones have in common."""

    caught_by: ClassVar[str]


class CutsLargeObjects(BrokenAdapter):
    caught_by = "test_an_object_of_any_size_comes_back"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        return await super().store_one(key, [memoryview(b"".join(data)[: 1 << 20])])


class DropsTheEmptyObject(BrokenAdapter):
    caught_by = "test_an_object_of_any_size_comes_back"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        return await super().load_one(key, into) if len(into) > 1 else None


class TakesOnly1024Segments(BrokenAdapter):
    caught_by = "test_more_segments_than_one_system_call_takes"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        return await super().store_one(key, data[:1024])


class KeepsTheCallersMemory(BrokenAdapter):
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


class FillsTheFirstSegmentsOnly(BrokenAdapter):
    caught_by = "test_scatter_gather_lists"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        return await super().load_one(key, into[:3])


class NeedsTheExactSize(BrokenAdapter):
    caught_by = "test_the_stored_length_may_vary"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        if key in self._objects and len(self._objects[key]) != sum(map(len, into)):
            raise BackendError("another size was expected")
        return await super().load_one(key, into)


class DeletesWhatDoesNotFit(BrokenAdapter):
    caught_by = "test_a_destination_too_short_fails_and_keeps_the_object"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        found = await super().load_one(key, into)
        if found is not None and found > sum(map(len, into)):
            self._remove(key)
        return found


class RaisesForAMiss(BrokenAdapter):
    caught_by = "test_a_miss_is_a_value_and_leaves_the_buffer"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        if key not in self._objects:
            raise KeyError(key)
        return await super().load_one(key, into)


class ScribblesOnAMiss(BrokenAdapter):
    caught_by = "test_a_miss_is_a_value_and_leaves_the_buffer"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        if key not in self._objects:
            into[-1][0] = 0
        return await super().load_one(key, into)


class FindsNothing(BrokenAdapter):
    caught_by = "test_lookup_knows_the_stored_size"

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return [None for _ in keys]


class LosesStores(BrokenAdapter):
    caught_by = "test_a_second_store_replaces_or_keeps_and_says_which"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        return StoreStatus.STORED if key in self._objects else await super().store_one(key, data)


class FailsTheBatchForOneKey(BrokenAdapter):
    caught_by = "test_a_partial_batch_has_exact_outcomes_in_key_order"

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        found = await super().acquire_many(keys)
        return found if all(found) else [None for _ in keys]


class AnswersSorted(BrokenAdapter):
    caught_by = "test_a_partial_batch_has_exact_outcomes_in_key_order"

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return await super().acquire_many(sorted(keys))


class AlwaysDeletes(BrokenAdapter):
    caught_by = "test_delete"

    async def delete_one(self, key: ObjectKey) -> bool:
        await super().delete_one(key)
        return True


class NeverDeletes(BrokenAdapter):
    caught_by = "test_delete"

    async def delete_one(self, key: ObjectKey) -> bool:
        return key in self._objects


class ForgetsTheLocked(BrokenAdapter):
    caught_by = "test_an_owned_lock_keeps_a_deleted_object_until_the_last_release"

    async def delete_one(self, key: ObjectKey) -> bool:
        self._locked.pop(key, None)
        return await super().delete_one(key)


class ReleasesAtOnce(BrokenAdapter):
    caught_by = "test_an_owned_lock_keeps_a_deleted_object_until_the_last_release"

    async def release_many(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            self._locks[key] = 1
        await super().release_many(keys)


class RefusesToDeleteTheLocked(BrokenAdapter):
    caught_by = "test_a_lease_does_not_hinder_storing_and_deleting"

    async def delete_one(self, key: ObjectKey) -> bool:
        return False if self._locks[key] else await super().delete_one(key)


class StoresInPieces(BrokenAdapter):
    caught_by = "test_readers_during_writes_see_one_version_whole"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        whole = b"".join(data)
        old = self._objects.get(key, b"")
        self._objects[key] = whole[: len(whole) // 2] + old[len(whole) // 2 :]
        await anyio.lowlevel.checkpoint()
        self._objects[key] = whole
        return StoreStatus.STORED


class RemovesBeforeItReplaces(BrokenAdapter):
    caught_by = "test_readers_during_writes_see_one_version_whole"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        self._remove(key)
        await anyio.lowlevel.checkpoint()
        return await super().store_one(key, data)


class AbandonsThreads(BrokenAdapter):
    caught_by = "test_a_cancelled_load_never_writes_again"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        payload = self._objects.get(key)
        if payload is None:
            return None

        def copy() -> None:
            time.sleep(0.02)
            rest = memoryview(payload)
            for segment in into:
                part = rest[: len(segment)]
                segment[: len(part)] = part
                rest = rest[len(part) :]

        await anyio.to_thread.run_sync(copy, abandon_on_cancel=True)
        return len(payload)


class ConfusesRepliesAfterACancel(BrokenAdapter):
    """Like a connection that goes on after a cancelled command: the next command gets the reply to the last."""

    caught_by = "test_a_cancelled_load_never_writes_again"
    unread: ObjectKey | None = None

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        answered, self.unread = self.unread or key, key
        await anyio.lowlevel.checkpoint()
        self.unread = key if answered != key else None
        return await super().load_one(answered, into)


class PublishesWhatWasCancelled(BrokenAdapter):
    caught_by = "test_a_cancelled_store_leaves_whole_objects_or_none"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        whole = b"".join(data)
        try:
            await anyio.lowlevel.checkpoint()
        except BaseException:
            self._objects[key] = whole[:-1]
            raise
        return await super().store_one(key, data)


class HangsOnClose(BrokenAdapter):
    caught_by = "test_closing_while_busy_ends_every_task"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        try:
            await anyio.lowlevel.checkpoint()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(1)
            raise
        return await super().store_one(key, data)


class OnlySaysThatItPersists(BrokenAdapter):
    caught_by = "test_objects_persist"
    capabilities = Capabilities(persistent=True, shared=False)


class OnlySaysThatItShares(BrokenAdapter):
    caught_by = "test_objects_are_shared"
    capabilities = Capabilities(persistent=False, shared=True)


class SecretConfig(MemoryConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """With a password."""

    password: Secret | None = None


class LogsItsPassword(BrokenAdapter):
    caught_by = "test_no_secret_shows"
    config_type = SecretConfig

    async def open(self) -> None:
        await super().open()
        logging.getLogger("broken").debug("logging in with %s", self._password)

    @property
    def _password(self) -> str:
        assert isinstance(self.config, SecretConfig)
        return self.config.password.reveal() if self.config.password else ""


class SaysItsPassword(LogsItsPassword):
    async def open(self) -> None:
        raise BackendError("wrong password") from ConnectionError(f"AUTH {self._password} was refused")


class FoldsNames(BrokenAdapter):
    """Namespaces cut to a length that a file system takes."""

    caught_by = "test_hostile_namespaces_stay_apart"

    def fold(self, key: ObjectKey) -> ObjectKey:
        return ObjectKey(key.namespace[:3], key.chunk_hash, key.shard, key.shards, key.group, key.layer)

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        return await super().store_one(self.fold(key), data)

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        return await super().load_one(self.fold(key), into)

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return await self.lookup_many([self.fold(key) for key in keys])

    async def delete_one(self, key: ObjectKey) -> bool:
        return await super().delete_one(self.fold(key))


class IgnoresLayers(FoldsNames):
    caught_by = "test_every_field_counts"

    def fold(self, key: ObjectKey) -> ObjectKey:
        return ObjectKey(key.namespace, key.chunk_hash, key.shard, key.shards, key.group)


class CutsNumbers(FoldsNames):
    caught_by = "test_extreme_numbers"

    def fold(self, key: ObjectKey) -> ObjectKey:
        top = (1 << 31) - 1
        numbers = (min(number, top) for number in (key.shard, key.shards, key.group))
        shard, shards, group = numbers
        return ObjectKey(key.namespace, key.chunk_hash, min(shard, shards - 1), shards, group)


class KeepsTheDamaged(BrokenAdapter):
    caught_by = "test_damaged_bytes_are_corrupt_and_healed"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        return StoreStatus.ALREADY_PRESENT if key in self._objects else await super().store_one(key, data)

    async def delete_one(self, key: ObjectKey) -> bool:
        return False


class ListsTwice(BrokenAdapter):
    caught_by = "test_listing_agrees_with_what_was_stored"

    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        for _ in range(2):
            async for info in super().iter_keys():
                yield info


class ListsPayloadSizes(BrokenAdapter):
    caught_by = "test_listing_agrees_with_what_was_stored"

    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        async for info in super().iter_keys():
            yield KeyInfo(info.key, info.size - 256)


class CountsReplacedObjectsTwice(BrokenAdapter):
    caught_by = "test_usage_agrees_with_what_was_stored"
    stores = 0

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        self.stores += 1
        return await super().store_one(key, data)

    async def usage(self) -> Usage:
        return Usage(self._used_bytes, self.config.max_bytes, self.stores)


class HasNoLimit(BrokenAdapter):
    caught_by = "test_the_limit_holds"

    def _remove(self, key: ObjectKey) -> bool:
        if len(self._objects) > 8:
            self._used_bytes = 0
            return False
        return super()._remove(key)


class EvictsForTheImpossible(BrokenAdapter):
    caught_by = "test_an_object_above_the_whole_limit_is_refused_alone"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        if self.config.max_bytes is not None and sum(map(len, data)) > self.config.max_bytes:
            self._objects.clear()
        return await super().store_one(key, data)


class EvictsTheLocked(BrokenAdapter):
    caught_by = "test_an_owned_lock_survives_eviction"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        return await super().load_one(key, into) if key in self._objects else None


class LeaksFiles(BrokenAdapter):
    caught_by = "test_opening_and_closing_leaves_nothing"

    async def open(self) -> None:
        await super().open()
        leaked.append(os.open(os.devnull, os.O_RDONLY))


class LeaksThreads(BrokenAdapter):
    caught_by = "test_opening_and_closing_leaves_nothing"

    async def open(self) -> None:
        await super().open()
        threading.Thread(target=stop.wait, args=(30,), daemon=True).start()


class LeaksTasks(BrokenAdapter):
    caught_by = "test_opening_and_closing_leaves_nothing"

    async def open(self) -> None:
        import asyncio

        await super().open()
        self.task = asyncio.get_running_loop().create_task(asyncio.sleep(30))


class FailsItsProbe(BrokenAdapter):
    caught_by = "test_the_probe_is_content"

    async def delete_one(self, key: ObjectKey) -> bool:
        raise PermissionError(13, "Permission denied")


#: What the leaking ones leave behind, for the tests to clear away.
leaked: list[int] = []
stop = threading.Event()


def every_broken_adapter() -> list[type[BrokenAdapter]]:
    """All classes of this module that have a fault."""
    found: dict[str, Any] = {name: kind for name, kind in globals().items() if isinstance(kind, type)}
    return [kind for kind in found.values() if issubclass(kind, BrokenAdapter) and kind is not BrokenAdapter]
