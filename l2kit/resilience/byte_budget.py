"""A budget of bytes in transfer, in which loads go before stores."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio

from l2kit.adapter import L2Adapter
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit.resilience.config import ResilienceConfig
from l2kit.wrapper import WrappingAdapter


class _Waiting:
    """One transfer that waits for its turn."""

    __slots__ = ("admitted", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        self.admitted = anyio.Event()


class ByteGate:
    """Lets transfers in, first come, first served, but loads before stores. Loop-bound.

    Stores hold half of the budget at most, so however many of them are stuck, loads find room. A transfer that is
    larger than the budget goes alone.
    """

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes`` in transfer at once."""
        self._max_bytes = max_bytes
        self._loading_bytes = 0
        self._storing_bytes = 0
        self._loads: deque[_Waiting] = deque()
        self._stores: deque[_Waiting] = deque()

    @property
    def inflight_bytes(self) -> int:
        """Bytes in transfer."""
        return self._loading_bytes + self._storing_bytes

    @property
    def waiting_store_bytes(self) -> int:
        """Bytes of the stores that wait."""
        return sum(waiting.nbytes for waiting in self._stores)

    async def enter_load(self, nbytes: int) -> None:
        """Wait until a load of ``nbytes`` may start; :meth:`leave_load` must follow."""
        if self._loads or not self._admits_load(nbytes):
            await self._wait(self._loads, nbytes, self.leave_load)
        else:
            self._loading_bytes += nbytes

    async def enter_store(self, nbytes: int) -> None:
        """Wait until a store of ``nbytes`` may start; :meth:`leave_store` must follow."""
        if self._loads or self._stores or not self._admits_store(nbytes):
            await self._wait(self._stores, nbytes, self.leave_store)
        else:
            self._storing_bytes += nbytes

    def leave_load(self, nbytes: int) -> None:
        """A load has ended."""
        self._loading_bytes -= nbytes
        self._admit()

    def leave_store(self, nbytes: int) -> None:
        """A store has ended."""
        self._storing_bytes -= nbytes
        self._admit()

    async def _wait(self, queue: deque[_Waiting], nbytes: int, leave: Any) -> None:
        waiting = _Waiting(nbytes)
        queue.append(waiting)
        try:
            await waiting.admitted.wait()
        except BaseException:
            if waiting.admitted.is_set():  # let in and cancelled in the same turn
                leave(nbytes)
            else:
                queue.remove(waiting)
                self._admit()
            raise

    def _admit(self) -> None:
        while self._loads and self._admits_load(self._loads[0].nbytes):
            waiting = self._loads.popleft()
            self._loading_bytes += waiting.nbytes
            waiting.admitted.set()
        while not self._loads and self._stores and self._admits_store(self._stores[0].nbytes):
            waiting = self._stores.popleft()
            self._storing_bytes += waiting.nbytes
            waiting.admitted.set()

    def _admits_load(self, nbytes: int) -> bool:
        return self._loading_bytes == 0 or self.inflight_bytes + nbytes <= self._max_bytes

    def _admits_store(self, nbytes: int) -> bool:
        if self._storing_bytes == 0:
            return self._loading_bytes == 0 or self.inflight_bytes + nbytes <= self._max_bytes
        return self._storing_bytes + nbytes <= self._max_bytes // 2 and self.inflight_bytes + nbytes <= self._max_bytes


class ByteBudgetAdapter(WrappingAdapter[ResilienceConfig]):
    """Keeps the objects in transfer below ``max_inflight_bytes``; drops stores when too many wait already."""

    options_type = ResilienceConfig

    def __init__(self, inner: L2Adapter[Any], options: ResilienceConfig | None = None) -> None:
        """Stand around ``inner``."""
        super().__init__(inner, options)
        self.gate: Final = ByteGate(self.options.max_inflight_bytes)

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """When no load waits and there is room."""
        async with self._store_turn(sum(map(len, data))) as admitted:
            return await self.inner.store_one(key, data) if admitted else StoreStatus.DROPPED

    async def store_many(self, items: Sequence[StoreItem]) -> Sequence[StoreStatus | Exception]:
        """When no load waits and there is room for all of them."""
        async with self._store_turn(sum(item.nbytes for item in items)) as admitted:
            return await self.inner.store_many(items) if admitted else [StoreStatus.DROPPED] * len(items)

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """Before any store that waits."""
        async with self._load_turn(sum(map(len, into))):
            return await self.inner.load_one(key, into)

    async def load_many(self, items: Sequence[LoadItem]) -> Sequence[int | Exception | None]:
        """Before any store that waits."""
        async with self._load_turn(sum(item.nbytes for item in items)):
            return await self.inner.load_many(items)

    @asynccontextmanager
    async def _store_turn(self, nbytes: int) -> AsyncIterator[bool]:
        if self.gate.waiting_store_bytes + nbytes > self.options.max_waiting_store_bytes:
            self.count("store_over_budget")
            yield False
            return
        await self.gate.enter_store(nbytes)
        try:
            yield True
        finally:
            self.gate.leave_store(nbytes)

    @asynccontextmanager
    async def _load_turn(self, nbytes: int) -> AsyncIterator[None]:
        await self.gate.enter_load(nbytes)
        try:
            yield
        finally:
            self.gate.leave_load(nbytes)
