"""`ObjectStore`: objects as one value each, or as a head and stripes; what each call does, in which order, and why.

The order is what makes an object in parts one thing:

- A store writes stripes first, under names that nobody knows, to expire in `_SAFETY_MS`; then the head, in the same
  moment as it learns which head it replaces; then it lets the stripes live as long as the head, and removes those of
  the head before. Whatever stops it leaves the old object or the new one, and nothing that stays for ever.
- A load reads the head first. When a stripe is missing, it asks again: a head that has changed is read anew, one that
  has not has lost a part, and is removed.
- A delete removes the head first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any, Final

import anyio
import anyio.lowlevel

from l2kit.adapter import caught
from l2kit.errors import L2Error
from l2kit.framing import Sealing
from l2kit.items import LoadItem, StoreItem
from l2kit.outcomes import StoreStatus
from l2kit_redis import lookups, values
from l2kit_redis.config import RedisConfig
from l2kit_redis.connection import Connection
from l2kit_redis.faults import ServerError
from l2kit_redis.lookups import Found
from l2kit_redis.metering import MeteredTalk
from l2kit_redis.stripe_transfer import ForEach, RunInThread, StripeTransfer
from l2kit_redis.stripes import Head, whole_bytes
from l2kit_redis.to_the_end import to_the_end
from l2kit_redis.upkeep import STRIPES_OUTLIVE_MS, Upkeep
from l2kit_redis.values import UNREAD

#: What the stripes of a writer that dies cost at most: so long, longer than any store.
_SAFETY_MS: Final = 600_000
#: A store that is cancelled while its head is put in place is completed, within this bound: nobody should have to find
#: out afterwards whether it was.
_PUBLISH_S: Final = 1.0
_MAX_REMEMBERED: Final = 100_000
#: After so many lookups that have found no head, the next ones do not ask for any: that halves their costs. Objects of
#: one model are of one size, so where there are some, there are many; one that comes after all costs a round trip.
_HEADLESS_LOOKUPS: Final = 16

#: An envelope and what a codec may add: objects that are smaller by this are surely one value.
_ENVELOPE_BYTES: Final = 64 << 10


class ObjectStore:
    """The objects of one adapter by the names of their keys. Loop-bound.

    Counts ``stripes_written``, ``stripes_read``, and as ``stripes_lost`` those that were evicted, or expired, while
    their head stayed.
    """

    def __init__(
        self,
        config: RedisConfig,
        talk: MeteredTalk,
        upkeep: Upkeep,
        count: Callable[[str, int], None],
        for_each: ForEach,
        run_in_thread: RunInThread,
    ) -> None:
        """``for_each`` runs as many coroutines at once as there are threads, which ``run_in_thread`` uses."""
        self._run_in_thread: Final = run_in_thread
        self._transfer: Final = StripeTransfer(talk, count, for_each, run_in_thread, config.max_concurrency)
        self._talk: Final = talk
        self._upkeep: Final = upkeep
        self._count: Final = count
        self._ttl_ms: Final = config.ttl_ms
        self._stripes_ttl_ms: Final = None if self._ttl_ms is None else self._ttl_ms + STRIPES_OUTLIVE_MS
        self._refreshes: Final = config.refreshes_ttl
        self._lease_ms: Final = config.lease_ms
        self._stripe_bytes: Final = config.stripe_bytes
        self._whole_bytes: Final = whole_bytes(config.stripe_bytes)
        self._headless = 0  # lookups in a row that have found something, and no head
        self._extended_until: Final[dict[bytes, float]] = {}  # by token, on the loop's clock

    async def put(self, name: bytes, data: Sequence[memoryview]) -> StoreStatus:
        """Store one object."""
        size = sum(map(len, data))
        if size > self._whole_bytes:
            await self._put_in_stripes(name, data)
            return StoreStatus.STORED
        replaced = await self._talk.about(
            name, lambda connection: values.put(connection, name, data, self._ttl_ms), writes=True
        )
        self._remove_stripes(name, replaced)
        return StoreStatus.STORED

    async def put_each(self, items: Mapping[bytes, StoreItem]) -> list[StoreStatus | Exception]:
        """Store several objects; small ones in one pipeline, errors as values."""
        # What an item becomes is not known before its checksum is made, which is for the thread to do.
        small = [name for name, item in items.items() if item.nbytes <= self._whole_bytes - _ENVELOPE_BYTES]
        outcomes: dict[bytes, StoreStatus | Exception] = {}

        def store(connection: Connection, some: Sequence[bytes]) -> Sequence[Head | Exception | None]:
            answers: dict[bytes, Head | Exception | None] = {}
            sealed: list[bytes] = []

            def seal_each() -> Iterator[tuple[bytes, Sequence[memoryview]]]:
                for name in some:
                    try:
                        data = items[name].data()
                    except Exception as error:
                        answers[name] = error
                    else:
                        sealed.append(name)
                        yield name, data  # while it is in the processor's cache, where its checksum has brought it

            stored = values.put_each(connection, seal_each(), self._ttl_ms)
            answers.update(zip(sealed, stored, strict=True))
            return [answers[name] for name in some]

        answers = await self._talk.about_each(small, store, writes=True, failure=_itself)
        for name, answer in zip(small, answers, strict=True):
            if isinstance(answer, Exception):
                outcomes[name] = answer
            else:
                outcomes[name] = StoreStatus.STORED
                self._remove_stripes(name, answer)
        for name, item in items.items():
            if name not in outcomes:
                outcomes[name] = await caught(self._put_large(name, item))
        return [outcomes[name] for name in items]

    async def _put_large(self, name: bytes, item: StoreItem) -> StoreStatus:
        sealing = item.begin()
        if sealing is None or item.stored_bytes <= self._whole_bytes:
            return await self.put(name, await self._run_in_thread(item.data))
        await self._put_in_stripes(name, sealing.data, sealing)
        return StoreStatus.STORED

    async def get(self, name: bytes, into: Sequence[memoryview], *, heals: bool) -> int | None:
        """Load one object and return its size; None for a miss. With ``heals`` one that has lost a part is removed."""
        what = await self._talk.about(name, lambda connection: values.get(connection, name, into), writes=False)
        return await self._complete(name, what, into, None, heals=heals)

    async def get_each(self, items: Mapping[bytes, LoadItem], *, heals: bool) -> list[int | Exception | None]:
        """Load several small objects in one pipeline, errors as values."""

        def load(connection: Connection, some: Sequence[bytes]) -> Sequence[Any]:
            asked = [items[name] for name in some]
            return values.get_each(
                connection, some, [item.into for item in asked], lambda index, size: asked[index].verify(size)
            )

        buffers = {name: item.into for name, item in items.items()}
        answers = await self._talk.about_each(list(items), load, writes=False, failure=_itself)
        sizes: list[int | Exception | None] = []
        for (name, parts), answer in zip(buffers.items(), answers, strict=True):
            if answer is None or type(answer) is int:
                self._note_hit(name, answer)
                sizes.append(answer)
            elif answer is UNREAD:
                sizes.append(await caught(self.get(name, parts, heals=heals)))
            elif isinstance(answer, Exception):
                sizes.append(None if lookups.is_no_object(answer) else answer)
            else:
                sizes.append(await caught(self._complete(name, answer, parts, items[name], heals=heals)))
        return sizes

    async def sizes(self, names: Sequence[bytes], *, lease: bool) -> list[int | None]:
        """The size of each object, in one round trip; with ``lease`` what is there is kept for a while.

        What only nodes have that do not answer is not there; when none answers, that is an error.
        In two round trips, once, where objects in stripes come after many lookups that have found none.
        """
        lease_ms = self._lease_ms if lease else None
        find = partial(lookups.find, lease_ms=lease_ms, heads=self._headless < _HEADLESS_LOOKUPS)
        failures: list[L2Error] = []

        def unanswered(error: L2Error) -> Found:
            failures.append(error)
            return lookups.NOT_FOUND

        found = await self._talk.about_each(names, find, writes=lease_ms is not None, failure=unanswered)
        if failures:  # of one node of several: its keys are misses, and the others' are not
            if len(failures) == len(names):
                raise failures[0]
            self._count("lookups_unanswered", len(failures))
        kinds = {type(what) for what, _ in found}
        if Head in kinds:
            self._headless = 0
        elif kinds - {NoneType}:
            self._headless += 1
        if lease_ms is not None and Head in kinds:
            await self._extend_stripes(names, found, lease_ms)
        if self._refreshes:
            for name, each in zip(names, found, strict=True):
                self._note_hit(name, each.what)
        return [each.size for each in found] if Head in kinds else [what for what, _ in found]  # type: ignore[misc]

    async def delete(self, name: bytes) -> bool:
        """Delete one object; False when there was none."""
        # Not repeated on a new connection: the second answer would be "there was none".
        existed, head = await self._talk.about(
            name, lambda connection: values.take_away(connection, name), writes=True, idempotent=False
        )
        if head is not None:
            stripes = head.names(name)
            try:
                await self._talk.about_each(stripes, partial(lookups.settle, kept={}), writes=True)
            except L2Error:  # the object is gone; what is left of it is tried again
                self._upkeep.remove(stripes)
            except BaseException:
                self._upkeep.remove(stripes)
                raise
        return existed

    async def _put_in_stripes(self, name: bytes, data: Sequence[memoryview], sealing: Sealing | None = None) -> None:
        head = Head.new(sum(map(len, data)), self._stripe_bytes)
        stripes = head.names(name)
        ttl_ms = _SAFETY_MS if self._stripes_ttl_ms is None else min(_SAFETY_MS, self._stripes_ttl_ms)
        try:
            await self._transfer.write(stripes, head, data, ttl_ms, sealing)
            await anyio.lowlevel.checkpoint_if_cancelled()  # from here on a reader may find it
        except BaseException:
            self._upkeep.remove(stripes)
            raise
        self._count("stripes_written", len(stripes))
        self._headless = 0
        refused = False

        def publish(connection: Connection) -> Head | None:
            nonlocal refused
            refused = False
            try:
                return values.put(connection, name, [head.pack()], self._ttl_ms)
            except ServerError:
                refused = True
                raise

        async with to_the_end(_PUBLISH_S):
            try:
                replaced = await self._talk.about(name, publish, writes=True)
            except BaseException:
                if refused:  # else nobody knows whether the head is there, and the stripes wait until they expire
                    self._upkeep.remove(stripes)
                raise
            await self._settle(name, stripes, replaced if replaced != head else None)

    async def _settle(self, name: bytes, stripes: Sequence[bytes], replaced: Head | None) -> None:
        kept = dict.fromkeys(stripes, self._stripes_ttl_ms)
        removed = replaced.names(name) if replaced else []
        try:
            await self._talk.about_each([*stripes, *removed], partial(lookups.settle, kept=kept), writes=True)
        except BaseException:
            self._upkeep.remove(removed)
            raise

    async def _complete(
        self,
        name: bytes,
        what: int | Head | None,
        into: Sequence[memoryview],
        item: LoadItem | None,
        *,
        heals: bool,
    ) -> int | None:
        """Finish the load of what a name was found to hold."""
        sure = False  # whether the primaries were asked: a replica may have the head and not yet its stripes
        head: Head | None = None
        while isinstance(what, Head):
            head = what
            lost = await self._transfer.read(head.names(name), head, into, item, writes=sure)
            if not lost:
                self._note_hit(name, head)
                return head.size
            what = await self._talk.about(name, lambda connection: values.get(connection, name, into), writes=True)
            if sure and what == head:
                self._count("stripes_lost", lost)
                if heals:
                    await self._heal(name, head)
                return None
            sure = True
        self._note_hit(name, what)
        return what

    async def _heal(self, name: bytes, head: Head) -> None:
        """Remove an object that has lost a part: a store that finds it present would leave it as it is."""
        try:
            await self._talk.about(name, lambda connection: values.take_away_head(connection, name, head), writes=True)
        except L2Error:
            self._count("heals_failed", 1)  # the next load tries again
        else:
            self._upkeep.remove(head.names(name))

    async def _extend_stripes(self, names: Sequence[bytes], found: Sequence[Found], lease_ms: int) -> None:
        """The second round trip of a lookup, for objects in stripes that were about to expire.

        Not for those that had one not long ago: stripes outlive their head.
        """
        now = anyio.current_time()
        stripes: list[bytes] = []
        for name, each in zip(names, found, strict=True):
            head = each.what
            if not each.extended or not isinstance(head, Head):
                continue
            if self._extended_until.get(head.token, 0.0) < now + lease_ms / 1000:
                stripes += head.names(name)
                self._extended_until[head.token] = now + (lease_ms + STRIPES_OUTLIVE_MS) / 1000
        ttls_ms = dict.fromkeys(stripes, lease_ms + STRIPES_OUTLIVE_MS)
        if len(self._extended_until) > _MAX_REMEMBERED:
            self._extended_until.clear()
        await self._talk.about_each(stripes, partial(lookups.extend, ttl_ms=ttls_ms), writes=True)

    def _note_hit(self, name: bytes, what: int | Head | None) -> None:
        if self._refreshes and what is not None:
            self._upkeep.found(name, what if isinstance(what, Head) else None)

    def _remove_stripes(self, name: bytes, replaced: Head | None) -> None:
        if replaced is not None:
            self._upkeep.remove(replaced.names(name))


def _itself(error: L2Error) -> Exception:
    return error
