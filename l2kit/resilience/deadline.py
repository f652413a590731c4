"""A deadline for each call of a backend."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TypeVar

import anyio

from l2kit.errors import BackendTimeoutError
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit.resilience.config import ResilienceConfig
from l2kit.wrapper import WrappingAdapter

ResultT = TypeVar("ResultT")


class DeadlineAdapter(WrappingAdapter[ResilienceConfig]):
    """Ends a call that takes longer than ``operation_timeout_s`` as a `BackendTimeoutError`.

    The call is cancelled and waited for: a hook that cannot be cancelled (a thread) still ends when it ends.
    """

    options_type = ResilienceConfig

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """Within the deadline."""
        return await self._bounded(self.inner.store_one(key, data), "store")

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """Within the deadline."""
        return await self._bounded(self.inner.load_one(key, into), "load")

    async def store_many(self, items: Sequence[StoreItem]) -> Sequence[StoreStatus | Exception]:
        """Within the deadline, together."""
        return await self._bounded(self.inner.store_many(items), "store")

    async def load_many(self, items: Sequence[LoadItem]) -> Sequence[int | Exception | None]:
        """Within the deadline, together."""
        return await self._bounded(self.inner.load_many(items), "load")

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> Sequence[int | None]:
        """Within the deadline."""
        return await self._bounded(self.inner.lookup_many(keys), "lookup")

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> Sequence[int | None]:
        """Within the deadline."""
        return await self._bounded(self.inner.acquire_many(keys), "lookup")

    async def delete_one(self, key: ObjectKey) -> bool:
        """Within the deadline."""
        return await self._bounded(self.inner.delete_one(key), "delete")

    async def _bounded(self, call: Awaitable[ResultT], what: str) -> ResultT:
        limit_s = self.options.operation_timeout_s or self.config.timeout_s / 2
        with anyio.move_on_after(limit_s):
            return await call
        self.count(f"timeout.{what}")
        raise BackendTimeoutError(f"{self.name}: no answer to a {what} within {limit_s:g} s")
