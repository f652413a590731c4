"""The synchronous front: a storage manager on a background thread with its own event loop, for callers without one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self
from weakref import WeakSet

from anyio.from_thread import BlockingPortal, start_blocking_portal

from l2kit.config import StorageConfig
from l2kit.engine import CacheEngine, KVSource, KVTarget, TokenRange
from l2kit.errors import ClosedError
from l2kit.keys import Namespace
from l2kit.layout import Layout
from l2kit.registry import Registry
from l2kit.storage_manager import StorageManager, open_storage


class BlockingStorage:
    """A `StorageManager` that runs on a thread of its own. A context manager; :meth:`open` and :meth:`close` by hand
    serve hosts whose life is not a ``with`` block.

    ``manager`` is the storage manager itself: its any-thread methods may be called directly.
    """

    def __init__(
        self, config: str | Path | Mapping[str, Any] | StorageConfig, *, registry: Registry | None = None
    ) -> None:
        """Check the configuration; no thread is started and no I/O done before :meth:`open`. See `open_storage`.

        Raises:
            ConfigError: names the wrong field and the nearest valid choice.
        """
        self.manager: Final[StorageManager] = open_storage(config, registry=registry)
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None
        self._pid = 0

    def open(self) -> Self:
        """Start the thread, open every tier, and return when all are ready.

        Raises:
            L2Error: a tier cannot be opened; nothing is left running.
        """
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal("asyncio", name="l2kit"))
            stack.enter_context(portal.wrap_async_context_manager(self.manager))
            self._portal, self._pid = portal, os.getpid()
            _watch_forks(portal)
            self._stack = stack.pop_all()
        return self

    def close(self) -> None:
        """Let stores end (bounded), close every tier, end the thread. Harmless when repeated, and in a forked child."""
        if self._portal is not None and os.getpid() != self._pid:
            return  # the thread stayed in the parent, and everything that it would close with it
        self._stack.close()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a coroutine function on the storage's event loop and return its result.

        Raises:
            ClosedError: before :meth:`open`, after :meth:`close`, or in a forked child.
        """
        if self._portal is None:
            raise ClosedError("the storage is not open; use it inside 'with BlockingStorage(…)'")
        if os.getpid() != self._pid:
            raise ClosedError("the storage was opened before a fork; open a new one in the child")
        try:
            return self._portal.call(function, *args)
        except RuntimeError as error:
            if "portal is not running" in str(error):
                raise ClosedError("the storage is closed") from error
            raise

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class BlockingCacheEngine:
    """`CacheEngine` for callers that are not async: the same calls, each returning when it is done."""

    def __init__(
        self,
        storage: BlockingStorage,
        namespace: Namespace,
        layout: Callable[[int], Layout],
        *,
        save_unfull_chunk: bool = False,
    ) -> None:
        """See `CacheEngine`; ``storage`` must be open when a method is called."""
        self.engine: Final = CacheEngine(storage.manager, namespace, layout, save_unfull_chunk=save_unfull_chunk)
        self._storage = storage

    def store(self, token_ids: Sequence[int], source: KVSource, **options: Any) -> list[TokenRange]:
        """`CacheEngine.store`."""
        ranges: list[TokenRange] = self._storage.call(partial(self.engine.store, token_ids, source, **options))
        return ranges

    def lookup(self, token_ids: Sequence[int], **options: Any) -> int:
        """`CacheEngine.lookup`."""
        tokens: int = self._storage.call(partial(self.engine.lookup, token_ids, **options))
        return tokens

    def retrieve(self, token_ids: Sequence[int], target: KVTarget, **options: Any) -> TokenRange:
        """`CacheEngine.retrieve`."""
        restored: TokenRange = self._storage.call(partial(self.engine.retrieve, token_ids, target, **options))
        return restored


_portals: WeakSet[BlockingPortal] = WeakSet()
_watching = False


def _watch_forks(portal: BlockingPortal) -> None:
    """See to it that ``portal`` refuses in forked children, where its thread is not."""
    global _watching  # noqa: PLW0603 - what is registered for forks cannot be taken back, so it is done once
    _portals.add(portal)
    if not _watching:
        os.register_at_fork(after_in_child=_disable_portals)
        _watching = True


def _disable_portals() -> None:
    # Even a child that never touches the storage would wait for ever when its interpreter tidies the portal up.
    for portal in list(_portals):
        portal.call = _refuse  # type: ignore[method-assign, assignment]


def _refuse(*_: object) -> NoReturn:
    raise RuntimeError("This portal is not running")
