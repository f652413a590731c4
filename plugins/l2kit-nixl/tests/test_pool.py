"""A memory pool and its clients as processes: what is left when one of them ends, stops or lies."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import anyio
import pytest

import l2kit
from l2kit import Layout, MemoryObj, ObjectKey
from l2kit.errors import AuthError, BackendError, ConfigError, TransientBackendError
from l2kit.outcomes import StoreStatus
from l2kit_nixl import pool_protocol as say
from l2kit_nixl.agent import Piece, TransferAgent
from l2kit_nixl.pool import Address, main
from l2kit_nixl.pool_client import PoolLink, PoolTarget
from l2kit_nixl.testing import PoolProcess, running_pool

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

_NBYTES = 1 << 20
_TOKEN = "a token of this test"

#: Reserves an object, writes half of it, says so, and does as it is told.
_HALF_WRITER = """
import os, sys
from l2kit_nixl import pool_protocol as say
from l2kit_nixl.pool_client import PoolLink, PoolTarget
where, key, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
host, _, port = where.rpartition(":")
path = where if where.startswith("/") else None
link = PoolLink(PoolTarget("child", host, int(port or 0) if path is None else 0, path, None, os.urandom(16), 5.0, 5.0))
[place] = link.ask(say.Reserve([key], [nbytes]), say.Places).places
link._move("WRITE", [__import__("l2kit_nixl.agent").agent.Piece(memoryview(os.urandom(nbytes // 2)), place.address, 0)],
           lambda: None)
print(place.generation, flush=True)
for line in sys.stdin:
    if line.strip() == "hang up":
        link._socket.close()
        print("hung up", flush=True)
"""


def _go_on() -> None:
    """Nobody cancels."""


def _target(pool: PoolProcess, token: str | None = None) -> PoolTarget:
    if pool.where.startswith("/"):
        return PoolTarget("test", "", 0, pool.where, token, os.urandom(16), 5.0, 5.0)
    host, _, port = pool.where.rpartition(":")
    return PoolTarget("test", host, int(port), None, token, os.urandom(16), 5.0, 5.0)


@contextmanager
def _half_writer(pool: PoolProcess, key: ObjectKey) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A client in the middle of a write, and the generation that it was given."""
    command = [sys.executable, "-c", _HALF_WRITER, pool.where, key.encode(), str(_NBYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child, int(child.stdout.readline())
        finally:
            child.kill()


def _holding(link: PoolLink) -> say.Holding:
    return link.ask(say.Report(), say.Holding)


async def _until(true: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not true():  # noqa: ASYNC110 - another process sets no event
            await anyio.sleep(0.01)


async def _loaded(adapter: l2kit.L2Adapter[l2kit.AdapterConfig], key: ObjectKey, nbytes: int) -> bytes | None:
    target = MemoryObj.allocate(Layout.raw(nbytes))
    [outcome] = await adapter.submit_load_task([key], [target])
    return target.tobytes() if outcome.loaded else None


@pytest.fixture(scope="module")
def unix_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcess]:
    """A pool that knows its clients' processes, and waits for nothing but their end."""
    path = tmp_path_factory.mktemp("pool") / "pool.sock"
    with running_pool("--grace-s", "0", listen=str(path)) as running:
        yield running
    assert not path.exists()


async def test_a_client_killed_in_mid_write_leaves_nothing_visible(unix_pool: PoolProcess) -> None:
    key, data = ObjectKey("killed", os.urandom(16)), os.urandom(_NBYTES - 8192)
    with closing(PoolLink(_target(unix_pool))) as link:

        def nothing_visible() -> bool:
            return link.ask(say.Look([key.encode()], hold=False), say.Found).sizes == [None]

        def commits(generation: int) -> list[bool]:
            return link.ask(say.Commit([generation]), say.Flags).flags

        with _half_writer(unix_pool, key) as (child, generation):
            assert _holding(link).writing == 1
            assert nothing_visible()
            assert commits(generation) == [False], "a generation is good for its own connection only"
            child.kill()
            await _until(lambda: _holding(link).writing == 0)
        assert nothing_visible()
        assert commits(generation) == [False], "a stale generation is refused"
        async with l2kit.open_adapter(unix_pool.url) as adapter:  # the key is free for others at once
            assert await _loaded(adapter, key, len(data)) is None
            [stored] = await adapter.submit_store_task([key], [MemoryObj.wrap(data, Layout.raw(len(data)))])
            assert stored.status is StoreStatus.STORED
            await _until(lambda: _holding(link).quarantined == 0)
            assert await _loaded(adapter, key, len(data)) == data


async def test_memory_is_not_used_while_a_lost_client_lives(unix_pool: PoolProcess) -> None:
    key = ObjectKey("unix", os.urandom(16))
    with closing(PoolLink(_target(unix_pool))) as link:
        with _half_writer(unix_pool, key) as (child, generation):
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("hang up\n")
            child.stdin.flush()
            assert child.stdout.readline() == "hung up\n"
            await _until(lambda: _holding(link).quarantined == 1)
            assert link.ask(say.Abandon([generation]), say.Flags).flags == [False], "nobody else can end it"
            await anyio.sleep(1)  # several turns of the quarantine, which has nothing to announce
            assert _holding(link).quarantined == 1, "it lives, and may still write"
        await _until(lambda: _holding(link).quarantined == 0)


async def test_an_adapter_finds_a_pool_that_was_started_anew() -> None:
    key, data = ObjectKey("anew", os.urandom(16)), os.urandom(_NBYTES)
    with running_pool() as first:
        async with l2kit.open_adapter(first.url) as adapter:
            source = MemoryObj.wrap(data, Layout.raw(_NBYTES))
            assert (await adapter.submit_store_task([key], [source]))[0].status is StoreStatus.STORED
            first.kill()
            [failed] = await adapter.submit_load_task([key], [MemoryObj.allocate(Layout.raw(_NBYTES))])
            assert isinstance(failed.error, TransientBackendError)
            assert "no pool answers" in str(failed.error)
            with running_pool(listen=first.where):
                assert await _loaded(adapter, key, _NBYTES) is None
                assert (await adapter.submit_store_task([key], [source]))[0].status is StoreStatus.STORED
                assert await _loaded(adapter, key, _NBYTES) == data


async def test_a_pool_that_stops_ends_a_load_and_never_writes_to_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Over TCP the pool itself takes part in every transfer; with shared memory the client would not notice.
    monkeypatch.setenv("UCX_TLS", "tcp")
    key, data, nbytes = ObjectKey("stops", os.urandom(16)), os.urandom(8 << 20), 8 << 20
    with running_pool(variables={"UCX_TLS": "tcp"}) as pool, closing(PoolLink(_target(pool))) as link:
        assert link.store([(key, [memoryview(data)])], _go_on) == [StoreStatus.STORED]
        [place] = link.ask(say.Lease([key.encode()]), say.Places).places
        assert isinstance(place, say.Place)
        agent = TransferAgent("UCX", {})
        remote = agent.connect(link.metadata)
        target = bytearray(nbytes)
        pieces = [Piece(memoryview(target), place.address, 0)]
        agent.move("READ", pieces, "DRAM", remote=remote, checkpoint=_go_on, give_up_s=10.0)
        assert target == data
        target[:] = bytes(nbytes)
        pool.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(BackendError):
                agent.move("READ", pieces, "DRAM", remote=remote, checkpoint=_go_on, give_up_s=0.5)
            assert not agent.usable
            left = bytes(target)
        finally:
            pool.process.send_signal(signal.SIGCONT)
        # It runs again now, and answers; unless UCX has ended it meanwhile, as it may when it finds us gone.
        with contextlib.suppress(TransientBackendError):
            assert link.ask(say.Return([place.generation]), say.Flags).flags == [True]
        assert bytes(target) == left
        agent.close()


async def test_a_pool_wants_its_token(pool: PoolProcess) -> None:
    with running_pool(variables={"L2KIT_NIXL_POOL_TOKEN": _TOKEN}) as guarded:
        for wrong in (None, "another"):
            with pytest.raises(AuthError, match="token"):
                PoolLink(_target(guarded, wrong))
        PoolLink(_target(guarded, _TOKEN)).close()
        adapter = l2kit.open_adapter(guarded.url, token="another")
        assert "another" not in repr(adapter.config)
        with pytest.raises(AuthError, match="token") as raised:
            async with adapter:
                pass
        assert "another" not in str(raised.value)
        async with l2kit.open_adapter(guarded.url, token=_TOKEN) as admitted:
            assert (await admitted.probe()).ok
    PoolLink(_target(pool, "a pool that wants none takes any")).close()


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xff",
        struct.pack("<I", 5) + b"hello",
        struct.pack("<I", 0),
        say.pack(say.Report()),
        say.pack(say.Hello(99, bytes(16), b"")),
    ],
    ids=["too long", "no message", "empty", "no hello", "another version"],
)
async def test_a_stranger_is_refused_and_cut_off(pool: PoolProcess, said: bytes) -> None:
    host, _, port = pool.where.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as stranger:
        stranger.sendall(said)
        received = b""
        while some := stranger.recv(1 << 16):
            received += some
    first = say.body_bytes(received[:4])
    assert isinstance(say.answer(received[4 : 4 + first]), say.Challenge)
    assert isinstance(say.answer(received[8 + first :]), say.Refused)


@pytest.mark.parametrize(
    "asked",
    [
        say.Reserve(["a/b"], [1]),
        say.Reserve([ObjectKey("x", bytes(16)).encode()], []),
        say.Reserve([ObjectKey("x", bytes(16)).encode()], [-1]),
        say.Look(["k" * 300], hold=False),
        say.Look([ObjectKey("x", bytes(16)).encode()] * 5000, hold=False),
        say.Hello(say.VERSION, bytes(16), b""),
    ],
    ids=["no key", "lengths", "negative", "long", "many", "twice"],
)
async def test_a_client_that_asks_the_impossible_is_cut_off_and_nobody_else(
    pool: PoolProcess, asked: say.Request
) -> None:
    with closing(PoolLink(_target(pool))) as other:
        link = PoolLink(_target(pool))
        with pytest.raises(BackendError, match="refuses"):
            link.ask(asked, say.Places)
        assert not link.usable
        assert _holding(other).writing == 0


async def test_more_than_fits_is_dropped(pool: PoolProcess) -> None:
    async with l2kit.open_adapter(pool.url) as adapter:
        huge = MemoryObj.allocate(Layout.raw(300 << 20))
        [outcome] = await adapter.submit_store_task([ObjectKey("huge", os.urandom(16))], [huge])
        assert outcome.status is StoreStatus.DROPPED


async def test_nobody_there_is_one_clear_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(TransientBackendError, match=r"start one with 'l2kit nixl-pool'"):
        async with l2kit.open_adapter(f"nixl+ucx://127.0.0.1:{port}"):
            pass


def test_an_address_that_others_can_reach_wants_a_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("L2KIT_NIXL_POOL_TOKEN", raising=False)
    assert main(["--listen", "0.0.0.0:0", "--max-bytes", "1MiB"]) == 2
    assert "L2KIT_NIXL_POOL_TOKEN" in capsys.readouterr().err
    assert main(["--listen", "nowhere", "--max-bytes", "1MiB"]) == 2
    assert main(["--max-bytes", "many"]) == 2
    assert main(["--max-bytes", "1MiB", "--grace-s", "-1"]) == 2


@pytest.mark.parametrize(
    ("text", "local"),
    [("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("/run/pool", True), ("10.0.0.1:1", False)],
)
def test_what_is_local(text: str, local: bool) -> None:
    assert Address.parse(text).is_local is local


@pytest.mark.parametrize("url", ["nixl+ucx://host:1/run/pool", "nixl+ucx://user@host", "nixl+ucx://?path=relative"])
def test_impossible_places_are_refused_at_configuration(url: str) -> None:
    with pytest.raises(ConfigError):
        l2kit.open_adapter(url)
