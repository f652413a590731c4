"""Keys whose fields come from outside: paths, control characters, great lengths, extreme numbers."""

# ruff: noqa: D102 - the names of the tests say what they test

from __future__ import annotations

import hashlib

from l2kit.keys import ObjectKey
from l2kit.testing.groups.base import Adapter, Conformance, content

_NAMESPACES = [
    "../../etc/passwd",
    "/",
    ".",
    "..",
    "a/b",
    "a\\b",
    "CON",
    "Namespace",
    "namespace",
    "name space",
    "naïve-ключ-鍵",
    "nul\0byte",
    "new\r\nline",
    "*?[a]{b}",
    "%2e%2e%2f",
    "x" * 64,
    "x" * 65,
    "y" * 10_000,
    "\ud800 lone surrogate",
]


class HostileKeyTests(Conformance):
    """Long and hostile key fields."""

    async def test_hostile_namespaces_stay_apart(self, adapter: Adapter) -> None:
        objects = {
            ObjectKey(namespace, self.key().chunk_hash): content(number, 700)
            for number, namespace in enumerate(_NAMESPACES)
        }
        await self._check(adapter, objects)

    async def test_every_field_counts(self, adapter: Adapter) -> None:
        hashes = [hashlib.blake2b(self.key().chunk_hash, digest_size=size).digest() for size in (8, 16, 20, 32)]
        keys = [
            *(ObjectKey("fields", chunk_hash) for chunk_hash in hashes),
            ObjectKey("fields", hashes[1][:8]),
            *(ObjectKey("fields", hashes[1], shard, 12) for shard in (0, 1, 11)),
            ObjectKey("fields", hashes[1], 1, 11),
            *(ObjectKey("fields", hashes[1], group=group) for group in (1, 11)),
            *(ObjectKey("fields", hashes[1], layer=layer) for layer in (0, 1, 11)),
            ObjectKey("fields", hashes[1], group=1, layer=1),
        ]
        await self._check(adapter, {key: content(number, 700) for number, key in enumerate(keys)})

    async def test_extreme_numbers(self, adapter: Adapter) -> None:
        top = (1 << 32) - 1
        keys = [
            ObjectKey("extreme", self.key().chunk_hash, top - 1, top, top, top),
            ObjectKey("extreme", self.key().chunk_hash, 0, top, top, top),
            ObjectKey("extreme", self.key().chunk_hash, 0, top, top),
            ObjectKey("z" * 64, (self.key().chunk_hash * 2), top - 1, top, top, top),
        ]
        await self._check(adapter, {key: content(number, 700) for number, key in enumerate(keys)})

    async def _check(self, adapter: Adapter, objects: dict[ObjectKey, bytes]) -> None:
        await self.store(adapter, objects)
        await self.expect(adapter, objects)
        deleted, *kept = objects
        await adapter.submit_delete_task([deleted])
        await self.expect(adapter, {deleted: None, **{key: objects[key] for key in kept}})
        outcomes = await adapter.submit_delete_task(kept)
        assert [outcome.status for outcome in outcomes] == ["deleted"] * len(kept)
        await self.expect(adapter, dict.fromkeys(objects))
