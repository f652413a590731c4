"""Faults that show after certain histories only: no other test of the suite meets them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence

from l2kit.adapter import KeyInfo, Usage
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from tests.unit.broken_adapters.base import BrokenAdapter


class LosesTheThirdReplacement(BrokenAdapter):
    """Says that it stored an object for the fourth time and keeps the third version."""

    caught_by = "test_any_history_agrees_with_a_dict"

    async def open(self) -> None:
        await super().open()
        self.stores: Counter[ObjectKey] = Counter()

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        self.stores[key] += 1
        if self.stores[key] == 4 and key in self._objects and sum(map(len, data)) < 10_000:
            return StoreStatus.STORED
        return await super().store_one(key, data)


class RestoresWhatWasLockedTwice(BrokenAdapter):
    """Two locks on one object: the last release brings it back over a newer one."""

    caught_by = "test_any_history_agrees_with_a_dict"

    async def open(self) -> None:
        await super().open()
        self.twice: dict[ObjectKey, bytes] = {}

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        found = await super().acquire_many(keys)
        for key in keys:
            if self._locks[key] > 1:
                self.twice.setdefault(key, self._locked[key])
        return found

    async def release_many(self, keys: Sequence[ObjectKey]) -> None:
        await super().release_many(keys)
        for key in keys:
            if not self._locks[key]:
                kept = self.twice.pop(key, None)
                if kept is not None and key in self._objects:
                    self._objects[key] = kept


class HoldsOneReplacementBack(BrokenAdapter):
    """Writes a replacement when something is asked next; a second replacement before that pushes the first one out."""

    caught_by = "test_any_history_agrees_with_a_dict"

    async def open(self) -> None:
        await super().open()
        self.held_back: dict[ObjectKey, bytes] = {}

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        if key not in self._objects or self.config.max_bytes is not None:
            return await super().store_one(key, data)
        self.held_back = {key: b"".join(data)}
        return StoreStatus.STORED

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        await self.catch_up()
        return await super().load_one(key, into)

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        await self.catch_up()
        return await super().acquire_many(keys)

    async def delete_one(self, key: ObjectKey) -> bool:
        await self.catch_up()
        return await super().delete_one(key)

    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        self.check_open()
        await self.catch_up()
        async for info in super().iter_keys():
            yield info

    async def usage(self) -> Usage:
        self.check_open()
        await self.catch_up()
        return await super().usage()

    async def catch_up(self) -> None:
        for key, payload in self.held_back.items():
            await super().store_one(key, [memoryview(payload)])
        self.held_back = {}


class PutsTheOutdatedBackUnderALimit(BrokenAdapter):
    """With a limit, the last unlock of an object that was replaced meanwhile brings the old one back."""

    caught_by = "test_any_history_under_a_limit_gives_no_other_bytes"

    async def open(self) -> None:
        await super().open()
        self.outdated: dict[ObjectKey, bytes] = {}

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        old = self._objects.get(key)
        if old is not None and self._locks[key] and self.config.max_bytes is not None:
            self.outdated[key] = old
        return await super().store_one(key, data)

    async def release_many(self, keys: Sequence[ObjectKey]) -> None:
        await super().release_many(keys)
        for key in keys:
            old = self.outdated.pop(key, None)
            if old is not None and key in self._objects:
                self._objects[key] = old
