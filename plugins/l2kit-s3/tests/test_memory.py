"""Values travel without copies, and what travels in parts is bounded: the peak of the process's memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import l2kit
from l2kit import Layout, MemoryObj, ObjectKey
from l2kit.testing.object_stores import ObjectStore

pytestmark = [pytest.mark.anyio, pytest.mark.service, pytest.mark.slow]

MIB = 1 << 20
OBJECT_BYTES = 32 * MIB
ALLOWED_BYTES = 128 * MIB


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def little_memory() -> Iterator[None]:
    """Fail when the process grows by more than `ALLOWED_BYTES`; native memory counts."""
    start = peak = resident_bytes()
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    print(f"peak: {(peak - start) / MIB:.0f} MiB over the buffers")  # noqa: T201 - shown with pytest -s
    assert peak - start < ALLOWED_BYTES, f"{(peak - start) / MIB:.0f} MiB over the buffers"


@pytest.mark.parametrize(
    ("times", "options"),
    [
        (8, {"unsigned_payload": "true"}),  # a gibibyte
        (2, {"unsigned_payload": "true", "multipart_bytes": "8MiB", "part_bytes": "8MiB"}),
        (2, {"direct": "false", "max_concurrency": "2"}),
    ],
    ids=["direct", "in parts", "through obstore"],
)
async def test_objects_of_32_mib(object_store: ObjectStore, prefix: str, times: int, options: dict[str, str]) -> None:
    """Stored and loaded from and into the same memory, so that the test itself needs little."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc/self/statm")
    layout = Layout.raw(OBJECT_BYTES)
    sources = [MemoryObj.wrap(bytearray(os.urandom(OBJECT_BYTES)), layout) for _ in range(4)]
    targets = [MemoryObj.wrap(bytearray(os.urandom(MIB) * 32), layout) for _ in range(4)]
    async with l2kit.open_adapter(object_store.url(prefix, timeout_s="60", **options)) as adapter:
        with little_memory():
            for _ in range(times):
                keys = [ObjectKey("memory", os.urandom(16)) for _ in sources]
                stored = await adapter.submit_store_task(keys, sources)
                assert all(outcome.present for outcome in stored), stored
                loaded = await adapter.submit_load_task(keys, targets)
                assert all(outcome.loaded for outcome in loaded), loaded
                for source, target in zip(sources, targets, strict=True):
                    assert source.segments == target.segments
                await adapter.submit_delete_task(keys)
        assert object_store.uploads(prefix) == []
