"""Values travel without copies: what a transfer allocates does not depend on the object's size."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import l2kit
from l2kit import Layout, MemoryObj, ObjectKey
from l2kit.testing.servers import RespServer

pytestmark = [pytest.mark.anyio, pytest.mark.service]

MIB = 1 << 20
OBJECT_BYTES = 32 * MIB
ALLOWED_BYTES = 8 * MIB


@contextmanager
def little_memory(allowed_bytes: int = ALLOWED_BYTES) -> Iterator[None]:
    """Fail when the block allocates more than ``allowed_bytes`` at once."""
    gc.collect()
    tracemalloc.start()
    try:
        yield
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < allowed_bytes, f"{peak_bytes / MIB:.1f} MiB were allocated"


def filled(nbytes: int) -> MemoryObj:
    """An object outside of what tracemalloc sees, in segments of different sizes."""
    obj = MemoryObj.allocate(Layout.raw(nbytes))
    pattern = os.urandom(MIB)
    view = obj.segments[0]
    for start in range(0, nbytes, MIB):
        view[start : start + MIB] = pattern[: nbytes - start]
    return MemoryObj((view[:100], view[100 : nbytes // 3], view[nbytes // 3 :]), obj.layout)


@pytest.mark.parametrize("scheme", ["redis", "redis+unix"])
async def test_no_copy_is_made_of_a_payload(redis_server: RespServer, prefix: str, scheme: str) -> None:
    url = redis_server.url()
    if scheme == "redis+unix":
        if redis_server.unix_socket is None:
            pytest.skip("needs a server with a Unix socket on this machine")
        credentials = url.partition("://")[2].rpartition("@")[0]
        url = f"redis+unix://{credentials}@{redis_server.unix_socket}"
    keys = [ObjectKey("memory", os.urandom(16)) for _ in range(4)]
    sources = [filled(OBJECT_BYTES) for _ in keys]
    targets = [filled(OBJECT_BYTES) for _ in keys]
    async with l2kit.open_adapter(url, key_prefix=prefix, timeout_s=60) as adapter:
        with little_memory():
            assert all(outcome.present for outcome in await adapter.submit_store_task(keys, sources))
        with little_memory():
            assert all(outcome.loaded for outcome in await adapter.submit_load_task(keys, targets))
        for source, target in zip(sources, targets, strict=True):
            assert target.tobytes() == source.tobytes()
        await adapter.submit_delete_task(keys)


@pytest.mark.slow
@pytest.mark.parametrize("stripe_bytes", [1 << 20, 4 << 20])
async def test_a_gibibyte_of_large_objects(redis_server: RespServer, prefix: str, stripe_bytes: int) -> None:
    """Stored and loaded two at a time, from and into the same memory, so that the test itself needs little."""
    sources = [filled(OBJECT_BYTES) for _ in range(2)]
    targets = [filled(OBJECT_BYTES) for _ in range(2)]
    async with l2kit.open_adapter(
        redis_server.url(), key_prefix=prefix, timeout_s=60, stripe_bytes=stripe_bytes
    ) as adapter:
        with little_memory(16 * MIB):
            for _ in range(16):
                keys = [ObjectKey("memory", os.urandom(16)) for _ in sources]
                assert all(outcome.present for outcome in await adapter.submit_store_task(keys, sources))
                assert all(outcome.loaded for outcome in await adapter.submit_load_task(keys, targets))
                await adapter.submit_delete_task(keys)
        assert adapter.counters["stripes_read"] == 32 * (OBJECT_BYTES // stripe_bytes + 1)
    for source, target in zip(sources, targets, strict=True):
        assert target.tobytes() == source.tobytes()


@pytest.mark.slow
async def test_an_object_of_64_mib(redis_server: RespServer, valkey_server: RespServer, prefix: str) -> None:
    source, target = filled(64 * MIB), filled(64 * MIB)
    key = ObjectKey("memory", os.urandom(16))
    for server in (redis_server, valkey_server):
        async with l2kit.open_adapter(server.url(), key_prefix=prefix, timeout_s=60) as adapter:
            target.segments[1][:] = bytes(len(target.segments[1]))
            assert (await adapter.submit_store_task([key], [source]))[0].present
            assert (await adapter.submit_load_task([key], [target]))[0].loaded
            assert target.tobytes() == source.tobytes()
            await adapter.submit_delete_task([key])


async def test_an_object_of_very_many_segments(redis_server: RespServer, prefix: str) -> None:
    """More segments than one system call takes."""
    count = 5000
    backing = os.urandom(count * 7)
    empty = bytearray(len(backing))
    layout = Layout.raw(len(backing))
    source = MemoryObj([memoryview(backing)[n * 7 : n * 7 + 7] for n in range(count)], layout)
    target = MemoryObj([memoryview(empty)[n * 7 : n * 7 + 7] for n in range(count)], layout)
    key = ObjectKey("memory", os.urandom(16))
    async with l2kit.open_adapter(redis_server.url(), key_prefix=prefix) as adapter:
        assert (await adapter.submit_store_task([key], [source]))[0].present
        assert (await adapter.submit_load_task([key], [target]))[0].loaded
    assert empty == backing


async def test_an_object_above_every_limit_is_refused_before_it_is_sent(redis_server: RespServer, prefix: str) -> None:
    async with l2kit.open_adapter(redis_server.url(), key_prefix=prefix, timeout_s=60) as adapter:
        limit = adapter.capabilities.max_object_bytes
        assert limit is not None
        chunk = memoryview(bytes(MIB))
        count = limit // MIB  # with the envelope just too long; one and the same memory many times
        obj = MemoryObj([chunk] * count, Layout.raw(count * MIB))
        [outcome] = await adapter.submit_store_task([ObjectKey("memory", bytes(16))], [obj])
        assert isinstance(outcome.error, l2kit.CapacityError)
        assert "bytes" in str(outcome.error)
