"""`StripeTransfer`: the stripes of one object to and from their servers, on one connection or on several at once.

On one connection they go in order, so the checksum of the object is made on the way: each stripe is hashed when it is
in the processor's cache anyway. Several connections are for networks in which one of them is slow; which is faster
shows in use, see `l2kit.sharing`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, Final, Literal

from l2kit.errors import first_error
from l2kit.framing import Sealing
from l2kit.items import LoadItem
from l2kit.memory import first_bytes
from l2kit.sharing import Sharing
from l2kit_redis import values
from l2kit_redis.connection import Connection
from l2kit_redis.metering import MeteredTalk
from l2kit_redis.stripes import Head, cut, deal

RunInThread = Callable[[Callable[[], Any]], Awaitable[Any]]
ForEach = Callable[[Sequence[Any], Callable[[Any], Awaitable[None]]], Awaitable[None]]
Direction = Literal["read", "write"]


class StripeTransfer:
    """Moves stripes of one adapter's objects. Loop-bound. Counts ``stripes_read``."""

    def __init__(
        self,
        talk: MeteredTalk,
        count: Callable[[str, int], None],
        for_each: ForEach,
        run_in_thread: RunInThread,
        connections: int,
    ) -> None:
        """``for_each`` runs as many coroutines at once as there are ``connections``, and threads."""
        self._talk: Final = talk
        self._count: Final = count
        self._for_each: Final = for_each
        self._run_in_thread: Final = run_in_thread
        self._connections: Final = connections
        self._under_way: Final = {"read": 0, "write": 0}
        self._sharing: Final[dict[Direction, Sharing]] = {"read": Sharing(), "write": Sharing()}

    async def write(
        self, names: Sequence[bytes], head: Head, data: Sequence[memoryview], ttl_ms: int, sealing: Sealing | None
    ) -> None:
        """Store ``data`` under ``names``, stripe by stripe; ``sealing``, whose data it is, is finished on the way."""
        parts = cut(data, head.stripe_bytes)
        parts_of = dict(zip(names, parts, strict=True))

        finishing = Lock()

        def write(connection: Connection, some: Sequence[bytes]) -> Sequence[bool]:
            return values.put_stripes(connection, some, [parts_of[name] for name in some], ttl_ms)

        def write_in_order(connection: Connection, some: Sequence[bytes]) -> Sequence[bool]:
            assert sealing is not None
            if len(some) < len(names):  # it has become several servers meanwhile, each with a thread of its own
                with finishing:
                    sealing.finish()
                return write(connection, some)

            def before(position: int) -> None:
                if position + 1 < len(some):
                    sealing.advance((position + 2) * head.stripe_bytes)
                else:
                    sealing.finish()

            return values.put_stripes(connection, some, [parts_of[name] for name in some], ttl_ms, before)

        with self._taking_part("write", len(names), head.size) as ways:
            if sealing is not None and ways == 1 and len(self._talk.servers()) == 1:
                # The first stripe has the object's header, which is known when all the others have been hashed.
                await self._talk.about_each([*names[1:], names[0]], write_in_order, writes=True)
                return
            if sealing is not None:
                await self._run_in_thread(sealing.finish)
            await self._side_by_side(names, ways, lambda some: self._talk.about_each(some, write, writes=True))

    async def read(
        self, names: Sequence[bytes], head: Head, into: Sequence[memoryview], item: LoadItem | None, *, writes: bool
    ) -> int:
        """Receive all stripes that have room; how many are known to be missing.

        ``item``, whose buffers ``into`` are, is verified on the way where that can be.
        """
        parts = cut(first_bytes(into, head.size), head.stripe_bytes)
        names = names[: len(parts)]
        place = dict(zip(names, enumerate(parts), strict=True))
        missing = 0

        def read(connection: Connection, some: Sequence[bytes]) -> Sequence[bool]:
            places = [place[stripe] for stripe in some]
            lengths = [head.length(index) for index, _ in places]
            return values.get_stripes(connection, some, [buffers for _, buffers in places], lengths)

        def read_in_order(connection: Connection, some: Sequence[bytes]) -> Sequence[bool]:
            assert item is not None
            if len(some) < len(names):  # they are on several servers
                return read(connection, some)
            receiving = item.receive()
            lengths = [head.length(index) for index in range(len(some))]
            there = values.get_stripes(
                connection,
                some,
                cut(first_bytes(receiving.into, head.size), head.stripe_bytes),
                lengths,
                lambda index: receiving.advance(index * head.stripe_bytes + lengths[index]),
            )
            if all(there):
                receiving.finish(head.size)
            return there

        async def read_some(some: Sequence[bytes]) -> None:
            nonlocal missing
            in_order = item is not None and ways == 1
            there = await self._talk.about_each(some, read_in_order if in_order else read, writes=writes)
            self._count("stripes_read", there.count(True))
            missing += 0 if all(there) else 1

        with self._taking_part("read", len(names), head.size) as ways:
            await self._side_by_side(names, ways, read_some)
        return missing

    async def _side_by_side(self, names: Sequence[bytes], ways: int, work: Callable[[Sequence[bytes]], Any]) -> None:
        """Share stripes out to so many connections, and do ``work`` on each share."""
        shares = [[names[index] for index in share] for share in deal(len(names), ways)]
        try:
            await self._for_each(shares, work)
        except Exception as group:
            error = first_error(group)
            raise error from error.__cause__

    @contextmanager
    def _taking_part(self, direction: Direction, count: int, nbytes: int) -> Iterator[int]:
        """How many connections one object gets: one, or as many as other objects leave."""
        plan = self._sharing[direction].plan(count, nbytes)
        self._under_way[direction] += 1
        started = time.perf_counter()
        try:
            yield -(-self._connections // self._under_way[direction]) if plan.shared else 1
        finally:
            self._under_way[direction] -= 1
        self._sharing[direction].took(plan, count, nbytes, time.perf_counter() - started)
