"""Which servers there are, and which of them has a key: the interface, and the case of one server."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final

import anyio

from l2kit_redis.config import RedisConfig
from l2kit_redis.dialer import Access, say_hello
from l2kit_redis.faults import ServerError
from l2kit_redis.fleet import Fleet, RunInThread
from l2kit_redis.pool import ConnectionPool

#: Servers are asked anew who serves what no more often than this.
_REFRESH_PAUSE_S: Final = 0.2
#: Where replicas are read, what is known of them is no older than this: nothing fails for want of a new one.
_MAX_AGE_S: Final = 30.0
#: How long a server that failed is passed by where another one can answer as well.
_AVOID_S: Final = 5.0


#: Errors that only say that another server has the key.
_WHEREABOUTS: Final = frozenset({"MOVED", "ASK", "READONLY"})


class Way(Enum):
    """How a question goes on after a server has not answered it."""

    END = "the error is the answer"
    MOVED = "ask who has it now"
    ASK = "ask once where the error says"
    LATER = "the same again in a moment"
    ELSEWHERE = "ask another server, if now another one is named; else the error is the answer"


class Topology(ABC):
    """The servers of one adapter. Belongs to the loop; finds out about changes when something failed.

    Attributes:
        fleet: conversations with the servers.
        several: whether there can be several servers, so that messages name the one.
    """

    several: bool = True

    def __init__(self, config: RedisConfig, fleet: Fleet) -> None:
        """No I/O before :meth:`open`."""
        self._config: Final = config
        self.fleet: Final = fleet
        self._lock: Final = anyio.Lock()  # of a refresh in progress
        self._outdated = False
        self._refreshed = 0
        self._not_before = 0.0
        self._reads_replicas: Final = config.read_from == "replica"
        self._old_at = math.inf
        self._avoided: dict[ConnectionPool, float] = {}  # until when

    @abstractmethod
    async def open(self, deadline: float) -> None:
        """Find the servers and check that they let us in.

        Raises:
            L2Error, ServerError, ProtocolError, OSError: what is wrong, untranslated.
        """

    def close(self) -> None:
        """Close all connections."""
        self.fleet.close()

    @abstractmethod
    def primaries(self) -> Sequence[ConnectionPool]:
        """Every server that is written to, as far as is known now."""

    @abstractmethod
    def route(self, name: bytes, *, reads: bool) -> ConnectionPool | None:
        """The server to ask about ``name``; None when nobody is known to serve it."""

    def shares(
        self, names: Sequence[bytes], indexes: Sequence[int], *, reads: bool
    ) -> dict[ConnectionPool | None, Sequence[int]]:
        """Which servers to ask about which of ``indexes`` into ``names``."""
        shares: dict[ConnectionPool | None, list[int]] = {}
        for index in indexes:
            shares.setdefault(self.route(names[index], reads=reads), []).append(index)
        return dict(shares)

    @abstractmethod
    def after(self, error: Exception, pool: ConnectionPool | None) -> Way:
        """Take note of what ``pool``'s server, or None of them, did, and say how to go on."""

    def final(self, error: Exception) -> Exception:
        """What to report when ``error`` is the end, although it says where to go on."""
        if self.several and isinstance(error, ServerError) and error.code in _WHEREABOUTS:
            return ServerError(f"TRYAGAIN after {error}")
        return error

    def asked_of(self, error: ServerError, pool: ConnectionPool) -> tuple[int, ConnectionPool]:
        """Which slot, and which server, an answer ASK from ``pool``'s server names."""
        raise NotImplementedError

    def slot_of(self, name: bytes) -> int:
        """The slot of a key; 0 where there are none."""
        return 0

    async def refresh(self, deadline: float) -> None:
        """Find out what changed, if anything seems to have. One at a time, and not too often.

        Nothing is raised when that fails: what is known may still be good, and if not, whoever uses it will notice.
        """
        now = time.monotonic()
        self._outdated |= now >= self._old_at
        if not self._outdated or now < self._not_before:
            return
        seen = self._refreshed
        async with self._lock:
            if self._refreshed != seen:
                return  # another task has done it meanwhile
            self._outdated = False  # first: what fails meanwhile must not be forgotten
            found = False
            try:
                found = await self._discovered(deadline)
            finally:
                self._outdated |= not found
                self._not_before = time.monotonic() + _REFRESH_PAUSE_S
            self._refreshed += 1
            self._note_age()

    async def discover(self, deadline: float) -> None:  # noqa: B027 - where nothing changes there is nothing to do
        """Ask the servers who serves what.

        Raises:
            L2Error, ServerError, ProtocolError, OSError: none of them said.
        """

    def _note_age(self) -> None:
        """What is known was found out now."""
        if self._reads_replicas:
            self._old_at = time.monotonic() + _MAX_AGE_S

    async def _discovered(self, deadline: float) -> bool:
        try:
            await self.discover(deadline)
        except Exception:  # see `refresh`
            return False
        return True

    def _is_avoided(self, pool: ConnectionPool) -> bool:
        return self._avoided.get(pool, 0.0) > time.monotonic()

    def _avoid(self, pool: ConnectionPool) -> None:
        now = time.monotonic()
        self._avoided = {other: until for other, until in self._avoided.items() if until > now}
        self._avoided[pool] = now + _AVOID_S

    def _replica(self, replicas: Iterable[ConnectionPool], number: int) -> ConnectionPool | None:
        """One of ``replicas`` that works as far as is known, always the same for the same ``number``."""
        usable = [pool for pool in replicas if not self._is_avoided(pool)]
        return usable[number % len(usable)] if usable else None


class OneServer(Topology):
    """A server on its own: nothing to find out, and every error is the answer."""

    several = False

    def __init__(self, config: RedisConfig, run_in_thread: RunInThread) -> None:
        """No I/O before :meth:`open`."""
        access = Access(config, config.credentials, tls=config.tls, db=config.db)
        super().__init__(config, Fleet(config, access, run_in_thread))
        self._pool: Final = self.fleet.at(config.endpoints[0])

    async def open(self, deadline: float) -> None:
        """Connect, log in and have a PING answered."""
        await self.fleet.prepare()
        await self.fleet.converse(self._pool, say_hello, deadline)

    def primaries(self) -> Sequence[ConnectionPool]:
        """The server."""
        return [self._pool]

    def route(self, name: bytes, *, reads: bool) -> ConnectionPool:
        """The server."""
        return self._pool

    def shares(
        self, names: Sequence[bytes], indexes: Sequence[int], *, reads: bool
    ) -> dict[ConnectionPool | None, Sequence[int]]:
        """All of them."""
        return {self._pool: indexes}

    def after(self, error: Exception, pool: ConnectionPool | None) -> Way:
        """What the server said stands."""
        return Way.END
