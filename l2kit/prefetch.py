"""PrefetchController: finds the longest prefix that any tier can give and brings it into L1.

L1 answers for what it has; only the rest is asked of L2. All tiers are asked side by side under one deadline, loads
start with the first useful answer, and a key that fails in one tier is tried in the next. The answer is the longest run
of chunks of which every object is readable in L1, each of them leased: what was promised cannot vanish.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Final

import anyio
import msgspec

from l2kit.errors import BackendError, L2Error
from l2kit.keys import ObjectKey
from l2kit.l1 import L1Manager, ReadLease, Refusal, WriteReservation
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.outcomes import LoadOutcome, LoadStatus
from l2kit.tier import Tier

_log = logging.getLogger(__name__)


class WantedObject(msgspec.Struct, frozen=True):
    """One object of a chunk and what its bytes must be."""

    key: ObjectKey
    layout: Layout


#: All objects of one chunk: every shard, group and layer that a reader needs.
WantedChunk = tuple[WantedObject, ...]


class Prefetch:
    """One lookup under way. Thread-safe: engines poll :attr:`done` from their own thread and never wait.

    The holder calls :meth:`release` exactly when it no longer needs the objects (also to cancel); every lease is then
    given back, now or as soon as the work in flight allows.

    Attributes:
        chunks: what was asked for.
        deadline: when the answer is final at the latest, in `time.monotonic` seconds.
        l1_chunks: how many chunks from the start L1 had in full when it was asked.
        loaded_objects: how many objects were read from L2 tiers for this search.
    """

    def __init__(self, chunks: Sequence[WantedChunk], deadline: float) -> None:
        """Made by `StorageManager.start_prefetch`."""
        self.chunks: Final = tuple(chunks)
        self.deadline: Final = deadline
        self.l1_chunks = 0
        self.loaded_objects = 0
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._released = False
        self._leases: list[ReadLease] = []
        self._wakers: list[Callable[[], object]] = []
        self._on_release: Callable[[], object] | None = None

    @property
    def done(self) -> bool:
        """True when the answer is final."""
        return self._done.is_set()

    @property
    def released(self) -> bool:
        """True when the holder has let go."""
        return self._released

    @property
    def ready_chunks(self) -> int:
        """How many chunks from the start are leased and readable in L1; final once :attr:`done`."""
        with self._lock:
            return _whole_chunks(self.chunks, range(len(self._leases)))

    def objects(self) -> list[MemoryObj]:
        """The readable objects of the ready chunks, in order; valid until :meth:`release`."""
        count = sum(len(chunk) for chunk in self.chunks[: self.ready_chunks])
        with self._lock:
            return [lease.obj for lease in self._leases[:count]]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block the calling thread until :attr:`done` (never on the event loop); False after ``timeout_s``."""
        return self._done.wait(timeout_s)

    async def wait_async(self) -> None:
        """Wait until :attr:`done` on an event loop (any loop) without blocking it; the deadline bounds it."""
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        with self._lock:
            if not self.done:
                self._wakers.append(lambda: loop.call_soon_threadsafe(event.set))
            else:
                event.set()
        await event.wait()

    def release(self) -> None:
        """Give up all leases, and the search if it still runs. Harmless when repeated."""
        with self._lock:
            self._released = True
            leases, self._leases = self._leases, []
            on_release = self._on_release
        for lease in leases:
            lease.release()
        if on_release is not None and not self.done:
            on_release()

    def _finish(self, leases: list[ReadLease]) -> None:
        """Give the answer; the leases go back at once when nobody wants them any more."""
        with self._lock:
            if not self._released:
                self._leases, leases = leases, []
            self._done.set()
            wakers, self._wakers = self._wakers, []
        for lease in leases:
            lease.release()
        for wake in wakers:
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there any more
                wake()

    def _bind(self, on_release: Callable[[], object]) -> None:
        with self._lock:
            self._on_release = on_release


class _Search:
    """The state of one running prefetch: what is leased, what each tier said, what is on its way.

    Tasks of the tiers report into it by callback; :meth:`PrefetchController.run` sleeps on :attr:`changed` in between.
    """

    def __init__(self, wanted: Sequence[WantedObject]) -> None:
        self.wanted: Final = wanted
        self.leases: dict[int, ReadLease] = {}  # by position in `wanted`
        self.silent: set[Tier] = set()  # asked, not answered yet
        self.hits: dict[Tier, set[int]] = {}  # found there, not tried yet
        self.locked: dict[Tier, set[int]] = {}  # found there, to be unlocked at the end
        self.loading: set[int] = set()
        self.elsewhere: set[int] = set()  # on its way for somebody else's prefetch
        self.hopeless: set[int] = set()
        self.over = False
        self.changed = anyio.Event()

    def notify(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    def plan(self, tiers: Sequence[Tier]) -> tuple[dict[Tier, list[int]], bool]:
        """What to load from where now, and whether the answer can still get longer. Pure.

        Objects are taken from the most preferred tier that has answered with them. Planning stops at the first object
        that is nowhere, or that only a tier that has not answered yet may have: what lies behind may not be needed.
        """
        loads: dict[Tier, list[int]] = {}
        pending = False
        for index in range(len(self.wanted)):
            if index in self.leases:
                continue
            if index in self.loading or index in self.elsewhere:
                pending = True
                continue
            source = next((tier for tier in tiers if index in self.hits.get(tier, ())), None)
            if source is None or index in self.hopeless:
                waits = index not in self.hopeless and any(tier.worth_waiting_for for tier in self.silent)
                return loads, pending or waits or bool(loads)
            loads.setdefault(source, []).append(index)
        return loads, pending or bool(loads)


class PrefetchController:
    """Runs prefetches. Loop-bound; `Prefetch` is the handle for other threads."""

    def __init__(self, l1: L1Manager, tiers: Sequence[Tier]) -> None:
        """``tiers`` in the order in which they are preferred."""
        self._l1 = l1
        self._tiers = tuple(tiers)
        self._arriving: dict[ObjectKey, set[_Search]] = {}  # loads in flight and the other searches that wait for them
        self.running = 0

    def answer_from_l1(self, prefetch: Prefetch, *, even_in_part: bool) -> bool:
        """Answer at once when L1 has every object, or with what it has when ``even_in_part``. Any thread."""
        keys = [wanted.key for chunk in prefetch.chunks for wanted in chunk]
        ready = self._l1.readable_prefix(keys)
        if ready < len(keys) and not even_in_part:
            return False
        leases = self._l1.acquire_prefix(keys, owner="prefetch")
        if len(leases) < len(keys) and not even_in_part:  # evicted in between
            for lease in leases:
                lease.release()
            return False
        prefetch.l1_chunks = _whole_chunks(prefetch.chunks, range(len(leases)))
        prefetch._finish(leases)  # noqa: SLF001 - the handle's other half
        return True

    async def run(self, prefetch: Prefetch, post: Callable[[Callable[[], None]], bool]) -> None:
        """Do one prefetch to its end; errors and cancellation still give an answer and leak no lease.

        Args:
            prefetch: the handle to answer.
            post: runs a function on this loop from any thread.
        """
        wanted = [w for chunk in prefetch.chunks for w in chunk]
        search = _Search(wanted)
        self.running += 1
        prefetch._bind(partial(post, search.notify))  # noqa: SLF001 - the handle's other half
        try:
            await self._search(search, prefetch)
        except Exception:  # an engine waits for this answer: a bug of ours becomes a shorter hit, with a trace
            _log.exception("a prefetch failed; its request is answered from what L1 has")
        finally:
            self.running -= 1
            prefetch._finish(self._answer(search, prefetch))  # noqa: SLF001

    async def _search(self, search: _Search, prefetch: Prefetch) -> None:
        for index, wanted in enumerate(search.wanted):
            lease = self._l1.acquire(wanted.key, owner="prefetch")
            if lease is not None:
                search.leases[index] = lease
        prefetch.l1_chunks = _whole_chunks(prefetch.chunks, search.leases)
        missing = [index for index in range(len(search.wanted)) if index not in search.leases]
        if not missing:
            return
        for tier in self._tiers:
            if tier.worth_asking:
                self._ask(search, tier, missing, prefetch.deadline)
        with anyio.CancelScope(deadline=prefetch.deadline):
            while not prefetch.released:
                self._collect_elsewhere(search)
                loads, promising = search.plan(self._tiers)
                for tier, indices in loads.items():
                    self._load(search, tier, indices, prefetch)
                if not promising:
                    return
                if not loads:  # after starting loads, look again: some were refused or already here
                    await search.changed.wait()
            return
        for tier in search.silent:
            tier.overdue()

    def _ask(self, search: _Search, tier: Tier, indices: Sequence[int], deadline: float) -> None:
        keys = [search.wanted[index].key for index in indices]

        def answered() -> None:
            tier.answered()
            search.silent.discard(tier)
            try:
                outcomes = task.outcomes()
            except L2Error as error:
                tier.failed(error)
                tier.counters.add("lookup_failures", len(keys))
                search.notify()
                return
            hits = {index for index, outcome in zip(indices, outcomes, strict=True) if outcome.hit}
            failure = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
            if failure is not None:
                tier.failed(failure)
            elif task.state == "done":
                tier.succeeded()
            for outcome in outcomes:
                tier.counters.add(
                    {"hit": "lookup_hits", "miss": "lookup_misses"}.get(outcome.status, "lookup_failures")
                )
            if search.over:
                self._unlock(search, tier, hits)
            else:
                search.hits[tier] = hits
                search.locked[tier] = set(hits)
                search.notify()

        try:
            task = tier.adapter.submit_lookup_and_lock_task(keys, deadline=deadline)
        except L2Error as error:  # closed, or forked
            tier.failed(error)
            return
        search.silent.add(tier)
        tier.asked()
        task.on_ended(answered)

    def _load(self, search: _Search, tier: Tier, indices: Sequence[int], prefetch: Prefetch) -> None:
        reserved: list[tuple[int, WriteReservation]] = []
        for index in indices:
            search.hits[tier].discard(index)
            wanted = search.wanted[index]
            reservation = self._reserve(search, index, tier)
            if isinstance(reservation, WriteReservation):
                reserved.append((index, reservation))
                continue
            search.hits[tier].add(index)  # not tried after all
            if reservation is Refusal.NO_MEMORY:
                search.hopeless.add(index)
            elif wanted.key in self._arriving:
                self._arriving[wanted.key].add(search)
                search.elsewhere.add(index)
            elif (lease := self._l1.acquire(wanted.key, owner="prefetch")) is not None:
                search.leases[index] = lease
            else:  # the engine itself is writing it right now; its next lookup will find it
                search.hopeless.add(index)
        if not reserved:
            return
        try:
            task = tier.adapter.submit_load_task(
                [reservation.key for _, reservation in reserved],
                [reservation.obj for _, reservation in reserved],
                deadline=min(prefetch.deadline, tier.deadline()),
            )
        except L2Error as error:
            for _, reservation in reserved:
                reservation.abort()
            tier.failed(error)
            tier.counters.add("load_failures", len(reserved))
            return
        for index, reservation in reserved:
            search.loading.add(index)
            self._arriving[reservation.key] = set()

        def completed(position: int, outcome: LoadOutcome) -> None:
            index, reservation = reserved[position]
            _count(tier, outcome)
            if outcome.loaded:
                prefetch.loaded_objects += 1
                leases = reservation.finish(() if search.over else ("prefetch",))
                if leases:
                    search.leases[index] = leases[0]
                self._arrived(search, index)

        def ended() -> None:
            # Only now has the adapter let go of the memory of what did not arrive.
            for index, reservation in reserved:
                reservation.abort()
                self._arrived(search, index)
            if task.state == "failed":
                tier.failed(task.error or BackendError(f"{tier.name}: a load failed"))
                tier.counters.add("load_failures", len(reserved))

        task.on_outcome(completed)
        task.on_ended(ended)

    def _reserve(self, search: _Search, index: int, tier: Tier) -> WriteReservation | Refusal:
        """Reserve memory for one object; where there is none, let go of what this search holds behind it.

        What lies behind a gap is worth nothing to the answer, and what lies before it everything.
        """
        wanted = search.wanted[index]
        while True:
            answer = self._l1.reserve_write(wanted.key, wanted.layout, owner=f"load:{tier.name}")
            last = max(search.leases, default=-1)
            if answer is not Refusal.NO_MEMORY or last < index:
                return answer
            search.leases.pop(last).release()
            search.hopeless.add(last)

    def _arrived(self, search: _Search, index: int) -> None:
        search.loading.discard(index)
        search.notify()
        for other in self._arriving.pop(search.wanted[index].key, ()):
            other.notify()

    def _collect_elsewhere(self, search: _Search) -> None:
        for index in list(search.elsewhere):
            key = search.wanted[index].key
            if key not in self._arriving:
                search.elsewhere.discard(index)
                lease = self._l1.acquire(key, owner="prefetch")
                if lease is not None:
                    search.leases[index] = lease

    def _unlock(self, search: _Search, tier: Tier, indices: Iterable[int]) -> None:
        keys = [search.wanted[index].key for index in indices]
        try:
            # Nobody waits for it: the adapter runs it, and its close releases whatever is left.
            _ = tier.adapter.submit_unlock_task(keys)
        except L2Error as error:  # closed: its leases went with it
            _log.debug("tier %s: %d leases went with the adapter: %s", tier.name, len(keys), error)

    def _answer(self, search: _Search, prefetch: Prefetch) -> list[ReadLease]:
        search.over = True
        for tier, indices in search.locked.items():
            self._unlock(search, tier, indices)
        chunks = _whole_chunks(prefetch.chunks, search.leases)
        objects = sum(len(chunk) for chunk in prefetch.chunks[:chunks])
        # Leased once more as one prefix, so that the eviction order sees a prefix and not the order of arrival.
        leases = self._l1.acquire_prefix([wanted.key for wanted in search.wanted[:objects]], owner="prefetch")
        for lease in search.leases.values():
            lease.release()
        return leases


def _whole_chunks(chunks: Sequence[WantedChunk], have: Container[int]) -> int:
    """How many chunks from the start have all their objects in ``have`` (positions of objects)."""
    position = 0
    for count, chunk in enumerate(chunks):
        if any(index not in have for index in range(position, position + len(chunk))):
            return count
        position += len(chunk)
    return len(chunks)


def _count(tier: Tier, outcome: LoadOutcome) -> None:
    names = {
        LoadStatus.LOADED: "loaded_objects",
        LoadStatus.MISS: "load_misses",
        LoadStatus.CORRUPT: "load_corrupt",
        LoadStatus.FAILED: "load_failures",
    }
    tier.counters.add(names[outcome.status])
    tier.counters.add("loaded_bytes", outcome.nbytes)
    if outcome.status is LoadStatus.FAILED and outcome.error is not None:
        tier.failed(outcome.error)
    elif outcome.loaded:
        tier.succeeded()
