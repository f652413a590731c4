"""Faults in names."""

from __future__ import annotations

from collections.abc import Sequence

from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from tests.unit.broken_adapters.base import BrokenAdapter


class CutsNamespaces(BrokenAdapter):
    """Cuts namespaces to a length that its file system takes."""

    caught_by = "test_hostile_namespaces_stay_apart"

    def fold(self, key: ObjectKey) -> ObjectKey:
        return ObjectKey(key.namespace[:3], key.chunk_hash, key.shard, key.shards, key.group, key.layer)

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        return await super().store_one(self.fold(key), data)

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        return await super().load_one(self.fold(key), into)

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return await self.lookup_many([self.fold(key) for key in keys])

    async def delete_one(self, key: ObjectKey) -> bool:
        return await super().delete_one(self.fold(key))


class IgnoresLayers(CutsNamespaces):
    """Names without the layer."""

    caught_by = "test_every_field_counts"

    def fold(self, key: ObjectKey) -> ObjectKey:
        return ObjectKey(key.namespace, key.chunk_hash, key.shard, key.shards, key.group)


class CutsNumbers(CutsNamespaces):
    """Keeps numbers in 31 bits."""

    caught_by = "test_extreme_numbers"

    def fold(self, key: ObjectKey) -> ObjectKey:
        top = (1 << 31) - 1
        numbers = (min(number, top) for number in (key.shard, key.shards, key.group))
        shard, shards, group = numbers
        return ObjectKey(key.namespace, key.chunk_hash, min(shard, shards - 1), shards, group)
