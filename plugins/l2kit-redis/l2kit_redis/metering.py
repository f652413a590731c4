"""`MeteredTalk`: conversations as `Talk` holds them, counted and timed."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from l2kit.errors import L2Error
from l2kit_redis.connection import Connection, Traffic
from l2kit_redis.talk import Talk

ResultT = TypeVar("ResultT")
Conversation = Callable[[Connection], ResultT]
Count = Callable[[str, int], None]

_BUCKETS_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_BUCKETS_S: Final = tuple(bound / 1000 for bound in _BUCKETS_MS)


class _Leg(NamedTuple):
    """One conversation on one connection."""

    connection: Connection
    traffic: Traffic
    seconds: float


class MeteredTalk:
    """Counts what each conversation of ``talk`` costs; its coroutines are those of `Talk`.

    - ``round_trips``, ``sent_bytes``, ``received_bytes``; ``connects``, and of these ``reconnects``, which replace a
      connection that was closed.
    - A histogram of how long conversations take, their wait for a thread not included: ``conversations``,
      ``conversation_us`` in all, and for each bound ``latency_le_…ms``, how many took no longer.
    """

    def __init__(self, talk: Talk, count: Count) -> None:
        """``count`` is called on the loop."""
        self._talk: Final = talk
        self._count: Final = count
        self._connections: set[Connection] = set()

    async def about(
        self, name: bytes, conversation: Conversation[ResultT], *, writes: bool, idempotent: bool = True
    ) -> ResultT:
        """See `Talk.about`."""
        legs: list[_Leg] = []

        def run(connection: Connection) -> ResultT:
            return _measured(legs, connection, lambda: conversation(connection))

        try:
            return await self._talk.about(name, run, writes=writes, idempotent=idempotent)
        finally:
            self._report(legs)

    async def about_each(
        self,
        names: Sequence[bytes],
        conversation: Callable[[Connection, Sequence[bytes]], Sequence[ResultT]],
        *,
        writes: bool,
        failure: Callable[[L2Error], ResultT] | None = None,
    ) -> list[ResultT]:
        """See `Talk.about_each`; without any names there is no conversation."""
        if not names:
            return []
        legs: list[_Leg] = []

        def run(connection: Connection, some: Sequence[bytes]) -> Sequence[ResultT]:
            return _measured(legs, connection, lambda: conversation(connection, some))

        try:
            return await self._talk.about_each(names, run, writes=writes, failure=failure)
        finally:
            self._report(legs)

    def servers(self) -> Sequence[Any]:
        """See `Talk.servers`."""
        return self._talk.servers()

    async def at(self, server: Any, conversation: Conversation[ResultT]) -> ResultT:
        """See `Talk.at`."""
        legs: list[_Leg] = []

        def run(connection: Connection) -> ResultT:
            return _measured(legs, connection, lambda: conversation(connection))

        try:
            return await self._talk.at(server, run)
        finally:
            self._report(legs)

    def _report(self, legs: Sequence[_Leg]) -> None:
        for leg in legs:
            self._count("round_trips", leg.traffic.round_trips)
            self._count("sent_bytes", leg.traffic.sent_bytes)
            self._count("received_bytes", leg.traffic.received_bytes)
            self._count("conversations", 1)
            self._count("conversation_us", round(leg.seconds * 1e6))
            for bound_ms in _BUCKETS_MS[bisect_left(_BUCKETS_S, leg.seconds) :]:
                self._count(f"latency_le_{bound_ms}ms", 1)
            if leg.connection not in self._connections:
                self._note_connect(leg.connection)

    def _note_connect(self, connection: Connection) -> None:
        self._count("connects", 1)
        lost = next((known for known in self._connections if known.closed), None)
        if lost is not None:
            self._connections.discard(lost)
            self._count("reconnects", 1)
        self._connections.add(connection)


def _measured(legs: list[_Leg], connection: Connection, conversation: Callable[[], ResultT]) -> ResultT:
    """Runs in a thread; ``legs`` is read when all its threads have ended."""
    before = connection.traffic  # the log-in, or a redirection's first word, belongs to somebody else
    started = time.perf_counter()
    try:
        return conversation()
    finally:
        seconds = time.perf_counter() - started
        traffic = Traffic(*(now - then for now, then in zip(connection.traffic, before, strict=True)))
        legs.append(_Leg(connection, traffic, seconds))
