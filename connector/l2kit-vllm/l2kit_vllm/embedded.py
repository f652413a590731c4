"""The embedded engine: one storage manager on a background thread, for both sides of the connector in a process.

vLLM makes two connector objects per process, one for each side; both find the same `EmbeddedEngine` by vLLM's engine
id. The worker side brings the pages, the scheduler side the requests.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from l2kit.blocking import BlockingStorage
from l2kit.config import StorageConfig
from l2kit.engine import CacheEngine
from l2kit.errors import ConfigError
from l2kit.keys import Namespace
from l2kit.layout import Layout
from l2kit.metrics import Counters
from l2kit.prefetch import Prefetch

_log = logging.getLogger(__name__)

ENGINE_COUNTERS: Final = (
    "requests",
    "requests_unidentified",
    "requests_hit",
    "prompt_tokens",
    "local_hit_tokens",
    "external_hit_tokens",
    "read_tokens",
    "written_tokens",
    "saved_tokens",
    "load_failures",
    "save_failures",
    "hook_errors",
)


class RequestRecord(msgspec.Struct, kw_only=True):
    """What the cache did for one request; tokens throughout.

    Attributes:
        request_id: vLLM's.
        prompt_tokens: length of the prompt.
        local_hit: prefix that vLLM's own prefix cache had.
        external_hit: end of the prefix that l2kit could give, counted from token 0.
        read: tokens of the chunks that were read from an L2 tier for it.
        written: tokens written into its pages (``external_hit - local_hit``, less what must be left to compute).
    """

    request_id: str
    prompt_tokens: int
    local_hit: int = 0
    external_hit: int = 0
    read: int = 0
    written: int = 0


class EmbeddedEngine:
    """What both sides share. Thread-safe where both sides touch it."""

    def __init__(self, config: StorageConfig) -> None:
        """Open the storage.

        Raises:
            L2Error: a tier cannot be opened.
        """
        self.config: Final = config
        self.counters: Final = Counters(ENGINE_COUNTERS)
        self.records: Final[deque[RequestRecord]] = deque(maxlen=1024)
        self.staged: Final[dict[str, Prefetch]] = {}  # by request id: leased objects on their way into pages
        self.failed_loads: Final[set[str]] = set()  # requests of which a load failed: they are not offered one again
        self.failed_block_ids: set[int] = set()  # pages that were not filled, until the scheduler side has seen to it
        self.pending_saves = 0
        self.engine: CacheEngine | None = None  # once the worker side knows the pages, see `serve`
        self.users = 0
        self._storage = BlockingStorage(config).open()

    @property
    def storage(self) -> Any:
        """The storage manager; its any-thread methods may be called."""
        return self._storage.manager

    def serve(self, namespace: Namespace, layout: Callable[[int], Layout]) -> None:
        """Serve the KV that ``namespace`` names from now on, in objects of ``layout(tokens)``."""
        self.engine = CacheEngine(self.storage, namespace, layout)
        self._layout = layout

    def start_new_epoch(self) -> None:
        """From now on find nothing that was stored before, and share with nobody."""
        if self.engine is not None:
            old = self.engine.namespace
            revision = f"{old.revision}+{uuid.uuid4().hex}"
            self.serve(msgspec.structs.replace(old, revision=revision), self._layout)

    def drain(self, timeout_s: float = 60.0) -> None:
        """Wait until every saved object was offered to every tier (demos and tests; serving never waits).

        Raises:
            TimeoutError: it took longer than ``timeout_s``.
        """

        async def bounded() -> None:
            import anyio

            with anyio.fail_after(timeout_s):
                await self._storage.manager.drain()

        self._storage.call(bounded)

    def status(self) -> dict[str, Any]:
        """The storage's status and this engine's counters."""
        return {**self.storage.status(), "engine": self.counters.snapshot()}

    def close(self) -> None:
        """Release what is staged and close the storage, bounded in time."""
        while self.staged:
            self.staged.popitem()[1].release()
        self._storage.close()


_engines: dict[str, EmbeddedEngine] = {}
_lock = threading.Lock()


def attach(engine_id: str, config: StorageConfig) -> EmbeddedEngine:
    """The embedded engine of this vLLM engine in this process; opened by the first side that asks.

    Raises:
        L2Error: it cannot be opened.
    """
    with _lock:
        embedded = _engines.get(engine_id)
        if embedded is None:
            embedded = _engines[engine_id] = EmbeddedEngine(config)
        elif embedded.config != config:
            raise ConfigError(
                "kv_connector_extra_config: the two sides of one vLLM engine were given different options"
            )
        embedded.users += 1
        return embedded


def detach(engine_id: str) -> None:
    """Let go of it; the last side closes it."""
    with _lock:
        embedded = _engines.get(engine_id)
        if embedded is None:
            return
        embedded.users -= 1
        if embedded.users > 0:
            return
        del _engines[engine_id]
    embedded.close()


def engines() -> dict[str, EmbeddedEngine]:
    """The embedded engines of this process by vLLM engine id."""
    with _lock:
        return dict(_engines)
