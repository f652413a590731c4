"""A backend that cannot be reached when its tier is opened must not keep the engine from starting."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, Self

import anyio
from anyio.abc import TaskStatus

from l2kit.adapter import KeyInfo, L2Adapter, Usage
from l2kit.errors import L2Error, TransientBackendError
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit.resilience.config import ResilienceConfig
from l2kit.wrapper import WrappingAdapter

_log = logging.getLogger(__name__)


class ReopeningAdapter(WrappingAdapter[ResilienceConfig]):
    """Opens although its backend is not there, and goes on trying to open that in the background.

    - Only what may pass (a `TransientBackendError`: nothing listens, no answer in time) is waited out. A wrong option
      or password is raised, as without this adapter.
    - Until the backend is open, lookups and loads are misses, stores are dropped, deletes fail, and :attr:`trouble`
      says why.
    """

    options_type = ResilienceConfig

    def __init__(self, make: Callable[[], L2Adapter[Any]], options: ResilienceConfig | None = None) -> None:
        """``make`` makes the adapter to stand around, not entered; again for each attempt, as they open once."""
        super().__init__(make(), options)
        self._make: Final = make
        self._error: L2Error | None = None

    @property
    def trouble(self) -> L2Error | None:
        """Why the backend is not open."""
        return self._error or super().trouble

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """DROPPED until the backend is open."""
        return StoreStatus.DROPPED if self._error else await self.inner.store_one(key, data)

    async def store_many(self, items: Sequence[StoreItem]) -> Sequence[StoreStatus | Exception]:
        """DROPPED until the backend is open."""
        return [StoreStatus.DROPPED] * len(items) if self._error else await self.inner.store_many(items)

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """A miss until the backend is open."""
        return None if self._error else await self.inner.load_one(key, into)

    async def load_many(self, items: Sequence[LoadItem]) -> Sequence[int | Exception | None]:
        """Misses until the backend is open."""
        return [None] * len(items) if self._error else await self.inner.load_many(items)

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> Sequence[int | None]:
        """Misses until the backend is open."""
        return [None] * len(keys) if self._error else await self.inner.lookup_many(keys)

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> Sequence[int | None]:
        """Misses until the backend is open."""
        return [None] * len(keys) if self._error else await self.inner.acquire_many(keys)

    async def delete_one(self, key: ObjectKey) -> bool:
        """Fails until the backend is open."""
        if self._error:
            raise self._error
        return await self.inner.delete_one(key)

    def iter_keys(self) -> AsyncIterator[KeyInfo]:
        """Fails until the backend is open."""
        if self._error:
            raise self._error
        return self.inner.iter_keys()

    async def usage(self) -> Usage:
        """Fails until the backend is open."""
        if self._error:
            raise self._error
        return await super().usage()

    async def __aenter__(self) -> Self:
        failure: L2Error | None = None
        async with AsyncExitStack() as stack:
            # The backend is opened and closed by one task, which outlives our batches.
            group = await stack.enter_async_context(anyio.create_task_group())
            self._closing = anyio.Event()
            stack.callback(self._closing.set)
            try:
                await group.start(self._hold)
            except L2Error as error:
                failure = error
            else:
                await L2Adapter.__aenter__(self)
                self._inner_stack = stack.pop_all()
        if failure is not None:
            raise failure
        return self

    async def _hold(self, *, task_status: TaskStatus[None]) -> None:
        """Keep the backend open until closing."""
        inner, pause_s, started = self.inner, self.options.breaker_pause_s, False
        while True:
            try:
                async with inner:
                    self.inner, self._error = inner, None
                    if started:
                        _log.warning("%s: the backend is open now", self.name)
                    else:
                        task_status.started()
                    await self._closing.wait()
                    return
            except L2Error as error:
                if not (started or isinstance(error, TransientBackendError)):
                    raise
                self._error = error
                if not started:
                    _log.warning("%s: it is left out until its backend can be opened: %s", self.name, error)
                    task_status.started()
                    started = True
            with anyio.move_on_after(pause_s * random.uniform(0.75, 1.25)):
                await self._closing.wait()
                return
            pause_s = min(2 * pause_s, self.options.breaker_max_pause_s)
            inner = self._make()
