"""`Fleet`: servers of one kind, a pool of connections to each, and conversations with them in the adapter's threads."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, TypeVar

import anyio.from_thread

from l2kit_redis.config import RedisConfig
from l2kit_redis.connection import Connection
from l2kit_redis.dialer import Access, Dialer
from l2kit_redis.endpoint import Endpoint
from l2kit_redis.pool import ConnectionPool
from l2kit_redis.stream import Patience

ResultT = TypeVar("ResultT")
Conversation = Callable[[Connection], ResultT]
RunInThread = Callable[[Callable[[], Any]], Awaitable[Any]]


class Fleet:
    """Servers that take the same credentials, each with its pool. Belongs to the loop."""

    def __init__(
        self,
        config: RedisConfig,
        access: Access,
        run_in_thread: RunInThread,
        greet: Callable[[Connection], None] | None = None,
    ) -> None:
        """No I/O before :meth:`prepare`. ``greet`` is said on each new connection."""
        self._config: Final = config
        self._access: Final = access
        self._run_in_thread: Final = run_in_thread
        self._greet: Final = greet
        self._pools: dict[Endpoint, ConnectionPool] = {}

    async def prepare(self) -> None:
        """Read certificates, and check that the password can be read.

        Raises:
            ConfigError: names the option whose file is wrong.
        """
        await self._run_in_thread(self._access.prepare)

    def at(self, endpoint: Endpoint) -> ConnectionPool:
        """The pool of a server; made when it is new."""
        pool = self._pools.get(endpoint)
        if pool is None:
            pool = ConnectionPool(Dialer(self._config, self._access, endpoint, self._greet))
            self._pools[endpoint] = pool
        return pool

    def keep_only(self, endpoints: Collection[Endpoint]) -> None:
        """Keep no connections to other servers than these. Conversations in progress go on."""
        for endpoint in self._pools.keys() - endpoints:
            self._pools.pop(endpoint).retire()

    def close(self) -> None:
        """Close all connections; conversations in progress fail at once. Does not block."""
        for pool in self._pools.values():
            pool.close()

    async def converse(
        self,
        pool: ConnectionPool,
        conversation: Conversation[ResultT],
        deadline: float,
        *,
        idempotent: bool = True,
        limit_s: float | None = None,
    ) -> ResultT:
        """Hold a conversation with one server, in a thread, until ``deadline`` (`time.monotonic`) at most.

        Args:
            pool: of the server.
            conversation: see `ConnectionPool.converse`, as ``idempotent``.
            deadline: also ends when the host task is cancelled; the thread is awaited then, too.
            idempotent: whether it may be repeated.
            limit_s: longest time for all of it, where that is less than what the deadline leaves.

        Raises:
            L2Error, ServerError, ProtocolError, OSError: what went wrong, untranslated.
        """

        def run() -> ResultT:
            patience = Patience(deadline, self._config.socket_limit_s, anyio.from_thread.check_cancelled)
            patience.waited()  # the wait for a thread may have used up all there was
            if limit_s is not None:
                patience = patience.at_most(limit_s)
            return pool.converse(conversation, patience, idempotent=idempotent)

        await pool.resolve()
        result: ResultT = await self._run_in_thread(run)
        return result


def time_left_s(deadline: float) -> float:
    """Until ``deadline``, on the clock of `time.monotonic`."""
    return deadline - time.monotonic()
