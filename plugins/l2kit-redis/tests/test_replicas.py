"""Reading from replicas: they are asked, their primary answers where they cannot, and what lags is a miss."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest

import l2kit
from l2kit import Layout, LoadStatus, MemoryObj, ObjectKey
from l2kit.errors import ConfigError
from l2kit.testing.clusters import RespCluster, run_cluster
from l2kit.testing.sentinels import RespSentinels, run_sentinels
from l2kit.testing.servers import Flavor, LocalServer

pytestmark = [pytest.mark.anyio, pytest.mark.service]

SLACK_S = 1.0
TIMEOUT_S = 5.0
KEYS = [ObjectKey("replicas", number.to_bytes(16, "little")) for number in range(24)]


def source(data: bytes) -> MemoryObj:
    return MemoryObj.wrap(data, Layout.raw(len(data)))


def blank(nbytes: int) -> MemoryObj:
    return MemoryObj.wrap(bytearray(nbytes), Layout.raw(nbytes))


class Deployment:
    """A cluster or a primary behind sentinels: which servers are replicas at the beginning."""

    def __init__(self, deployment: RespCluster | RespSentinels) -> None:
        self.url = f"{deployment.url()}{'&' if '?' in deployment.url() else '?'}read_from=replica"
        nodes = deployment.nodes if isinstance(deployment, RespCluster) else deployment.servers
        primaries = deployment.primaries() if isinstance(deployment, RespCluster) else [deployment.primary]
        self.primaries: list[LocalServer] = primaries
        self.replicas = [node for node in nodes if node not in self.primaries]
        self.wait_until_well = deployment.wait_until_well

    def reads(self, servers: list[LocalServer]) -> int:
        """How many GETs they have had."""
        total = 0
        for server in servers:
            stats = server.info("commandstats").get("cmdstat_get", "calls=0")
            total += int(stats.partition("calls=")[2].partition(",")[0])
        return total

    def wait_until_copied(self) -> None:
        for primary in self.primaries:
            primary.wait_until_copied()


@pytest.fixture(params=["cluster-redis", "cluster-valkey", "sentinels-redis", "sentinels-valkey"])
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    kind, _, flavor = request.param.partition("-")
    which: Flavor = flavor
    run: Any = run_cluster(which, node_timeout_ms=2000) if kind == "cluster" else run_sentinels(which)
    with run as started:
        yield Deployment(started)


async def test_replicas_are_read_and_primaries_written(deployment: Deployment) -> None:
    contents = [os.urandom(3000) for _ in KEYS]
    async with l2kit.open_adapter(deployment.url, timeout_s=TIMEOUT_S) as adapter:
        stored = await adapter.submit_store_task(KEYS, [source(data) for data in contents])
        assert all(outcome.present for outcome in stored)
        await anyio.to_thread.run_sync(deployment.wait_until_copied)
        before = deployment.reads(deployment.primaries)
        assert all(outcome.hit for outcome in await adapter.submit_lookup_and_lock_task(KEYS))
        targets = [blank(3000) for _ in KEYS]
        assert all(outcome.loaded for outcome in await adapter.submit_load_task(KEYS, targets))
        assert [target.tobytes() for target in targets] == contents
        assert deployment.reads(deployment.primaries) == before
        assert deployment.reads(deployment.replicas) >= len(KEYS)
        large = os.urandom(6 << 20)
        await adapter.submit_store_task(KEYS[:1], [source(large)])
        await anyio.to_thread.run_sync(deployment.wait_until_copied)
        target = blank(len(large))
        assert (await adapter.submit_load_task(KEYS[:1], [target]))[0].loaded
        assert target.tobytes() == large
        await adapter.submit_delete_task(KEYS)
        await anyio.to_thread.run_sync(deployment.wait_until_copied)
        assert not any(outcome.hit for outcome in await adapter.submit_lookup_and_lock_task(KEYS))


async def test_a_replica_that_is_dead_is_passed_by(deployment: Deployment) -> None:
    async with l2kit.open_adapter(deployment.url, timeout_s=TIMEOUT_S) as adapter:
        await adapter.submit_store_task(KEYS, [source(b"x" * 3000)] * len(KEYS))
        await anyio.to_thread.run_sync(deployment.wait_until_copied)
        for replica in deployment.replicas:
            replica.kill()
        for _ in range(3):
            assert all(outcome.hit for outcome in await adapter.submit_lookup_and_lock_task(KEYS))
            loaded = await adapter.submit_load_task(KEYS, [blank(3000) for _ in KEYS])
            assert all(outcome.loaded for outcome in loaded), loaded
    async with l2kit.open_adapter(deployment.url, timeout_s=TIMEOUT_S) as adapter:
        assert all(outcome.hit for outcome in await adapter.submit_lookup_and_lock_task(KEYS))


async def test_a_replica_that_is_frozen_is_passed_by(deployment: Deployment) -> None:
    async with l2kit.open_adapter(deployment.url, timeout_s=TIMEOUT_S, socket_timeout_s=0.5) as adapter:
        await adapter.submit_store_task(KEYS, [source(b"x" * 3000)] * len(KEYS))
        await anyio.to_thread.run_sync(deployment.wait_until_copied)
        assert all(outcome.hit for outcome in await adapter.submit_lookup_and_lock_task(KEYS))
        for replica in deployment.replicas:
            replica.pause()
        started = anyio.current_time()
        loaded = await adapter.submit_load_task(KEYS, [blank(3000) for _ in KEYS])
        assert all(outcome.loaded for outcome in loaded), loaded
        assert anyio.current_time() - started < TIMEOUT_S
        started = anyio.current_time()
        assert all(outcome.hit for outcome in await adapter.submit_lookup_and_lock_task(KEYS))
        assert anyio.current_time() - started < 0.5, "it was asked again"
        for replica in deployment.replicas:
            replica.resume()


async def test_what_has_not_arrived_yet_is_a_miss(deployment: Deployment) -> None:
    async with l2kit.open_adapter(deployment.url, timeout_s=TIMEOUT_S) as adapter:
        assert (await adapter.submit_load_task(KEYS[:1], [blank(10)]))[0].status is LoadStatus.MISS
        old, new = b"old" * 1000, b"new" * 1000
        await adapter.submit_store_task(KEYS, [source(old)] * len(KEYS))
        await anyio.to_thread.run_sync(deployment.wait_until_copied)
        for primary in deployment.primaries:  # they go on, and tell their replicas nothing
            primary.command("CONFIG", "SET", "repl-ping-replica-period", "3600")
            primary.command("CLIENT", "KILL", "TYPE", "replica")
        await adapter.submit_store_task(KEYS, [source(new)] * len(KEYS))
        targets = [blank(3000) for _ in KEYS]
        for outcome, target in zip(await adapter.submit_load_task(KEYS, targets), targets, strict=True):
            assert outcome.loaded, outcome
            assert target.tobytes() in (old, new)


@pytest.mark.slow
async def test_traffic_while_replicas_come_and_go(deployment: Deployment, traffic: Callable[..., Any]) -> None:
    async with l2kit.open_adapter(deployment.url, timeout_s=TIMEOUT_S, socket_timeout_s=1) as adapter:
        load = traffic(adapter)
        async with anyio.create_task_group() as group:
            group.start_soon(load.run)
            await load.good(1)
            for replica in deployment.replicas:
                await anyio.to_thread.run_sync(replica.kill)
            await load.good()
            for replica in deployment.replicas:
                await anyio.to_thread.run_sync(replica.start)
            await anyio.to_thread.run_sync(deployment.wait_until_well)
            await load.good()
            load.end()
        assert load.slowest_s < TIMEOUT_S + SLACK_S


def test_one_server_has_none() -> None:
    with pytest.raises(ConfigError, match="read_from"):
        l2kit.open_adapter("redis://h?read_from=replica")
