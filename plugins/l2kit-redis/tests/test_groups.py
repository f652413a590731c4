"""Small objects travel in pipelines; a stranger's value among them costs the others nothing."""

from __future__ import annotations

import pytest

import l2kit
from l2kit import Layout, LoadStatus, MemoryObj, ObjectKey
from l2kit.testing.servers import RespServer

pytestmark = [pytest.mark.anyio, pytest.mark.service]

NBYTES = 1000


def keys(count: int) -> list[ObjectKey]:
    return [ObjectKey("groups", number.to_bytes(16, "little")) for number in range(count)]


def content(number: int) -> bytes:
    return bytes([number]) * NBYTES


async def load(adapter: l2kit.L2Adapter[l2kit.AdapterConfig], count: int) -> list[LoadStatus]:
    targets = [MemoryObj.allocate(Layout.raw(NBYTES)) for _ in range(count)]
    outcomes = await adapter.submit_load_task(keys(count), targets)
    for number, (outcome, target) in enumerate(zip(outcomes, targets, strict=True)):
        assert not outcome.loaded or target.tobytes() == content(number)
    return [outcome.status for outcome in outcomes]


@pytest.mark.parametrize("nbytes", [10_000, 5_000_000])
async def test_a_value_that_is_too_long_among_others(
    redis_server: RespServer, url: str, prefix: str, nbytes: int
) -> None:
    async with l2kit.open_adapter(url, max_concurrency=1) as adapter:
        objects = [MemoryObj.wrap(content(number), Layout.raw(NBYTES)) for number in range(12)]
        assert all(outcome.present for outcome in await adapter.submit_store_task(keys(12), objects))
        redis_server.command("SET", f"{prefix}{keys(12)[4].encode()}", bytes(nbytes))
        redis_server.command("DEL", f"{prefix}{keys(12)[7].encode()}")
        redis_server.command("LPUSH", f"{prefix}{keys(12)[7].encode()}", "a list")
        expected = [LoadStatus.LOADED] * 12
        expected[4], expected[7] = LoadStatus.CORRUPT, LoadStatus.MISS
        assert await load(adapter, 12) == expected
        expected[4] = LoadStatus.MISS
        assert await load(adapter, 12) == expected
