"""`Talk`: conversations with whatever servers a configuration names, by the keys that they are about.

What lies behind it (one server now) is nobody else's business: the adapter says which keys a conversation is about, and
whether it writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import anyio
import anyio.from_thread

from l2kit.errors import L2Error
from l2kit_redis.config import RedisConfig
from l2kit_redis.connection import Connection
from l2kit_redis.dialer import Dialer, say_hello
from l2kit_redis.pool import ConnectionPool
from l2kit_redis.stream import Patience

ResultT = TypeVar("ResultT")
Conversation = Callable[[Connection], ResultT]


class Talk:
    """The servers of one adapter. Its coroutines run on the adapter's loop, conversations in the adapter's threads.

    - A conversation has until the deadline of its batch, ends early when that is cancelled, and is never abandoned.
    - Only errors of l2kit's tree are raised.
    """

    def __init__(
        self,
        config: RedisConfig,
        run_in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        translate: Callable[[Exception], L2Error],
    ) -> None:
        """No I/O before :meth:`open`. ``translate`` turns what servers and sockets do into errors of the tree."""
        self._config: Final = config
        self._translate: Final = translate
        self._run_in_thread: Final = run_in_thread
        self._dialer: Final = Dialer(config)
        self._pool: Final = ConnectionPool(self._dialer)

    async def open(self) -> None:
        """Read certificates, connect, log in and have a PING answered."""
        await self._run_in_thread(self._dialer.prepare)
        for server in self.servers():
            await self.at(server, say_hello)

    def close(self) -> None:
        """Close all connections; conversations in progress fail at once. Does not block."""
        self._pool.close()

    async def about(
        self, name: bytes, conversation: Conversation[ResultT], *, writes: bool, idempotent: bool = True
    ) -> ResultT:
        """Hold a conversation about the key ``name`` with the server that has it.

        Args:
            name: the key, prefix included.
            conversation: runs in a thread; may be called again, on another connection or server, when ``idempotent``.
            writes: whether it changes anything.
            idempotent: whether it may be repeated when it is not known whether it took effect.
        """
        return await self._converse(conversation, idempotent=idempotent)

    async def about_each(
        self,
        names: Sequence[bytes],
        conversation: Callable[[Connection, Sequence[bytes]], Sequence[ResultT]],
        *,
        writes: bool,
    ) -> list[ResultT]:
        """Hold one conversation with each server that has some of ``names``, side by side; answers in their order.

        ``conversation`` gets the names that it is about and answers for each of them; it must be idempotent.
        """
        return list(await self._converse(lambda connection: conversation(connection, names)))

    def servers(self) -> Sequence[ConnectionPool]:
        """Every server that objects are written to, as far as is known now; for :meth:`at`."""
        return [self._pool]

    async def at(self, server: ConnectionPool, conversation: Conversation[ResultT]) -> ResultT:
        """Hold a conversation, which must be idempotent, with one of :meth:`servers`."""
        return await self._converse(conversation)

    async def _converse(self, conversation: Conversation[ResultT], *, idempotent: bool = True) -> ResultT:
        left_s = anyio.current_effective_deadline() - anyio.current_time()  # two clocks: the loop's and a thread's
        deadline = time.monotonic() + (left_s if left_s < math.inf else self._config.timeout_s)

        def run() -> ResultT:
            patience = Patience(deadline, self._config.socket_limit_s, anyio.from_thread.check_cancelled)
            patience.waited()  # the wait for a thread may have used up all there was
            return self._pool.converse(conversation, patience, idempotent=idempotent)

        try:
            await self._dialer.resolve()
            result: ResultT = await self._run_in_thread(run)
        except Exception as error:
            raise self._translate(error) from error
        return result
