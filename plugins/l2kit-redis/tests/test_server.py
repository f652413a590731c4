"""Real servers that fill up, freeze, die and come back; and what lies where on them."""

from __future__ import annotations

import logging
import os
from typing import Any

import anyio
import pytest

import l2kit
from l2kit import Layout, LoadStatus, MemoryObj, ObjectKey, StoreStatus
from l2kit.errors import (
    BackendBusyError,
    BackendError,
    BackendTimeoutError,
    CapacityError,
    ClosedError,
    TransientBackendError,
)
from l2kit.testing.servers import RespServer, ServerError, free_port, run_server

pytestmark = [pytest.mark.anyio, pytest.mark.service]

SECRET = "xyzzy-open-sesame"
SLACK_S = 1.0


def key(number: int) -> ObjectKey:
    return ObjectKey("server", number.to_bytes(8, "little") * 2)


def source(data: bytes) -> MemoryObj:
    return MemoryObj.wrap(data, Layout.raw(len(data)))


def blank(nbytes: int) -> MemoryObj:
    return MemoryObj.wrap(bytearray(nbytes), Layout.raw(nbytes))


# --- a server in trouble --------------------------------------------------------------------------


async def test_a_server_that_dies_between_lookup_and_load_and_comes_back(own_server: RespServer) -> None:
    async with l2kit.open_adapter(own_server.url()) as adapter:
        keys, data = [key(n) for n in range(8)], [os.urandom(50_000) for _ in range(8)]
        assert all(o.present for o in await adapter.submit_store_task(keys, [source(d) for d in data]))
        found = await adapter.submit_lookup_and_lock_task(keys)
        assert all(outcome.hit for outcome in found)
        own_server.kill()
        outcomes = await adapter.submit_load_task(keys, [blank(50_000) for _ in keys])
        assert {outcome.status for outcome in outcomes} == {LoadStatus.FAILED}
        assert all(isinstance(outcome.error, TransientBackendError) for outcome in outcomes)
        with pytest.raises(TransientBackendError):
            await adapter.submit_lookup_and_lock_task(keys)
        own_server.start()
        found = await adapter.submit_lookup_and_lock_task(keys)
        assert not any(outcome.hit for outcome in found), "the server came back empty"
        assert all(o.present for o in await adapter.submit_store_task(keys, [source(d) for d in data]))
        targets = [blank(50_000) for _ in keys]
        assert all(outcome.loaded for outcome in await adapter.submit_load_task(keys, targets))
        assert [target.tobytes() for target in targets] == data


async def test_a_restart_between_two_batches_goes_unnoticed(own_server: RespServer) -> None:
    async with l2kit.open_adapter(own_server.url()) as adapter:
        for _ in range(3):
            own_server.stop()
            own_server.start()
            [stored] = await adapter.submit_store_task([key(1)], [source(b"again")])
            assert stored.status is StoreStatus.STORED
            own_server.kill()
            own_server.start()
            [deleted] = await adapter.submit_delete_task([key(1)])
            assert deleted.error is None


async def test_a_kill_in_the_middle_of_traffic(own_server: RespServer) -> None:
    nbytes, numbers = 300_000, range(24)
    content = {number: os.urandom(nbytes) for number in numbers}
    async with l2kit.open_adapter(own_server.url(), timeout_s=2) as adapter:
        keys = [key(number) for number in numbers]
        sources = [source(content[number]) for number in numbers]
        for _ in range(2):
            storing = adapter.submit_store_task(keys, sources)
            targets = [blank(nbytes) for _ in keys]
            loading = adapter.submit_load_task(keys, targets)
            while not any([outcome async for _, outcome in _first(storing)]):
                pass
            started = anyio.current_time()
            own_server.kill()
            stored, loaded = await storing, await loading
            assert anyio.current_time() - started < 2 + SLACK_S
            assert all(outcome.present or isinstance(outcome.error, BackendError) for outcome in stored)
            for number, outcome, target in zip(numbers, loaded, targets, strict=True):
                assert not outcome.loaded or target.tobytes() == content[number]
            own_server.start()
            assert all(outcome.present for outcome in await adapter.submit_store_task(keys, sources))


@pytest.mark.slow
async def test_a_kill_in_the_middle_of_200_stores_and_loads(own_server: RespServer) -> None:
    """Half of the objects in stripes; the server is back after 2 s. The client is not touched."""
    timeout_s, sizes = 1.5, [3000 if number % 2 else 200_000 for number in range(40)]
    contents = [os.urandom(nbytes) for nbytes in sizes]
    outcomes: list[Any] = []
    slowest_s = 0.0

    async with l2kit.open_adapter(own_server.url(), timeout_s=timeout_s, stripe_bytes=16 << 10) as adapter:

        async def use(number: int) -> None:
            nonlocal slowest_s
            started = anyio.current_time()
            if number % 3 == 0:
                task: Any = adapter.submit_store_task([key(number % 40)], [source(contents[number % 40])])
                [outcome] = await task
            else:
                target = blank(sizes[number % 40])
                [outcome] = await adapter.submit_load_task([key(number % 40)], [target])
                assert not outcome.loaded or target.tobytes() == contents[number % 40], "wrong bytes"
            slowest_s = max(slowest_s, anyio.current_time() - started)
            outcomes.append(outcome)

        keys = [key(number) for number in range(40)]
        assert all(o.present for o in await adapter.submit_store_task(keys, [source(data) for data in contents]))
        async with anyio.create_task_group() as group:
            for number in range(200):
                group.start_soon(use, number)
                if number == 100:
                    await anyio.to_thread.run_sync(own_server.kill)
                await anyio.sleep(0.002)
            await anyio.sleep(2)
            await anyio.to_thread.run_sync(own_server.start)
        assert len(outcomes) == 200
        assert slowest_s < timeout_s + SLACK_S
        failed = [outcome for outcome in outcomes if outcome.error]
        assert failed
        assert all(isinstance(outcome.error, BackendError) for outcome in failed)
        assert all(o.present for o in await adapter.submit_store_task(keys, [source(data) for data in contents]))
        targets = [blank(nbytes) for nbytes in sizes]
        assert all(outcome.loaded for outcome in await adapter.submit_load_task(keys, targets))
        assert [target.tobytes() for target in targets] == contents


async def _first(task: Any) -> Any:
    async for item in task:
        yield item
        return


async def test_a_frozen_server_costs_no_more_than_the_deadline(own_server: RespServer) -> None:
    async with l2kit.open_adapter(own_server.url()) as adapter:
        await adapter.submit_store_task([key(1)], [source(b"frozen")])
        own_server.pause()
        started = anyio.current_time()
        deadline = started + 0.4
        load = adapter.submit_load_task([key(1)] * 9, [blank(6) for _ in range(9)], deadline=deadline)
        store = adapter.submit_store_task([key(2)], [source(bytes(32 << 20))], deadline=deadline)
        lookup = adapter.submit_lookup_and_lock_task([key(1)], deadline=deadline)
        errors = [outcome.error for outcome in await load] + [outcome.error for outcome in await store]
        assert all(isinstance(error, BackendTimeoutError) for error in errors), errors
        await lookup.wait_ended()
        assert anyio.current_time() - started < 0.4 + SLACK_S
        own_server.resume()
        [outcome] = await adapter.submit_load_task([key(1)], [blank(6)])
        assert outcome.loaded


async def test_a_full_server_is_a_capacity_error() -> None:
    with run_server("redis", maxmemory="8mb", maxmemory_policy="noeviction") as server:
        async with l2kit.open_adapter(server.url()) as adapter:
            keys = [key(number) for number in range(12)]
            outcomes = await adapter.submit_store_task(keys, [source(os.urandom(1 << 20)) for _ in keys])
            refused = [outcome for outcome in outcomes if not outcome.present]
            assert refused
            assert all(isinstance(outcome.error, CapacityError) for outcome in refused)
            assert "maxmemory" in str(refused[0].error)
            for number, outcome in enumerate(outcomes):
                [loaded] = await adapter.submit_load_task([key(number)], [blank(1 << 20)])
                assert loaded.loaded == outcome.present
            assert (await adapter.usage()).max_bytes == 8 << 20


async def test_a_value_above_the_servers_limit_is_a_capacity_error() -> None:
    with run_server("redis", proto_max_bulk_len="1mb") as server:
        async with l2kit.open_adapter(server.url()) as adapter:
            [outcome] = await adapter.submit_store_task([key(1)], [source(bytes(3 << 19))])
            assert isinstance(outcome.error, CapacityError), outcome
            assert "proto-max-bulk-len" in str(outcome.error)
            [outcome] = await adapter.submit_store_task([key(1)], [source(bytes(8 << 20))])
            assert outcome.present, "stripes are short enough"
            [outcome] = await adapter.submit_store_task([key(1)], [source(bytes(1 << 19))])
            assert outcome.present


async def test_a_server_without_room_for_clients_is_busy() -> None:
    with run_server("redis", maxclients="1") as server:
        async with l2kit.open_adapter(server.url()):
            with pytest.raises(BackendBusyError, match="maxclients"):
                await l2kit.open_adapter(server.url()).__aenter__()


async def test_a_replica_refuses_stores_with_a_clear_error(own_server: RespServer) -> None:
    async with l2kit.open_adapter(own_server.url()) as adapter:
        await adapter.submit_store_task([key(1)], [source(b"replica")])
        own_server.command("REPLICAOF", "127.0.0.1", free_port())
        [stored] = await adapter.submit_store_task([key(2)], [source(b"replica")])
        assert "replica" in str(stored.error)
        [loaded] = await adapter.submit_load_task([key(1)], [blank(7)])
        assert loaded.loaded
        own_server.command("REPLICAOF", "NO", "ONE")


async def test_a_cluster_node_is_named_as_such() -> None:
    with run_server("redis", cluster_enabled="yes") as server:
        async with l2kit.open_adapter(server.url()) as adapter:
            [stored] = await adapter.submit_store_task([key(1)], [source(b"cluster")])
            assert isinstance(stored.error, BackendError)
            assert "cluster" in str(stored.error)
            with pytest.raises(BackendError, match="cluster"):
                await adapter.submit_lookup_and_lock_task([key(1)])


# --- what is stored where -------------------------------------------------------------------------


async def test_objects_lie_under_prefix_and_key(redis_server: RespServer, url: str, prefix: str) -> None:
    async with l2kit.open_adapter(url) as adapter:
        await adapter.submit_store_task([key(1)], [source(b"here")])
        stored = redis_server.command("GET", prefix + key(1).encode())
        assert isinstance(stored, bytes)
        assert stored.endswith(b"here")


async def test_prefixes_with_glob_characters_do_not_see_each_other(redis_server: RespServer, prefix: str) -> None:
    names = ["*", "?", "[ab]", "a", "b", "x*y", "\\", "\\*", "[^a]", "a-b", "\u00fc{tag}"]
    adapters = [l2kit.open_adapter(redis_server.url(), key_prefix=f"{prefix}{name}/") for name in names]
    for number, adapter in enumerate(adapters):
        async with adapter:
            await adapter.submit_store_task([key(number)], [source(b"%d" % number)])
    for number, name in enumerate(names):
        async with l2kit.open_adapter(redis_server.url(), key_prefix=f"{prefix}{name}/") as adapter:
            assert [info.key async for info in adapter.iter_keys()] == [key(number)]
            found = await adapter.submit_lookup_and_lock_task([key(other) for other in range(len(names))])
            assert [outcome.hit for outcome in found] == [other == number for other in range(len(names))]


async def test_databases_do_not_see_each_other(redis_server: RespServer, prefix: str) -> None:
    async with (
        l2kit.open_adapter(f"{redis_server.url()}/3", key_prefix=prefix) as three,
        l2kit.open_adapter(redis_server.url(), db=4, key_prefix=prefix) as four,
    ):
        await three.submit_store_task([key(1)], [source(b"three")])
        assert not (await four.submit_lookup_and_lock_task([key(1)]))[0].hit
        assert (await three.submit_lookup_and_lock_task([key(1)]))[0].hit
        await three.submit_delete_task([key(1)])


async def test_foreign_keys_under_the_prefix_are_left_alone(redis_server: RespServer, url: str, prefix: str) -> None:
    redis_server.command("SET", f"{prefix}not-a-key", "x")
    redis_server.command("RPUSH", prefix + key(1).encode(), "a list")
    async with l2kit.open_adapter(url) as adapter:
        assert [info async for info in adapter.iter_keys()] == []
        assert not (await adapter.submit_lookup_and_lock_task([key(1)]))[0].hit
        assert (await adapter.submit_load_task([key(1)], [blank(10)]))[0].status is LoadStatus.MISS
        [stored] = await adapter.submit_store_task([key(1)], [source(b"healed")])
        assert stored.present
        assert (await adapter.submit_load_task([key(1)], [blank(6)]))[0].loaded


async def test_objects_expire(redis_server: RespServer, url: str, prefix: str) -> None:
    async with l2kit.open_adapter(url, ttl_s=0.4, refresh_ttl=False) as adapter:
        await adapter.submit_store_task([key(1)], [source(b"short-lived")])
        left_ms = redis_server.command("PTTL", prefix + key(1).encode())
        assert isinstance(left_ms, int)
        assert 0 < left_ms <= 400
        assert (await adapter.submit_load_task([key(1)], [blank(11)]))[0].loaded
        with anyio.fail_after(5):
            while redis_server.command("EXISTS", prefix + key(1).encode()):  # noqa: ASYNC110
                await anyio.sleep(0.02)
        assert not (await adapter.submit_lookup_and_lock_task([key(1)]))[0].hit
        assert (await adapter.submit_load_task([key(1)], [blank(11)]))[0].status is LoadStatus.MISS


async def test_without_a_ttl_objects_stay(redis_server: RespServer, url: str, prefix: str) -> None:
    async with l2kit.open_adapter(url) as adapter:
        await adapter.submit_store_task([key(1)], [source(b"long-lived")])
        assert redis_server.command("PTTL", prefix + key(1).encode()) == -1


@pytest.mark.parametrize("beyond", [1, 1000, (1 << 20) + 1, 8 << 20])
async def test_a_value_longer_than_the_buffers(redis_server: RespServer, url: str, prefix: str, beyond: int) -> None:
    async with l2kit.open_adapter(url) as adapter:
        await adapter.submit_store_task([key(1), key(2)], [source(b"a" * 1000), source(b"b" * 1000)])
        stored = redis_server.command("GET", prefix + key(1).encode())
        assert isinstance(stored, bytes)
        redis_server.command("SET", prefix + key(1).encode(), stored + bytes(beyond))
        [outcome] = await adapter.submit_load_task([key(1)], [blank(1000)])
        assert outcome.status is LoadStatus.CORRUPT
        target = blank(1000)
        [outcome] = await adapter.submit_load_task([key(2)], [target])
        assert outcome.loaded
        assert target.tobytes() == b"b" * 1000
        assert redis_server.command("EXISTS", prefix + key(1).encode()) == 0, "the damaged object is still there"


async def test_lookups_of_thousands_of_keys(url: str) -> None:
    async with l2kit.open_adapter(url) as adapter:
        await adapter.submit_store_task([key(n) for n in range(0, 3000, 3)], [source(b"x")] * 1000)
        found = await adapter.submit_lookup_and_lock_task([key(number) for number in range(3000)])
        assert [outcome.hit for outcome in found] == [number % 3 == 0 for number in range(3000)]
        assert len([info async for info in adapter.iter_keys()]) == 1000


async def test_listing_and_usage_belong_to_an_open_adapter(url: str) -> None:
    adapter = l2kit.open_adapter(url)
    async with adapter:
        pass
    with pytest.raises(ClosedError):
        await adapter.usage()
    with pytest.raises(ClosedError):
        [info async for info in adapter.iter_keys()]


async def test_no_secret_is_logged(redis_server: RespServer, url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with l2kit.open_adapter(url) as adapter:
        shown = f"{adapter!r} {adapter.config!r} {await adapter.probe()!r}"
    assert redis_server.password is not None
    assert redis_server.password not in caplog.text + shown
    with pytest.raises(ServerError):
        redis_server.command("NO-SUCH-COMMAND")
