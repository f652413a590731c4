"""Retries of what may pass, within a budget."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import anyio

from l2kit.adapter import L2Adapter, caught
from l2kit.errors import BackendTimeoutError, TransientBackendError
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit.resilience.config import ResilienceConfig
from l2kit.resilience.share_budget import ShareBudget
from l2kit.wrapper import WrappingAdapter, failure_of

ResultT = TypeVar("ResultT")

_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.5


class RetryAdapter(WrappingAdapter[ResilienceConfig]):
    """Calls the backend again after a `TransientBackendError` that is no time-out, after a pause with full jitter.

    Deletes are not retried: after one that took effect and lost its reply, the second would say that there was nothing.
    """

    options_type = ResilienceConfig

    def __init__(self, inner: L2Adapter[Any], options: ResilienceConfig | None = None) -> None:
        """Stand around ``inner``."""
        super().__init__(inner, options)
        self._budget = ShareBudget(self.options.retry_share, self.options.retry_burst)

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """Again, if it may help: a store replaces what an earlier try left."""
        return await self._retried(lambda: self.inner.store_one(key, data), "store")

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """Again, if it may help: a load fills its buffers anew."""
        return await self._retried(lambda: self.inner.load_one(key, into), "load")

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> Sequence[int | None]:
        """Again, if it may help."""
        return await self._retried(lambda: self.inner.lookup_many(keys), "lookup")

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> Sequence[int | None]:
        """Again, if it may help: one that raises leaves nothing locked."""
        return await self._retried(lambda: self.inner.acquire_many(keys), "lookup")

    async def store_many(self, items: Sequence[StoreItem]) -> Sequence[StoreStatus | Exception]:
        """Those again for which it may help, one by one."""
        answers = list(await self._retried(lambda: self.inner.store_many(items), "store"))
        for index, answer in enumerate(answers):
            if isinstance(answer, Exception) and await self._pauses(answer, 0, "store"):
                answers[index] = await caught(self.store_one(items[index].key, items[index].data()))
        return answers

    async def load_many(self, items: Sequence[LoadItem]) -> Sequence[int | Exception | None]:
        """Those again for which it may help, one by one."""
        answers = list(await self._retried(lambda: self.inner.load_many(items), "load"))
        for index, answer in enumerate(answers):
            if isinstance(answer, Exception) and await self._pauses(answer, 0, "load"):
                answers[index] = await caught(self.load_one(items[index].key, items[index].into))
        return answers

    async def _retried(self, call: Callable[[], Awaitable[ResultT]], what: str) -> ResultT:
        self._budget.earn()
        for turn in range(self.options.max_retries):
            try:
                return await call()
            except Exception as error:
                if not await self._pauses(error, turn, what):
                    raise
        return await call()

    async def _pauses(self, error: Exception, turn: int, what: str) -> bool:
        """Wait before the next try; False when there shall be none."""
        pause_s = random.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 4**turn))
        if not self._worthwhile(failure_of(self.inner, error), pause_s, what):
            return False
        self.count(f"retry.{what}")
        await anyio.sleep(pause_s)
        return True

    def _worthwhile(self, error: Exception, pause_s: float, what: str) -> bool:
        if not isinstance(error, TransientBackendError) or isinstance(error, BackendTimeoutError):
            return False
        if anyio.current_time() + pause_s >= anyio.current_effective_deadline():
            return False
        if not self._budget.spend():
            self.count(f"retry_refused.{what}")
            return False
        return True
