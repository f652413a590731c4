"""``redis://`` and ``valkey://`` beside a bare blocking socket that sends and receives the same bytes."""

from __future__ import annotations

import socket
from functools import partial

import anyio
import anyio.to_thread

import l2kit
from bench.objects import Batch, compare_adapter
from bench.pairs import Result
from l2kit.testing.servers import Flavor, RespServer, find_binary, run_server


async def measure(*, quick: bool) -> list[Result]:
    """Compare on every server that this machine has a binary for, for objects from 64 KiB to 4 MiB."""
    results: list[Result] = []
    for flavor in ("redis", "valkey"):
        if find_binary(flavor) is None:
            print(f"# {flavor}: no server binary here")
            continue
        with run_server(flavor) as server:
            results += await _measure_on(flavor, server, quick=quick)
    return results


async def _measure_on(flavor: Flavor, server: RespServer, *, quick: bool) -> list[Result]:
    results: list[Result] = []
    bare = _BareClient(server)
    try:
        async with l2kit.open_adapter(server.url(flavor)) as adapter:
            for count, nbytes in [(64, 64 << 10), (32, 1 << 20), (16, 4 << 20)]:
                batch = Batch(count, nbytes)
                store = partial(anyio.to_thread.run_sync, partial(bare.store, batch))
                load = partial(anyio.to_thread.run_sync, partial(bare.load, batch))
                results += await compare_adapter(
                    f"{flavor}://", adapter, batch, store, load, peer_name="bare socket", rounds=5 if quick else 15
                )
    finally:
        bare.close()
    return results


class _BareClient:
    """One blocking connection, no checks, no copies: what the server and the loopback can do for one client."""

    def __init__(self, server: RespServer) -> None:
        self._socket = socket.create_connection((server.host, server.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if server.password:
            self._command(b"AUTH", server.password.encode())

    def close(self) -> None:
        self._socket.close()

    def store(self, batch: Batch) -> None:
        for index, source in enumerate(batch.sources):
            head = _words(b"SET", b"bare:%d" % index) + b"$%d\r\n" % batch.nbytes
            self._socket.sendall(head.replace(b"*2", b"*3", 1))
            for segment in source.segments:
                self._socket.sendall(segment)
            self._socket.sendall(b"\r\n")
            assert self._line() == b"+OK"

    def load(self, batch: Batch) -> None:
        for index, target in enumerate(batch.targets):
            self._socket.sendall(_words(b"GET", b"bare:%d" % index))
            assert self._line() == b"$%d" % batch.nbytes
            for segment in target.segments:
                self._fill(segment)
            self._fill(memoryview(bytearray(2)))

    def _command(self, *words: bytes) -> None:
        self._socket.sendall(_words(*words))
        assert self._line() == b"+OK"

    def _line(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\r\n"):
            part = self._socket.recv(1)
            assert part, "the server closed the connection"
            line += part
        return bytes(line[:-2])

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            received = self._socket.recv_into(view[done:])
            assert received, "the server closed the connection"
            done += received


def _words(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
