"""``memory://``: objects in this process's memory. The reference adapter: the contract in its shortest form."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence

from l2kit.adapter import Capabilities, KeyInfo, L2Adapter, Usage
from l2kit.config import AdapterConfig, PositiveInt
from l2kit.inventory import counts_as_use
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus


class MemoryConfig(AdapterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``memory://``.

    Attributes:
        max_bytes: objects beyond this evict the least recently used ones; no limit by default.
    """

    max_bytes: PositiveInt | None = None


class MemoryAdapter(L2Adapter[MemoryConfig]):
    """Keeps each stored object as one `bytes`; a lock is a second reference, so it outlives eviction and deletion."""

    api_version = (1, 0)
    config_type = MemoryConfig
    capabilities = Capabilities(persistent=False, shared=False, lock="owned", evicts=True)

    async def open(self) -> None:
        """Start empty."""
        self._objects: OrderedDict[ObjectKey, bytes] = OrderedDict()
        self._used_bytes = 0
        self._locked: dict[ObjectKey, bytes] = {}
        self._locks: Counter[ObjectKey] = Counter()

    async def close(self) -> None:
        """Forget everything."""
        self._objects.clear()
        self._locked.clear()
        self._used_bytes = 0

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """Copy the object in."""
        payload = b"".join(data)
        limit = self.config.max_bytes
        if limit is not None and len(payload) > limit:
            return StoreStatus.DROPPED
        self._remove(key)
        while limit is not None and self._used_bytes + len(payload) > limit:
            self._remove(next(iter(self._objects)))
        self._objects[key] = payload
        self._used_bytes += len(payload)
        return StoreStatus.STORED

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """Copy the object out."""
        payload = self._objects.get(key, self._locked.get(key))
        if payload is None:
            return None
        if counts_as_use():
            self._touch(key)
        position = 0
        for segment in into:
            part = payload[position : position + len(segment)]
            segment[: len(part)] = part
            position += len(part)
        return len(payload)

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Sizes of the objects that are here."""
        return [len(self._objects[key]) if key in self._objects else None for key in keys]

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Keep a second reference to each object found."""
        for key in keys:
            if key in self._objects:
                self._touch(key)
                self._locks[key] += 1
                self._locked[key] = self._objects[key]
        return await self.lookup_many(keys)

    async def release_many(self, keys: Sequence[ObjectKey]) -> None:
        """Drop the second reference with the last lock."""
        for key in keys:
            self._locks[key] -= 1
            if self._locks[key] <= 0:
                del self._locks[key]
                self._locked.pop(key, None)

    async def delete_one(self, key: ObjectKey) -> bool:
        """Delete one object."""
        return self._remove(key)

    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        """Every object, least recently used first."""
        self.check_open()
        for key, payload in list(self._objects.items()):
            yield KeyInfo(key, len(payload))

    async def usage(self) -> Usage:
        """Exact."""
        self.check_open()
        return Usage(self._used_bytes, self.config.max_bytes, len(self._objects))

    def _remove(self, key: ObjectKey) -> bool:
        payload = self._objects.pop(key, None)
        self._used_bytes -= len(payload or b"")
        return payload is not None

    def _touch(self, key: ObjectKey) -> None:
        if key in self._objects:
            self._objects.move_to_end(key)
