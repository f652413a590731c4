"""How an adapter's batches run: sealing, bounded fan-out, verification, healing and leases around the author's hooks.

Kept apart from the contract in `adapter.py`; nothing here is public.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import anyio

from l2kit.envelope import INTACT_REASONS
from l2kit.errors import (
    AdapterContractError,
    BackendError,
    BackendTimeoutError,
    CorruptObjectError,
    L2Error,
    first_error,
)
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.memory import MemoryObj
from l2kit.outcomes import (
    DeleteOutcome,
    DeleteStatus,
    LoadOutcome,
    LoadStatus,
    LookupOutcome,
    LookupStatus,
    StoreOutcome,
    StoreStatus,
)
from l2kit.quarantine import Quarantine
from l2kit.serde import CodecSource
from l2kit.sharing import Sharing
from l2kit.task import L2Task, Outcome, TaskRunner

if TYPE_CHECKING:
    from l2kit.adapter import L2Adapter

OutcomeT = TypeVar("OutcomeT", bound=Outcome)
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

#: Below this, hashing on the loop (about 30 µs) costs less than the way to a thread and back.
INLINE_CPU_BYTES: Final = 1 << 20
#: Objects that go to the backend in one call have so many bytes together; a larger one goes alone.
_GROUP_BYTES: Final = 16 << 20

#: Which of an adapter's threads the running batch uses: writes that are stuck must not keep readers waiting.
Lane = Literal["read", "write"]
current_lane: Final[ContextVar[Lane]] = ContextVar("l2kit_lane", default="read")

_STORE_COUNTERS: Final = {status: f"store.{status}" for status in StoreStatus}
_LOAD_COUNTERS: Final = {status: f"load.{status}" for status in LoadStatus}

_log = logging.getLogger(__name__)


class Batches:
    """The batches of one open adapter, their leases and counters. Loop-bound."""

    def __init__(
        self, adapter: L2Adapter[Any], runner: TaskRunner, codec_source: CodecSource, counters: Counter[str]
    ) -> None:
        """Run ``adapter``'s hooks in the workers of ``runner`` and count in ``counters``."""
        self._adapter = adapter
        self._runner = runner
        self._codec_source = codec_source
        self._tasks: set[L2Task[Any]] = set()
        self.leases: Counter[ObjectKey] = Counter()
        self.counters = counters
        self.quarantine = Quarantine()
        self._sharing: Final[dict[Lane, Sharing]] = {"read": Sharing(), "write": Sharing()}

    def submit(
        self,
        count: int,
        outcome_type: type[OutcomeT],
        body: Callable[[L2Task[OutcomeT]], Awaitable[None]],
        deadline: float | None,
        *,
        lane: Lane = "read",
        certain: bool = False,
    ) -> L2Task[OutcomeT]:
        """Start ``body`` over ``count`` keys; an empty batch has ended when this returns. See `L2Task.run`."""
        task = L2Task(count, outcome_type, self._adapter.name)
        if count == 0:
            task.end()
            return task
        limit = anyio.current_time() + self._adapter.config.timeout_s if deadline is None else deadline
        self._tasks.add(task)
        task.on_ended(lambda: self._tasks.discard(task))

        def run() -> Awaitable[None]:
            current_lane.set(lane)  # in the worker's own context, for this batch and the workers that it starts
            return task.run(lambda running: self._guard(running, body), limit, certain=certain)

        self._runner.start(run)
        return task

    def end_all(self) -> None:
        """End the tasks whose worker never got to run (the task group is gone)."""
        for task in list(self._tasks):
            task.end()

    async def release_all(self) -> None:
        """Give every lease back; a part of closing."""
        held = list(self.leases.elements())
        self.leases.clear()
        if held:
            await self._adapter.release_many(held)

    async def store(self, task: L2Task[StoreOutcome], keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> None:
        """Body of a store task."""
        adapter = self._adapter
        first: dict[ObjectKey, int] = {}
        for index, key in enumerate(keys):
            first.setdefault(key, index)
        outcomes: dict[ObjectKey, StoreOutcome] = {}
        moved_bytes = 0

        async def store_group(group: Sequence[int]) -> None:
            items: dict[int, StoreItem] = {}
            for index in group:
                try:
                    # An adapter that keeps what is present would keep what is damaged.
                    if self.quarantine and self.quarantine.is_damaged(keys[index]):
                        await adapter.delete_one(keys[index])
                    items[index] = StoreItem(keys[index], objects[index], adapter)
                except Exception as error:
                    finish(index, StoreOutcome.failed(self._translate(error)))
            answers: Sequence[object] = await self._answers(items.values(), self._store_one, adapter.store_many)
            for (index, item), answer in zip(items.items(), answers, strict=True):
                if not isinstance(answer, StoreStatus):
                    if not isinstance(answer, Exception):  # a forgotten return must not look like anything else
                        answer = AdapterContractError(f"{adapter.name}: a store returned {answer!r}, no StoreStatus")
                    finish(index, StoreOutcome.failed(self._translate(answer)))
                    continue
                stored = answer is StoreStatus.STORED
                if stored and self.quarantine:
                    self.quarantine.discard(keys[index])
                finish(index, StoreOutcome(answer, item.stored_bytes if stored else 0))

        def finish(index: int, outcome: StoreOutcome) -> None:
            nonlocal moved_bytes
            moved_bytes += outcome.nbytes
            outcomes[keys[index]] = outcome
            self.counters[_STORE_COUNTERS[outcome.status]] += 1
            self.counters["stored_bytes"] += outcome.nbytes
            task.complete(index, outcome)

        await self._in_groups(list(first.values()), keys, objects, store_group, lambda: moved_bytes)
        for index, key in enumerate(keys):
            task.complete(index, outcomes[key])

    async def lookup(self, task: L2Task[LookupOutcome], keys: Sequence[ObjectKey]) -> None:
        """Body of a lookup task."""
        distinct = list(dict.fromkeys(keys))
        asked = [key for key in distinct if key not in self.quarantine] if self.quarantine else distinct
        sizes: dict[ObjectKey, int | None] = dict.fromkeys(distinct)
        if asked:
            sizes.update(zip(asked, await self._adapter.acquire_many(asked), strict=True))
        distinct_sizes = set(sizes.values()) - {None}
        for size in distinct_sizes:
            if size is not None and size < 0:
                raise BackendError(f"{self._adapter.name}: lookup answered a size of {size} bytes")
        # A key given twice is locked once; its second unlock is a miss.
        self.leases.update([key for key, size in sizes.items() if size is not None])
        # Outcomes are facts about sizes, and most objects have the same.
        known = {size: LookupOutcome(LookupStatus.HIT, size) for size in distinct_sizes if size is not None}
        miss = LookupOutcome(LookupStatus.MISS)
        outcomes = [miss if (size := sizes[key]) is None else known[size] for key in keys]
        misses = outcomes.count(miss)
        self.counters["lookup.miss"] += misses
        self.counters["lookup.hit"] += len(outcomes) - misses
        task.complete_all(outcomes)

    async def load(self, task: L2Task[LoadOutcome], keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> None:
        """Body of a load task."""
        adapter = self._adapter
        moved_bytes = 0

        async def load_group(group: Sequence[int]) -> None:
            items: dict[int, LoadItem] = {}
            for index in group:
                if self.quarantine and keys[index] in self.quarantine:
                    self.counters["load.quarantined"] += 1
                    finish(index, LoadOutcome(LoadStatus.MISS))
                else:
                    items[index] = LoadItem(keys[index], objects[index], adapter)
            answers = await self._answers(items.values(), self._load_one, adapter.load_many)
            for (index, item), answer in zip(items.items(), answers, strict=True):
                if type(answer) is int and item.is_intact(answer):  # a thread has seen to it; the common case
                    finish(index, LoadOutcome(LoadStatus.LOADED, item.frame.nbytes))
                    continue
                try:
                    outcome = await self._verified(item, answer)
                except Exception as caught:
                    error = self._translate(caught)
                    outcome = LoadOutcome.failed(error)
                    if isinstance(error, CorruptObjectError):
                        await self._heal(keys[index], error)
                finish(index, outcome)

        def finish(index: int, outcome: LoadOutcome) -> None:
            nonlocal moved_bytes
            moved_bytes += outcome.nbytes
            self.counters[_LOAD_COUNTERS[outcome.status]] += 1
            self.counters["loaded_bytes"] += outcome.nbytes
            task.complete(index, outcome)

        await self._in_groups(range(len(keys)), keys, objects, load_group, lambda: moved_bytes)

    async def unlock(self, task: L2Task[DeleteOutcome], keys: Sequence[ObjectKey]) -> None:
        """Body of an unlock task, which has no deadline: it bounds itself, and is never left out."""
        held: list[ObjectKey] = []
        found: list[bool] = []
        for key in keys:
            found.append(self.leases[key] > 0)
            if found[-1]:
                held.append(key)
                self.leases[key] -= 1
            if self.leases[key] == 0:
                del self.leases[key]
        if held:  # they are off our books: the adapter must hear of it, cancelled or not
            with anyio.move_on_after(self._adapter.config.timeout_s, shield=True) as scope:
                await self._adapter.release_many(held)
            if scope.cancelled_caught:
                raise BackendTimeoutError(f"{self._adapter.name}: unlocking did not end in time")
        for index, released in enumerate(found):
            task.complete(index, DeleteOutcome(DeleteStatus.DELETED if released else DeleteStatus.MISS))

    async def delete(self, task: L2Task[DeleteOutcome], keys: Sequence[ObjectKey]) -> None:
        """Body of a delete task."""

        async def delete_one(index: int) -> None:
            try:
                found = await self._adapter.delete_one(keys[index])
                self.quarantine.discard(keys[index])
                outcome = DeleteOutcome(DeleteStatus.DELETED if found else DeleteStatus.MISS)
            except Exception as error:
                outcome = DeleteOutcome.failed(self._translate(error))
            self.counters[f"delete.{outcome.status}"] += 1
            task.complete(index, outcome)

        await self._adapter.for_each(range(len(keys)), delete_one)

    async def _in_groups(
        self,
        indices: Sequence[int],
        keys: Sequence[ObjectKey],
        objects: Sequence[MemoryObj],
        work: Callable[[Sequence[int]], Awaitable[None]],
        moved_bytes: Callable[[], int],
    ) -> None:
        """Do ``work`` on all of a batch, in groups that go to the backend in one call each.

        Small objects share a call. The groups go one after the other in one worker, or are dealt to all workers,
        whichever is faster: see `Sharing`.
        """
        most = self._adapter.capabilities.group_keys
        workers = self._adapter.config.max_concurrency
        if most <= 1 or not indices:
            await for_each([[index] for index in indices], work, max_concurrency=workers)
            return
        count, nbytes = len(indices), sum(objects[index].nbytes for index in indices)
        sharing = self._sharing[current_lane.get()]
        plan = sharing.plan(count, nbytes)
        if plan.shared:
            most = min(most, -(-count // workers))
        groups = self._groups(indices, keys, objects, most)
        started = time.perf_counter()
        await for_each(groups, work, max_concurrency=workers if plan.shared else 1)
        if moved_bytes() >= nbytes:  # misses and failures are faster, or slower, than what moves
            sharing.took(plan, count, nbytes, time.perf_counter() - started)

    @staticmethod
    def _groups(
        indices: Sequence[int], keys: Sequence[ObjectKey], objects: Sequence[MemoryObj], most: int
    ) -> list[list[int]]:
        groups: list[list[int]] = []
        inside: set[ObjectKey] = set()
        room = 0
        for index in indices:
            nbytes = objects[index].nbytes
            if not groups or len(groups[-1]) >= most or nbytes > room or keys[index] in inside:
                groups.append([])
                inside.clear()
                room = _GROUP_BYTES
            groups[-1].append(index)
            inside.add(keys[index])
            room -= nbytes
        return groups

    async def _answers(
        self,
        items: Collection[ItemT],
        one: Callable[[ItemT], Awaitable[ResultT]],
        many: Callable[[Sequence[ItemT]], Awaitable[Sequence[ResultT | Exception]]],
    ) -> Sequence[ResultT | Exception]:
        """What the backend says for each of ``items``, errors as values."""
        try:
            if self._adapter.capabilities.group_keys <= 1:
                return [await one(item) for item in items]
            answers = await many(tuple(items)) if items else []
            if len(answers) != len(items):
                what = f"{len(answers)} answers for {len(items)} keys"
                raise AdapterContractError(f"{self._adapter.name}: {what}")
            return answers
        except Exception as error:
            return [error] * len(items)

    async def _store_one(self, item: StoreItem) -> StoreStatus:
        return await self._adapter.store_one(item.key, await self._cpu(item.nbytes, item.data))

    async def _load_one(self, item: LoadItem) -> int | None:
        return await self._adapter.load_one(item.key, item.into)

    async def _verified(self, item: LoadItem, answer: int | Exception | None) -> LoadOutcome:
        """The outcome of a load whose buffers the backend has filled."""
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            return LoadOutcome(LoadStatus.MISS)
        size, frame = answer, item.frame
        if not await self._cpu(0 if item.is_verified else item.nbytes, lambda: item.finish(size)):
            whole = memoryview(bytearray(size))
            again = await self._adapter.load_one(item.key, [whole])
            if again is None:
                return LoadOutcome(LoadStatus.MISS)
            await self._cpu(item.nbytes, lambda: frame.finish_whole(whole[:again], again, self._codec_source))
        return LoadOutcome(LoadStatus.LOADED, frame.nbytes)

    async def _heal(self, key: ObjectKey, error: CorruptObjectError) -> None:
        """See to it that nobody tries a damaged object again: delete it, or remember it until it is replaced.

        One that is intact but not readable here stays for those who can read it, and is remembered as well; one of
        another layout than was asked for is left alone: the next caller may ask rightly.
        """
        self.counters[f"corrupt.{error.reason}"] += 1
        _log.warning("%s: object %s is damaged (%s): %s", self._adapter.name, key, error.reason, error)
        if not self._adapter.deletes_damaged or error.reason == "layout":
            return
        damaged = error.reason not in INTACT_REASONS
        in_hand = self.quarantine.is_damaged(key)
        self.quarantine.add(key, damaged=damaged)
        if not damaged or in_hand:  # another load that ran at the same time deletes it
            return
        try:
            await self._adapter.delete_one(key)
        except Exception as failure:
            _log.warning(
                "%s: cannot delete the damaged object %s: %s", self._adapter.name, key, self._translate(failure)
            )
        else:
            self.quarantine.discard(key)

    async def _cpu(self, nbytes: int, function: Callable[[], ResultT]) -> ResultT:
        if nbytes <= INLINE_CPU_BYTES:
            return function()
        return await self._adapter.run_in_thread(function)

    async def _guard(self, task: L2Task[OutcomeT], body: Callable[[L2Task[OutcomeT]], Awaitable[None]]) -> None:
        """Let only errors of the tree out of a task; callers catch those, not groups of a hook's task group."""
        try:
            await body(task)
        except Exception as caught:
            error = first_error(caught)
            if isinstance(error, L2Error):
                raise error from error.__cause__
            raise self._translate(error) from error

    def _translate(self, error: Exception) -> L2Error:
        error = first_error(error)
        if isinstance(error, L2Error):
            return error
        try:
            translated = self._adapter.translate_error(error)
        except Exception:  # it runs where an error that escapes would end the adapter's workers
            _log.exception("%s: translate_error failed", self._adapter.name)
            translated = BackendError(f"{self._adapter.name}: unexpected {type(error).__name__}")
        if type(translated) is BackendError and not isinstance(error, OSError):
            # Its place but not its text, which is the client library's and may hold the URL with its password.
            where = "".join(traceback.format_tb(error.__traceback__))
            _log.error("%s: unexpected %s in the adapter\n%s", self._adapter.name, type(error).__name__, where)
        return translated


async def for_each(items: Sequence[ItemT], work: Callable[[ItemT], Awaitable[None]], *, max_concurrency: int) -> None:
    """Run ``work`` for each item in a few workers that pull from one iterator: no task per item."""
    workers = min(max_concurrency, len(items))
    iterator = iter(items)
    if workers <= 1:
        await _pull(iterator, work)
        return
    async with anyio.create_task_group() as group:
        for _ in range(workers):
            group.start_soon(_pull, iterator, work)


async def _pull(iterator: Iterator[ItemT], work: Callable[[ItemT], Awaitable[None]]) -> None:
    for item in iterator:
        await work(item)
