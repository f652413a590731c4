"""The scrubber: reads every object of a tier now and then, slowly, and finds rot before a reader does.

Opt-in, per tier: ``scrub = { interval_s = 3600, max_bytes_per_s = "50MiB" }``, in a URL ``?scrub.interval_s=3600``.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Annotated, Any, Final, Self

import anyio
import msgspec

from l2kit import envelope
from l2kit.adapter import KeyInfo, L2Adapter
from l2kit.config import PositiveInt, parse_size_bytes
from l2kit.envelope import INTACT_REASONS
from l2kit.errors import BackendTimeoutError, ConfigError, CorruptObjectError, L2Error
from l2kit.inventory import listing
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.outcomes import LoadStatus, StoreStatus
from l2kit.resilience import BreakerAdapter
from l2kit.sealed import MAX_SEALED_BYTES, read_checked, read_head
from l2kit.wrapper import WrappingAdapter, innermost

SCRUB_COUNTERS: Final = ("scrub.objects", "scrub.bytes", "scrub.corrupt", "scrub.failed", "scrub.rounds")

#: So long one object waits for a tier that is never idle: a busy tier rots like any other.
_LONGEST_YIELD_S: Final = 1.0
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0

_log = logging.getLogger(__name__)


class ScrubOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a tier is scrubbed; any of these turns it on.

    Attributes:
        interval_s: pause between two rounds over all objects. The first round begins somewhere within it, so nodes that
            start together do not read together. Too small a value reads the tier all the time, too large a one
            never, where processes do not live that long.
        max_bytes_per_s: the rate of reading, in bytes or as ``50MiB``, on average over the objects of a round: each is
            read at once, and paid for by the pause after it. A large value takes the backend's time away from the
            engine; with a small one a round takes long: a tier of 1 TiB takes 6 hours at ``50MiB``.
    """

    interval_s: Annotated[float, msgspec.Meta(gt=0, le=31 * 86_400)] = 3600.0
    max_bytes_per_s: PositiveInt = 50 << 20


class Pace:
    """How long to wait so that bytes stay below a rate. Pure: time comes in by ``clock``."""

    def __init__(self, max_bytes_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing owed; ``clock`` in seconds."""
        self._max_bytes_per_s = max_bytes_per_s
        self._clock = clock
        self._paid_at = clock()

    def owe(self, nbytes: int) -> None:
        """``nbytes`` are about to be read. Rest that was not needed before is not saved up for them."""
        self._paid_at = max(self._clock(), self._paid_at) + nbytes / self._max_bytes_per_s

    @property
    def wait_s(self) -> float:
        """How long to wait, from now, before the next bytes."""
        return max(0.0, self._paid_at - self._clock())


class ScrubbingAdapter(WrappingAdapter[ScrubOptions]):
    """Reads and checks every object of ``inner`` in turn, in the background.

    - A damaged object is loaded as a reader would load it, which counts it by reason and deletes it, once, or keeps it
      out of lookups until it is replaced. What is only not readable here stays.
    - It gives way: an object is read when no load, store or lookup is under way, or when it has waited for a second;
      one object at a time, at ``max_bytes_per_s`` on average.
    - What it reads is no use of an object, for adapters that ask `counts_as_use`; for others, a round makes the order
      of eviction that of the listing.
    - Its failures do not count against the tier: it reads beneath the circuit breaker, and pauses longer with each
      failure in a row, up to half a minute.
    - A listing that fails, or does not go on for ``open_timeout_s``, ends the round; as background work that died it is
      logged, and the tier in trouble, until it runs again.
    - Counters: ``scrub.objects`` and ``scrub.bytes`` that were read, ``scrub.corrupt``, ``scrub.failed`` (could not be
      read), ``scrub.rounds``.

    It belongs outside of all other wrappers, so that what it finds is healed where readers look.
    """

    options_type = ScrubOptions

    def __init__(self, inner: L2Adapter[Any], options: ScrubOptions | None = None) -> None:
        """Stand around ``inner``, which is not entered yet.

        Raises:
            ConfigError: it cannot list its keys.
        """
        super().__init__(inner, options)
        if type(innermost(inner)).iter_keys is L2Adapter.iter_keys:
            raise ConfigError(f"{inner.name}: scrub: this adapter cannot list its keys; leave the option out")
        self.pace: Final = Pace(self.options.max_bytes_per_s)
        self._source: Final = inner.inner if isinstance(inner, BreakerAdapter) else inner
        self._under_way = 0
        self._pause_s = _FIRST_PAUSE_S

    @classmethod
    def around(cls, inner: L2Adapter[Any], options: Mapping[str, Any], *, where: str) -> Self:
        """As `WrappingAdapter.around`; a rate may be a size like ``50MiB``."""
        rate = options.get("max_bytes_per_s")
        if isinstance(rate, str):
            options = {**options, "max_bytes_per_s": parse_size_bytes(rate, where=f"{where}: max_bytes_per_s")}
        return super().around(inner, options, where=where)

    @property
    def counters(self) -> Counter[str]:
        """Its own and those of the adapters underneath."""
        merged = super().counters
        for name in SCRUB_COUNTERS:
            merged.setdefault(name, 0)
        return merged

    async def open(self) -> None:
        """Start scrubbing."""
        self._idle = anyio.Event()
        self._idle.set()
        self.run_in_background("scrub", self._scrub)

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """Before the scrubber."""
        with self._first():
            return await self.inner.store_one(key, data)

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """Before the scrubber."""
        with self._first():
            return await self.inner.load_one(key, into)

    async def store_many(self, items: Sequence[StoreItem]) -> Sequence[StoreStatus | Exception]:
        """Before the scrubber."""
        with self._first():
            return await self.inner.store_many(items)

    async def load_many(self, items: Sequence[LoadItem]) -> Sequence[int | Exception | None]:
        """Before the scrubber."""
        with self._first():
            return await self.inner.load_many(items)

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> Sequence[int | None]:
        """Before the scrubber."""
        with self._first():
            return await self.inner.lookup_many(keys)

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> Sequence[int | None]:
        """Before the scrubber."""
        with self._first():
            return await self.inner.acquire_many(keys)

    @contextmanager
    def _first(self) -> Iterator[None]:
        if not self._under_way:
            self._idle = anyio.Event()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def _scrub(self) -> None:
        await anyio.sleep(random.uniform(0, self.options.interval_s))
        while True:
            async with aclosing(listing(self.inner)) as objects:
                while (info := await self._next(objects)) is not None:
                    with anyio.move_on_after(_LONGEST_YIELD_S):
                        while self._under_way:
                            await self._idle.wait()
                    await self._look_at(info)
                    await anyio.sleep(self.pace.wait_s)
            self.count("scrub.rounds")
            await anyio.sleep(self.options.interval_s)

    async def _next(self, objects: AsyncGenerator[KeyInfo, None]) -> KeyInfo | None:
        """The next object of a listing; None at its end."""
        limit_s = self.config.open_timeout_s  # a step may read a whole folder
        with anyio.move_on_after(limit_s):
            return await anext(objects, None)
        raise BackendTimeoutError(f"{self.name}: the listing did not go on within {limit_s:g} s")

    async def _look_at(self, info: KeyInfo) -> None:
        """Read and check one object; heal it if need be."""
        self.pace.owe(info.size)
        try:
            try:
                stored = await read_checked(self._source, info.key, info.size)
            except CorruptObjectError as error:
                self._looked_at(info.size)
                if error.reason not in INTACT_REASONS:
                    await self._heal(info.key)
                return
        except L2Error as error:
            self.count("scrub.failed")
            _log.warning("%s: the scrubber cannot read %s: %s", self.name, info.key, error)
            await anyio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            return
        if stored is not None:
            self._looked_at(len(stored))

    def _looked_at(self, nbytes: int) -> None:
        self.count("scrub.objects")
        self.count("scrub.bytes", nbytes)
        self._pause_s = _FIRST_PAUSE_S

    async def _heal(self, key: ObjectKey) -> None:
        """Load a damaged object as a reader would: that finds the damage again, or a good object in its place."""
        head = await read_head(self._source, key)
        if head is None:
            return
        try:
            nbytes = min(envelope.parse(head).layout.nbytes, MAX_SEALED_BYTES)
        except CorruptObjectError:
            nbytes = 0  # nothing will be written to it
        [outcome] = await self.submit_load_task([key], [MemoryObj.allocate(Layout.raw(nbytes))])
        if outcome.status is LoadStatus.CORRUPT:
            self.count("scrub.corrupt")
