"""Fixtures: an object store, a place in it for each test, and a proxy that breaks things."""

from __future__ import annotations

import itertools
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple
from urllib.parse import quote, urlsplit

import obstore
import pytest
from obstore.store import MemoryStore

from l2kit import ObjectKey
from l2kit.testing.leaks import leak_check, task_check, thread_and_file_check
from l2kit.testing.object_stores import ObjectStore, object_store, run_object_store

__all__ = ["leak_check", "object_store", "task_check", "thread_and_file_check"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "service: needs a server")
    config.addinivalue_line("markers", "slow: takes more than a second or two")
    obstore.put(MemoryStore(), "warm", b"up")  # its runtime opens files of its own at first use, and keeps them


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> Iterator[str]:
    """A prefix that no other test has; what is left under it afterwards is removed."""
    prefix = f"l2kit-test-{os.urandom(6).hex()}"
    yield prefix
    if "object_store" in request.fixturenames:
        request.getfixturevalue("object_store").delete_all(f"{prefix}/")


@pytest.fixture
def url(object_store: ObjectStore, prefix: str) -> str:
    return object_store.url(prefix, unsigned_payload="true")


@pytest.fixture
def own_store() -> Iterator[ObjectStore]:
    with run_object_store() as store:
        if not store.manageable:
            pytest.skip("needs a store that may be stopped")
        yield store


class Asked(NamedTuple):
    """One request: its number from 0, its method, its path with the query."""

    number: int
    method: str
    target: str


class Fault(NamedTuple):
    """What is done with an answer.

    Attributes:
        status: answer so, with an error ``code`` in the body and further ``headers``, without asking the store.
        headers: replace those of the answer.
        after: so many bytes of the answer's body are sent.
        reset: then the connection is reset; else it is closed in good order.
        silent: nothing is answered at all.
        flip: a bit of the last byte of the body is turned over.
    """

    status: int | None = None
    code: str = ""
    headers: Mapping[str, str] = {}
    after: int | None = None
    reset: bool = False
    silent: bool = False
    flip: bool = False


class FaultyProxy:
    """Forwards each request to the store, on a connection of its own, and does to the answer what `plan` says.

    Any thread; each connection has one. `asked` only grows.
    """

    def __init__(self, upstream: str, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "", parts.port or 80)
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self.asked: list[Asked] = []
        self.plan: Callable[[Asked], Fault | None] = lambda _: None
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def always(self, method: str, first: int = 0, times: int = 1 << 30, **fault: Any) -> None:
        """Do so to the answers to ``method``, from the one with this number on, so many times."""
        numbers = itertools.count()

        def plan(asked: Asked) -> Fault | None:
            return Fault(**fault) if asked.method == method and first <= next(numbers) < first + times else None

        self.plan = plan

    def once(self, method: str, **fault: Any) -> None:
        """Do so to the answer to the next ``method``."""
        self.always(method, times=1, **fault)

    def count(self, method: str) -> int:
        return sum(asked.method == method for asked in self.asked)

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.add(connection)
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
                with self._lock:
                    self._open.add(connection)
            with suppress(OSError, ValueError):
                while self._forward(connection):
                    pass
        except ssl.SSLError:
            pass  # the other side does not trust us
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _forward(self, connection: socket.socket) -> bool:
        with connection.makefile("rb") as stream:
            lines, length = _head(stream)
            body = stream.read(length)
        if not lines or len(body) < length:
            return False
        method, target, _ = lines[0].split(" ", 2)
        with self._lock:
            asked = Asked(len(self.asked), method, target)
            self.asked.append(asked)
        fault = self.plan(asked) or Fault()
        if fault.silent:
            self._closed.wait()
            return False
        if fault.status is not None:
            text = f"<Error><Code>{fault.code}</Code></Error>".encode() if method != "HEAD" else b""
            headers = {"content-length": str(len(text)), **fault.headers}
            connection.sendall(_framed(f"HTTP/1.1 {fault.status} X", headers) + text)
            return True
        with socket.create_connection(self._upstream) as store, store.makefile("rb") as answers:
            with self._lock:
                self._open.add(store)
            try:
                store.sendall("\r\n".join([*lines, "", ""]).encode() + body)
                return self._answer(connection, answers, fault, method)
            finally:
                with self._lock:
                    self._open.discard(store)

    def _answer(self, connection: socket.socket, answers: IO[bytes], fault: Fault, method: str) -> bool:
        lines, length = _head(answers)
        content = answers.read(length) if method != "HEAD" else b""
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        if fault.flip and content:
            content = content[:-1] + bytes([content[-1] ^ 1])
        sent = content if fault.after is None else content[: fault.after]
        connection.sendall(_framed(lines[0], {**headers, **fault.headers}) + sent)
        if fault.after is None:
            return True
        if fault.reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return False


@contextmanager
def faulty_proxy(upstream: str, tls: ssl.SSLContext | None = None) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(upstream, tls)
    try:
        yield proxy
    finally:
        proxy.close()


def _head(stream: IO[bytes]) -> tuple[list[str], int]:
    """The lines of a head, and how many bytes of body follow."""
    lines: list[str] = []
    length = 0
    while line := stream.readline().rstrip(b"\r\n").decode("latin-1"):
        lines.append(line)
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            length = int(value)
    return lines, length


def _framed(first: str, headers: Mapping[str, str]) -> bytes:
    return "\r\n".join([first, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode("latin-1")


class Place:
    """A prefix of the store, behind a proxy."""

    def __init__(self, store: ObjectStore, prefix: str, proxy: FaultyProxy) -> None:
        self.store = store
        self.prefix = prefix
        self.proxy = proxy

    def name(self, key: ObjectKey) -> str:
        """Where the adapter keeps it, written down a second time."""
        return f"{self.prefix}/{'.'.join(key.encode().rsplit('/', 1))}"

    def url(self, **options: str) -> str:
        settings = {
            "endpoint": self.proxy.endpoint,
            "access_key_id": self.store.access_key_id,
            "secret_access_key": self.store.secret_access_key,
            "unsigned_payload": "true",
            **options,
        }
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in settings.items() if value)
        return f"s3://{self.store.bucket}/{self.prefix}?{query}"


@pytest.fixture
def place(object_store: ObjectStore, prefix: str, thread_and_file_check: None) -> Iterator[Place]:
    with faulty_proxy(object_store.endpoint) as proxy:
        yield Place(object_store, prefix, proxy)


@pytest.fixture
def behind_tls(object_store: ObjectStore, prefix: str, thread_and_file_check: None) -> Callable[[ssl.SSLContext], Any]:
    """Makes a `Place` whose proxy speaks TLS; to be entered."""

    @contextmanager
    def make(context: ssl.SSLContext) -> Iterator[Place]:
        with faulty_proxy(object_store.endpoint, context) as proxy:
            yield Place(object_store, prefix, proxy)

    return make
