"""`Upkeep`: what has to be done about keys, but not while a caller waits: removing stripes, starting `ttl_s` anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import anyio

from l2kit.errors import L2Error
from l2kit_redis import lookups
from l2kit_redis.connection import Connection
from l2kit_redis.metering import MeteredTalk
from l2kit_redis.stripes import Head

Conversation = Callable[[Connection, Sequence[bytes]], Sequence[object]]

#: Bounds of what waits, in keys; beyond them it is dropped and counted. What is dropped expires by itself, or early.
_MAX_WAITING: Final = 200_000
_KEYS_AT_ONCE: Final = 4096
_RETRY_S: Final = 0.5
_TRIES: Final = 20
_FLUSH_S: Final = 1.0
_LONGEST_PERIOD_S: Final = 30.0

#: Stripes live so much longer than their head, so that what a head promises is there while both are being extended.
STRIPES_OUTLIVE_MS: Final = 60_000


class Upkeep:
    """A queue of names to remove and one of objects that were found; loop-bound.

    - :meth:`remove` and :meth:`found` return at once. :meth:`run_removals` and :meth:`run_refreshes` do the work, until
      they are cancelled.
    - What fails is tried again for some seconds, then dropped and counted as ``upkeep_dropped``.
    """

    def __init__(self, talk: MeteredTalk, count: Callable[[str, int], None], ttl_ms: int | None) -> None:
        """``ttl_ms`` is what an object that was found lives from then on; None for objects that do not expire."""
        self._talk: Final = talk
        self._count: Final = count
        self._ttl_ms: Final = ttl_ms
        self._removable: dict[bytes, None] = {}
        self._found: dict[bytes, Head | None] = {}
        self._something_to_remove = anyio.Event()
        self._something_found = anyio.Event()

    def remove(self, names: Sequence[bytes]) -> None:
        """Remove these keys, which nobody reads any more."""
        if len(self._removable) + len(names) > _MAX_WAITING:
            self._count("upkeep_dropped", len(names))
            return
        self._removable.update(dict.fromkeys(names))
        if names:
            self._something_to_remove.set()

    def found(self, name: bytes, head: Head | None) -> None:
        """An object was used: it lives for its whole time to live again."""
        if self._ttl_ms is None:
            return
        if len(self._found) >= _MAX_WAITING and name not in self._found:
            self._count("upkeep_dropped", 1)
            return
        self._found[name] = head
        self._something_found.set()

    async def run_removals(self) -> None:
        """Remove what is to be removed, as soon as it is known."""
        while True:
            await self._something_to_remove.wait()
            self._something_to_remove = anyio.Event()
            await self._remove_all()

    async def run_refreshes(self) -> None:
        """Extend the lives of what was found; each object once in a twentieth of its life, or half a minute."""
        assert self._ttl_ms is not None
        period_s = min(self._ttl_ms / 20_000, _LONGEST_PERIOD_S)
        while True:
            await self._something_found.wait()
            await anyio.sleep(period_s)
            self._something_found = anyio.Event()
            await self._refresh_all(self._ttl_ms)

    async def flush(self) -> None:
        """Remove what is left to remove, in a second at most; a part of closing."""
        with anyio.move_on_after(_FLUSH_S):
            await self._remove_all(tries=1)

    async def _remove_all(self, tries: int = _TRIES) -> None:
        while self._removable:
            names = list(self._removable)[:_KEYS_AT_ONCE]
            if not await self._done(names, partial(lookups.settle, kept={}), tries):
                self._count("upkeep_dropped", len(names))
            for name in names:
                self._removable.pop(name, None)

    async def _refresh_all(self, ttl_ms: int) -> None:
        found, self._found = self._found, {}
        ttls_ms: dict[bytes, int] = {}
        for name, head in found.items():
            ttls_ms[name] = ttl_ms
            ttls_ms.update(dict.fromkeys(head.names(name) if head else (), ttl_ms + STRIPES_OUTLIVE_MS))
            if len(ttls_ms) >= _KEYS_AT_ONCE:
                await self._extend(ttls_ms)
                ttls_ms = {}
        await self._extend(ttls_ms)

    async def _extend(self, ttls_ms: Mapping[bytes, int]) -> None:
        if not await self._done(list(ttls_ms), partial(lookups.extend, ttl_ms=ttls_ms), 1):
            self._count("upkeep_dropped", len(ttls_ms))  # the next hit asks for it again

    async def _done(
        self,
        names: Sequence[bytes],
        conversation: Callable[[Connection, Sequence[bytes]], Sequence[object]],
        tries: int,
    ) -> bool:
        for left in reversed(range(tries)):
            try:
                await self._talk.about_each(names, conversation, writes=True)
            except L2Error:  # counted by the callers
                if left:
                    await anyio.sleep(_RETRY_S)
            else:
                return True
        return not names
