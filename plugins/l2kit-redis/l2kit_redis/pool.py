"""Connections that are kept, and the rule when one may be used again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from l2kit.errors import ClosedError
from l2kit_redis.connection import Connection
from l2kit_redis.dialer import Dialer
from l2kit_redis.endpoint import Endpoint
from l2kit_redis.faults import ServerError
from l2kit_redis.stream import Patience

ResultT = TypeVar("ResultT")


class ConnectionPool:
    """Lends each conversation a connection of its own.

    - A connection comes back only when it is settled. After a time-out, a cancellation, a protocol error or a
      value that was not read to its end it is closed.
    - The most recently used one is lent first, after a look whether the server has closed it meanwhile.
    - There are never more connections than threads that converse.

    ``_idle``, ``_busy``, ``_closed`` and ``_retired`` are shared under ``_lock``, which is never held across I/O.
    """

    def __init__(self, dialer: Dialer) -> None:
        """Connections to one server come from ``dialer``."""
        self._dialer: Final = dialer
        self._lock: Final = threading.Lock()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False
        self._retired = False

    @property
    def endpoint(self) -> Endpoint:
        """The server at the other end."""
        return self._dialer.endpoint

    async def resolve(self) -> None:
        """Look the server up, if that is due; on the loop, before each :meth:`converse`. See `Dialer.resolve`."""
        await self._dialer.resolve()

    def converse(
        self, conversation: Callable[[Connection], ResultT], patience: Patience, *, idempotent: bool = True
    ) -> ResultT:
        """Run ``conversation`` on a connection and return its result. Blocks.

        A kept connection that breaks before the server has answered anything is replaced once, and the
        conversation repeated, if it is ``idempotent``: the server was restarted, or tired of waiting.

        Raises:
            ClosedError: the pool is closed.
            ServerError, ProtocolError, OSError: what the peer did.
        """
        connection = self._lend()
        if connection is not None:
            try:
                return self._use(connection, conversation, patience)
            except ConnectionError:
                if connection.answered or not idempotent:
                    raise
        return self._use(self._dial(patience), conversation, patience)

    def close(self) -> None:
        """Close all connections; conversations in progress fail at once. Does not block."""
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        self._close_idle()
        for connection in busy:  # their threads close them
            connection.abort()

    def retire(self) -> None:
        """Keep no connection from now on. Conversations go on, each on a connection that is closed afterwards."""
        with self._lock:
            self._retired = True
        self._close_idle()

    def _use(
        self, connection: Connection, conversation: Callable[[Connection], ResultT], patience: Patience
    ) -> ResultT:
        keep = False
        try:
            connection.begin(patience)
            result = conversation(connection)
            keep = True
        except ServerError as error:
            keep = not error.reconnect
            self._dialer.outdated |= error.reconnect
            raise
        except TimeoutError:
            self._dialer.outdated = True
            self._close_idle()  # if the way to the server is gone, each of them would cost a time-out of its own
            raise
        except OSError:
            self._dialer.outdated = True
            raise
        finally:
            self._give_back(connection, keep=keep and connection.settled)
        return result

    def _lend(self) -> Connection | None:
        while True:
            self._check_open()
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
                self._busy.add(connection)
            if connection.is_alive():
                return connection
            self._dialer.outdated = True
            self._give_back(connection, keep=False)

    def _dial(self, patience: Patience) -> Connection:
        self._check_open()
        try:
            connection = self._dialer.dial(patience)
        except OSError:
            self._dialer.outdated = True
            raise
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
                return connection
        connection.close()
        raise ClosedError("the connection pool is closed")

    def _give_back(self, connection: Connection, *, keep: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if keep and not (self._closed or self._retired):
                self._idle.append(connection)
                return
        connection.close()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the connection pool is closed")
