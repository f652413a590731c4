"""An outage of a real server under a whole storage manager: its circuit opens, half-opens and closes again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

import l2kit
from l2kit import Layout, ObjectKey, StorageManager
from l2kit.prefetch import WantedChunk, WantedObject
from l2kit.resilience import BreakerAdapter
from l2kit.resilience.circuit import CircuitState
from l2kit.testing.servers import Flavor, RespServer, run_server

pytestmark = [pytest.mark.anyio, pytest.mark.service, pytest.mark.timeout(120)]

LAYOUT = Layout.raw(20_000)


@pytest.fixture(params=["redis", "valkey"])
def server(request: pytest.FixtureRequest) -> Iterator[RespServer]:
    flavor: Flavor = request.param
    with run_server(flavor) as server:
        if not server.manageable:
            pytest.skip("needs a server that may be stopped")
        yield server


def key(number: int) -> ObjectKey:
    return ObjectKey("outage", number.to_bytes(16, "little"))


def content(number: int) -> bytes:
    return number.to_bytes(8, "little") * (LAYOUT.nbytes // 8)


def chunk(number: int) -> WantedChunk:
    return (WantedObject(key(number), LAYOUT),)


async def write(manager: StorageManager, *numbers: int) -> None:
    for number in numbers:
        reservation = manager.reserve_write(key(number), LAYOUT)
        if reservation is not None:
            reservation.obj.segments[0][:] = content(number)
            manager.finish_write([reservation])
    await manager.drain()


async def read(manager: StorageManager, number: int) -> bool:
    """Whether the object comes from a tier; L1 forgets it first."""
    manager.l1.remove(key(number))
    prefetch = manager.start_prefetch([chunk(number)], timeout_s=2)
    await prefetch.wait_async()
    objects = [obj.tobytes() for obj in prefetch.objects()]
    prefetch.release()
    assert objects in ([], [content(number)])
    return bool(objects)


async def until(predicate: Callable[[], object], timeout_s: float = 30) -> None:
    with anyio.fail_after(timeout_s):
        while not predicate():  # noqa: ASYNC110 - what happens outside sets no event
            await anyio.sleep(0.005)


async def test_an_engine_starts_while_its_server_is_down(server: RespServer) -> None:
    url = f"{server.url()}?key_prefix=outage-{os.urandom(4).hex()}:"
    server.kill()
    config: dict[str, Any] = {
        "tiers": [{"url": url, "name": "shared", "resilience": {"breaker_pause_s": 0.1}}],
        "l1": {"max_bytes": "4MiB"},
    }
    async with l2kit.open_storage(config) as manager:
        tier = manager.tiers[0]
        assert "nothing listens there" in str(tier.last_error)
        await write(manager, 1)
        assert not await read(manager, 1)
        server.start()
        await until(lambda: tier.healthy)
        await write(manager, 1)
        assert await read(manager, 1)


async def test_the_circuit_opens_half_opens_and_closes(server: RespServer) -> None:
    url = f"{server.url()}?key_prefix=outage-{os.urandom(4).hex()}:"
    options = {"breaker_pause_s": 0.3, "breaker_max_pause_s": 0.3}
    config: dict[str, Any] = {
        "tiers": [{"url": url, "name": "shared", "resilience": options}],
        "l1": {"max_bytes": "4MiB"},
    }
    async with l2kit.open_storage(config) as manager:
        tier = manager.tiers[0]
        adapter = tier.adapter
        assert isinstance(adapter, BreakerAdapter)
        await write(manager, *range(20))
        assert await read(manager, 1)

        server.kill()
        started = time.monotonic()
        for number in range(20):
            await read(manager, number)
            await write(manager, 100 + number)
        assert {circuit.state for circuit in adapter.circuits.values()} <= {CircuitState.OPEN, CircuitState.HALF_OPEN}
        assert time.monotonic() - started < 20
        assert not tier.healthy
        assert "suspended" in str(adapter.trouble)
        misses = tier.counters.snapshot()["lookup_misses"]
        begun = time.monotonic()
        for number in range(20):
            assert not await read(manager, number)
        assert time.monotonic() - begun < 2, "an open circuit answers at once"
        assert tier.counters.snapshot()["lookup_misses"] == misses + 20

        probes = adapter.counters["circuit.read.probes"]
        await until(lambda: adapter.counters["circuit.read.probes"] > probes + 1)
        assert not adapter.circuits["read"].closed, "probes fail as long as the server is down"

        server.start()
        server.pause()  # it accepts connections and answers nothing: a probe is out, and the circuit is half-open
        await until(lambda: adapter.circuits["read"].state is CircuitState.HALF_OPEN)
        assert not await read(manager, 1)
        server.resume()
        await until(lambda: all(circuit.closed for circuit in adapter.circuits.values()))
        assert adapter.trouble is None

        await write(manager, *range(200, 210))
        assert await read(manager, 200)
        await until(lambda: tier.healthy, 5)
        assert adapter.counters["circuit.read.opened"] == adapter.counters["circuit.write.opened"] == 1
