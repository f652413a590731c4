"""A million small objects: memory, reopening, lookup. The slab is a sparse file; only its table is really written."""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
import tracemalloc
from pathlib import Path

import pytest

import l2kit
from l2kit import ObjectKey
from l2kit.testing.groups.base import Adapter
from l2kit_nvme.catalog import Catalog
from l2kit_nvme.geometry import PAGE_BYTES, Superblock, plan
from l2kit_nvme.records import Record, RegionShape, encode, family_of

_OBJECTS = 1_000_000
#: For what tracemalloc slows down tenfold; a million take a little less each (178 bytes).
_COUNTED = 200_000
_NAMESPACE = hashlib.blake2b(b"scale", digest_size=16).hexdigest()
#: Of a slot of two pages: the envelope's, and one of payload.
_SIZE = 2 * PAGE_BYTES
_REGION_PAGES = 16_384


def chunk_hash(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def key(number: int) -> ObjectKey:
    return ObjectKey(_NAMESPACE, chunk_hash(number), 1, 8, 0, number % 4)


def record(number: int) -> Record:
    per_region = _REGION_PAGES // 2
    shape = RegionShape(number // per_region * _REGION_PAGES, _REGION_PAGES, 2)
    return Record(number + 1, 1, _SIZE, shape, number % per_region, family_of(key(number)), chunk_hash(number))


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    """A slab whose table says that a million objects are there."""
    path = tmp_path / "slab"
    records = _OBJECTS + 4096
    geometry = plan((1 << 20) + records * 512 + (_OBJECTS // 8192 + 8) * (_REGION_PAGES * PAGE_BYTES), 1, records)
    superblock = Superblock(bytes(range(16)), 0, geometry, records, 0)
    with path.open("wb") as file:
        file.truncate(geometry.member_bytes)
        file.write(superblock.encode())
        file.seek(geometry.locate(0)[1])
        for number in range(_OBJECTS):
            file.write(encode(record(number), superblock.seed))
    return path


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_million_objects(slab: Path) -> None:
    """All of them are found again; how long that takes is for the benchmarks, and printed here."""
    started = time.perf_counter()
    async with l2kit.open_adapter(f"nvme://{slab}", open_timeout_s=300) as adapter:
        reopening_s = time.perf_counter() - started
        assert (await adapter.usage()).objects == _OBJECTS
        median_ms = await median_lookup_ms(adapter)
        listed = 0
        async for _ in adapter.iter_keys():
            listed += 1
        assert listed == _OBJECTS
    slab.unlink()
    print(f"reopening {reopening_s:.2f} s, lookup of 512 keys: median {median_ms:.2f} ms")  # noqa: T201


async def median_lookup_ms(adapter: Adapter) -> float:
    """The median of 15 lookups, each of 512 keys that were not asked for before."""
    seconds = []
    for turn in range(15):
        keys = [key(number * 1951 % _OBJECTS) for number in range(turn * 512, (turn + 1) * 512)]
        started = time.perf_counter()
        outcomes = await adapter.submit_lookup_and_lock_task(keys)
        seconds.append(time.perf_counter() - started)
        assert all(outcome.hit for outcome in outcomes)
        await adapter.submit_unlock_task(keys)
    return statistics.median(seconds) * 1000


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stored", "opened"])
def test_the_memory_of_many_objects(how: str) -> None:
    """As tracemalloc counts: objects that are stored one after the other, and those of a slab that is opened."""
    pages = (_COUNTED // 8192 + 8) * _REGION_PAGES
    family = family_of(key(0))
    shapes = [RegionShape(first * _REGION_PAGES, _REGION_PAGES, 2) for first in range(_COUNTED // 8192 + 1)]
    tracemalloc.start()
    try:
        catalog = Catalog(pages, _COUNTED, None)
        if how == "opened":
            rows = (
                (
                    number,
                    Record(number + 1, 1, _SIZE, shapes[number // 8192], number % 8192, family, chunk_hash(number)),
                )
                for number in range(_COUNTED)
            )
            assert catalog.adopt(rows, _COUNTED) == []
        else:
            for number in range(_COUNTED):
                place = catalog.reserve(_SIZE)
                catalog.publish(place, ObjectKey(_NAMESPACE, chunk_hash(number)), number + 1)  # type: ignore[arg-type]
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
        assert catalog.objects == _COUNTED
    finally:
        tracemalloc.stop()
    print(f"{used / _COUNTED:.0f} bytes per object {how}")  # noqa: T201
    assert used / _COUNTED <= 250
