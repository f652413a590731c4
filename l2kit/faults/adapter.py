"""`FaultyAdapter`: any adapter, hurt after a plan. What goes wrong when is decided in `plan.py`."""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, Final

import anyio
import anyio.lowlevel

from l2kit.adapter import L2Adapter
from l2kit.errors import (
    AuthError,
    BackendBusyError,
    BackendError,
    CapacityError,
    L2Error,
    TransientBackendError,
)
from l2kit.faults.damage import between, flip_bit, garble, total, with_flipped_bit
from l2kit.faults.options import FaultOptions
from l2kit.faults.plan import Fault, FaultPlan, Kind, Operation
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit.wrapper import WrappingAdapter

_DELAYS: Final[frozenset[Kind]] = frozenset({"latency", "jitter", "hang", "stuck"})
_REFUSALS: Final[dict[Kind, tuple[type[L2Error], str]]] = {
    "error": (BackendError, "the backend failed"),
    "transient": (TransientBackendError, "the backend failed for now"),
    "busy": (BackendBusyError, "the backend has too much to do"),
    "denied": (AuthError, "the backend refuses our credentials"),
}

#: Of these operations a lost connection tells nothing: the backend may have done what it was asked for.
_UNCERTAIN: Final[frozenset[Operation]] = frozenset({"load", "store", "delete"})

_REMEMBERED_KEYS: Final = 64
_PLAUSIBLE_BYTES: Final = 4096
_INLINE_BYTES: Final = 64 << 10  # damage to more than this is done in a thread
_log = logging.getLogger(__name__)

Faults = dict[Kind, Fault]


class FaultyAdapter(WrappingAdapter[FaultOptions]):
    """``inner`` with the faults of a plan: slow, hung, failing, lying, full, losing and damaging, call by call.

    - Every fault that took effect is counted as ``fault.OPERATION.KIND``, and in :attr:`injected`. A fault that finds
      nothing to hurt (a flip in an object that is not there) is none.
    - Of one call, delays come first, in the order of their rules, then the first refusal, then damage; of two rules of
      one kind of damage the first counts.
    - The adapter contract holds throughout: no buffer is touched after a hook has ended, stored bytes are damaged in a
      copy and loaded ones inside the destination, cancellation is passed on. ``inner`` only releases what it locked.
    - With no rule it does what ``inner`` does.

    `_thread_relief` is the one thing that threads see: those that are stuck wait for it.
    """

    api_version = (1, 0)
    options_type = FaultOptions

    def __init__(self, inner: L2Adapter[Any], options: FaultOptions | None = None) -> None:
        """Stand around ``inner``, which is not entered yet."""
        super().__init__(inner, options)
        self.plan: Final[FaultPlan] = self.options.plan()
        self._injected = 0
        self._recent: OrderedDict[ObjectKey, int] = OrderedDict()  # stored through us, with their sizes
        self._phantoms: Counter[ObjectKey] = Counter()  # hits that we invented and that are not released yet
        self._relief: anyio.Event | None = None
        self._thread_relief = threading.Event()

    # --- for tests and rehearsals ---------------------------------------------------------------------

    @property
    def injected(self) -> int:
        """How many faults took effect so far."""
        return self._injected

    def calm(self) -> None:
        """End the outage: no faults until :meth:`resume`; calls that are held up go on unhurt. On the loop."""
        self.plan.pause()
        if self._relief is not None:
            self._relief.set()
            self._relief = None
        self._thread_relief.set()

    def resume(self) -> None:
        """Go on with the plan where :meth:`calm` stopped it. On the loop."""
        self._thread_relief = threading.Event()
        self.plan.resume()

    # --- hooks ----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Hurt the opening; ``inner`` is open by now, and closed again when this fails."""
        if not self.plan.is_empty:
            _log.warning("%s: faults are injected on purpose: %s", self.name, self.options)
        await self._strike("open")

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """See `L2Adapter.store_one`. A backend that is full says so with `CapacityError`, as disks and servers do."""
        faults = await self._strike("store")
        size = total(data)
        if (slow := faults.get("slow")) is not None:
            self._inject("store", slow)
            await self._hold_up(size / slow.value)
            faults = {} if self.plan.paused else faults
        if (full := faults.get("full")) is not None:
            self._inject("store", full)
            raise CapacityError(self._message("store", full, "there is no room left"))
        if (lost := faults.get("lost")) is not None:
            self._inject("store", lost)
            return StoreStatus.STORED
        if (truncate := faults.get("truncate")) is not None and size:
            self._inject("store", truncate)
            data = between(data, 0, truncate.random.randrange(size))
        if (flip := faults.get("flip")) is not None and total(data):
            self._inject("store", flip)
            bit = flip.random.randrange(8 * total(data))
            data = await self._do(total(data), partial(with_flipped_bit, data, bit))
        disconnect = faults.get("disconnect")
        if disconnect is not None and disconnect.random.random() < 0.5:
            self._disconnect("store", disconnect)
        status = await self.inner.store_one(key, data)
        if disconnect is not None:
            self._disconnect("store", disconnect)
        self._remember(key, size)
        return status

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """See `L2Adapter.load_one`."""
        faults = await self._strike("load")
        capacity = total(into)
        if (disconnect := faults.get("disconnect")) is not None:
            await self.inner.load_one(key, between(into, 0, disconnect.random.randrange(capacity + 1)))
            self._disconnect("load", disconnect)
        cut = faults.get("short") or faults.get("truncate")
        parts = into if cut is None else between(into, 0, cut.random.randrange(max(1, capacity)))
        size = await self._read(key, parts, faults.get("wrong"))
        if size is None:
            return None
        filled = min(size, total(parts))
        if cut is not None and filled < capacity and size:
            if size <= filled:  # nothing is missing yet: the destination is larger than the object
                filled = cut.random.randrange(size)
                missing = between(into, filled, size)
                await self._do(size - filled, partial(garble, missing, cut.random))
            self._inject("load", cut)
            size = filled if cut.kind == "truncate" else size
        if (flip := faults.get("flip")) is not None and filled:
            flip_bit(into, flip.random.randrange(8 * filled))
            self._inject("load", flip)
        if (slow := faults.get("slow")) is not None:
            self._inject("load", slow)
            await self._hold_up(filled / slow.value)
        return size

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> Sequence[int | None]:
        """See `L2Adapter.lookup_many`."""
        faults = await self._strike("lookup")
        sizes = dict(zip(keys, await self.inner.lookup_many(keys), strict=True))
        if (lie := faults.get("lie")) is not None and keys:
            sizes |= self._lies({key: sizes[key] for key in _some(keys, lie.random)}, lie)
        return [sizes[key] for key in keys]

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> Sequence[int | None]:
        """See `L2Adapter.acquire_many`. Nothing of what is lied about is locked."""
        faults = await self._strike("lookup")
        if (lie := faults.get("lie")) is None or not keys:
            return await self.inner.acquire_many(keys)
        chosen = _some(keys, lie.random)
        truth = dict(zip(chosen, await self.inner.lookup_many(chosen), strict=True))
        honest = [key for key in keys if key not in truth]
        sizes: dict[ObjectKey, int | None] = {}
        if honest:  # the last thing that can fail: no lock is taken before it, and nothing is awaited after it
            sizes = dict(zip(honest, await self.inner.acquire_many(honest), strict=True))
        lies = self._lies(truth, lie)
        self._phantoms.update(key for key, size in lies.items() if size is not None)
        sizes |= lies
        return [sizes[key] for key in keys]

    async def release_many(self, keys: Sequence[ObjectKey]) -> None:
        """See `L2Adapter.release_many`. Only the answer is hurt: ``inner`` has released before anything happens."""
        held: list[ObjectKey] = []
        for key in keys:
            if self._phantoms[key] > 0:  # these first: a true lock then stays until its last holder is gone
                self._phantoms[key] -= 1
            else:
                held.append(key)
        self._phantoms = +self._phantoms
        if held:
            await self.inner.release_many(held)
        await self._strike("release")

    async def delete_one(self, key: ObjectKey) -> bool:
        """See `L2Adapter.delete_one`."""
        disconnect = (await self._strike("delete")).get("disconnect")
        if disconnect is not None and disconnect.random.random() < 0.5:
            self._disconnect("delete", disconnect)
        found = await self.inner.delete_one(key)
        if disconnect is not None:
            self._disconnect("delete", disconnect)
        self._recent.pop(key, None)
        return found

    # --- inner ----------------------------------------------------------------------------------------

    async def _strike(self, operation: Operation) -> Faults:
        """Delay and refuse as planned; return the damage that is left to do, by kind."""
        planned = self.plan.decide(operation)
        if not planned:
            return {}
        for fault in planned:
            if fault.kind in _DELAYS:
                self._inject(operation, fault)
                await self._delay(fault)
        if self.plan.paused:  # the outage ended while we waited
            return {}
        damage: Faults = {}
        for fault in planned:
            if fault.kind in _REFUSALS:
                error, text = _REFUSALS[fault.kind]
                self._inject(operation, fault)
                raise error(self._message(operation, fault, text))
            if fault.kind == "disconnect" and operation not in _UNCERTAIN:
                self._disconnect(operation, fault)
            if fault.kind not in _DELAYS:
                damage.setdefault(fault.kind, fault)
        return damage

    async def _delay(self, fault: Fault) -> None:
        if fault.kind == "latency":
            await self._hold_up(fault.value)
        elif fault.kind == "jitter":
            await self._hold_up(fault.random.uniform(0, fault.value))
        elif fault.kind == "hang":
            await self._hold_up(math.inf)
        else:
            await self.run_in_thread(partial(self._thread_relief.wait, fault.value))
            await anyio.lowlevel.checkpoint_if_cancelled()  # it comes to nothing when it was given up meanwhile

    async def _hold_up(self, delay_s: float) -> None:
        if self._relief is None:  # made here because it belongs to the running loop
            self._relief = anyio.Event()
        with anyio.move_on_after(delay_s):
            await self._relief.wait()

    async def _read(self, key: ObjectKey, into: Sequence[memoryview], wrong: Fault | None) -> int | None:
        """Load ``key``, or something else in its place."""
        others = [other for other in self._recent if other != key]
        if wrong is not None and others:
            size = await self.inner.load_one(wrong.random.choice(others), into)
            if size is not None:
                self._inject("load", wrong)
                return size
        size = await self.inner.load_one(key, into)
        if wrong is not None and size:
            filled = between(into, 0, size)
            await self._do(total(filled), partial(garble, filled, wrong.random))
            self._inject("load", wrong)
        return size

    def _lies(self, truth: dict[ObjectKey, int | None], lie: Fault) -> dict[ObjectKey, int | None]:
        self._inject("lookup", lie)
        plausible = list(self._recent.values()) or [_PLAUSIBLE_BYTES]
        return {key: lie.random.choice(plausible) if size is None else None for key, size in truth.items()}

    def _remember(self, key: ObjectKey, size: int) -> None:
        self._recent[key] = size
        self._recent.move_to_end(key)
        if len(self._recent) > _REMEMBERED_KEYS:
            self._recent.popitem(last=False)

    async def _do(self, nbytes: int, damage: Callable[[], Any]) -> Any:
        return damage() if nbytes <= _INLINE_BYTES else await self.run_in_thread(damage)

    def _inject(self, operation: Operation, fault: Fault) -> None:
        self._injected += 1
        self.count(f"fault.{operation}.{fault.kind}")

    def _disconnect(self, operation: Operation, fault: Fault) -> None:
        self._inject(operation, fault)
        cause = ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        raise TransientBackendError(self._message(operation, fault, "the connection was lost")) from cause

    def _message(self, operation: Operation, fault: Fault, text: str) -> str:
        return f"{self.name}: {text} (injected: {fault.kind} at {operation} {fault.call})"


def _some(keys: Sequence[ObjectKey], random: Random) -> list[ObjectKey]:
    """At least one of ``keys``, and each other one as often as not."""
    sure = random.randrange(len(keys))
    return [key for index, key in enumerate(keys) if index == sure or random.random() < 0.5]
