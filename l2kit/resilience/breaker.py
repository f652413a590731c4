"""A circuit breaker for each tier: a backend that keeps failing is left alone, and asked again by a probe."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

import anyio

from l2kit.adapter import L2Adapter
from l2kit.batches import Lane, current_lane
from l2kit.errors import BackendError, BackendTimeoutError, L2Error
from l2kit.framing import seal
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.outcomes import StoreStatus
from l2kit.resilience.circuit import Circuit
from l2kit.resilience.config import ResilienceConfig
from l2kit.serde import CodecChain
from l2kit.wrapper import WrappingAdapter, failure_of

ResultT = TypeVar("ResultT")

#: A call that had less time than this before its deadline proves nothing by missing it.
_FAIR_S: Final = 0.25
#: What write probes store; one key for all, so that what killed processes leave behind does not add up.
_PROBE: Final = ObjectKey("l2kit-probe", bytes(16))

_log = logging.getLogger(__name__)


class BreakerAdapter(WrappingAdapter[ResilienceConfig]):
    """Watches reads (lookups, loads) and writes (stores, deletes) of a backend apart.

    - While a circuit is open, nothing of its side reaches the backend: lookups and loads are misses, stores are
      dropped, deletes fail, all at once, and counted as ``circuit.read.rejected`` and ``circuit.write.rejected``.
    - An open circuit closes when a probe succeeds, which is sent in the background: no request pays for it.
    - Failures are errors of the backend and calls that reached their deadline; a miss or a full backend is none.
    """

    options_type = ResilienceConfig

    def __init__(self, inner: L2Adapter[Any], options: ResilienceConfig | None = None) -> None:
        """Stand around ``inner``."""
        super().__init__(inner, options)
        self.circuits: Final[dict[Lane, Circuit]] = {"read": Circuit(self.options), "write": Circuit(self.options)}
        self._worked_again_at: dict[Lane, float] = {}

    @property
    def trouble(self) -> L2Error | None:
        """The open circuit, with the failure that opened it."""
        for side, circuit in self.circuits.items():
            error = circuit.error
            if error is not None:
                return BackendError(f"{self.name}: {side}s are suspended until a probe succeeds: {error}")
        return super().trouble

    def worked_again_at(self, lane: Lane) -> float:
        """When a probe last closed the circuit."""
        return max(self._worked_again_at.get(lane, 0.0), super().worked_again_at(lane))

    async def open(self) -> None:
        """Get ready to send probes."""
        self._tripped = {side: anyio.Event() for side in self.circuits}
        for side in self.circuits:
            self.run_in_background(f"{side} circuit", partial(self._probe_when_open, side))

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """DROPPED while writes are suspended."""
        return await self._guarded("write", lambda: self.inner.store_one(key, data), lambda: StoreStatus.DROPPED)

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """A miss while reads are suspended."""
        return await self._guarded("read", lambda: self.inner.load_one(key, into), lambda: None)

    async def store_many(self, items: Sequence[StoreItem]) -> Sequence[StoreStatus | Exception]:
        """DROPPED while writes are suspended."""
        return self._judged(
            "write",
            await self._guarded(
                "write",
                lambda: self.inner.store_many(items),
                lambda: [StoreStatus.DROPPED] * len(items),
            ),
        )

    async def load_many(self, items: Sequence[LoadItem]) -> Sequence[int | Exception | None]:
        """Misses while reads are suspended."""
        return self._judged(
            "read", await self._guarded("read", lambda: self.inner.load_many(items), lambda: [None] * len(items))
        )

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> Sequence[int | None]:
        """Misses while reads are suspended."""
        return await self._guarded("read", lambda: self.inner.lookup_many(keys), lambda: [None] * len(keys))

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> Sequence[int | None]:
        """Misses while reads are suspended."""
        return await self._guarded("read", lambda: self.inner.acquire_many(keys), lambda: [None] * len(keys))

    async def delete_one(self, key: ObjectKey) -> bool:
        """Fails while writes are suspended: whether there was something to delete is not known."""

        def refuse() -> bool:
            raise BackendError(f"{self.name}: not deleted, writes are suspended: {self.circuits['write'].error}")

        return await self._guarded("write", lambda: self.inner.delete_one(key), refuse)

    async def _guarded(
        self, side: Lane, call: Callable[[], Awaitable[ResultT]], reject: Callable[[], ResultT]
    ) -> ResultT:
        circuit = self.circuits[side]
        if not circuit.closed:
            self.count(f"circuit.{side}.rejected")
            return reject()
        deadline, started = anyio.current_effective_deadline(), anyio.current_time()
        try:
            result = await call()
        except Exception as caught:
            error = failure_of(self.inner, caught)
            if isinstance(error, BackendError):
                self._failed(side, error)
            raise
        except anyio.get_cancelled_exc_class():
            now = anyio.current_time()
            if now >= deadline and now - started >= _FAIR_S:
                self._failed(side, BackendTimeoutError(f"{self.name}: no answer before the deadline"))
            raise
        circuit.succeeded()
        return result

    def _judged(self, side: Lane, answers: Sequence[ResultT | Exception]) -> Sequence[ResultT | Exception]:
        """Take the failures of single keys into account."""
        for answer in answers:
            error = failure_of(self.inner, answer) if isinstance(answer, Exception) else None
            if isinstance(error, BackendError):
                self._failed(side, error)
        return answers

    def _failed(self, side: Lane, error: L2Error) -> None:
        if self.circuits[side].failed(error):
            self.count(f"circuit.{side}.opened")
            self._tripped[side].set()
            _log.warning("%s: %ss keep failing and are suspended: %s", self.name, side, error)

    async def _probe_when_open(self, side: Lane) -> None:
        circuit = self.circuits[side]
        while True:
            await self._tripped[side].wait()
            while not circuit.closed:
                await anyio.sleep(circuit.next_pause_s())
                circuit.probing()
                self.count(f"circuit.{side}.probes")
                try:
                    await self._probe(side)
                except Exception as error:
                    circuit.probe_failed(failure_of(self.inner, error))
                    continue
                self._tripped[side] = anyio.Event()
                circuit.probe_succeeded()
                self._worked_again_at[side] = time.monotonic()
                _log.warning("%s: %ss work again", self.name, side)

    async def _probe(self, side: Lane) -> None:
        """Ask for an object that nobody has, or write one, if there is room for it, and try to delete it."""
        current_lane.set(side)
        with anyio.move_on_after(self.config.timeout_s) as scope:
            if side == "read":
                await self.inner.load_one(ObjectKey("l2kit-probe", os.urandom(16)), [memoryview(bytearray(256))])
            else:
                # Of another size than what an earlier probe may have left: adapters may keep what is there already.
                layout = Layout.raw(random.randrange(64, 4096))
                obj = MemoryObj.wrap(os.urandom(layout.nbytes), layout)
                await self.inner.store_one(_PROBE, seal(_PROBE, obj, CodecChain(), self.capabilities.alignment))
                with suppress(Exception):  # where deleting is not allowed, one object stays: it is always the same
                    await self.inner.delete_one(_PROBE)
        if scope.cancelled_caught:
            raise BackendTimeoutError(f"{self.name}: no answer to a probe within {self.config.timeout_s:g} s")
