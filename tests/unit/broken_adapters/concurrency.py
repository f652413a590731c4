"""Faults that show when things happen at the same time, are cancelled, or late."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit.task import L2Task
from tests.unit.broken_adapters.base import BrokenAdapter


class MixesUpBatches(BrokenAdapter):
    """Keeps the key that it works on in the adapter, where the next batch replaces it."""

    caught_by = "test_many_batches_at_once"
    current: ObjectKey

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        self.current = key
        await anyio.lowlevel.checkpoint()
        return await super().load_one(self.current, into)


class StoresInPieces(BrokenAdapter):
    """Writes a new object over the old one, half after half, under its final name."""

    caught_by = "test_readers_during_writes_see_one_version_whole"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        whole = b"".join(data)
        old = self._objects.get(key, b"")
        self._objects[key] = whole[: len(whole) // 2] + old[len(whole) // 2 :]
        await anyio.lowlevel.checkpoint()
        self._objects[key] = whole
        return StoreStatus.STORED


class RemovesBeforeItReplaces(BrokenAdapter):
    """For a moment there is neither the old object nor the new one."""

    caught_by = "test_readers_during_writes_see_one_version_whole"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        self._remove(key)
        await anyio.lowlevel.checkpoint()
        return await super().store_one(key, data)


class GivesUpWhatWasCancelled(BrokenAdapter):
    """A key whose store was cancelled is never loaded again, whatever other writers stored under it."""

    caught_by = "test_writers_that_are_cancelled_leave_old_or_new"

    async def open(self) -> None:
        await super().open()
        self.given_up: set[ObjectKey] = set()

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        try:
            await anyio.sleep(0.01)
        except BaseException:
            self.given_up.add(key)
            raise
        return await super().store_one(key, data)

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        return None if key in self.given_up else await super().load_one(key, into)


class SharesOneStagingName(BrokenAdapter):
    """Two writers of one key write into the same temporary file."""

    caught_by = "test_a_writer_that_fails_leaves_old_or_new"

    async def open(self) -> None:
        await super().open()
        self.staged: dict[ObjectKey, bytearray] = {}

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        for segment in data:
            self.staged.setdefault(key, bytearray()).extend(segment)
            await anyio.lowlevel.checkpoint()
        return await super().store_one(key, [memoryview(self.staged.pop(key, bytearray()))])


class CleansUpTheFinalName(BrokenAdapter):
    """A writer that fails removes the object that another writer has just stored."""

    caught_by = "test_a_writer_that_fails_leaves_old_or_new"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        try:
            if sum(map(len, data)) > 1 << 20:  # as slow as it is large
                await anyio.sleep(0.01)
        except BaseException:
            self._remove(key)
            raise
        return await super().store_one(key, data)


class KeepsWhatIsBeingRead(BrokenAdapter):
    """Says that it deleted an object that somebody reads, and does not."""

    caught_by = "test_deleting_while_reading"
    readers = 0

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        self.readers += 1
        await anyio.lowlevel.checkpoint()
        self.readers -= 1
        return await super().load_one(key, into)

    async def delete_one(self, key: ObjectKey) -> bool:
        return key in self._objects if self.readers else await super().delete_one(key)


class AbandonsThreads(BrokenAdapter):
    """Cancelling a load leaves the thread that fills the buffer running."""

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
    """Goes on with a connection after a cancelled command: the next command gets the reply to that one."""

    caught_by = "test_a_cancelled_load_never_writes_again"
    unread: ObjectKey | None = None

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        answered, self.unread = self.unread or key, key
        await anyio.lowlevel.checkpoint()
        self.unread = key if answered != key else None
        return await super().load_one(answered, into)


class PublishesWhatWasCancelled(BrokenAdapter):
    """A store that is cancelled leaves what it had written so far under the final name."""

    caught_by = "test_a_cancelled_store_leaves_whole_objects_or_none"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        whole = b"".join(data)
        try:
            await anyio.lowlevel.checkpoint()
        except BaseException:
            self._objects[key] = whole[:-1]
            raise
        return await super().store_one(key, data)


class LeavesUnfinishedUploads(BrokenAdapter):
    """A store that is cancelled leaves its temporary name behind."""

    caught_by = "test_a_cancelled_store_leaves_nothing_unfinished"

    async def open(self) -> None:
        await super().open()
        self.unfinished: list[str] = []

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        self.unfinished.append(key.encode())
        await anyio.lowlevel.checkpoint()
        self.unfinished.remove(key.encode())
        return await super().store_one(key, data)


class _LetsGo(L2Task[Any]):
    __slots__ = ()

    async def _result(self) -> list[Any]:
        await self.wait_ended()
        return self.outcomes()


class LetsTheWaiterGo(BrokenAdapter):
    """Whoever waits for a batch and is cancelled goes on at once, with its buffers in flight."""

    caught_by = "test_a_waiter_that_is_cancelled_waits_for_the_buffers"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        await anyio.sleep(0.001)
        return await super().load_one(key, into)

    def submit_load_task(self, keys: Any, objects: Any, *, deadline: Any = None) -> Any:
        task = super().submit_load_task(keys, objects, deadline=deadline)
        task.__class__ = _LetsGo
        return task


class IgnoresDeadlines(BrokenAdapter):
    """Takes the time that it needs."""

    caught_by = "test_a_deadline_in_the_past_is_a_time_out_for_each_key"

    def submit_load_task(self, keys: Any, objects: Any, *, deadline: Any = None) -> Any:
        return super().submit_load_task(keys, objects)


class TakesALateObjectForDamaged(BrokenAdapter):
    """A load that the deadline cuts off is an incomplete read, and the object is deleted for it."""

    caught_by = "test_a_deadline_in_mid_transfer"

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        try:
            await anyio.sleep(0.01)
        except BaseException:
            self._remove(key)
            raise
        return await super().load_one(key, into)
