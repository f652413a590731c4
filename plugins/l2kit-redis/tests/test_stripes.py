"""Large objects in stripes: all parts or a miss, whatever is lost, replaced, cancelled or refused; nothing stays."""

from __future__ import annotations

import os
from collections.abc import Callable

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import l2kit
from l2kit import Layout, LoadStatus, MemoryObj, ObjectKey, StoreStatus
from l2kit.errors import CapacityError
from l2kit.memory import first_bytes
from l2kit.testing.servers import RespServer, run_server
from l2kit_redis import RedisAdapter
from l2kit_redis.stripes import HEAD_BYTES, Head, cut, deal, parse_head, whole_bytes

KIB = 1 << 10
NBYTES = 300 * KIB
STRIPE_BYTES = 16 * KIB
STRIPES = 19  # of an object of that size, with its envelope

service = [pytest.mark.anyio, pytest.mark.service]


def key(number: int = 0) -> ObjectKey:
    return ObjectKey("stripes", number.to_bytes(8, "little") * 2)


def content(number: int = 0, nbytes: int = NBYTES) -> bytes:
    return bytes([number]) + os.urandom(16) + bytes([number]) * (nbytes - 17)


def source(data: bytes) -> MemoryObj:
    return MemoryObj.wrap(data, Layout.raw(len(data)))


def blank(nbytes: int = NBYTES) -> MemoryObj:
    return MemoryObj.wrap(bytearray(nbytes), Layout.raw(nbytes))


def open_redis(url: str, **options: object) -> RedisAdapter:
    adapter = l2kit.open_adapter(url, **{"stripe_bytes": STRIPE_BYTES, **options})
    assert isinstance(adapter, RedisAdapter)
    return adapter


def names_below(server: RespServer, prefix: str) -> list[str]:
    reply = server.command("KEYS", prefix + "*")
    assert isinstance(reply, list)
    return sorted(name.decode() for name in reply if isinstance(name, bytes))


def stripes_below(server: RespServer, prefix: str) -> list[str]:
    """In the order of their numbers."""
    names = [name for name in names_below(server, prefix) if "#" in name]
    return sorted(names, key=lambda name: int(name.rpartition("#")[2]))


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    with anyio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110 - what changes is a server
            await anyio.sleep(0.01)


async def load(adapter: RedisAdapter, number: int = 0, nbytes: int = NBYTES) -> tuple[LoadStatus, bytes]:
    target = blank(nbytes)
    [outcome] = await adapter.submit_load_task([key(number)], [target])
    return outcome.status, target.tobytes()


async def store(adapter: RedisAdapter, data: bytes, number: int = 0) -> None:
    [outcome] = await adapter.submit_store_task([key(number)], [source(data)])
    assert outcome.status is StoreStatus.STORED, outcome


async def hit(adapter: RedisAdapter, number: int = 0) -> bool:
    [found] = await adapter.submit_lookup_and_lock_task([key(number)])
    await adapter.submit_unlock_task([key(number)])
    return found.hit


# --- which bytes go where -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 50))
def test_stripes_are_the_object_in_order(sizes: list[int], stripe_bytes: int) -> None:
    segments = [memoryview(os.urandom(size)) for size in sizes]
    stripes = cut(segments, stripe_bytes)
    lengths = [sum(map(len, parts)) for parts in stripes]
    assert b"".join(b"".join(parts) for parts in stripes) == b"".join(segments)
    assert all(length == stripe_bytes for length in lengths[:-1])
    if sum(sizes):
        head = Head.new(sum(sizes), stripe_bytes)
        assert [head.length(index) for index in range(head.stripes)] == lengths
        assert len(set(head.names(b"name"))) == head.stripes == len(stripes)


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(0, 500))
def test_the_first_bytes_of_a_list(sizes: list[int], nbytes: int) -> None:
    segments = [memoryview(os.urandom(size)) for size in sizes]
    assert b"".join(first_bytes(segments, nbytes)) == b"".join(segments)[:nbytes]


@given(st.integers(1, 100), st.integers(1, 8))
def test_every_stripe_is_dealt_once_and_evenly(count: int, ways: int) -> None:
    shares = deal(count, ways)
    assert sorted(index for share in shares for index in share) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 1 << 39), st.integers(1 << 20, 1 << 22))
def test_a_head_is_read_as_it_was_written(size: int, stripe_bytes: int) -> None:
    head = Head.new(size, stripe_bytes)
    assert len(head.pack()) == HEAD_BYTES
    assert parse_head(head.pack()) == head
    assert head != Head.new(size, stripe_bytes)


@given(st.binary(max_size=60) | st.integers(0, HEAD_BYTES * 8 - 1))
def test_nothing_else_is_a_head(other: bytes | int) -> None:
    if isinstance(other, int):
        packed = bytearray(Head.new(5000, 100).pack())
        packed[other // 8] ^= 1 << other % 8
        # Padding is covered by the checksum as well.
        other = bytes(packed)
    assert parse_head(other) is None


def test_no_reply_is_longer_than_redis_7_sends_well() -> None:
    for stripe_bytes in (1 << 20, 4 << 20):
        assert 4 << 20 < whole_bytes(stripe_bytes) < 5 << 20, "4 MiB of KV and their envelope are one value"
    assert whole_bytes(1024) < 5000


# --- on a server ----------------------------------------------------------------------------------------------------


class TestOnServer:
    pytestmark = service

    async def test_a_large_object_is_a_head_and_stripes(self, redis_server: RespServer, url: str, prefix: str) -> None:
        data = content()
        async with open_redis(url) as adapter:
            await store(adapter, data)
            names = names_below(redis_server, prefix)
            assert len(names) == 1 + STRIPES
            assert redis_server.command("STRLEN", prefix + key().encode()) == HEAD_BYTES
            assert {redis_server.command("PTTL", name) for name in names} == {-1}, "something expires"
            [found] = await adapter.submit_lookup_and_lock_task([key()])
            assert found.size == NBYTES + 256
            assert await load(adapter) == (LoadStatus.LOADED, data)
            assert [(info.key, info.size) async for info in adapter.iter_keys()] == [(key(), found.size)]
            assert adapter.counters["stripes_written"] == adapter.counters["stripes_read"] == STRIPES
            [deleted] = await adapter.submit_delete_task([key()])
            assert deleted.status == "deleted"
            assert names_below(redis_server, prefix) == []

    async def test_a_small_object_is_one_value(self, redis_server: RespServer, url: str, prefix: str) -> None:
        async with open_redis(url) as adapter:
            await store(adapter, bytes(whole_bytes(STRIPE_BYTES) - 256))
            assert names_below(redis_server, prefix) == [prefix + key().encode()]
            await store(adapter, bytes(whole_bytes(STRIPE_BYTES) - 255), 1)
            assert len(stripes_below(redis_server, prefix)) == 5

    @pytest.mark.parametrize("stripe_bytes", [1 * KIB, 100_000, 4096 * KIB])
    async def test_readers_need_not_have_the_writers_options(self, url: str, stripe_bytes: int) -> None:
        data = content()
        async with open_redis(url) as writer, open_redis(url, stripe_bytes=stripe_bytes) as reader:
            await store(writer, data)
            assert await load(reader) == (LoadStatus.LOADED, data)
            await store(reader, data)
            assert await load(writer) == (LoadStatus.LOADED, data)
            assert (await reader.submit_delete_task([key()]))[0].status == "deleted"

    @pytest.mark.parametrize("sizes", [(300, 300), (300, 10), (10, 300), (300, 120)])
    async def test_what_is_replaced_is_removed(
        self, redis_server: RespServer, url: str, prefix: str, sizes: tuple[int, int]
    ) -> None:
        old, new = (content(number, size * KIB) for number, size in enumerate(sizes))
        async with open_redis(url) as adapter:
            await store(adapter, old)
            await store(adapter, new)
            assert await load(adapter, nbytes=len(new)) == (LoadStatus.LOADED, new)
            count = 1 if sizes[1] == 10 else 1 + -(-(len(new) + 256) // STRIPE_BYTES)
            await until(lambda: len(names_below(redis_server, prefix)) == count)

    async def test_small_objects_in_a_group_replace_large_ones(
        self, redis_server: RespServer, url: str, prefix: str
    ) -> None:
        keys = [key(number) for number in range(6)]
        async with open_redis(url, max_concurrency=1) as adapter:
            for number in range(6):
                await store(adapter, content(number), number)
            outcomes = await adapter.submit_store_task(keys, [source(content(n, 1000)) for n in range(6)])
            assert all(outcome.present for outcome in outcomes)
            await until(lambda: len(names_below(redis_server, prefix)) == 6)

    async def test_large_and_small_objects_in_one_group(self, url: str) -> None:
        sizes = [100 * KIB, 1000, 90 * KIB, 100, 70 * KIB, 5000]
        data = [content(number, size) for number, size in enumerate(sizes)]
        keys = [key(number) for number in range(6)]
        async with open_redis(url, max_concurrency=1) as adapter:
            outcomes = await adapter.submit_store_task(keys, [source(each) for each in data])
            assert all(outcome.status is StoreStatus.STORED for outcome in outcomes)
            targets = [blank(size) for size in sizes]
            assert all(outcome.loaded for outcome in await adapter.submit_load_task(keys, targets))
            assert [target.tobytes() for target in targets] == data
            found = await adapter.submit_lookup_and_lock_task(keys)
            assert [outcome.size for outcome in found] == [size + 256 for size in sizes]

    @pytest.mark.parametrize("which", [0, 7, STRIPES - 1])
    @pytest.mark.parametrize("damage", ["evicted", "short", "long", "very long", "a list"])
    async def test_a_lost_part_is_a_miss_and_heals(
        self, redis_server: RespServer, url: str, prefix: str, which: int, damage: str
    ) -> None:
        async with open_redis(url) as adapter:
            await store(adapter, content())
            await store(adapter, content(1), 1)
            other = set(stripes_below(redis_server, f"{prefix}{key(1).encode()}"))
            stripe = stripes_below(redis_server, f"{prefix}{key().encode()}")[which]
            longer = {"short": 100, "long": STRIPE_BYTES + 1, "very long": 3 << 20}
            redis_server.command("DEL", stripe)
            if damage == "a list":
                redis_server.command("LPUSH", stripe, "x")
            elif damage != "evicted":
                redis_server.command("SET", stripe, bytes(longer[damage]))
            assert await hit(adapter), "a lookup looks at the head only"
            assert (await load(adapter))[0] is LoadStatus.MISS
            assert adapter.counters["stripes_lost"] >= 1
            assert not await hit(adapter)
            await until(lambda: set(stripes_below(redis_server, prefix)) == other)
            data = content(2)
            await store(adapter, data)
            assert await load(adapter) == (LoadStatus.LOADED, data)
            assert (await load(adapter, 1))[0] is LoadStatus.LOADED

    async def test_who_only_looks_removes_nothing(self, redis_server: RespServer, url: str, prefix: str) -> None:
        async with open_redis(url) as adapter:
            adapter.deletes_damaged = False
            await store(adapter, content())
            redis_server.command("DEL", stripes_below(redis_server, prefix)[3])
            for _ in range(2):
                assert (await load(adapter))[0] is LoadStatus.MISS
            assert await hit(adapter)
            assert len(names_below(redis_server, prefix)) == STRIPES

    async def test_a_damaged_stripe_is_corrupt_and_heals(self, redis_server: RespServer, url: str, prefix: str) -> None:
        async with open_redis(url) as adapter:
            await store(adapter, content())
            redis_server.command("SETRANGE", stripes_below(redis_server, prefix)[4], 77, "damage")
            assert (await load(adapter))[0] is LoadStatus.CORRUPT
            await until(lambda: names_below(redis_server, prefix) == [])
            assert (await load(adapter))[0] is LoadStatus.MISS

    @pytest.mark.parametrize("place", [3, 12, 20, 30, 35])
    async def test_a_damaged_head_is_corrupt_and_heals(
        self, redis_server: RespServer, url: str, prefix: str, place: int
    ) -> None:
        async with open_redis(url) as adapter:
            await store(adapter, content())
            name = prefix + key().encode()
            head = redis_server.command("GET", name)
            assert isinstance(head, bytes)
            redis_server.command("SETRANGE", name, place, bytes([head[place] ^ 1]))
            assert (await load(adapter))[0] is LoadStatus.CORRUPT
            assert not await hit(adapter)

    async def test_a_head_under_another_key_finds_nothing(
        self, redis_server: RespServer, url: str, prefix: str
    ) -> None:
        async with open_redis(url) as adapter:
            await store(adapter, content())
            redis_server.command("COPY", prefix + key().encode(), prefix + key(1).encode())
            assert (await load(adapter, 1))[0] is LoadStatus.MISS
            assert (await load(adapter))[0] is LoadStatus.LOADED

    async def test_a_destination_that_is_too_small(self, url: str) -> None:
        async with open_redis(url) as adapter:
            data = content()
            await store(adapter, data)
            [outcome] = await adapter.submit_load_task([key()], [blank(NBYTES // 2)])
            assert isinstance(outcome.error, CapacityError)
            assert await load(adapter, nbytes=2 * NBYTES) == (LoadStatus.LOADED, data + bytes(NBYTES))

    async def test_a_store_that_is_cancelled_leaves_nothing(
        self, redis_server: RespServer, url: str, prefix: str
    ) -> None:
        """Cancelled sooner and later: the old object or the new one, and no stripe of the other."""
        async with open_redis(url) as adapter:
            old = content(1)
            await store(adapter, old)
            cancelled = 0
            for turns in range(0, 60, 2):
                new = content(2)
                task = adapter.submit_store_task([key()], [source(new)])
                for _ in range(turns):
                    await anyio.sleep(0.0001)
                task.cancel()
                [outcome] = await task
                cancelled += not outcome.present
                status, received = await load(adapter)
                assert status is LoadStatus.LOADED
                assert received == new or (received == old and not outcome.present)
                old = received
                await until(lambda: len(names_below(redis_server, prefix)) == 1 + STRIPES)
                ttls = {redis_server.command("PTTL", name) for name in names_below(redis_server, prefix)}
                assert ttls == {-1}, "a part of it expires"
            assert cancelled

    async def test_a_store_that_is_refused_leaves_the_old_object(self) -> None:
        with run_server("redis", maxmemory="16mb", maxmemory_policy="noeviction") as server:
            async with open_redis(server.url(), stripe_bytes=256 * KIB) as adapter:
                old = content(1, 4 << 20)
                await store(adapter, old)
                [outcome] = await adapter.submit_store_task([key()], [source(content(2, 14 << 20))])
                assert isinstance(outcome.error, CapacityError)
                assert await load(adapter, nbytes=4 << 20) == (LoadStatus.LOADED, old)
                await until(lambda: len(stripes_below(server, "l2kit:")) == 17)

    async def test_the_stripes_of_a_writer_that_dies_expire(
        self, redis_server: RespServer, url: str, prefix: str
    ) -> None:
        seen: set[int] = set()
        async with open_redis(url, max_concurrency=1) as adapter, anyio.create_task_group() as group:

            async def write() -> None:
                await store(adapter, content())
                group.cancel_scope.cancel()

            async def look() -> None:
                while True:
                    for name in stripes_below(redis_server, prefix):
                        left_ms = redis_server.command("PTTL", name)
                        assert isinstance(left_ms, int)
                        seen.add(left_ms)
                    await anyio.sleep(0.0001)

            group.start_soon(look)
            group.start_soon(write)
        assert all(left_ms <= 600_000 for left_ms in seen)
        assert {-1} == {redis_server.command("PTTL", name) for name in names_below(redis_server, prefix)}

    async def test_evicting_servers_give_whole_objects_or_misses(self) -> None:
        with run_server("redis", maxmemory="20mb", maxmemory_policy="allkeys-random") as server:
            async with open_redis(server.url()) as adapter:
                data = {number: content(number) for number in range(60)}
                loaded = 0
                for number, each in data.items():
                    await adapter.submit_store_task([key(number)], [source(each)])
                for _ in range(2):
                    for number, each in data.items():
                        status, received = await load(adapter, number)
                        assert status in (LoadStatus.LOADED, LoadStatus.MISS)
                        assert status is LoadStatus.MISS or received == each
                        loaded += status is LoadStatus.LOADED
                        assert status is LoadStatus.LOADED or not await hit(adapter, number)
                assert loaded
                assert adapter.counters["stripes_lost"]

    async def test_two_writers_and_a_remover_leave_no_stripe(
        self, redis_server: RespServer, url: str, prefix: str
    ) -> None:
        async with open_redis(url) as one, open_redis(url) as two:

            async def write(adapter: RedisAdapter) -> None:
                for number in range(12):
                    await store(adapter, content(number))

            async def remove(adapter: RedisAdapter) -> None:
                for _ in range(12):
                    await adapter.submit_delete_task([key()])
                    await anyio.sleep(0.002)

            async with anyio.create_task_group() as group:
                group.start_soon(write, one)
                group.start_soon(write, two)
                group.start_soon(remove, one)
            await one.submit_delete_task([key()])
            await until(lambda: names_below(redis_server, prefix) == [])

    async def test_lookups_take_one_round_trip(self, url: str) -> None:
        async with open_redis(url, ttl_s=100) as adapter:
            for number in range(3):
                await store(adapter, content(number), number)
            before = adapter.counters["round_trips"]
            found = await adapter.submit_lookup_and_lock_task([key(number) for number in range(2000)])
            assert [outcome.hit for outcome in found[:4]] == [True, True, True, False]
            assert adapter.counters["round_trips"] == before + 1

    async def test_large_objects_after_many_small_ones(self, url: str) -> None:
        """Lookups have stopped to ask for heads: they ask again, once."""
        async with open_redis(url) as adapter, open_redis(url) as other:
            await store(adapter, bytes(1000), 1)
            for _ in range(40):
                assert await hit(adapter, 1)
            await store(other, content())
            for trips in (2, 1, 1):
                before = adapter.counters["round_trips"]
                found = await adapter.submit_lookup_and_lock_task([key(), key(1), key(2)])
                assert [outcome.size for outcome in found] == [NBYTES + 256, 1256, 0]
                assert adapter.counters["round_trips"] == before + trips
