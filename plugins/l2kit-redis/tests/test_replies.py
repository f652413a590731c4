"""A server that answers what a test wants: each error has its meaning, a lie costs only the connection."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

import l2kit
from l2kit import Layout, LoadStatus, MemoryObj, ObjectKey
from l2kit.errors import (
    AuthError,
    BackendBusyError,
    BackendError,
    BackendTimeoutError,
    CapacityError,
    TransientBackendError,
)

pytestmark = pytest.mark.anyio

SECRET = "xyzzy-open-sesame"
KEY = ObjectKey("replies", bytes(16))


class Script:
    """A server that answers each command with what ``replies`` has for it; None means that it hangs up."""

    def __init__(self) -> None:
        self.replies: dict[bytes, bytes | None] = {b"PING": b"+PONG\r\n", b"AUTH": b"+OK\r\n"}
        self.greeting: bytes | None = None
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._clients: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def url(self, credentials: str = "") -> str:
        return f"redis://{credentials}127.0.0.1:{self.port}"

    def close(self) -> None:
        for each in (self._listener, *self._clients):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                self._clients.append(client)
                thread = threading.Thread(target=self._serve, args=(client,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), client.makefile("rb") as stream:
            if self.greeting is not None:
                client.sendall(self.greeting)
            while line := stream.readline():
                words = []
                for _ in range(int(line[1:])):
                    length = int(stream.readline()[1:])
                    words.append(stream.read(length + 2)[:-2])
                reply = self.replies.get(words[0], b"-ERR unknown command\r\n")
                if reply is None:
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(reply)


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    yield script
    script.close()


def source(nbytes: int = 1000) -> MemoryObj:
    return MemoryObj.wrap(b"x" * nbytes, Layout.raw(nbytes))


def blank(nbytes: int = 1000) -> MemoryObj:
    return MemoryObj.wrap(bytearray(nbytes), Layout.raw(nbytes))


async def opening_error(url: str, **options: Any) -> BaseException:
    with pytest.raises(l2kit.L2Error) as caught:
        async with l2kit.open_adapter(url, **options):
            pass
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return caught.value


ERRORS = [
    ("-NOAUTH Authentication required.", AuthError, "password"),
    ("-NOPERM this user has no permissions to run the 'get' command", AuthError, "'get'"),
    ("-WRONGPASS invalid username-password pair or user is disabled.", AuthError, "password"),
    ("-DENIED Redis is running in protected mode because ...", AuthError, "protected"),
    ("-OOM command not allowed when used memory > 'maxmemory'.", CapacityError, "maxmemory"),
    ("-LOADING Redis is loading the dataset in memory", TransientBackendError, "loading"),
    ("-MASTERDOWN Link with MASTER is down", TransientBackendError, "primary"),
    ("-NOREPLICAS Not enough good replicas to write.", TransientBackendError, "replicas"),
    ("-BUSY Redis is busy running a script.", BackendBusyError, "script"),
    ("-ERR max number of clients reached", BackendBusyError, "maxclients"),
    ("-READONLY You can't write against a read only replica.", BackendError, "replica"),
    ("-MISCONF Redis is configured to save RDB snapshots", BackendError, "MISCONF"),
    ("-MOVED 3999 127.0.0.1:6381", BackendError, "redis+cluster://"),
    ("-ASK 3999 127.0.0.1:6381", BackendError, "redis+cluster://"),
    ("-CLUSTERDOWN The cluster is down", TransientBackendError, "CLUSTER INFO"),
    ("-TRYAGAIN Multiple keys request during rehashing of slot", TransientBackendError, "try again"),
    ("-ERR Protocol error: invalid bulk length", CapacityError, "proto-max-bulk-len"),
    ("-ERR something new", BackendError, "something new"),
    ("-", BackendError, ""),
]


@pytest.mark.parametrize(
    ("reply", "kind", "word"), ERRORS, ids=[reply.split()[0] + str(n) for n, (reply, *_) in enumerate(ERRORS)]
)
async def test_each_error_reply_has_its_meaning(script: Script, reply: str, kind: type, word: str) -> None:
    async with l2kit.open_adapter(script.url()) as adapter:
        for command in (b"GET", b"SET", b"STRLEN", b"GETRANGE", b"UNLINK", b"INFO", b"SCAN", b"MULTI", b"EXEC"):
            script.replies[command] = reply.encode() + b"\r\n"
        [loaded] = await adapter.submit_load_task([KEY], [blank()])
        [stored] = await adapter.submit_store_task([KEY], [source()])
        [deleted] = await adapter.submit_delete_task([KEY])
        errors: list[BaseException | None] = [loaded.error, stored.error, deleted.error]
        for call in (
            lambda: adapter.submit_lookup_and_lock_task([KEY, KEY]),
            adapter.usage,
            lambda: anext(adapter.iter_keys()),
        ):
            with pytest.raises(kind) as caught:
                await call()
            errors.append(caught.value)
        for error in errors:
            assert type(error) is kind
            assert word in str(error)
            assert f"127.0.0.1:{script.port}" in str(error)
        script.replies[b"GET"] = b"$-1\r\n"
        [loaded] = await adapter.submit_load_task([KEY], [blank()])
        assert loaded.status is LoadStatus.MISS


LIES: list[tuple[str, bytes]] = [
    ("another type", b":7\r\n"),
    ("a status", b"+OK\r\n"),
    ("a list", b"*1\r\n$1\r\nx\r\n"),
    ("a negative length", b"$-7\r\n"),
    ("a length that is no number", b"$1_0\r\n"),
    ("an endless line", b"+" + b"x" * 100_000),
    ("no protocol", b"HTTP/1.1 200 OK\r\n\r\n"),
    ("a value without its end", b"$5\r\nhelloXX"),
    ("two answers", b"$-1\r\n$-1\r\n"),
    ("an immense value", b"$1099511627776\r\n" + bytes(100_000)),
]


@pytest.mark.parametrize("lie", [lie for _, lie in LIES], ids=[name for name, _ in LIES])
async def test_a_lie_costs_the_connection_and_no_more(
    script: Script, lie: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with l2kit.open_adapter(script.url()) as adapter:
        script.replies[b"GET"] = lie
        script.replies[b"UNLINK"] = b":1\r\n"
        [outcome] = await adapter.submit_load_task([KEY], [blank()])
        assert not outcome.loaded
        assert not isinstance(outcome.error, BackendTimeoutError), "it must not wait for what will not come"
        script.replies[b"GET"] = b"$-1\r\n"
        [outcome] = await adapter.submit_load_task([KEY], [blank()])
        assert outcome.status is LoadStatus.MISS
        assert script.connections == 2
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("reply", [b"+OK\r\n", b"$1\r\nx\r\n", b":1\r\n+OK\r\n", b":-5\r\n"])
async def test_a_lookup_that_is_lied_to_is_an_error_and_no_hit(script: Script, reply: bytes) -> None:
    async with l2kit.open_adapter(script.url()) as adapter:
        script.replies[b"STRLEN"] = reply
        task = adapter.submit_lookup_and_lock_task([KEY, ObjectKey("replies", b"1" * 16)])
        if reply.startswith(b":1"):
            with contextlib.suppress(BackendError):
                assert (await task)[0].size == 1
        else:
            with pytest.raises(BackendError):
                await task
        assert adapter.held_leases == 0 or reply.startswith(b":1")


@pytest.mark.parametrize(
    ("greeting", "ping"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b""),
        (b"SSH-2.0-OpenSSH_9.2\r\n", b""),
        (b"220 mail.example ESMTP\r\n", b""),
        (b"\x15\x03\x01\x00\x02\x02\x46", b"\r\n"),
        (b"", b":1\r\n"),
        (b"", b"+HELLO\r\n"),
    ],
    ids=["http", "ssh", "smtp", "tls", "an integer", "another word"],
)
async def test_what_is_no_redis_is_an_error_at_start_up(script: Script, greeting: bytes, ping: bytes) -> None:
    script.greeting = greeting
    script.replies[b"PING"] = ping
    error = await opening_error(script.url(f":{SECRET}@") if greeting else script.url())
    assert isinstance(error, BackendError)
    assert "not the Redis protocol" in str(error)
    assert "host and port" in str(error)


async def test_what_says_nothing_is_an_error_at_start_up(script: Script) -> None:
    script.replies[b"PING"] = b""
    started = time.monotonic()
    error = await opening_error(script.url(), socket_timeout_s=0.2)
    assert isinstance(error, BackendTimeoutError)
    assert time.monotonic() - started < 1


async def test_what_hangs_up_is_an_error_at_start_up(script: Script) -> None:
    script.replies[b"PING"] = None
    assert type(await opening_error(script.url())) is TransientBackendError


@pytest.mark.parametrize(
    "reply",
    [
        f"-ERR unknown command 'AUTH', with args beginning with: '{SECRET}'",
        f"-{SECRET} is wrong",
        f"-{SECRET.upper()} is wrong",
        f"+{SECRET}",
        f"${len(SECRET)}\r\n{SECRET}",
    ],
)
async def test_a_server_that_echoes_the_password_does_not_make_us_show_it(
    script: Script, reply: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    script.replies[b"AUTH"] = reply.encode() + b"\r\n"
    script.replies[b"PING"] = b"-ERR no\r\n"
    error = await opening_error(script.url(f"ann:{SECRET}@"))
    told = "".join(traceback.format_exception(error)) + caplog.text
    assert SECRET.lower() not in told.lower()


async def test_a_kept_connection_that_breaks_is_replaced_for_what_can_be_repeated(script: Script) -> None:
    """A delete is not repeated: its second answer would be that there was nothing."""
    async with l2kit.open_adapter(script.url()) as adapter:
        script.replies.update({b"GET": None, b"MULTI": None})
        [outcome] = await adapter.submit_load_task([KEY], [blank()])
        assert type(outcome.error) is TransientBackendError
        assert script.connections == 2, "the kept one and one more"
        script.replies[b"GET"] = b"$-1\r\n"
        [outcome] = await adapter.submit_load_task([KEY], [blank()])
        assert outcome.status is LoadStatus.MISS
        [deleted] = await adapter.submit_delete_task([KEY])
        assert type(deleted.error) is TransientBackendError
        assert script.connections == 3


async def test_connections_are_bounded_and_reused(script: Script) -> None:
    script.replies[b"GET"] = b"$-1\r\n"
    async with l2kit.open_adapter(script.url(), max_concurrency=3) as adapter:
        tasks = [adapter.submit_load_task([KEY] * 20, [blank() for _ in range(20)]) for _ in range(5)]
        for task in tasks:
            assert {outcome.status for outcome in await task} == {LoadStatus.MISS}
    assert script.connections <= 3


def test_the_script_is_a_server() -> None:
    """The fixture speaks the protocol at all: else every test above would pass for the wrong reason."""
    script = Script()
    try:
        with socket.create_connection(("127.0.0.1", script.port)) as client:
            client.sendall(b"*1\r\n$4\r\nPING\r\n")
            assert client.recv(100) == b"+PONG\r\n"
    finally:
        script.close()
