"""A cluster: redirections, slots that move and nodes that fail over under load, and what is wrong at start-up."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import l2kit
from l2kit import Layout, MemoryObj, ObjectKey
from l2kit.adapter import L2Adapter
from l2kit.errors import AuthError, BackendError, BackendTimeoutError, ConfigError, TransientBackendError
from l2kit.testing.clusters import RespCluster, run_cluster, run_node
from l2kit.testing.servers import Flavor, RespServer, free_port, run_server, unavailable
from l2kit_redis import RedisAdapter
from l2kit_redis.connection import Connection
from l2kit_redis.talk import Talk

pytestmark = [pytest.mark.anyio, pytest.mark.service]

SLACK_S = 1.0
TIMEOUT_S = 5.0


def key(number: int) -> ObjectKey:
    return ObjectKey("cluster", number.to_bytes(8, "little") * 2)


def source(data: bytes) -> MemoryObj:
    return MemoryObj.wrap(data, Layout.raw(len(data)))


def blank(nbytes: int) -> MemoryObj:
    return MemoryObj.wrap(bytearray(nbytes), Layout.raw(nbytes))


@pytest.fixture(params=["redis", "valkey"])
def cluster(request: pytest.FixtureRequest) -> RespCluster:
    """A cluster for tests that leave its nodes as they are."""
    found: RespCluster = request.getfixturevalue(f"{request.param}_cluster")
    return found


@pytest.fixture
async def adapter(cluster: RespCluster, prefix: str) -> AsyncIterator[L2Adapter[Any]]:
    async with l2kit.open_adapter(cluster.url(), key_prefix=prefix, timeout_s=TIMEOUT_S) as adapter:
        yield adapter
    await anyio.to_thread.run_sync(cluster.delete_all, prefix)


@pytest.fixture(params=["redis", "valkey"])
def fragile(request: pytest.FixtureRequest) -> Iterator[RespCluster]:
    """A cluster of one's own that soon takes silent nodes for dead."""
    flavor: Flavor = request.param
    with run_cluster(flavor, node_timeout_ms=1000) as cluster:
        yield cluster


async def step(steps: Iterator[str]) -> str | None:
    return await anyio.to_thread.run_sync(next, steps, None)


# --- where things are -----------------------------------------------------------------------------


async def test_objects_lie_on_all_nodes(cluster: RespCluster, adapter: L2Adapter[Any], prefix: str) -> None:
    keys = [key(number) for number in range(60)]
    contents = [os.urandom(3000) for _ in keys]
    assert all(o.present for o in await adapter.submit_store_task(keys, [source(data) for data in contents]))
    for node in cluster.primaries():
        names = node.command("KEYS", f"{prefix}*")
        assert isinstance(names, list)
        assert 5 < len(names) < 40
    targets = [blank(3000) for _ in keys]
    assert all(outcome.loaded for outcome in await adapter.submit_load_task(keys, targets))
    assert [target.tobytes() for target in targets] == contents
    assert {info.key async for info in adapter.iter_keys()} == set(keys)
    found = await adapter.submit_lookup_and_lock_task([*keys, key(1000)])
    assert [outcome.hit for outcome in found] == [True] * 60 + [False]
    assert all(outcome.error is None for outcome in await adapter.submit_delete_task(keys))
    assert [info async for info in adapter.iter_keys()] == []


async def test_one_large_object_is_spread_over_nodes(
    cluster: RespCluster, adapter: L2Adapter[Any], prefix: str
) -> None:
    data = os.urandom(12 << 20)
    [stored] = await adapter.submit_store_task([key(1)], [source(data)])
    assert stored.present, stored
    target = blank(len(data))
    [loaded] = await adapter.submit_load_task([key(1)], [target])
    assert loaded.loaded
    assert target.tobytes() == data
    assert all(node.command("KEYS", f"{prefix}*") for node in cluster.primaries())


async def test_a_lookup_is_one_round_trip_per_node(cluster: RespCluster, adapter: L2Adapter[Any]) -> None:
    keys = [key(number) for number in range(1500)]
    await adapter.submit_store_task(keys[::2], [source(b"x")] * 750)
    before = adapter.counters["round_trips"]
    found = await adapter.submit_lookup_and_lock_task(keys)
    assert [outcome.hit for outcome in found] == [number % 2 == 0 for number in range(1500)]
    assert adapter.counters["round_trips"] - before == len(cluster.primaries())


async def test_any_node_will_do_to_begin_with(cluster: RespCluster, prefix: str) -> None:
    dead = f"127.0.0.1:{free_port()}"
    replica = cluster.replica_of(cluster.primaries()[0])
    for hosts in (f"{replica.host}:{replica.port}", f"{dead},{replica.host}:{replica.port}"):
        flavor = replica.flavor
        where = f"{flavor}+cluster://?hosts={hosts}&key_prefix={prefix}"
        async with l2kit.open_adapter(where, password=cluster.password) as adapter:
            assert (await adapter.probe()).ok


async def test_one_hash_tag_is_one_node(cluster: RespCluster, prefix: str) -> None:
    async with l2kit.open_adapter(cluster.url(), key_prefix=f"{prefix}{{tag}}") as adapter:
        await adapter.submit_store_task([key(number) for number in range(20)], [source(b"x")] * 20)
        holders = [node for node in cluster.primaries() if node.command("KEYS", f"{prefix}*")]
        assert holders == [cluster.owner_of("tag")]


# --- slots that move ------------------------------------------------------------------------------


async def test_keys_of_a_slot_that_is_half_moved(cluster: RespCluster, adapter: L2Adapter[Any], prefix: str) -> None:
    """Half of the slot's keys are here, half there, and the others nowhere: MOVED, ASK, and the map as it was."""
    tagged = f"{prefix}{{moving}}"
    async with l2kit.open_adapter(cluster.url(), key_prefix=tagged, timeout_s=TIMEOUT_S) as tagging:
        keys = [key(number) for number in range(12)]
        contents = [os.urandom(40_000) for _ in keys]
        await tagging.submit_store_task(keys[:8], [source(data) for data in contents[:8]])
        origin = cluster.owner_of("moving")
        target = next(node for node in cluster.primaries() if node is not origin)
        steps = cluster.move_slot(cluster.slot_of("moving"), origin, target)
        while (await step(steps)) != "key":
            pass
        for _ in range(4):
            assert await step(steps) == "key"
        found = await tagging.submit_lookup_and_lock_task(keys)
        assert [outcome.hit for outcome in found] == [True] * 8 + [False] * 4
        targets = [blank(40_000) for _ in keys]
        loaded = await tagging.submit_load_task(keys, targets)
        assert [outcome.loaded for outcome in loaded] == [True] * 8 + [False] * 4
        assert [target.tobytes() for target in targets[:8]] == contents[:8]
        stored = await tagging.submit_store_task(keys, [source(data) for data in contents])
        assert all(outcome.present for outcome in stored), stored
        deleted = await tagging.submit_delete_task([keys[0], keys[11], key(99)])
        assert [str(outcome.status) for outcome in deleted] == ["deleted", "deleted", "miss"]
        [large] = await tagging.submit_store_task([key(50)], [source(contents[0] * 200)])
        assert large.present, large
        while await step(steps):
            pass
        target_of = blank(len(contents[0]) * 200)
        assert (await tagging.submit_load_task([key(50)], [target_of]))[0].loaded
        assert target_of.tobytes() == contents[0] * 200
        loaded = await tagging.submit_load_task(keys[1:11], targets[1:11])
        assert all(outcome.loaded for outcome in loaded)
        assert [target.tobytes() for target in targets[1:11]] == contents[1:11]
        for _ in cluster.move_slot(cluster.slot_of("moving"), target, origin):
            pass


async def test_resharding_under_load(
    cluster: RespCluster, adapter: L2Adapter[Any], prefix: str, traffic: Callable[..., Any]
) -> None:
    load = traffic(adapter)
    await load.round()
    names = [info.key.encode() async for info in adapter.iter_keys()]
    slots = sorted({cluster.slot_of(prefix + name) for name in names})[:12]
    moved: list[tuple[int, RespServer, RespServer]] = []
    async with anyio.create_task_group() as group:
        group.start_soon(load.run)
        for slot in slots:
            origin = next(node for node in cluster.primaries() if _owns(cluster, node, slot))
            target = next(node for node in cluster.primaries() if node is not origin)
            steps = cluster.move_slot(slot, origin, target)
            while await step(steps):
                if slot == slots[0]:
                    await load.good(1)  # some rounds in each state
            moved.append((slot, origin, target))
        await load.good()
        load.end()
    assert not load.errors
    assert not load.counts["lookup.missed"] + load.counts["load.missed"], load.counts
    for slot, before, after in moved:
        for _ in cluster.move_slot(slot, after, before):
            pass


def _owns(cluster: RespCluster, node: Any, slot: int) -> bool:
    return any(start <= slot <= stop for start, stop in cluster.slots_of(node))


# --- nodes that fail ------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_primary_is_killed_under_load(fragile: RespCluster, traffic: Callable[..., Any]) -> None:
    async with l2kit.open_adapter(fragile.url(), timeout_s=TIMEOUT_S) as adapter:
        load = traffic(adapter)
        async with anyio.create_task_group() as group:
            group.start_soon(load.run)
            await load.good()
            victim = fragile.primaries()[1]
            replica = fragile.replica_of(victim)
            await anyio.to_thread.run_sync(victim.kill)
            await load.good()
            assert load.errors, "nobody noticed"
            assert await anyio.to_thread.run_sync(lambda: replica in fragile.primaries())
            await anyio.to_thread.run_sync(victim.start)
            await anyio.to_thread.run_sync(fragile.wait_until_well)
            await load.good()
            load.end()
        assert load.slowest_s < TIMEOUT_S + SLACK_S
        assert not any("unexpected" in error for error in load.errors)


@pytest.mark.slow
async def test_a_primary_freezes_under_load(fragile: RespCluster, traffic: Callable[..., Any]) -> None:
    async with l2kit.open_adapter(fragile.url(), timeout_s=TIMEOUT_S, socket_timeout_s=1) as adapter:
        load = traffic(adapter)
        async with anyio.create_task_group() as group:
            group.start_soon(load.run)
            await load.good()
            victim = fragile.primaries()[2]
            victim.pause()
            await load.good()
            victim.resume()
            await anyio.to_thread.run_sync(fragile.wait_until_well)
            await load.good()
            load.end()
        assert load.slowest_s < TIMEOUT_S + SLACK_S


@pytest.mark.slow
async def test_an_orderly_failover_under_load_loses_nothing(fragile: RespCluster, traffic: Callable[..., Any]) -> None:
    async with l2kit.open_adapter(fragile.url(), timeout_s=TIMEOUT_S) as adapter:
        load = traffic(adapter)
        async with anyio.create_task_group() as group:
            group.start_soon(load.run)
            await load.good()
            replica = fragile.replica_of(fragile.primaries()[0])
            await anyio.to_thread.run_sync(replica.command, "CLUSTER", "FAILOVER")
            with anyio.fail_after(30):
                while replica not in await anyio.to_thread.run_sync(fragile.primaries):
                    pass
            await load.good()
            load.end()
        assert not load.errors
        assert not load.counts["lookup.missed"] + load.counts["load.missed"], load.counts


@pytest.mark.parametrize("nbytes", [3000, 1_200_000], ids=["in groups", "one by one"])
async def test_a_dead_node_costs_only_its_own_keys(fragile: RespCluster, nbytes: int) -> None:
    for node in fragile.running:  # so that the others go on, and nobody takes over
        node.command("CONFIG", "SET", "cluster-require-full-coverage", "no")
        node.command("CONFIG", "SET", "cluster-replica-no-failover", "yes")
    async with l2kit.open_adapter(fragile.url(), timeout_s=TIMEOUT_S) as adapter:
        keys = [key(number) for number in range(24)]
        content = [os.urandom(nbytes) for _ in keys]
        await adapter.submit_store_task(keys, [source(data) for data in content])
        victim = fragile.primaries()[0]
        lost = {k for k in keys if fragile.owner_of("l2kit:" + k.encode()) is victim}
        assert lost
        assert len(lost) < len(keys)
        victim.kill()
        targets = [blank(nbytes) for _ in keys]
        started = anyio.current_time()
        outcomes = await adapter.submit_load_task(keys, targets)
        assert anyio.current_time() - started < TIMEOUT_S + SLACK_S
        for k, outcome, target, data in zip(keys, outcomes, targets, content, strict=True):
            assert outcome.loaded == (k not in lost)
            assert target.tobytes() == data or k in lost
            if k in lost:
                assert isinstance(outcome.error, TransientBackendError)
                assert f"127.0.0.1:{victim.port}" in str(outcome.error)
        async with l2kit.open_adapter(fragile.url()) as another:  # a dead node keeps nobody from beginning
            [outcome] = await another.submit_load_task([next(k for k in keys if k not in lost)], [blank(nbytes)])
            assert outcome.loaded


async def test_answers_of_nodes_that_are_alive_are_kept(fragile: RespCluster) -> None:
    for node in fragile.running:
        node.command("CONFIG", "SET", "cluster-require-full-coverage", "no")
        node.command("CONFIG", "SET", "cluster-replica-no-failover", "yes")
    async with l2kit.open_adapter(fragile.url(), timeout_s=TIMEOUT_S) as adapter:
        assert isinstance(adapter, RedisAdapter)
        talk = Talk(adapter.config, adapter.run_in_thread, adapter.translate_error)
        await talk.open()
        names = [b"name-%d" % number for number in range(30)]

        def sizes(connection: Connection, some: Sequence[bytes]) -> Sequence[int | Exception]:
            return connection.call_integers(b"STRLEN", some)

        assert await talk.about_each(names, sizes, writes=False) == [0] * 30
        victim = fragile.primaries()[0]
        lost = {name for name in names if fragile.owner_of(name) is victim}
        victim.kill()
        answers = await talk.about_each(names, sizes, writes=False, failure=lambda error: error)
        for name, answer in zip(names, answers, strict=True):
            assert isinstance(answer, TransientBackendError) if name in lost else answer == 0
        with pytest.raises(TransientBackendError, match=str(victim.port)):
            await talk.about_each(names, sizes, writes=False)
        assert await talk.about_each([], sizes, writes=False) == []
        talk.close()


async def test_all_nodes_frozen_is_no_hang(fragile: RespCluster) -> None:
    async with l2kit.open_adapter(fragile.url(), timeout_s=2) as adapter:
        await adapter.submit_store_task([key(1)], [source(b"x")])
        for node in fragile.nodes:
            node.pause()
        started = anyio.current_time()
        [outcome] = await adapter.submit_load_task([key(1)], [blank(1)])
        assert isinstance(outcome.error, BackendTimeoutError), outcome
        found = await adapter.submit_lookup_and_lock_task([key(number) for number in range(30)])
        assert not any(outcome.hit for outcome in found)
        assert anyio.current_time() - started < 2 * (2 + SLACK_S)
        for node in fragile.nodes:
            node.resume()
        with anyio.fail_after(30):
            while not (await adapter.probe()).ok:
                pass


async def test_a_batch_that_is_cancelled_ends_soon(fragile: RespCluster) -> None:
    async with l2kit.open_adapter(fragile.url(), timeout_s=60) as adapter:
        keys = [key(number) for number in range(30)]
        await adapter.submit_store_task(keys, [source(b"x")] * 30)
        for node in fragile.nodes:
            node.pause()
        task = adapter.submit_lookup_and_lock_task(keys)
        with anyio.move_on_after(0.2):
            await task
        task.cancel()
        with anyio.fail_after(SLACK_S):
            await task.wait_ended()
        for node in fragile.nodes:
            node.resume()


# --- nodes that come --------------------------------------------------------------------------------


async def test_a_node_that_joins_is_found(fragile: RespCluster, traffic: Callable[..., Any]) -> None:
    async with l2kit.open_adapter(fragile.url(), timeout_s=TIMEOUT_S) as adapter:
        load = traffic(adapter)
        await load.round()
        with run_node(fragile.nodes[0].flavor, node_timeout_ms=1000) as newcomer:
            fragile.meet(newcomer)
            fragile.wait_until_well()
            names = [info.key.encode() async for info in adapter.iter_keys()]
            origin = fragile.owner_of("l2kit:" + names[0])
            for _ in fragile.move_slot(fragile.slot_of("l2kit:" + names[0]), origin, newcomer):
                pass
            await load.round()
            assert not load.errors
            assert load.good_rounds
            assert newcomer.command("DBSIZE") == 1


# --- TLS ------------------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that vouches for itself; its key lies beside it."""
    if shutil.which("openssl") is None:
        unavailable("openssl", "there is no openssl program to make a certificate with")
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=node -addext subjectAltName=IP:127.0.0.1"
    files = f"-keyout {tmp_path}/key.pem -out {tmp_path}/node.pem"
    subprocess.run(["openssl", *words.split(), *files.split()], check=True, capture_output=True)
    return tmp_path / "node.pem"


@pytest.mark.slow
async def test_a_cluster_over_tls(certificate: Path) -> None:
    options: dict[str, Any] = {
        "tls_cert_file": str(certificate),
        "tls_key_file": str(certificate.with_name("key.pem")),
        "tls_ca_cert_file": str(certificate),
        "tls_auth_clients": "no",
        "tls_cluster": "yes",
        "tls_replication": "yes",
    }
    with ExitStack() as stack:
        ports = [free_port() for _ in range(6)]
        nodes = [stack.enter_context(run_node("redis", tls_port=str(port), **options)) for port in ports]
        cluster = RespCluster(nodes)
        cluster.form()
        where = f"rediss+cluster://127.0.0.1:{ports[0]}"
        credentials = {"password": cluster.password, "ca_file": str(certificate)}
        async with l2kit.open_adapter(where, **credentials, read_from="replica") as adapter:
            keys = [key(number) for number in range(20)]
            contents = [os.urandom(100_000) for _ in keys]
            assert all(o.present for o in await adapter.submit_store_task(keys, [source(data) for data in contents]))
            for primary in cluster.primaries():
                primary.wait_until_copied()
            targets = [blank(100_000) for _ in keys]
            assert all(outcome.loaded for outcome in await adapter.submit_load_task(keys, targets))
            assert [target.tobytes() for target in targets] == contents
        with pytest.raises(BackendError, match="certificate"):
            await l2kit.open_adapter(where, password=cluster.password).__aenter__()


# --- what is wrong at start-up --------------------------------------------------------------------


async def test_a_server_that_is_no_cluster(redis_server: RespServer) -> None:
    with pytest.raises(ConfigError, match="redis://"):
        await l2kit.open_adapter(redis_server.url("redis+cluster")).__aenter__()


async def test_a_cluster_without_slots() -> None:
    with run_server("redis", cluster_enabled="yes", cluster_port=str(free_port())) as server:
        adapter = l2kit.open_adapter(server.url("redis+cluster"))
        with pytest.raises(TransientBackendError, match="slots"):
            await adapter.__aenter__()


async def test_a_plain_url_says_what_to_use(cluster: RespCluster) -> None:
    async with l2kit.open_adapter(cluster.url(cluster.nodes[0].flavor)) as adapter:
        with pytest.raises(BackendError, match=r"redis\+cluster://"):
            await adapter.submit_lookup_and_lock_task([key(number) for number in range(20)])


async def test_a_wrong_password(cluster: RespCluster) -> None:
    node = cluster.nodes[0]
    with pytest.raises(AuthError, match=f"node 127.0.0.1:{node.port}") as caught:
        await l2kit.open_adapter(f"redis+cluster://:xyzzy-open-sesame@{node.host}:{node.port}").__aenter__()
    assert "xyzzy" not in str(caught.value)


async def test_nobody_is_there() -> None:
    ports = [free_port(), free_port()]
    where = f"redis+cluster://127.0.0.1:{ports[0]}?hosts=127.0.0.1:{ports[1]}"
    with pytest.raises(TransientBackendError, match="nothing listens"):
        await l2kit.open_adapter(where).__aenter__()


async def test_an_acl_user_with_the_documented_rights(cluster: RespCluster, prefix: str) -> None:
    name = f"user-{os.urandom(4).hex()}"
    commands = "ping get set strlen unlink getrange scan info config|get multi exec watch unwatch pexpire pttl persist"
    for_clusters = "cluster|slots asking readonly"
    rights = [f"~{prefix}*", "-@all", *(f"+{word}" for word in f"{commands} {for_clusters}".split())]
    for node in cluster.nodes:
        node.command("ACL", "SETUSER", name, "on", ">xyzzy", *rights)
    try:
        node = cluster.nodes[0]
        where = f"redis+cluster://{name}:xyzzy@{node.host}:{node.port}?key_prefix={prefix}"
        async with l2kit.open_adapter(where) as adapter:
            probe = await adapter.probe()
            assert probe.ok, probe
            assert [info async for info in adapter.iter_keys()] == []
            assert (await adapter.usage()).used_bytes > 0
    finally:
        for node in cluster.nodes:
            node.command("ACL", "DELUSER", name)
