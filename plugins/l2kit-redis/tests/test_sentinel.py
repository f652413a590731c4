"""A primary behind sentinels: failover under load, what sentinels and servers say that is not so, and start-up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import anyio
import anyio.to_thread
import pytest

import l2kit
from l2kit import Layout, MemoryObj, ObjectKey
from l2kit.errors import AuthError, ConfigError, TransientBackendError
from l2kit.testing.sentinels import SENTINEL_PASSWORD, SERVICE, RespSentinels, run_sentinels
from l2kit.testing.servers import Flavor, RespServer, free_port
from l2kit_redis.endpoint import Endpoint
from l2kit_redis.faults import ProtocolError
from l2kit_redis.resp import Reply
from l2kit_redis.sentinel import primary_of, replicas_of

pytestmark = [pytest.mark.anyio, pytest.mark.service]

SLACK_S = 1.0
TIMEOUT_S = 5.0


def key(number: int) -> ObjectKey:
    return ObjectKey("sentinel", number.to_bytes(8, "little") * 2)


def source(data: bytes) -> MemoryObj:
    return MemoryObj.wrap(data, Layout.raw(len(data)))


def blank(nbytes: int) -> MemoryObj:
    return MemoryObj.wrap(bytearray(nbytes), Layout.raw(nbytes))


@pytest.fixture(params=["redis", "valkey"])
def watched(request: pytest.FixtureRequest) -> RespSentinels:
    """A deployment for tests that leave it as it is."""
    found: RespSentinels = request.getfixturevalue(f"{request.param}_sentinels")
    return found


@pytest.fixture(params=["redis", "valkey"])
def fragile(request: pytest.FixtureRequest) -> Iterator[RespSentinels]:
    """A deployment of one's own whose sentinels soon take a silent server for dead."""
    flavor: Flavor = request.param
    with run_sentinels(flavor, down_after_ms=1000) as deployment:
        yield deployment


@pytest.mark.slow
async def test_the_primary_is_killed_under_load(fragile: RespSentinels, traffic: Callable[..., Any]) -> None:
    async with l2kit.open_adapter(fragile.url(), timeout_s=TIMEOUT_S) as adapter:
        load = traffic(adapter)
        async with anyio.create_task_group() as group:
            group.start_soon(load.run)
            await load.good()
            victim = fragile.primary
            await anyio.to_thread.run_sync(victim.kill)
            await load.good()
            assert load.errors, "nobody noticed"
            assert await anyio.to_thread.run_sync(lambda: fragile.primary) is not victim
            await anyio.to_thread.run_sync(victim.start)
            await anyio.to_thread.run_sync(fragile.wait_until_well)
            await load.good()
            load.end()
        assert load.slowest_s < TIMEOUT_S + SLACK_S


@pytest.mark.slow
async def test_an_orderly_failover_under_load(fragile: RespSentinels, traffic: Callable[..., Any]) -> None:
    async with l2kit.open_adapter(fragile.url(), timeout_s=TIMEOUT_S) as adapter:
        load = traffic(adapter)
        async with anyio.create_task_group() as group:
            group.start_soon(load.run)
            await load.good()
            before = fragile.primary
            await anyio.to_thread.run_sync(fragile.sentinels[0].command, "SENTINEL", "FAILOVER", SERVICE)
            with anyio.fail_after(60):
                while await anyio.to_thread.run_sync(lambda: fragile.primary) is before:
                    pass
            await anyio.to_thread.run_sync(fragile.wait_until_well)
            await load.good()
            load.end()
        assert load.slowest_s < TIMEOUT_S + SLACK_S


async def test_a_primary_that_was_demoted_is_left(fragile: RespSentinels) -> None:
    """Nobody hangs up: a kept connection leads to a server that takes no writes any more."""
    async with l2kit.open_adapter(fragile.url(), timeout_s=TIMEOUT_S) as adapter:
        await adapter.submit_store_task([key(1)], [source(b"before")])
        before = fragile.primary
        await anyio.to_thread.run_sync(fragile.sentinels[0].command, "SENTINEL", "FAILOVER", SERVICE)
        await anyio.to_thread.run_sync(fragile.wait_until_well)
        assert fragile.primary is not before
        for number in range(4):
            [stored] = await adapter.submit_store_task([key(number)], [source(b"after")])
            assert stored.present, stored
        assert [info.key async for info in adapter.iter_keys()]
        assert (await adapter.usage()).used_bytes


async def test_a_sentinel_that_is_down_is_passed_by(fragile: RespSentinels) -> None:
    where = fragile.url()
    fragile.sentinels[0].kill()
    async with l2kit.open_adapter(where, timeout_s=TIMEOUT_S) as adapter:
        assert (await adapter.probe()).ok
    fragile.sentinels[1].pause()
    started = anyio.current_time()
    async with l2kit.open_adapter(where, timeout_s=TIMEOUT_S, connect_timeout_s=0.5) as adapter:
        assert (await adapter.probe()).ok
    assert anyio.current_time() - started < 0.5 + SLACK_S
    fragile.sentinels[1].resume()


async def test_sentinels_are_needed_only_when_something_changes(fragile: RespSentinels) -> None:
    async with l2kit.open_adapter(fragile.url(), timeout_s=TIMEOUT_S) as adapter:
        for sentinel in fragile.sentinels:
            sentinel.kill()
        assert (await adapter.probe()).ok
        primary = fragile.servers[0]
        primary.kill()
        [stored] = await adapter.submit_store_task([key(1)], [source(b"x")])
        assert isinstance(stored.error, TransientBackendError)
        assert f"node 127.0.0.1:{primary.port}" in str(stored.error)
        primary.start()
        with anyio.fail_after(10):
            while not (await adapter.probe()).ok:
                pass


async def test_databases_and_names(watched: RespSentinels, prefix: str) -> None:
    where = watched.url(key_prefix=prefix)
    async with l2kit.open_adapter(where, db=3) as three, l2kit.open_adapter(where) as zero:
        await three.submit_store_task([key(1)], [source(b"three")])
        assert (await three.submit_lookup_and_lock_task([key(1)]))[0].hit
        assert not (await zero.submit_lookup_and_lock_task([key(1)]))[0].hit
        await three.submit_delete_task([key(1)])
    async with l2kit.open_adapter(where.replace("127.0.0.1", "localhost")) as adapter:
        assert (await adapter.probe()).ok


# --- what is wrong at start-up --------------------------------------------------------------------


async def test_a_service_that_nobody_knows(watched: RespSentinels) -> None:
    with pytest.raises(ConfigError, match="service"):
        await l2kit.open_adapter(watched.url(), service="hers").__aenter__()


async def test_the_two_passwords_are_apart(watched: RespSentinels) -> None:
    sentinel = watched.sentinels[0]
    where = f"redis+sentinel://:{quote(SENTINEL_PASSWORD, safe='')}@{sentinel.host}:{sentinel.port}/{SERVICE}"
    with pytest.raises(AuthError, match=f"node 127.0.0.1:{sentinel.port}.*password") as caught:
        await l2kit.open_adapter(where).__aenter__()  # the sentinels' password for the server, none for the sentinels
    assert SENTINEL_PASSWORD not in str(caught.value)
    with pytest.raises(AuthError, match=f"node 127.0.0.1:{watched.primary.port}"):
        await l2kit.open_adapter(where, sentinel_password=SENTINEL_PASSWORD).__aenter__()


async def test_no_sentinel_is_there() -> None:
    with pytest.raises(TransientBackendError, match="nothing listens"):
        await l2kit.open_adapter(f"redis+sentinel://127.0.0.1:{free_port()}").__aenter__()


async def test_what_answers_is_no_sentinel(redis_server: RespServer) -> None:
    where = f"redis+sentinel://{redis_server.host}:{redis_server.port}"
    with pytest.raises(l2kit.L2Error, match="refused the command"):
        await l2kit.open_adapter(where, sentinel_password=redis_server.password).__aenter__()


async def test_a_primary_that_says_it_is_none(fragile: RespSentinels) -> None:
    """The sentinels are gone before they could notice; what they last said, their successor says still."""
    replica = fragile.replica
    sentinel = fragile.sentinels[0]
    for other in fragile.sentinels[1:]:
        other.kill()
    sentinel.command("SENTINEL", "REMOVE", SERVICE)
    sentinel.command("SENTINEL", "MONITOR", SERVICE, replica.host, replica.port, 3)
    started = anyio.current_time()
    with pytest.raises(TransientBackendError, match="is a replica"):
        await l2kit.open_adapter(fragile.url(), timeout_s=TIMEOUT_S).__aenter__()
    assert anyio.current_time() - started < TIMEOUT_S + SLACK_S


# --- what sentinels say ---------------------------------------------------------------------------


def test_the_address_of_the_primary() -> None:
    assert primary_of([b"::1", b"6379"]) == Endpoint("::1", 6379)
    assert primary_of(None) is None


@pytest.mark.parametrize("reply", [b"x", [b"h"], [b"", b"1"], [b"h", b"x"], [b"h", 1], 1])
def test_what_is_no_address(reply: Reply) -> None:
    with pytest.raises(ProtocolError):
        primary_of(reply)


def test_only_replicas_that_are_well_are_read() -> None:
    def entry(ip: bytes, flags: bytes, link: bytes) -> list[Reply]:
        return [b"name", b"x", b"ip", ip, b"port", b"7000", b"flags", flags, b"master-link-status", link]

    reply: Reply = [
        entry(b"10.0.0.1", b"slave", b"ok"),
        entry(b"10.0.0.2", b"slave,s_down", b"ok"),
        entry(b"10.0.0.3", b"slave,disconnected", b"ok"),
        entry(b"10.0.0.4", b"slave", b"err"),
        [],
    ]
    assert replicas_of(reply) == (Endpoint("10.0.0.1", 7000),)
    refused: list[Reply] = [None, b"x", [b"x"]]
    for wrong in refused:
        with pytest.raises(ProtocolError):
            replicas_of(wrong)


async def test_objects_survive_a_failover(fragile: RespSentinels) -> None:
    async with l2kit.open_adapter(fragile.url(), timeout_s=TIMEOUT_S) as adapter:
        data = os.urandom(3 << 20)
        await adapter.submit_store_task([key(1)], [source(data)])
        primary = fragile.primary
        primary.wait_until_copied()
        primary.kill()
        with anyio.fail_after(60):
            while not (await adapter.probe()).ok:
                pass
        target = blank(len(data))
        assert (await adapter.submit_load_task([key(1)], [target]))[0].loaded
        assert target.tobytes() == data
