"""``redis://`` and ``valkey://`` beside LMCache's ``resp`` and ``valkey`` adapters and a bare blocking socket.

All store and load the same bytes on the same server, in the same rounds. Ours makes and verifies checksums; the
others do not. By itself: ``python bench/resp.py [--quick] [--json FILE]``.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from typing import Final

import anyio

import l2kit
from bench.lmcache_peer import LMCachePeer, why_missing
from bench.objects import VERIFIED, Batch, blocking, our_load, our_lookup, our_store
from bench.pairs import Result, Side, Target, compare_all, run_all
from l2kit.testing.servers import Flavor, RespServer, find_binary, run_server

_SHAPES: Final = [(256, 64 << 10), (64, 1 << 20), (16, 4 << 20), (4, 32 << 20)]
_LARGE_BYTES: Final = 32 << 20
_LOOKUP_KEYS: Final = 512
_LOOKUPS: Final = 5
_BARE: Final = "bare socket"


async def measure(*, quick: bool) -> list[Result]:
    """Compare on every server that this machine has a binary for: store and load, 64 KiB to 32 MiB, and lookup."""
    results: list[Result] = []
    for flavor in ("redis", "valkey"):
        if find_binary(flavor) is None:
            print(f"# {flavor}: no server binary here")
            continue
        with run_server(flavor) as server:
            results += await _measure_on(flavor, server, rounds=5 if quick else 15)
    return results


async def _measure_on(flavor: Flavor, server: RespServer, *, rounds: int) -> list[Result]:
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(contextlib.closing(_Server(server)))
        bare = stack.enter_context(contextlib.closing(_BareClient(server)))
        peers = {kind: stack.enter_context(contextlib.closing(peer)) for kind, peer in _peers(server)}
        async with l2kit.open_adapter(server.url(flavor)) as adapter:
            for count, nbytes in _SHAPES:
                batch = Batch(count, nbytes)
                storing = [peer.storing(batch, control.settle) for peer in peers.values()]
                results += await compare_all(
                    f"{flavor}:// store {batch.size}",
                    our_store(adapter, batch, control.settle),
                    [*storing, bare.storing(batch, control)],
                    amount=batch.gigabytes,
                    unit="GB/s",
                    rounds=rounds,
                    targets=_targets(peers, flavor, "store", nbytes),
                    note=VERIFIED,
                    server_cpu_s=control.cpu_s,
                )
                results += await compare_all(
                    f"{flavor}:// load {batch.size}",
                    our_load(adapter, batch),
                    [*(peer.loading(batch) for peer in peers.values()), bare.loading(batch)],
                    amount=batch.gigabytes,
                    unit="GB/s",
                    rounds=rounds,
                    targets=_targets(peers, flavor, "load", nbytes),
                    note=VERIFIED,
                    server_cpu_s=control.cpu_s,
                )
                await _clear(our_store(adapter, batch), *storing, bare.storing(batch, control))
            batch = Batch(_LOOKUP_KEYS, 4096)
            storing = [our_store(adapter, batch), *(peer.storing(batch) for peer in peers.values())]
            for side in (*storing, bare.storing(batch, control)):
                await side.work()
            results += await compare_all(
                f"{flavor}:// lookup of {_LOOKUP_KEYS} keys, all there",
                our_lookup(adapter, batch, _LOOKUPS),
                [*(peer.looking_up(batch, _LOOKUPS) for peer in peers.values()), bare.looking_up(batch)],
                amount=_LOOKUPS,
                unit="lookups/s",
                rounds=rounds,
                targets={
                    peer.name: Target(4.0, 8.0) if kind == "resp" else Target(20.0) for kind, peer in peers.items()
                },
                note="ours learns the sizes as well as the existence",
                server_cpu_s=control.cpu_s,
            )
            await _clear(*storing, bare.storing(batch, control))
    return results


def _peers(server: RespServer) -> Iterator[tuple[str, LMCachePeer]]:
    """LMCache's adapters for this server, with their default (and documented) eight workers."""
    reason = why_missing()
    if reason is not None:
        print(f"# no LMCache: {reason}")
        return
    name, password = server.username or "default", server.password
    login = {"username": name, "password": password} if password else {}
    # LMCache 0.5.6 hands them to the client library of its valkey adapter in the wrong order.
    swapped = {"username": password, "password": name} if password else {}
    address = {"host": server.host, "port": server.port}
    nodes = {"startup_nodes": f"{server.host}:{server.port}"}
    for kind, options in (("resp", address | login), ("valkey", nodes | swapped)):
        try:
            peer = LMCachePeer(kind, **options)
        except (ImportError, RuntimeError) as error:
            print(f"# no LMCache {kind}: {error}")
        else:
            yield kind, peer


def _targets(peers: Mapping[str, LMCachePeer], flavor: Flavor, operation: str, nbytes: int) -> dict[str, Target]:
    resp = Target(1.0, 1.15)
    if nbytes >= _LARGE_BYTES:
        in_redis, in_valkey = (1.4, 1.1) if operation == "store" else (1.7, 1.0)
        resp = Target(in_redis if flavor == "redis" else in_valkey)
    targets = {"resp": resp, "valkey": Target(1.3 if operation == "store" else 1.7)}
    return {_BARE: Target(0.85)} | {peer.name: targets[kind] for kind, peer in peers.items()}


async def _clear(*storing: Side) -> None:
    """Delete what the sides have stored."""
    for side in storing:
        assert side.before is not None
        await side.before()


class _Wire:
    """One blocking connection: commands out, expected replies in."""

    def __init__(self, server: RespServer) -> None:
        self._socket = socket.create_connection((server.host, server.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if server.password:
            login = [server.username.encode()] if server.username else []
            self.send(_words(b"AUTH", *login, server.password.encode()))
            self.expect(b"+OK\r\n")

    def close(self) -> None:
        self._socket.close()

    def send(self, *buffers: bytes | memoryview) -> None:
        sent = self._socket.sendmsg(buffers)
        for buffer in buffers:
            if sent < len(buffer):
                self._socket.sendall(memoryview(buffer)[sent:])
            sent = max(0, sent - len(buffer))

    def expect(self, reply: bytes) -> None:
        received = bytearray(len(reply))
        self.fill(memoryview(received))
        assert received == reply, bytes(received)

    def fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            received = self._socket.recv_into(view[done:])
            assert received, "the server closed the connection"
            done += received

    def info(self, section: bytes) -> dict[str, str]:
        self.send(_words(b"INFO", section))
        with self._socket.makefile("rb") as replies:
            length = int(replies.readline()[1:])
            lines = replies.read(length + 2).decode().splitlines()
        return {name: value for name, _, value in (line.partition(":") for line in lines)}


class _Server(_Wire):
    """What the server says of itself, on a connection that is used for nothing else."""

    def cpu_s(self) -> float:
        """CPU seconds that all its threads have used so far."""
        info = self.info(b"cpu")
        return float(info["used_cpu_sys"]) + float(info["used_cpu_user"])

    async def settle(self) -> None:
        """Wait until nothing is left to be freed in the background."""
        for _ in range(30_000):
            if self.info(b"memory")["lazyfree_pending_objects"] == "0":
                return
            await anyio.sleep(0.001)
        raise AssertionError("the server is still freeing memory")


class _BareClient(_Wire):
    """One connection, no checks, no copies: what the server and the loopback can do for one client."""

    def storing(self, batch: Batch, server: _Server) -> Side:
        """The side that stores ``batch``, absent before."""

        def store() -> None:
            for index, source in enumerate(batch.sources):
                head = _words(b"SET", b"bare:%d" % index).replace(b"*2", b"*3", 1)
                self.send(head + b"$%d\r\n" % batch.nbytes, *source.segments, b"\r\n")
                self.expect(b"+OK\r\n")

        async def delete() -> None:
            for index in range(len(batch.keys)):
                self.send(_words(b"UNLINK", b"bare:%d" % index))
                self.fill(memoryview(bytearray(4)))  # :0 or :1
            await server.settle()

        return Side(name=_BARE, work=blocking(store), before=delete)

    def loading(self, batch: Batch) -> Side:
        """The side that loads ``batch``."""
        head, trailer = b"$%d\r\n" % batch.nbytes, memoryview(bytearray(2))

        def load() -> None:
            for index, target in enumerate(batch.targets):
                self.send(_words(b"GET", b"bare:%d" % index))
                self.expect(head)
                for segment in target.segments:
                    self.fill(segment)
                self.fill(trailer)

        return Side(name=_BARE, work=blocking(load), first=batch.proven(blocking(load)))

    def looking_up(self, batch: Batch) -> Side:
        """The side that looks up all of ``batch`` in one pipeline."""
        request = b"".join(_words(b"STRLEN", b"bare:%d" % index) for index in range(len(batch.keys)))
        replies = b":%d\r\n" % batch.nbytes * len(batch.keys)

        def look_up() -> None:
            for _ in range(_LOOKUPS):
                self.send(request)
                self.expect(replies)

        return Side(name=_BARE, work=blocking(look_up))


def _words(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


if __name__ == "__main__":
    run_all({"resp": measure}, "Redis and Valkey, beside peers.", by_name=False)
