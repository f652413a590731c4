"""One search for the longest prefix that L1 and the tiers can give together: the work behind a `Prefetch`.

L1 answers for what it has; only the rest is asked of L2. All tiers are asked side by side under one deadline, loads
start with the first useful answer, and a key that fails in one tier is tried in the next. A tier that owes an answer is
still asked, once, but nobody waits for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio

from l2kit.arrivals import Arrival, Arrivals, Load, count_load
from l2kit.errors import BackendTimeoutError, L2Error
from l2kit.l1 import L1Manager, ReadLease, Refusal, WriteReservation
from l2kit.outcomes import LoadOutcome, LookupOutcome
from l2kit.resilience.share_budget import ShareBudget
from l2kit.task import L2Task
from l2kit.tier import Tier

if TYPE_CHECKING:
    from l2kit.prefetch import WantedChunk, WantedObject

#: The owner of the leases that prefetches take.
OWNER: Final = "prefetch"

_log = logging.getLogger(__name__)


class Hedging:
    """When a second tier is asked for what the first one owes; shared by all searches of a storage manager."""

    def __init__(self, after_s: float) -> None:
        """Not before ``after_s``, and never if that is 0; for no more than a tenth of all loads."""
        self.after_s: Final = after_s
        self.budget: Final = ShareBudget(0.1, burst=4)


class Search:
    """The search for one prompt. Loop-bound: tasks report into it by callback, :meth:`run` sleeps in between."""

    def __init__(
        self,
        l1: L1Manager,
        tiers: Sequence[Tier],
        arrivals: Arrivals,
        wanted: Sequence[WantedObject],
        deadline: float,
        hedging: Hedging,
    ) -> None:
        """Look for ``wanted`` until ``deadline``.

        Args:
            l1: where objects are and where they go.
            tiers: in the order in which they are preferred.
            arrivals: what is on its way for any search; shared by all of them.
            wanted: the objects in prompt order.
            deadline: on the loop's clock.
            hedging: when to ask a second tier; shared by all searches.
        """
        self.leases: Final[dict[int, ReadLease]] = {}  # by position in `wanted`, like all that follows
        self.found_in_l1: frozenset[int] = frozenset()
        self.loaded_objects = 0
        self._l1 = l1
        self._tiers = tiers
        self._arrivals = arrivals
        self._wanted = wanted
        self._deadline = deadline
        self._hedging_rules = hedging
        self._silent: set[Tier] = set()  # asked, not answered yet
        self._hits: dict[Tier, set[int]] = {}  # found there, not tried yet
        self._locked: dict[Tier, set[int]] = {}  # found there, to be unlocked at the end
        self._loads: set[Load] = set()
        self._arriving: set[int] = set()  # on its way, for this search or for another one
        self._hedging: set[int] = set()  # on its way a second time, for this search
        self._hopeless: set[int] = set()
        self._over = False
        self._changed = anyio.Event()

    def notify(self) -> None:
        """Look again: something has changed."""
        self._changed.set()
        self._changed = anyio.Event()

    async def run(self, is_wanted: Callable[[], bool]) -> None:
        """Bring into L1 and lease what can be had by the deadline, as long as ``is_wanted`` says so."""
        if not is_wanted():
            return
        for index, item in enumerate(self._wanted):
            lease = self._l1.acquire(item.key, owner=OWNER)
            if lease is not None:
                self.leases[index] = lease
        self.found_in_l1 = frozenset(self.leases)
        self._ask([index for index in range(len(self._wanted)) if index not in self.leases])
        with anyio.CancelScope(deadline=self._deadline) as scope:
            while is_wanted():
                self._collect()
                loads, promising = self.plan()
                self._start(loads)
                if not promising:
                    break
                if not loads:  # after starting loads, look again: some were refused or already here
                    with anyio.move_on_after(self._hedge() - anyio.current_time()):
                        await self._changed.wait()
        if scope.cancelled_caught:
            self._distrust()

    async def look_up(self) -> set[int]:
        """Positions of what L1 has or some tier says it has, as far as known by the deadline. Loads nothing."""
        found = {index for index, item in enumerate(self._wanted) if self._l1.contains(item.key)}
        self._ask([index for index in range(len(self._wanted)) if index not in found])
        with anyio.CancelScope(deadline=self._deadline) as scope:
            while self._awaits_answers() and len(found.union(*self._hits.values())) < len(self._wanted):
                await self._changed.wait()
        if scope.cancelled_caught:
            self._distrust()
        return found.union(*self._hits.values())

    def finish(self, objects: int) -> list[ReadLease]:
        """End the search: unlock what was found, release what is leased, return leases of the first ``objects``.

        What is still on its way arrives without a lease.
        """
        self._over = True
        for tier, indices in self._locked.items():
            self._unlock(tier, indices)
        # Leased once more as one prefix, so that the eviction order sees a prefix and not the order of arrival.
        leases = self._l1.acquire_prefix([item.key for item in self._wanted[:objects]], owner=OWNER)
        for lease in self.leases.values():
            lease.release()
        return leases

    def plan(self) -> tuple[list[tuple[int, Tier]], bool]:
        """What to load from where now, in order, and whether the answer can still get longer. Pure.

        - An object is taken from the most preferred tier that has answered with it and is trusted with loads.
        - Planning stops at the first object that is nowhere, or that only a tier that has not answered yet may have:
          what lies behind may not be needed.
        - What only a distrusted tier has is loaded as its probe, and not waited for.
        """
        loads: list[tuple[int, Tier]] = []
        pending = False
        for index, item in enumerate(self._wanted):
            if index in self.leases:
                continue
            if index in self._hedging:
                pending = True
                continue
            arrival = self._arrivals.find(item.key) if index in self._arriving else None
            if arrival is not None and arrival.tier.trusted("load"):
                pending = True
                continue
            having = [tier for tier in self._tiers if index in self._hits.get(tier, ())]
            source = next((tier for tier in having if tier.trusted("load")), None)
            if source is None or index in self._hopeless:
                promising = pending or bool(loads)
                if index in self._hopeless:
                    return loads, promising
                if self._awaits_answers():
                    return loads, True
                probe = next((tier for tier in having if tier.worth_asking("load")), None)
                if probe is not None and arrival is None:
                    loads.append((index, probe))
                return loads, promising
            loads.append((index, source))
        return loads, pending or bool(loads)

    def _awaits_answers(self) -> bool:
        return any(tier.trusted("lookup") for tier in self._silent)

    def _distrust(self) -> None:
        """The deadline has passed: whoever gave nothing until now is not waited for next time."""
        for tier in self._silent:
            tier.overdue("lookup")
        for load in self._loads:
            if not load.brought:
                load.tier.overdue("load")
                for _, arrival in load.arrivals:
                    arrival.notify()  # others may get it from another tier

    def _ask(self, indices: Sequence[int]) -> None:
        """Ask every tier for the objects at ``indices``."""
        keys = [self._wanted[index].key for index in indices]
        for tier in self._tiers if keys else ():
            if not tier.worth_asking("lookup"):
                continue
            try:
                task = tier.adapter.submit_lookup_and_lock_task(keys, deadline=self._deadline)
            except Exception as error:
                tier.broke("lookup", error)
                continue
            self._silent.add(tier)
            tier.asked("lookup")
            task.on_ended(partial(self._answered, tier, indices, task))

    def _answered(self, tier: Tier, indices: Sequence[int], task: L2Task[LookupOutcome]) -> None:
        tier.answered("lookup")
        self._silent.discard(tier)
        outcomes = task.outcomes() if task.error is None else []
        hits = {index for index, outcome in zip(indices, outcomes, strict=False) if outcome.hit}
        failure = task.error or next((outcome.error for outcome in outcomes if outcome.error is not None), None)
        if failure is None:
            tier.succeeded("lookup")
        elif isinstance(failure, BackendTimeoutError):
            tier.overdue("lookup", failure)
        else:
            tier.failed("lookup", failure)
        misses = sum(outcome.status == "miss" for outcome in outcomes)
        tier.counters.add("lookup_hits", len(hits))
        tier.counters.add("lookup_misses", misses)
        tier.counters.add("lookup_failures", len(indices) - len(hits) - misses)
        if self._over:
            self._unlock(tier, hits)
        else:
            self._hits[tier] = hits
            self._locked[tier] = set(hits)
            self.notify()

    def _start(self, loads: Sequence[tuple[int, Tier]]) -> None:
        """Reserve memory in prompt order, so that what fits is a prefix, and start one load task for each tier."""
        batches: dict[Tier, list[tuple[int, WriteReservation]]] = {}
        try:
            for index, tier in loads:
                answer = self._reserve(index, tier)
                if isinstance(answer, WriteReservation):
                    batches.setdefault(tier, []).append((index, answer))
                elif isinstance(answer, ReadLease):
                    self.leases[index] = answer
                elif answer is not None:
                    answer.waiting.add(self)
                    self._arriving.add(index)
                else:  # nothing behind this is worth loading
                    self._hopeless.add(index)
                    break
            while batches:
                self._load(*batches.popitem())
        finally:
            for reserved in batches.values():  # left only by an error
                for _, reservation in reserved:
                    reservation.abort()

    def _reserve(self, index: int, tier: Tier) -> WriteReservation | ReadLease | Arrival | None:
        """Memory for one object, or the object itself, or its arrival; None when this search cannot have it."""
        wanted = self._wanted[index]
        while True:
            answer = self._l1.reserve_write(wanted.key, wanted.layout, owner=f"load:{tier.name}")
            if isinstance(answer, WriteReservation):
                return answer
            if answer is Refusal.PRESENT:
                lease = self._l1.acquire(wanted.key, owner=OWNER)
                if lease is not None:  # else it was evicted in between
                    return lease
            elif answer is Refusal.WRITING:
                arrival = self._arrivals.find(wanted.key)
                if arrival is None or arrival.tier.trusted("load"):  # None: the engine itself is writing it right now
                    return arrival
                self._arrivals.give_up_on(arrival)
            else:
                # What lies behind a gap is worth nothing to the answer, and what lies before it everything.
                last = max(self.leases, default=-1)
                if last < index:
                    return None
                self.leases.pop(last).release()
                self._hopeless.add(last)

    def _load(self, tier: Tier, reserved: Sequence[tuple[int, WriteReservation]], *, hedge: bool = False) -> None:
        self._hits[tier].difference_update(index for index, _ in reserved)
        try:
            task = tier.adapter.submit_load_task(
                [reservation.key for _, reservation in reserved],
                [reservation.obj for _, reservation in reserved],
                deadline=min(self._deadline, tier.deadline()),
            )
        except Exception as error:
            for _, reservation in reserved:
                reservation.abort()
            tier.broke("load", error)
            tier.counters.add("load_failures", len(reserved))
            return
        arrivals = [(index, Arrival(reservation, tier, self)) for index, reservation in reserved]
        load = Load(tier, arrivals, anyio.current_time(), hedge=hedge)
        for index, arrival in arrivals:
            if hedge:
                self._hedging.add(index)
            else:
                self._arriving.add(index)
                self._arrivals.add(arrival)
        if not hedge:
            self._hedging_rules.budget.earn()
        self._loads.add(load)
        tier.asked("load")
        task.on_outcome(partial(self._completed, load))
        task.on_ended(partial(self._ended, load, task))

    def _completed(self, load: Load, position: int, outcome: LoadOutcome) -> None:
        index, arrival = load.arrivals[position]
        load.ended += 1
        now = anyio.current_time()
        if outcome.loaded:
            load.tier.waited(now - load.progress)
        load.progress = now
        is_first = index not in self.leases
        if load.hedge:
            self._hedging.discard(index)
            load.tier.counters.add("hedges_won", outcome.loaded and is_first)
        load.timed_out |= isinstance(outcome.error, BackendTimeoutError)
        count_load(load.tier, outcome)
        if outcome.loaded:
            load.brought += 1
            self.loaded_objects += is_first
            owners = () if self._over or not is_first else (OWNER,)
            for lease in arrival.reservation.finish(owners):
                self.leases[index] = lease
            self._arrivals.arrived(arrival)

    def _ended(self, load: Load, task: L2Task[LoadOutcome]) -> None:
        self._loads.discard(load)
        load.tier.answered("load")
        if task.error is not None:
            load.timed_out |= isinstance(task.error, BackendTimeoutError)
            load.tier.failed("load", task.error)
            load.tier.counters.add("load_failures", len(load.arrivals) - load.ended)
        if load.timed_out and not load.brought:
            load.tier.overdue("load")
        for index, arrival in load.arrivals:
            if load.hedge:
                self._hedging.discard(index)
            arrival.reservation.abort()  # only now has the adapter let go of the memory of what did not arrive
            self._arrivals.landed(arrival)
        self.notify()

    def _hedge(self) -> float:
        """Ask other tiers for what loads owe for too long; return when to look again, on the loop's clock."""
        again = math.inf
        for load in [load for load in self._loads if not (load.hedge or load.hedged)]:
            due = load.progress + load.tier.patience_s(self._hedging_rules.after_s)
            second = self._second_tiers(load) if self._hedging_rules.after_s else {}
            if not second:
                continue
            if due > anyio.current_time():
                again = min(again, due)
                continue
            load.hedged = True
            if not self._hedging_rules.budget.spend():
                continue
            load.tier.counters.add("hedged_loads")
            for tier, indices in second.items():
                self._load_beside(tier, indices)
        return again

    def _second_tiers(self, load: Load) -> dict[Tier, list[int]]:
        """What ``load`` has not brought yet, by the best other tier that has it."""
        second: dict[Tier, list[int]] = {}
        for index, _ in load.arrivals:
            if index in self._arriving and index not in self.leases and index not in self._hedging:
                having = (tier for tier in self._tiers if index in self._hits.get(tier, ()) and tier.trusted("load"))
                tier = next(having, None)
                if tier is not None:
                    second.setdefault(tier, []).append(index)
        return second

    def _load_beside(self, tier: Tier, indices: Sequence[int]) -> None:
        reserved: list[tuple[int, WriteReservation]] = []
        for index in indices:
            wanted = self._wanted[index]
            reservation = self._l1.reserve_beside(wanted.key, wanted.layout, owner=f"load:{tier.name}")
            if not isinstance(reservation, WriteReservation):
                break  # no memory for a second copy, or it has just arrived
            reserved.append((index, reservation))
        if reserved:
            self._load(tier, reserved, hedge=True)

    def _collect(self) -> None:
        """Lease what has arrived, and wait on for what has not."""
        for index in list(self._arriving):
            key = self._wanted[index].key
            arrival = self._arrivals.find(key)
            if arrival is not None:
                if arrival.search is not self:  # its own loads wake it when they end, not object by object
                    arrival.waiting.add(self)
                continue
            self._arriving.discard(index)
            lease = None if index in self.leases else self._l1.acquire(key, owner=OWNER)
            if lease is not None:
                self.leases[index] = lease

    def _unlock(self, tier: Tier, indices: Iterable[int]) -> None:
        keys = [self._wanted[index].key for index in indices]
        if not keys:
            return
        try:
            # Nobody waits for it: the adapter runs it, and its close releases whatever is left.
            _ = tier.adapter.submit_unlock_task(keys)
        except L2Error as error:  # closed: its leases went with it
            _log.debug("tier %s: %d leases went with the adapter: %s", tier.name, len(keys), error)


def whole_chunks(chunks: Sequence[WantedChunk], have: Container[int]) -> int:
    """How many chunks from the start have all their objects in ``have`` (positions of objects)."""
    position = 0
    for count, chunk in enumerate(chunks):
        if any(index not in have for index in range(position, position + len(chunk))):
            return count
        position += len(chunk)
    return len(chunks)
