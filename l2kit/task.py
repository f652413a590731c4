"""`L2Task`, the handle of one batch, and `TaskRunner`, the few workers that run batches.

A worker is parked between batches instead of being made anew, so that submitting costs microseconds; all workers
live in one task group that outlives every batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from typing import Generic, Literal, Protocol, Self, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from l2kit.errors import BackendTimeoutError, L2Error, TaskCancelledError

_log = logging.getLogger(__name__)

TaskState = Literal["running", "done", "cancelled", "failed"]


class Outcome(Protocol):
    """What every outcome type offers the task."""

    @classmethod
    def failed(cls, error: L2Error) -> Self:
        """An outcome that carries ``error``."""
        ...


OutcomeT = TypeVar("OutcomeT", bound=Outcome)


class L2Task(Generic[OutcomeT]):
    """One submitted batch. Await it for the outcomes in key order, or iterate it for each as it completes.

    - ``await task`` returns one outcome per key. A deadline that passed or a :meth:`cancel` turns the unfinished keys
      into failed outcomes (`BackendTimeoutError`, `TaskCancelledError`); finished ones keep theirs.
    - ``async for index, outcome in task`` yields in order of completion; leaving the loop leaves the task running.
    - When the task has ended, the adapter no longer touches any buffer of the batch.
    - If the awaiting coroutine is cancelled, the task is cancelled too, and the cancellation goes on only when the
      task has ended: no buffer is ever left in flight. Use :meth:`wait_ended` to wait without that bond.
    - Belongs to the event loop that made it; not thread-safe.
    """

    __slots__ = (
        "_callbacks",
        "_completed",
        "_ended",
        "_name",
        "_outcome_callback",
        "_outcome_type",
        "_outcomes",
        "_progress",
        "_scope",
        "error",
        "state",
    )

    def __init__(self, count: int, outcome_type: type[OutcomeT], name: str = "the backend") -> None:
        """A running task over ``count`` keys of the adapter ``name``; adapters make these, nobody else."""
        self.state: TaskState = "running"
        self._name = name
        self._outcome_type = outcome_type
        self._outcomes: list[OutcomeT | None] = [None] * count
        self._completed: list[int] = []
        self.error: L2Error | None = None
        self._ended = False
        self._progress: anyio.Event | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._outcome_callback: Callable[[int, OutcomeT], None] | None = None
        self._scope = anyio.CancelScope()

    def __len__(self) -> int:
        return len(self._outcomes)

    @property
    def ended(self) -> bool:
        """True when the adapter has let go of every buffer."""
        return self._ended

    def cancel(self) -> None:
        """Ask the task to end early; it ends once its in-flight I/O has. Harmless when it has ended."""
        self._scope.cancel()

    def complete(self, index: int, outcome: OutcomeT) -> None:
        """Record the outcome of one key (adapters only). The first one counts."""
        if self._outcomes[index] is None:
            self._outcomes[index] = outcome
            self._completed.append(index)
            if self._outcome_callback is not None:
                try:
                    self._outcome_callback(index, outcome)
                except Exception:  # a broken callback must not fail the batch
                    _log.exception("a callback for the outcome of a key failed")
            self._notify()

    def complete_all(self, outcomes: Sequence[OutcomeT]) -> None:
        """Record the outcomes of all keys at once, in key order (adapters only)."""
        if self._completed or self._outcome_callback is not None:
            for index, outcome in enumerate(outcomes):
                self.complete(index, outcome)
            return
        self._outcomes[:] = outcomes
        self._completed.extend(range(len(outcomes)))
        self._notify()

    def on_outcome(self, callback: Callable[[int, OutcomeT], None]) -> None:
        """Call ``callback(index, outcome)`` on the loop for each key as it completes, at once for those that have.

        It must not raise. Buffers of keys that have not completed stay the adapter's until the task has ended.
        """
        for index in self._completed:
            outcome = self._outcomes[index]
            assert outcome is not None
            callback(index, outcome)
        self._outcome_callback = callback

    def on_ended(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the loop when the task has ended, at once if it already has. It must not raise."""
        if self._ended:
            callback()
        else:
            self._callbacks.append(callback)

    def outcomes(self) -> list[OutcomeT]:
        """The outcomes of an ended task in key order.

        Raises:
            L2Error: the whole call failed.
        """
        if self.error is not None:
            raise self.error
        return [outcome for outcome in self._outcomes if outcome is not None]

    async def wait_ended(self) -> None:
        """Wait until the task has ended, however it ends. Cancelling this wait leaves the task running."""
        while not self._ended:
            await self._next_progress()

    def __await__(self) -> Generator[object, None, list[OutcomeT]]:
        return self._result().__await__()

    async def _result(self) -> list[OutcomeT]:
        try:
            await self.wait_ended()
        finally:
            if not self._ended:
                self.cancel()
                with anyio.CancelScope(shield=True):
                    await self.wait_ended()
        return self.outcomes()

    async def __aiter__(self) -> AsyncIterator[tuple[int, OutcomeT]]:
        seen = 0
        while True:
            while seen < len(self._completed):
                index = self._completed[seen]
                seen += 1
                outcome = self._outcomes[index]
                assert outcome is not None
                yield index, outcome
            if self._ended:
                break
            await self._next_progress()
        if self.error is not None:
            raise self.error

    async def _next_progress(self) -> None:
        if self._progress is None:
            self._progress = anyio.Event()
        await self._progress.wait()

    def _notify(self) -> None:
        if self._progress is not None:
            self._progress.set()
            self._progress = None

    async def run(
        self, body: Callable[[L2Task[OutcomeT]], Awaitable[None]], deadline: float, *, certain: bool = False
    ) -> None:
        """Run the batch to its end (adapters only): ``body`` under the deadline, then an outcome for every key left.

        A ``certain`` body runs even when the task was cancelled before its turn came.
        """
        error: L2Error | None = None
        try:
            self._scope.deadline = min(deadline, self._scope.deadline)
            with self._scope:
                # Hooks that never suspend would otherwise do their work in spite of a cancel or a past deadline.
                if not certain:
                    await anyio.lowlevel.checkpoint_if_cancelled()
                await body(self)
        except L2Error as caught:
            error = caught
        finally:
            self.end(error, deadline)

    def end(self, error: L2Error | None = None, deadline: float = math.inf) -> None:
        """Give every key left its outcome and wake all waiters (adapters only). Only the first call counts."""
        if self._ended:
            return
        if error is not None:
            self.state, self.error = "failed", error
        elif None in self._outcomes:
            left: L2Error
            if self._scope.cancelled_caught and anyio.current_time() >= deadline:
                self.state, left = "done", BackendTimeoutError(f"{self._name}: no answer before the deadline")
            else:
                self.state, left = "cancelled", TaskCancelledError("the task was cancelled before this key was done")
            for index, outcome in enumerate(self._outcomes):
                if outcome is None:
                    self.complete(index, self._outcome_type.failed(left))
        else:
            self.state = "done"
        self._ended = True
        self._notify()
        for callback in self._callbacks:
            try:
                callback()
            except Exception:  # a broken callback must not take the worker and its other batches down
                _log.exception("a callback of an ended task failed")
        self._callbacks.clear()


class _Parked:
    """A worker that waits for its next job."""

    __slots__ = ("job", "ready")

    def __init__(self) -> None:
        self.job: Callable[[], Awaitable[None]] | None = None
        self.ready = anyio.Event()


class TaskRunner:
    """Starts jobs in parked workers of one task group. Loop-bound, not thread-safe."""

    def __init__(self, task_group: TaskGroup, name: str) -> None:
        """Workers are started in ``task_group`` as needed and end with it."""
        self._task_group = task_group
        self._name = name
        self._parked: list[_Parked] = []

    def start(self, job: Callable[[], Awaitable[None]]) -> None:
        """Run ``job`` soon. It must handle its own errors: one that escapes ends the task group."""
        if self._parked:
            worker = self._parked.pop()
            worker.job = job
            worker.ready.set()
        else:
            self._task_group.start_soon(self._work, job, name=self._name)

    async def _work(self, job: Callable[[], Awaitable[None]]) -> None:
        while True:
            await job()
            del job  # a parked worker must not keep alive what it has done
            parked = _Parked()
            self._parked.append(parked)
            try:
                await parked.ready.wait()
            except BaseException:
                if parked.job is None:
                    self._parked.remove(parked)  # or the next job would go to a worker that is gone
                else:
                    await parked.job()  # it was handed over already: it must see the cancellation and clean up
                raise
            assert parked.job is not None
            job = parked.job
            del parked
