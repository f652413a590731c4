"""The memory pool behind ``nixl+ucx://``: a process that owns registered memory and says what lies where in it.

``l2kit nixl-pool --listen 127.0.0.1:7600 --max-bytes 8GiB``. Clients read and write the memory themselves,
through NIXL; this process only answers short messages (`pool_protocol`) from its index (`pool_index`).
"""

from __future__ import annotations

import argparse
import hmac
import os
import secrets
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import lru_cache, partial
from ipaddress import ip_address
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import anyio.abc
import anyio.from_thread
import anyio.to_thread
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from l2kit.config import parse_size_bytes
from l2kit.errors import ConfigError, L2Error, first_error
from l2kit.keys import ObjectKey
from l2kit_nixl import pool_protocol as say
from l2kit_nixl.agent import TransferAgent
from l2kit_nixl.pool_index import Connection, PoolIndex

_HELLO_TIMEOUT_S: Final = 5.0
_QUARANTINE_TURN_S: Final = 0.25
#: How long NIXL waits for a turn: to greet a new client, and while one may be moving bytes over TCP.
_IDLE_TURN_S: Final = 5e-3
_MOVING_TURN_S: Final = 200e-6
_MAX_CONNECTIONS: Final = 1024
_KNOWN_KEYS: Final = 1 << 15
_PAGE_BYTES: Final = 4096
_PREFAULT_BYTES: Final = 256 << 20
_SECRET_VARIABLE: Final = "L2KIT_NIXL_POOL_TOKEN"  # noqa: S105 - the name of it
_PEER: Final = struct.Struct("3i")


class Address(NamedTuple):
    """Where a pool listens: ``host`` and ``port`` for TCP, or ``path`` for a Unix socket."""

    host: str | None
    port: int
    path: str | None

    @classmethod
    def parse(cls, text: str) -> Address:
        """``HOST:PORT`` or an absolute path.

        Raises:
            ConfigError: neither.
        """
        if text.startswith("/"):
            return cls(None, 0, text)
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdigit() or int(port) > 65_535:
            raise ConfigError(f"listen: {text!r} is neither HOST:PORT nor the absolute path of a Unix socket")
        return cls(host.strip("[]"), int(port), None)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ip_address(self.host or "").is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


class Pool:
    """One pool: memory, its index, the agent that it is registered with, and the clients that talk to it."""

    def __init__(self, index: PoolIndex, agent: TransferAgent, token: str | None) -> None:
        """Serve ``index``, whose memory is registered with ``agent``. With a ``token`` every client must know it."""
        self._index: Final = index
        self._agent: Final = agent
        self._metadata: Final = agent.metadata()
        self._moving: Final = threading.Event()
        self._token: Final = token
        self._connections = 0

    async def serve(self, listener: anyio.abc.Listener[SocketStream]) -> None:
        """Answer clients until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, self._progress)
            group.start_soon(self._tend_quarantine)
            await listener.serve(self._serve_one, group)

    def _progress(self) -> None:
        """In a thread: lend NIXL time, much while clients may be moving bytes, and little otherwise."""
        while True:
            anyio.from_thread.check_cancelled()
            self._agent.progress()
            if self._moving.wait(_IDLE_TURN_S):
                time.sleep(_MOVING_TURN_S)

    async def _tend_quarantine(self) -> None:
        while True:
            await anyio.sleep(_QUARANTINE_TURN_S)
            self._index.release_quarantined()

    async def _serve_one(self, stream: SocketStream) -> None:
        self._connections += 1
        try:
            async with stream, AsyncExitStack() as stack:
                received = BufferedByteReceiveStream(stream)
                is_gone = _watch_peer(stream, stack)
                with anyio.fail_after(_HELLO_TIMEOUT_S):
                    session = await self._greet(stream, received)
                if session is None:
                    return
                connection = self._index.connect(session, is_gone)
                try:
                    await self._converse(connection, stream, received)
                finally:
                    self._index.disconnect(connection)
                    self._note_moving()
        except (
            OSError,
            TimeoutError,
            anyio.EndOfStream,
            anyio.IncompleteRead,
            anyio.BrokenResourceError,
            anyio.ClosedResourceError,
        ):
            pass  # the client went away, which it may at any time
        finally:
            self._connections -= 1

    async def _greet(self, stream: SocketStream, received: BufferedByteReceiveStream) -> bytes | None:
        """The session that an acceptable client names; None when it was refused."""
        nonce = secrets.token_bytes(16)
        await stream.send(say.pack(say.Challenge(say.VERSION, nonce)))
        hello = await self._receive(stream, received)
        if hello is None:
            return None
        if not isinstance(hello, say.Hello):
            reason = "say Hello first"
        elif hello.version != say.VERSION:
            reason = f"this pool speaks version {say.VERSION} of the protocol, the client {hello.version}"
        elif self._token is not None and not hmac.compare_digest(
            say.proof(self._token, nonce, hello.session), hello.proof
        ):
            reason = "token: it is missing or wrong"
        elif self._connections > _MAX_CONNECTIONS:
            reason = f"there are {_MAX_CONNECTIONS} connections already"
        else:
            await stream.send(say.pack(say.Welcome(self._metadata, len(self._index.memory))))
            return hello.session
        await stream.send(say.pack(say.Refused(reason)))
        return None

    async def _converse(
        self, connection: Connection, stream: SocketStream, received: BufferedByteReceiveStream
    ) -> None:
        while True:
            request = await self._receive(stream, received)
            if request is None:
                return
            try:
                answer = self._answer(connection, request)
                self._note_moving()
            except (ConfigError, ValueError) as error:  # a key that is none; lists of different lengths
                answer = say.Refused(str(error))
            await stream.send(say.pack(answer))
            if isinstance(answer, say.Refused):
                return

    def _note_moving(self) -> None:
        if self._index.is_moving:
            self._moving.set()
        else:
            self._moving.clear()

    async def _receive(self, stream: SocketStream, received: BufferedByteReceiveStream) -> say.Request | None:
        """The next request; None when it was none and the client was told so."""
        try:
            nbytes = say.body_bytes(await received.receive_exactly(say.LENGTH.size))
            return say.request(await received.receive_exactly(nbytes))
        except ValueError as error:
            await stream.send(say.pack(say.Refused(f"this is no request: {error}")))
            return None

    def _answer(self, connection: Connection, request: say.Request) -> say.Answer:
        index = self._index
        match request:
            case say.Reserve(keys, sizes):
                wanted = list(zip(_parsed(keys), sizes, strict=True))
                return say.Places([index.reserve(connection, key, size) for key, size in wanted])
            case say.Commit(generations):
                return say.Flags([index.commit(connection, one) for one in generations])
            case say.Abandon(generations):
                return say.Flags([index.abandon(connection, one) for one in generations])
            case say.Lease(keys):
                return say.Places([index.lease(connection, key) for key in _parsed(keys)])
            case say.Return(generations):
                return say.Flags([index.give_back(connection, one) for one in generations])
            case say.Look(keys, hold):
                return say.Found([index.look(connection, key, hold=hold) for key in _parsed(keys)])
            case say.LetGo(keys):
                return say.Flags([index.let_go(connection, key) for key in _parsed(keys)])
            case say.Delete(keys):
                return say.Flags([index.delete(key) for key in _parsed(keys)])
            case say.List(after):
                return index.page(after)
            case say.Report():
                return index.holding()
            case _:
                return say.Refused("Hello is said once")


@lru_cache(maxsize=_KNOWN_KEYS)
def _key(text: str) -> ObjectKey:
    """A key, parsed once for all that is asked about it."""
    return ObjectKey.parse(text)


def _parsed(keys: Sequence[str]) -> list[ObjectKey]:
    return [_key(key) for key in keys]


def _watch_peer(stream: SocketStream, stack: AsyncExitStack) -> Callable[[], bool]:
    """What says later whether the client's process is gone; for other machines nobody can, and it says yes."""
    raw = stream.extra(SocketAttribute.raw_socket)
    if raw.family != socket.AF_UNIX or not hasattr(os, "pidfd_open"):
        return lambda: True
    try:
        pid, _, _ = _PEER.unpack(raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        peer = _Process(os.pidfd_open(pid))
    except OSError:
        return lambda: True
    return peer.is_gone


class _Process:
    """Another process of this machine, by a descriptor that the kernel never gives to its successor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def is_gone(self) -> bool:
        if self._fd < 0:
            return True
        if select.select([self._fd], [], [], 0)[0]:
            self.close()
            return True
        return False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


async def run(
    address: Address, max_bytes: int, token: str | None, grace_s: float, ready: Callable[[str], None]
) -> None:
    """Serve a pool until cancelled; ``ready`` hears where.

    Raises:
        ConfigError: an address that others can reach, without a token; more memory than there is.
        L2Error: NIXL or its plugin UCX cannot be used here.
        OSError: the address cannot be listened at.
    """
    if not address.is_local and not token:
        raise ConfigError(
            f"listen: {address} can be reached by others; set {_SECRET_VARIABLE} to a secret, here and there"
        )
    if address.is_local:  # nor shall UCX listen where others can reach it
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    index = PoolIndex(max_bytes, grace_s=grace_s)
    agent: TransferAgent | None = None
    try:
        agent = await anyio.to_thread.run_sync(partial(_register, index))
        listener: anyio.abc.Listener[SocketStream]
        if address.path is not None:
            listener = await anyio.create_unix_listener(address.path, mode=0o600)
        else:
            listener = await anyio.create_tcp_listener(local_host=address.host, local_port=address.port)
        async with listener:
            where = address
            if address.path is None:
                where = address._replace(port=listener.extra(SocketAttribute.local_port))
            ready(str(where))
            await Pool(index, agent, token).serve(listener)
    finally:
        if agent is not None:
            agent.close()
        index.close()
        if address.path is not None:
            Path(address.path).unlink(missing_ok=True)  # noqa: ASYNC240 - the pool has ended


def _register(index: PoolIndex) -> TransferAgent:
    """Touch every page, so that no client waits for the kernel to find one, and register all of it."""
    view = memoryview(index.memory)
    for start in range(0, len(view), _PREFAULT_BYTES):
        part = view[start : start + _PREFAULT_BYTES]
        part[::_PAGE_BYTES] = bytes(len(range(0, len(part), _PAGE_BYTES)))
    agent = TransferAgent("UCX", {})
    agent.regions.keep(index.memory)
    return agent


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 after a signal to end, 1 when the pool fails, 2 when it is asked for something impossible."""
    parser = argparse.ArgumentParser(
        prog="l2kit nixl-pool",
        description="Serve a pool of memory to nixl+ucx://. Objects are gone when it ends.",
        epilog=f"A pool that other machines can reach wants a token in the environment variable {_SECRET_VARIABLE}.",
    )
    parser.add_argument("--listen", metavar="ADDRESS", default="127.0.0.1:7600", help="HOST:PORT, or a socket's path")
    parser.add_argument("--max-bytes", metavar="SIZE", required=True, help="memory for objects, e.g. 8GiB")
    parser.add_argument(
        "--grace-s",
        metavar="SECONDS",
        type=float,
        default=30.0,
        help="how long memory that a lost client was writing to is not used again (default 30)",
    )
    options = parser.parse_args(arguments)
    try:
        address = Address.parse(options.listen)
        if not options.grace_s >= 0:
            raise ConfigError(f"grace-s: {options.grace_s} is no number of seconds")
        max_bytes = parse_size_bytes(options.max_bytes, where="max-bytes")
        token = os.environ.get(_SECRET_VARIABLE) or None

        def ready(where: str) -> None:
            print(f"listening on {where}", flush=True)  # noqa: T201 - the command's one line of output

        anyio.run(_until_signal, partial(run, address, max_bytes, token, options.grace_s, ready))
    except ConfigError as error:
        return _complain(error, 2)
    except (L2Error, OSError) as error:
        return _complain(error, 1)
    return 0


async def _until_signal(work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work`` until it ends, or until the process is told to."""
    failure: Exception | None = None
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as group:

            async def serve() -> None:
                nonlocal failure
                try:
                    await work()
                except Exception as error:
                    failure = first_error(error)
                group.cancel_scope.cancel()

            group.start_soon(serve)
            async for _ in signals:
                group.cancel_scope.cancel()
                break
    if failure is not None:
        raise failure


def _complain(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main())
