"""One record of the table: one sector that says which object lies in which slot; pure.

A record is committed by writing it, and revoked by writing zeros over it. It fits in one sector, so a write that is
torn can only hurt the record that is being written, and its checksum tells. Of two records of one key the one with the
higher sequence number is true; the other is left of a store that was interrupted before it could revoke it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

import xxhash

from l2kit.errors import ConfigError
from l2kit.keys import ObjectKey
from l2kit_nvme.geometry import RECORD_BYTES

REVOKED: Final = bytes(RECORD_BYTES)

_MAGIC: Final = b"L2KR"
_BODY: Final = struct.Struct("<4sIQQQIIIIIIqBB32s64s")
_RECORD: Final = struct.Struct(f"{_BODY.format}Q{RECORD_BYTES - _BODY.size - 8}x")
_NOTHING: Final = bytes(4)

#: What all parts of one prefix have in common: namespace, shard, shards, group, layer (-1 for all).
Family = tuple[str, int, int, int, int]


class RegionShape(NamedTuple):
    """A run of equal slots: its first page of the data area, how many pages, and how many for each slot."""

    first_page: int
    pages: int
    slot_pages: int


class Record(NamedTuple):
    """A committed object: ``size`` in bytes, in slot number ``slot`` of ``region``."""

    sequence: int
    generation: int
    size: int
    region: RegionShape
    slot: int
    family: Family
    chunk_hash: bytes


def family_of(key: ObjectKey) -> Family:
    """What ``key`` shares with others."""
    return key.namespace, key.shard, key.shards, key.group, -1 if key.layer is None else key.layer


def object_key(family: Family, chunk_hash: bytes) -> ObjectKey:
    """Invert :func:`family_of`."""
    namespace, shard, shards, group, layer = family
    return ObjectKey(namespace, chunk_hash, shard, shards, group, None if layer < 0 else layer)


def encode(record: Record, seed: int) -> bytes:
    """The sector that commits ``record``."""
    namespace, shard, shards, group, layer = record.family
    name = namespace.encode()
    body = _BODY.pack(
        _MAGIC,
        record.generation,
        record.sequence,
        record.size,
        *record.region,
        record.slot,
        shard,
        shards,
        group,
        layer,
        len(record.chunk_hash),
        len(name),
        record.chunk_hash,
        name,
    )
    return (body + xxhash.xxh3_64_intdigest(body, seed).to_bytes(8, "little")).ljust(RECORD_BYTES, b"\0")


def decode(table: memoryview, seed: int) -> Iterator[Record | bool]:
    """What each sector of a part of the table says: a record, False for none, True for a damaged one.

    A million of them are read at once when a slab is opened, hence the pains.
    """
    digest, size, make = xxhash.xxh3_64_intdigest, _BODY.size, tuple.__new__
    names: dict[tuple[bytes, int, int, int, int], Family] = {}
    shapes: dict[tuple[int, int, int], RegionShape] = {}
    position = 0
    for fields in _RECORD.iter_unpack(table):
        magic, generation, sequence, nbytes, first_page, pages, slot_pages, slot = fields[:8]
        if magic != _MAGIC:
            yield magic != _NOTHING
        elif digest(table[position : position + size], seed) != fields[16]:
            yield True
        else:
            numbers = fields[15], fields[8], fields[9], fields[10], fields[11]
            family = names.get(numbers)
            if family is None:
                family = names[numbers] = (fields[15][: fields[13]].decode(), *numbers[1:])
            shape = first_page, pages, slot_pages
            region = shapes.get(shape)
            if region is None:
                region = shapes[shape] = RegionShape(*shape)
            yield make(Record, (sequence, generation, nbytes, region, slot, family, fields[14][: fields[12]]))
        position += RECORD_BYTES


def is_key(family: Family, chunk_hash: bytes) -> bool:
    """Whether these fields name an object at all."""
    return 8 <= len(chunk_hash) <= 32 and _is_family(family)


@lru_cache(maxsize=1024)
def _is_family(family: Family) -> bool:
    try:
        object_key(family, bytes(8))
    except ConfigError:
        return False
    return True
