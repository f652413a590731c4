"""The tiers behind one engine: one L1 and its L2 adapters under one lookup, prefetch, read and write.

A `StorageManager` lives on one event loop. Engines call it from their own threads through the methods marked
*any thread*; none of those waits for I/O.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import Context, copy_context
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import anyio
import anyio.lowlevel

from l2kit.config import StorageConfig, load_storage_config
from l2kit.errors import AdapterContractError, ClosedError, ConfigError
from l2kit.keys import ObjectKey
from l2kit.l1 import L1Manager, ReadLease, WriteReservation
from l2kit.layout import Layout
from l2kit.metrics import Counters
from l2kit.policy import GuardedPolicy
from l2kit.prefetch import Prefetch, PrefetchController, WantedChunk
from l2kit.registry import Registry, default_registry
from l2kit.store import StoreController
from l2kit.task import TaskRunner
from l2kit.tier import Tier

_log = logging.getLogger(__name__)

STORAGE_COUNTERS: Final = (
    "prefetches",
    "prefetches_from_l1",
    "prefetches_refused",
    "writes_finished",
    "writes_present",
    "writes_refused",
)


class _Opened(NamedTuple):
    """What a storage manager has only while it is open."""

    loop: asyncio.AbstractEventLoop
    context: Context
    stack: AsyncExitStack
    scope: anyio.CancelScope
    runner: TaskRunner
    pid: int


class StorageManager:
    """One L1 and any number of L2 tiers. An async context manager; make it with `open_storage`."""

    def __init__(self, config: StorageConfig, registry: Registry) -> None:
        """Check the configuration and find every plugin that it names; no I/O, no memory mapped.

        Raises:
            ConfigError: a wrong option, or a name that no installed plugin offers.
        """
        self.config: Final = config
        self._policy = registry.policy_class(config.l1.policy)
        adapters = [registry.tier(tier) for tier in config.tiers]
        names = [adapter.name for adapter in adapters]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"tiers: {name!r} is the name of two tiers; give each its own 'name'")
        self.tiers: Final = [Tier(adapter) for adapter in adapters]
        self.counters: Final = Counters(STORAGE_COUNTERS)
        self._open_prefetches: set[Prefetch] = set()
        self._l1: L1Manager | None = None
        self._opened: _Opened | None = None
        self._closed = False

    # --- life -------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._opened is not None or self._closed:
            raise ClosedError("a storage manager opens once; make a new one with open_storage()")
        async with AsyncExitStack() as stack:
            self._l1 = self._make_l1()
            stack.callback(self.l1.close)
            for tier in self.tiers:
                await stack.enter_async_context(tier.adapter)
            self._prefetcher = PrefetchController(self.l1, self.tiers, self.config.hedge_after_s)
            self._store = StoreController(
                # A slow tier leaves a quarter of L1 to new objects and to loads.
                self.tiers,
                min(self.config.max_store_queue_bytes, self.config.l1.max_bytes * 3 // 4),
            )
            stack.callback(self._store.close)
            group = await stack.enter_async_context(anyio.create_task_group())
            self._store.start(group)
            self._opened = _Opened(
                asyncio.get_running_loop(),
                copy_context(),  # tasks started from other threads' calls must still belong to this task group
                stack.pop_all(),
                group.cancel_scope,
                TaskRunner(group, "l2kit prefetch"),
                os.getpid(),
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._opened is not None
        patience_s = self.config.drain_timeout_s if kind is None else 0.0  # after an error nobody waits for stores
        try:
            with anyio.move_on_after(patience_s, shield=True):
                await self.drain()
            if not self._store.idle:
                _log.warning("closing: stores were still on their way after %.0f s", patience_s)
        finally:
            self._closed = True
            self._opened.scope.cancel()
            try:
                await self._opened.stack.__aexit__(None, None, None)
            finally:
                for prefetch in list(self._open_prefetches):  # those that never got to run
                    prefetch._finish([])  # noqa: SLF001 - the handle's other half
                self._open_prefetches.clear()

    async def drain(self) -> None:
        """Wait until everything that is readable now has been offered to every tier. Bound it from outside."""
        await anyio.lowlevel.checkpoint()  # what other threads posted before comes first
        await self._store.drain()

    @property
    def l1(self) -> L1Manager:
        """The host memory tier; closed with the storage manager.

        Raises:
            ClosedError: it was never opened.
        """
        if self._l1 is None:
            raise ClosedError("the storage manager is not open; use it inside 'async with open_storage(…)'")
        return self._l1

    # --- for engines: any thread ------------------------------------------------------------------

    def readable_prefix(self, keys: Sequence[ObjectKey]) -> int:
        """How many objects from the start of ``keys`` are readable in L1 now. Any thread."""
        self._check_process()
        return self.l1.readable_prefix(keys)

    def start_prefetch(self, chunks: Sequence[WantedChunk], *, timeout_s: float | None = None) -> Prefetch:
        """Start bringing the longest possible prefix of ``chunks`` into L1. Any thread; returns at once.

        - What L1 has in full, or what no tier could add to, is answered before this returns.
        - The answer comes within ``timeout_s`` (by default ``config.lookup_timeout_s``), whatever the tiers do.
        - The caller releases the `Prefetch` exactly once, whether it is done or not.

        Raises:
            ClosedError: outside ``async with``, or in a forked child.
        """
        opened = self._require_open()
        timeout_s = self.config.lookup_timeout_s if timeout_s is None else timeout_s
        prefetch = Prefetch(chunks, time.monotonic() + timeout_s, self._post)
        self.counters.add("prefetches")
        refused = len(self._open_prefetches) >= self.config.max_pending_prefetches
        if refused:
            self.counters.add("prefetches_refused")
        if self._prefetcher.answer_from_l1(prefetch, even_in_part=refused or not self.tiers):
            self.counters.add("prefetches_from_l1")
            return prefetch
        self._open_prefetches.add(prefetch)

        async def run() -> None:
            try:
                await self._prefetcher.run(prefetch, self._post)
            except Exception:  # it must not take the workers of all other prefetches down
                _log.exception("a prefetch could not give back what it held")
            finally:
                self._open_prefetches.discard(prefetch)

        def refuse() -> None:
            self._open_prefetches.discard(prefetch)
            prefetch._finish([])  # noqa: SLF001

        # Between posting and running the manager may have been closed, and its workers with it.
        if not self._post(lambda: refuse() if self._closed else opened.runner.start(run)):
            refuse()
        return prefetch

    async def lookup(self, chunks: Sequence[WantedChunk], *, timeout_s: float | None = None) -> int:
        """How many chunks from the start L1 and the tiers say they have. Nothing is loaded, so nothing is verified.

        - The answer comes within ``timeout_s`` (by default ``config.lookup_timeout_s``), whatever the tiers do.
        - No lease is left when this returns, or as soon as a late tier answers.

        Raises:
            ClosedError: outside ``async with``, or in a forked child.
        """
        self._require_open()
        timeout_s = self.config.lookup_timeout_s if timeout_s is None else timeout_s
        return await self._prefetcher.look_up(chunks, anyio.current_time() + timeout_s)

    def reserve_write(self, key: ObjectKey, layout: Layout, *, owner: str = "engine") -> WriteReservation | None:
        """Reserve L1 memory for a new object; None when it is there already, being written, or there is no memory.

        Any thread. The caller fills ``reservation.obj`` and hands it to :meth:`finish_write`, or aborts it.
        """
        self._require_open()
        reservation = self.l1.reserve_write(key, layout, owner=owner)
        if isinstance(reservation, WriteReservation):
            return reservation
        self.counters.add("writes_refused" if reservation == "no_memory" else "writes_present")
        return None

    def finish_write(self, reservations: Sequence[WriteReservation]) -> None:
        """Make filled objects readable and send them on to every tier. Any thread; returns at once.

        ``reservations`` are in prompt order: tiers get the start of a prompt first, and L1 gives up its end first.
        """
        self._check_process()
        owners = self._store.lease_owners
        finished: list[list[ReadLease]] = []

        def enqueue() -> None:
            for leases in reversed(finished):
                self._store.enqueue(leases)

        try:
            for reservation in reversed(reservations):
                finished.append(reservation.finish(owners))
                self.counters.add("writes_finished")
        finally:
            if not self._post(enqueue):
                for leases in finished:
                    for lease in leases:
                        lease.release()

    def status(self) -> dict[str, Any]:
        """What is going on, for people and tools; no secrets. Any thread."""
        usage = self.l1.usage()
        queued = self._store.held_bytes()
        return {
            "l1": {name: getattr(usage, name) for name in usage.__struct_fields__} | {"evictions": self.l1.evictions},
            "storage": self.counters.snapshot(),
            "tiers": {
                tier.name: {
                    "healthy": tier.healthy,
                    "last_error": None if tier.last_error is None else str(tier.last_error),
                    "store_queue_bytes": queued.get(tier.name, 0),
                    **tier.counters.snapshot(),
                    "adapter": dict(tier.adapter.counters),
                }
                for tier in self.tiers
            },
        }

    # --- inner ------------------------------------------------------------------------------------

    def _make_l1(self) -> L1Manager:
        try:
            policy = self._policy()
        except Exception as error:
            raise AdapterContractError(f"policies: {self.config.l1.policy!r} cannot be made: {error}") from error
        try:
            return L1Manager(self.config.l1.max_bytes, GuardedPolicy(policy))
        except ConfigError as error:
            raise ConfigError(f"l1.max_bytes: {str(error).partition(': ')[2]}") from error

    def _require_open(self) -> _Opened:
        if self._opened is None or self._closed:
            raise ClosedError("the storage manager is not open; use it inside 'async with open_storage(…)'")
        self._check_process()
        return self._opened

    def _check_process(self) -> None:
        if self._opened is not None and os.getpid() != self._opened.pid:
            raise ClosedError("the storage manager was opened before a fork; open a new one in the child")

    def _post(self, function: Callable[[], None]) -> bool:
        """Run ``function`` on our loop soon; False when that is over."""
        opened = self._opened
        if opened is None or self._closed or os.getpid() != opened.pid:
            return False
        try:
            opened.loop.call_soon_threadsafe(function, context=opened.context)
        except RuntimeError:  # the loop was closed under us
            return False
        return True


def open_storage(
    config: str | Path | Mapping[str, Any] | StorageConfig, *, registry: Registry | None = None
) -> StorageManager:
    """Make the storage manager that ``config`` describes; an async context manager, no I/O before it is entered.

    Args:
        config: a path to a ``.toml`` or ``.yaml`` file, a mapping, or a `StorageConfig`.
        registry: where plugins are found; by default everything installed.

    Raises:
        ConfigError: names the wrong field and the nearest valid choice.
    """
    return StorageManager(load_storage_config(config), registry or default_registry())
