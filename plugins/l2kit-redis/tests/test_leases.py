"""How long objects live: what a lookup promises, what a hit starts anew, and that no part dies before its head."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import anyio
import pytest

import l2kit
from l2kit import ConfigError, Layout, LoadStatus, MemoryObj, ObjectKey
from l2kit.testing.servers import RespServer
from l2kit_redis import lookups
from l2kit_redis.connection import Connection
from l2kit_redis.stream import Patience, Stream

SMALL = 1000
LARGE = 5000  # in stripes of 1 KiB

service = [pytest.mark.anyio, pytest.mark.service]


def key(number: int = 0) -> ObjectKey:
    return ObjectKey("leases", number.to_bytes(8, "little") * 2)


def blank(nbytes: int) -> MemoryObj:
    return MemoryObj.wrap(bytearray(nbytes), Layout.raw(nbytes))


def open_redis(url: str, **options: object) -> l2kit.L2Adapter[l2kit.AdapterConfig]:
    return l2kit.open_adapter(url, **{"stripe_bytes": 1024, **options})


async def store(adapter: l2kit.L2Adapter[l2kit.AdapterConfig], nbytes: int, number: int = 0) -> None:
    [outcome] = await adapter.submit_store_task([key(number)], [MemoryObj.wrap(bytes(nbytes), Layout.raw(nbytes))])
    assert outcome.present


def lives_ms(server: RespServer, prefix: str) -> tuple[int, list[int]]:
    """What is left to the head (or value) of the one object, and to each of its stripes."""
    names = server.command("KEYS", prefix + "*")
    assert isinstance(names, list)
    lives: dict[bool, list[int]] = {True: [], False: []}
    for name in names:
        assert isinstance(name, bytes)
        left_ms = server.command("PTTL", name)
        assert isinstance(left_ms, int)
        lives[b"#" in name].append(left_ms)
    [head] = lives[False]
    return head, lives[True]


def test_options_that_belong_together() -> None:
    with pytest.raises(ConfigError, match="refresh_ttl"):
        l2kit.open_adapter("redis://localhost", refresh_ttl=True)
    plain = l2kit.open_adapter("redis://localhost").config
    assert (plain.lease_ms, plain.refreshes_ttl) == (None, False)
    short = l2kit.open_adapter("redis://localhost", ttl_s=5).config
    assert (short.lease_ms, short.refreshes_ttl) == (5000, True)
    long = l2kit.open_adapter("redis://localhost", ttl_s=86_400, refresh_ttl=False).config
    assert (long.lease_ms, long.refreshes_ttl) == (60_000, False)


class TestOnServer:
    pytestmark = service

    @pytest.mark.parametrize("nbytes", [SMALL, LARGE])
    async def test_stripes_outlive_their_head(
        self, redis_server: RespServer, url: str, prefix: str, nbytes: int
    ) -> None:
        async with open_redis(url, ttl_s=2000) as adapter:
            await store(adapter, nbytes)
            head, stripes = lives_ms(redis_server, prefix)
            assert 1_990_000 < head <= 2_000_000
            assert len(stripes) == (6 if nbytes == LARGE else 0)
            assert all(head + 50_000 < stripe <= 2_060_000 for stripe in stripes)

    @pytest.mark.parametrize("nbytes", [SMALL, LARGE])
    async def test_a_lookup_extends_what_is_about_to_expire(
        self, redis_server: RespServer, url: str, prefix: str, nbytes: int
    ) -> None:
        async with open_redis(url, ttl_s=5, lease_s=500, refresh_ttl=False) as adapter:
            await store(adapter, nbytes)
            assert (await adapter.submit_lookup_and_lock_task([key(), key(1)]))[0].hit
            head, stripes = lives_ms(redis_server, prefix)
            assert 490_000 < head <= 500_000
            assert all(head < stripe for stripe in stripes)
            trips = adapter.counters["round_trips"]
            assert (await adapter.submit_lookup_and_lock_task([key()]))[0].hit
            assert adapter.counters["round_trips"] == trips + 1, "its stripes were extended a moment ago"

    @pytest.mark.parametrize("nbytes", [SMALL, LARGE])
    async def test_a_lease_shortens_nothing(self, redis_server: RespServer, url: str, prefix: str, nbytes: int) -> None:
        async with open_redis(url) as writer:
            await store(writer, nbytes)
        async with open_redis(url, lease_s=5) as adapter:
            assert (await adapter.submit_lookup_and_lock_task([key()]))[0].hit
            head, stripes = lives_ms(redis_server, prefix)
            assert {head, *stripes} == {-1}, "what lives for ever was given an end"
        redis_server.command("PEXPIRE", prefix + key().encode(), 900_000)
        async with open_redis(url, lease_s=5) as adapter:
            assert (await adapter.submit_lookup_and_lock_task([key()]))[0].hit
            assert lives_ms(redis_server, prefix)[0] > 890_000

    @pytest.mark.parametrize("use", ["lookup", "load", "loads in a group"])
    @pytest.mark.parametrize("nbytes", [SMALL, LARGE])
    async def test_a_hit_starts_the_time_to_live_anew(
        self, redis_server: RespServer, url: str, prefix: str, nbytes: int, use: str
    ) -> None:
        async with open_redis(url, ttl_s=2, lease_s=0.001) as adapter:
            await store(adapter, nbytes)
            redis_server.command("PEXPIRE", prefix + key().encode(), 1000)
            with anyio.fail_after(5):
                while lives_ms(redis_server, prefix)[0] < 1500:
                    if use == "lookup":
                        assert (await adapter.submit_lookup_and_lock_task([key()]))[0].hit
                    else:
                        count = 1 if use == "load" else 20
                        keys = [key(number) for number in range(count)]
                        [outcome, *_] = await adapter.submit_load_task(keys, [blank(nbytes) for _ in keys])
                        assert outcome.loaded
                    await anyio.sleep(0.02)
            head, stripes = lives_ms(redis_server, prefix)
            assert all(head < stripe for stripe in stripes)

    async def test_without_refresh_an_object_expires_with_all_its_parts(
        self, redis_server: RespServer, url: str, prefix: str
    ) -> None:
        async with open_redis(url, ttl_s=0.5, lease_s=0.001, refresh_ttl=False) as adapter:
            await store(adapter, LARGE)
            with anyio.fail_after(5):
                while redis_server.command("EXISTS", prefix + key().encode()):
                    [outcome] = await adapter.submit_load_task([key()], [blank(LARGE)])
                    assert outcome.status in (LoadStatus.LOADED, LoadStatus.MISS)
                    await anyio.sleep(0.02)
            [outcome] = await adapter.submit_load_task([key()], [blank(LARGE)])
            assert outcome.status is LoadStatus.MISS
            names = redis_server.command("KEYS", prefix + "*")
            assert isinstance(names, list)
            lives = [redis_server.command("PTTL", name) for name in names if isinstance(name, bytes)]
            assert all(isinstance(left_ms, int) and 0 < left_ms <= 61_000 for left_ms in lives)


# --- a server that cannot compare times to live (before version 7) ---------------------------------------------------


@pytest.fixture
def old_server() -> Iterator[tuple[Connection, dict[bytes, int], list[list[bytes]]]]:
    """A connection to a server that refuses ``PEXPIRE … GT``; its keys' times to live, and what it was told."""
    ours, theirs = socket.socketpair()
    ours.settimeout(0.02)
    lives: dict[bytes, int] = {}
    told: list[list[bytes]] = []

    def answer(words: list[bytes]) -> bytes:
        match words:
            case [b"STRLEN", name]:
                return b":%d\r\n" % (7 if name in lives else 0)
            case [b"GETRANGE", name, _, _]:
                return b"$7\r\nan-obj.\r\n" if name in lives else b"$0\r\n\r\n"
            case [b"PTTL", name]:
                return b":%d\r\n" % lives.get(name, -2)
            case [b"PEXPIRE", name, ttl_ms]:
                known = name in lives
                lives[name] = int(ttl_ms)
                return b":%d\r\n" % known
        return b"-ERR wrong number of arguments for 'pexpire' command\r\n"

    def serve() -> None:
        with theirs, theirs.makefile("rb") as stream:
            while line := stream.readline():
                words = [stream.read(int(stream.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
                told.append(words)
                theirs.sendall(answer(words))

    thread = threading.Thread(target=serve)
    thread.start()
    patience = Patience(float("inf"), 5.0, lambda: None)
    connection = Connection(Stream(ours, patience))
    connection.begin(patience)
    yield connection, lives, told
    connection.close()
    thread.join()


def test_an_old_server_is_asked_first(
    old_server: tuple[Connection, dict[bytes, int], list[list[bytes]]],
) -> None:
    connection, lives, told = old_server
    names = [b"short", b"long", b"for ever", b"none"]
    lives.update({b"short": 100, b"long": 99_000, b"for ever": -1})
    for _ in range(2):
        found = lookups.find(connection, names, 5000)
        assert [each.size for each in found] == [7, 7, 7, None]
        assert [each.extended for each in found] == [True, False, False, False]
        assert lives == {b"short": 5000, b"long": 99_000, b"for ever": -1}
        lives[b"short"] = 100
    assert not connection.compares_expiry
    assert connection.settled
    assert sum(words[-1] == b"GT" for words in told) == len(names), "it was asked again for what it cannot do"
    assert lookups.extend(connection, names, dict.fromkeys(names, 7000)) == [True, False, False, False]
