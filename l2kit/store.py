"""StoreController: brings objects that became readable in L1 to every L2 tier, off the engine's path.

Each object is leased per tier before anybody can evict it. What a tier may hold that way is bounded in bytes: a tier
that is slow or hung costs its own stores and nothing else; what does not fit is dropped and counted. A tier that stored
nothing of a batch by its deadline loses its queue, and is offered one object at a time until it stores one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

import anyio
from anyio.abc import TaskGroup

from l2kit.errors import BackendTimeoutError
from l2kit.l1 import ReadLease
from l2kit.outcomes import StoreOutcome, StoreStatus
from l2kit.task import L2Task
from l2kit.tier import Tier

# A batch shares one deadline: small enough for a slow tier to keep it, large enough to keep a fast one busy.
_BATCH_OBJECTS: Final = 16
_BATCH_BYTES: Final = 64 << 20
_END_GRACE_S: Final = 0.1  # after its deadline a batch has this long to end before its tier counts as hung


class _TierQueue:
    """Objects on their way to one tier."""

    def __init__(self, tier: Tier, max_bytes: int) -> None:
        self.tier = tier
        self.max_bytes = max_bytes
        self.waiting: deque[ReadLease] = deque()
        self.held_bytes = 0  # waiting and in flight: the adapter's hold on L1
        self.in_flight = 0
        self.changed = anyio.Event()

    def full(self, size: int) -> bool:
        """True when one more object of ``size`` is too much."""
        busy = self.waiting or self.in_flight
        return self.held_bytes + size > self.max_bytes or (bool(busy) and not self.tier.trusted("store"))

    def next_batch(self) -> list[ReadLease]:
        """Take what goes to the tier next: at least one object, of large ones no more."""
        batch = [self.waiting.popleft()]
        size = batch[0].obj.nbytes
        while self.waiting and len(batch) < _BATCH_OBJECTS and size + self.waiting[0].obj.nbytes <= _BATCH_BYTES:
            batch.append(self.waiting.popleft())
            size += batch[-1].obj.nbytes
        return batch

    def drop_waiting(self) -> None:
        """Give up what has not been started."""
        self.tier.counters.add("store_drops", len(self.waiting))
        self._release(self.waiting)
        self.waiting.clear()
        self.notify()

    def let_go(self, batch: Sequence[ReadLease]) -> None:
        """A batch in flight has ended."""
        self._release(batch)
        self.in_flight -= len(batch)
        self.notify()

    def _release(self, leases: Iterable[ReadLease]) -> None:
        for lease in leases:
            self.held_bytes -= lease.obj.nbytes
            lease.release()

    def notify(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()


class StoreController:
    """Queues and workers, one of each per tier. Loop-bound."""

    def __init__(self, tiers: Sequence[Tier], max_queue_bytes: int) -> None:
        """``max_queue_bytes`` bounds what each tier has waiting and in flight."""
        self._queues = [_TierQueue(tier, max_queue_bytes) for tier in tiers]
        self._closing = False

    @property
    def lease_owners(self) -> list[str]:
        """For whom a new object must be leased, in the order that :meth:`enqueue` takes the leases."""
        return [f"store:{queue.tier.name}" for queue in self._queues]

    @property
    def idle(self) -> bool:
        """True when nothing waits and nothing is in flight."""
        return not any(queue.waiting or queue.in_flight for queue in self._queues)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of L1 that each tier's stores hold now, by the tier's name."""
        return {queue.tier.name: queue.held_bytes for queue in self._queues}

    def start(self, task_group: TaskGroup) -> None:
        """Start the workers; they end with the task group."""
        for queue in self._queues:
            queue.tier.supervisor.run_in(task_group)
            queue.tier.supervisor.start("storing", partial(self._work, queue))

    def enqueue(self, leases: Sequence[ReadLease]) -> None:
        """Take over one lease per tier, in the order of :attr:`lease_owners`."""
        for queue, lease in zip(self._queues, leases, strict=True):
            size = lease.obj.nbytes
            if self._closing or queue.full(size):
                queue.tier.counters.add("store_drops")
                lease.release()
                continue
            queue.waiting.append(lease)
            queue.held_bytes += size
            queue.notify()

    async def drain(self) -> None:
        """Wait until every queue is empty and every store has ended. Bound it from outside."""
        for queue in self._queues:
            while queue.waiting or queue.in_flight:
                await queue.changed.wait()

    def close(self) -> None:
        """Drop what still waits; call it when the workers have ended."""
        self._closing = True
        for queue in self._queues:
            queue.drop_waiting()

    async def _work(self, queue: _TierQueue) -> None:
        while True:
            while not queue.waiting:
                await queue.changed.wait()
            await self._store(queue, queue.next_batch())

    async def _store(self, queue: _TierQueue, batch: list[ReadLease]) -> None:
        tier = queue.tier
        queue.in_flight += len(batch)
        deadline = tier.deadline()
        try:
            task = tier.adapter.submit_store_task(
                [lease.key for lease in batch], [lease.obj for lease in batch], deadline=deadline
            )
        except Exception as error:
            queue.let_go(batch)
            tier.broke("store", error)
            tier.counters.add("store_failures", len(batch))
            return
        task.on_ended(partial(_ended, queue, batch, task))
        with anyio.CancelScope(deadline=deadline + _END_GRACE_S):
            await task.wait_ended()
        if not task.ended:  # a thread that nothing can cancel
            tier.overdue("store")
            queue.drop_waiting()
            await task.wait_ended()


def _ended(queue: _TierQueue, batch: list[ReadLease], task: L2Task[StoreOutcome]) -> None:
    """Only now, not on a time-out, has the adapter let go of the memory; the worker may be gone by then."""
    tier = queue.tier
    queue.let_go(batch)
    outcomes = [StoreOutcome.failed(task.error)] * len(batch) if task.error is not None else task.outcomes()
    for outcome in outcomes:
        _count(tier, outcome)
    late = next((o.error for o in outcomes if isinstance(o.error, BackendTimeoutError)), None)
    if late is not None and not any(outcome.present for outcome in outcomes):
        tier.overdue("store", late)
        queue.drop_waiting()


def _count(tier: Tier, outcome: StoreOutcome) -> None:
    names = {
        StoreStatus.STORED: "stored_objects",
        StoreStatus.ALREADY_PRESENT: "store_present",
        StoreStatus.DROPPED: "store_drops",
        StoreStatus.FAILED: "store_failures",
    }
    tier.counters.add(names[outcome.status])
    tier.counters.add("stored_bytes", outcome.nbytes)
    if outcome.status is StoreStatus.FAILED and outcome.error is not None:
        tier.failed("store", outcome.error)
    elif outcome.present:
        tier.succeeded("store")
