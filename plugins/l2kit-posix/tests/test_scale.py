"""Very many small objects: memory, reopening, lookup. The files are sparse, in a tmpfs where there is one."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

import l2kit
from l2kit import ObjectKey
from l2kit.testing.groups.base import Adapter
from l2kit_posix.index import Found, Index
from l2kit_posix.names import Names

#: A million with ``L2KIT_SCALE_OBJECTS=1000000``, which takes a minute more.
_OBJECTS = int(os.environ.get("L2KIT_SCALE_OBJECTS", "100000"))
#: For what tracemalloc slows down; a dictionary of this size has just grown, as one of a million has.
_COUNTED = 200_000
_NAMESPACE = hashlib.blake2b(b"scale", digest_size=16).hexdigest()
_SIZE = 8192


def key(number: int) -> ObjectKey:
    chunk_hash = hashlib.blake2b((number // 4).to_bytes(8, "little"), digest_size=16).digest()
    return ObjectKey(_NAMESPACE, chunk_hash, 1, 8, 0, number % 4)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A directory with that many objects."""
    shm = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="l2kit-scale-", dir=shm if shm.is_dir() else tmp_path))
    try:
        names = Names(f"{root}/objects")
        for number in range(256):
            (root / "objects" / _NAMESPACE / f"{number:02x}").mkdir(parents=True)
        for number in range(_OBJECTS):
            fd = os.open(names.place(key(number))[1], os.O_CREAT | os.O_WRONLY, 0o600)
            os.ftruncate(fd, _SIZE)
            os.close(fd)
        yield root
    finally:
        shutil.rmtree(root)


@pytest.mark.slow
@pytest.mark.anyio
async def test_very_many_objects(root: Path) -> None:
    """All of them are found again; how long that takes is for the benchmarks, and printed here."""
    started = time.perf_counter()
    async with l2kit.open_adapter(f"file://{root}?max_bytes=1TiB", open_timeout_s=300) as adapter:
        reopening_s = time.perf_counter() - started
        hits_ms = await median_lookup_ms(adapter, 0, hit=True)
        misses_ms = await median_lookup_ms(adapter, _OBJECTS, hit=False)
        usage = await adapter.usage()
        assert (usage.objects, usage.used_bytes) == (_OBJECTS, _OBJECTS * _SIZE)
        listed = 0
        async for _ in adapter.iter_keys():
            listed += 1
        assert listed == _OBJECTS
    lookups = f"lookup of 512 keys: median {hits_ms:.2f} ms, {misses_ms:.2f} ms when all are missing"
    print(f"reopening {_OBJECTS} objects {reopening_s:.2f} s, {lookups}")  # noqa: T201


async def median_lookup_ms(adapter: Adapter, first: int, *, hit: bool) -> float:
    """The median of 15 lookups, each of 512 keys that were not asked for before."""
    seconds = []
    for turn in range(15):
        keys = [key(first + number * 1951 % _OBJECTS) for number in range(turn * 512, (turn + 1) * 512)]
        started = time.perf_counter()
        outcomes = await adapter.submit_lookup_and_lock_task(keys)
        seconds.append(time.perf_counter() - started)
        assert all(outcome.hit == hit for outcome in outcomes)
        if hit:
            await adapter.submit_unlock_task(keys)
    return statistics.median(seconds) * 1000


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stored", "opened"])
def test_the_memory_of_very_many_objects(how: str) -> None:
    """As tracemalloc counts: objects that are stored one after the other, and those that a scan finds."""
    names = Names("/cache/objects")
    names.place(key(0))
    tracemalloc.start()
    try:
        index = Index()
        if how == "opened":
            index.fill([Found(names.place(key(number))[0], _SIZE, number) for number in range(_COUNTED)])
        else:
            for number in range(_COUNTED):
                index.put(names.place(key(number))[0], _SIZE, number)
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
        assert len(index) == _COUNTED
    finally:
        tracemalloc.stop()
    print(f"{used / _COUNTED:.0f} bytes per object {how}")  # noqa: T201
    assert used / _COUNTED <= 250
