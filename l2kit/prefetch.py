"""PrefetchController and `Prefetch`: the longest prefix that any tier can give, brought into L1 for whoever asked.

The answer is the longest run of chunks of which every object is readable in L1, each of them leased: what was promised
cannot vanish. How it is found is in `search.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from l2kit.arrivals import Arrivals
from l2kit.keys import ObjectKey
from l2kit.l1 import L1Manager, ReadLease
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.search import OWNER, Hedging, Search, whole_chunks
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
    given back, now or as soon as the work in flight allows. One that is dropped without that is a bug of its holder:
    it is logged, and the leases go back all the same.

    Attributes:
        chunks: what was asked for.
        deadline: when the answer is final at the latest, in `time.monotonic` seconds.
        l1_chunks: how many chunks from the start L1 had in full when it was asked.
        loaded_objects: how many objects were read from L2 tiers for this search.
    """

    def __init__(
        self, chunks: Sequence[WantedChunk], deadline: float, post: Callable[[Callable[[], None]], bool]
    ) -> None:
        """Made by `StorageManager.start_prefetch`; ``post`` runs a function on its loop soon, from any thread."""
        self._post = post
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
            return whole_chunks(self.chunks, range(len(self._leases)))

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

    def __del__(self) -> None:
        leases = self._leases
        if leases:
            # Whoever's code this interrupts may hold L1's lock: nothing is released here and now.
            self._post(partial(_release_dropped, leases))

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


def _release_dropped(leases: Sequence[ReadLease]) -> None:
    _log.error("a prefetch was dropped without release(); its %d leases are given back now", len(leases))
    for lease in leases:
        lease.release()


class PrefetchController:
    """Runs prefetches. Loop-bound; `Prefetch` is the handle for other threads."""

    def __init__(self, l1: L1Manager, tiers: Sequence[Tier], hedge_after_s: float) -> None:
        """``tiers`` in the order in which they are preferred; ``hedge_after_s`` as in `StorageConfig`."""
        self._hedging = Hedging(hedge_after_s)
        self._l1 = l1
        self._tiers = tuple(tiers)
        self._arrivals = Arrivals()

    def answer_from_l1(self, prefetch: Prefetch, *, even_in_part: bool) -> bool:
        """Answer at once when L1 has every object, or with what it has when ``even_in_part``. Any thread."""
        keys = [wanted.key for chunk in prefetch.chunks for wanted in chunk]
        ready = self._l1.readable_prefix(keys)
        if ready < len(keys) and not even_in_part:
            return False
        leases = self._l1.acquire_prefix(keys, owner=OWNER)
        if len(leases) < len(keys) and not even_in_part:  # evicted in between
            for lease in leases:
                lease.release()
            return False
        prefetch.l1_chunks = whole_chunks(prefetch.chunks, range(len(leases)))
        prefetch._finish(leases)  # noqa: SLF001 - the handle's other half
        return True

    async def run(self, prefetch: Prefetch, post: Callable[[Callable[[], None]], bool]) -> None:
        """Do one prefetch to its end; errors and cancellation still give an answer and leak no lease.

        Args:
            prefetch: the handle to answer.
            post: runs a function on this loop from any thread.
        """
        search = self._search(prefetch.chunks, prefetch.deadline)
        prefetch._bind(partial(post, search.notify))  # noqa: SLF001 - the handle's other half
        leases: list[ReadLease] = []
        try:
            await search.run(lambda: not prefetch.released)
        except Exception:  # an engine waits for this answer: a bug of ours becomes a shorter hit, with a trace
            _log.exception("a prefetch failed; its request is answered from what L1 has")
        finally:
            prefetch.l1_chunks = whole_chunks(prefetch.chunks, search.found_in_l1)
            prefetch.loaded_objects = search.loaded_objects
            ready = whole_chunks(prefetch.chunks, search.leases)
            try:
                leases = search.finish(sum(map(len, prefetch.chunks[:ready])))
            finally:
                prefetch._finish(leases)  # noqa: SLF001

    async def look_up(self, chunks: Sequence[WantedChunk], deadline: float) -> int:
        """How many chunks from the start L1 and the tiers say they have; the answer comes by ``deadline``."""
        search = self._search(chunks, deadline)
        try:
            return whole_chunks(chunks, await search.look_up())
        finally:
            search.finish(0)

    def _search(self, chunks: Sequence[WantedChunk], deadline: float) -> Search:
        wanted = [item for chunk in chunks for item in chunk]
        return Search(self._l1, self._tiers, self._arrivals, wanted, deadline, self._hedging)
