"""`Talk`: conversations with whatever servers a configuration names, by the keys that they are about.

What lies behind it (one server, a cluster, a primary that sentinels name) is the business of `l2kit_redis.topology`:
the adapter says which keys a conversation is about, and whether it writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import anyio

from l2kit.errors import L2Error
from l2kit_redis.cluster import Cluster
from l2kit_redis.config import RedisConfig
from l2kit_redis.connection import Connection
from l2kit_redis.faults import NodeError, ServerError
from l2kit_redis.fleet import Conversation, RunInThread
from l2kit_redis.pool import ConnectionPool
from l2kit_redis.question import Failed, Question
from l2kit_redis.sentinel import Sentinels
from l2kit_redis.topology import OneServer, Topology

__all__ = ["Conversation", "Talk"]

ResultT = TypeVar("ResultT")

#: Waits between attempts to ask a server about keys that are moving away from it.
_PAUSES_S: Final = (0.02, 0.05, 0.1, 0.2)
_MOVING: Final = frozenset({"MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"})


class Talk:
    """The servers of one adapter. Its coroutines run on the adapter's loop, conversations in the adapter's threads.

    - A conversation has until the deadline of its batch, ends early when that is cancelled, and is never abandoned.
    - Redirections are followed, and a server that has taken over from another is found, within the same deadline.
    - Only errors of l2kit's tree are raised.
    """

    def __init__(
        self, config: RedisConfig, run_in_thread: RunInThread, translate: Callable[[Exception], L2Error]
    ) -> None:
        """No I/O before :meth:`open`. ``translate`` turns what servers and sockets do into errors of the tree.

        Raises:
            ConfigError: an option has no meaning for these servers.
        """
        self._config: Final = config
        self._translate: Final = translate
        self._topology: Final = _topology(config, run_in_thread)

    async def open(self) -> None:
        """Read certificates, find the servers, connect, log in and have a PING answered."""
        try:
            await self._topology.open(self._deadline())
        except Exception as error:
            raise self._translate(error) from error

    def close(self) -> None:
        """Close all connections; conversations in progress fail at once. Does not block."""
        self._topology.close()

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

        def hold(connection: Connection, names: Sequence[bytes]) -> Sequence[ResultT]:
            return [conversation(connection)]

        [answer] = await self._settle([name], hold, writes=writes, idempotent=idempotent)
        return self._raised(answer)

    async def about_each(
        self,
        names: Sequence[bytes],
        conversation: Callable[[Connection, Sequence[bytes]], Sequence[ResultT]],
        *,
        writes: bool,
        failure: Callable[[L2Error], ResultT] | None = None,
    ) -> list[ResultT]:
        """Hold one conversation with each server that has some of ``names``, side by side; answers in their order.

        Args:
            names: the keys, prefix included.
            conversation: gets the names that it is about and answers for each of them; it must be idempotent. It may be
                called again for some of them, which other servers have or will have.
            writes: whether it changes anything.
            failure: makes an answer for the names whose server failed; without it one such name fails all.
        """
        settled = await self._settle(names, conversation, writes=writes)
        if failure is None:
            return [self._raised(answer) for answer in settled]
        return [failure(self._translate(item.error)) if isinstance(item, Failed) else item for item in settled]

    def servers(self) -> Sequence[ConnectionPool]:
        """Every server that objects are written to, as far as is known now; for :meth:`at`."""
        return self._topology.primaries()

    async def at(self, server: ConnectionPool, conversation: Conversation[ResultT]) -> ResultT:
        """Hold a conversation, which must be idempotent, with one of :meth:`servers`.

        It is repeated, a few times, when it mentions keys that are moving to another server at that moment.
        """
        deadline = self._deadline()
        pauses_s = iter(_PAUSES_S if self._topology.several else ())
        while True:
            try:
                return await self._topology.fleet.converse(server, conversation, deadline)
            except Exception as error:
                pause_s = next(pauses_s, None)
                if pause_s is None or not (isinstance(error, ServerError) and error.code in _MOVING):
                    self._topology.after(error, server)
                    located = NodeError(str(server.endpoint), error) if self._topology.several else error
                    raise self._translate(located) from error
            await anyio.sleep(pause_s)

    async def _settle(
        self,
        names: Sequence[bytes],
        conversation: Callable[[Connection, Sequence[bytes]], Sequence[ResultT]],
        *,
        writes: bool,
        idempotent: bool = True,
    ) -> Sequence[ResultT | Failed]:
        question = Question(
            self._topology, names, conversation, self._deadline(), reads=not writes, idempotent=idempotent
        )
        return await question.settle()

    def _raised(self, answer: ResultT | Failed) -> ResultT:
        if isinstance(answer, Failed):
            raise self._translate(answer.error) from answer.error
        return answer

    def _deadline(self) -> float:
        left_s = anyio.current_effective_deadline() - anyio.current_time()  # two clocks: the loop's and a thread's
        return time.monotonic() + (left_s if left_s < math.inf else self._config.timeout_s)


def _topology(config: RedisConfig, run_in_thread: RunInThread) -> Topology:
    if config.mode == "sentinel":
        return Sentinels(config, run_in_thread)
    config.check_for_sentinels()
    return Cluster(config, run_in_thread) if config.mode == "cluster" else OneServer(config, run_in_thread)
