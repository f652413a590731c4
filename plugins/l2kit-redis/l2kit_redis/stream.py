"""Bytes over one socket: scatter/gather without copies, under a deadline and cancellation. Knows no RESP.

Sockets wait in short slices. Between two slices a thread looks whether its host task was cancelled and
whether its time is over, so that no thread outlives its batch by more than one slice and none needs to be
abandoned.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from l2kit_redis.faults import ConnectionLostError

_SLICE_S: Final = 0.02
_SLICE: Final = struct.pack("@ll", 0, int(_SLICE_S * 1e6))  # a timeval
#: A slice has passed: Python's time-out with TLS, the kernel's without.
_NOTHING_MOVED: Final = (TimeoutError, BlockingIOError)
_TLS_ENDS: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
_MAX_SEGMENTS: Final = min(1024, os.sysconf("SC_IOV_MAX"))


class Patience:
    """How long one conversation may take. Belongs to the thread that holds the conversation.

    - It ends at ``deadline``, in `time.monotonic` seconds, or when no byte has moved for ``idle_s``.
    - ``check_cancelled`` raises when the conversation's host task was cancelled.
    """

    __slots__ = ("_check_cancelled", "_deadline", "_idle_s", "_idle_since")

    def __init__(self, deadline: float, idle_s: float, check_cancelled: Callable[[], None]) -> None:
        """Time runs from now."""
        self._deadline = deadline
        self._idle_s = idle_s
        self._idle_since = time.monotonic()
        self._check_cancelled = check_cancelled

    def at_most(self, limit_s: float) -> Patience:
        """The same, but no longer than ``limit_s`` from now in all."""
        deadline = min(self._deadline, time.monotonic() + limit_s)
        return Patience(deadline, limit_s, self._check_cancelled)

    def moved(self) -> None:
        """Call when bytes have moved.

        Raises:
            TimeoutError: the deadline has passed. The host's cancellation is raised as it is.
        """
        self._check_cancelled()
        self._idle_since = now = time.monotonic()
        if now >= self._deadline:
            raise TimeoutError("the deadline passed in the middle of a transfer")

    def waited(self) -> None:
        """Call when a slice has passed in which nothing moved.

        Raises:
            TimeoutError: the patience is at its end. The host's cancellation is raised as it is.
        """
        self._check_cancelled()
        now = time.monotonic()
        if now >= self._idle_since + self._idle_s:
            raise TimeoutError(f"no answer for {self._idle_s:g} s")
        if now >= self._deadline:
            raise TimeoutError("no answer before the deadline")


class Address(NamedTuple):
    """Where a socket connects to, name resolution done."""

    family: int
    target: Any  # what `socket.connect` takes: its type depends on the family


class Stream:
    """A connected socket. One thread at a time, except for :meth:`abort`.

    Attributes:
        patience: of the conversation in progress; set before each.
        received, sent: bytes that arrived and left since it was last set to 0.
    """

    __slots__ = ("_poll", "_socket", "_tls", "patience", "received", "sent")

    def __init__(self, connected: socket.socket, patience: Patience) -> None:
        """Take ownership of ``connected``, whose time-out is one slice."""
        self._socket = connected
        self._tls = isinstance(connected, ssl.SSLSocket)  # takes one buffer at a time
        if not self._tls:
            # The kernel keeps the time: one system call then moves all there is to move within a slice. Python's own
            # time-outs would poll before each, and give up the interpreter's lock and take it again for every part.
            connected.settimeout(None)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SLICE)
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self.patience = patience
        self.received = self.sent = 0

    def send(self, buffers: Iterable[bytes | memoryview]) -> None:
        """Send all of ``buffers``, which are only read, straight from where they are."""
        left = _views(buffers)
        while left:
            try:
                if self._tls:
                    sent = self._socket.send(left[0])
                else:
                    sent = self._socket.sendmsg(
                        left if len(left) <= _MAX_SEGMENTS else list(itertools.islice(left, _MAX_SEGMENTS))
                    )
            except _NOTHING_MOVED:
                self.patience.waited()
                continue
            except _TLS_ENDS as error:
                raise ConnectionLostError("the server closed it") from error
            self.sent += sent
            _advance(left, sent)
            self.patience.moved()

    def receive(self, buffers: Iterable[memoryview]) -> None:
        """Fill all of ``buffers``, one after the other.

        Raises:
            ConnectionLostError: the stream ended first.
        """
        left = _views(buffers)
        while left:
            _advance(left, self._receive_some(left, socket.MSG_WAITALL))

    def receive_some(self, into: Sequence[memoryview], *, expected: bool = False) -> int:
        """Receive what is there, at least one byte and at most what ``into`` holds, and return how many.

        All of it, when it is ``expected`` and comes within a slice: waiting once costs less than looking often.
        """
        return self._receive_some(into, socket.MSG_WAITALL if expected else 0)

    def is_quiet(self) -> bool:
        """True when the peer has neither sent anything unread nor closed the connection. Does not block."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return False
        return not self._poll.poll(0)

    def abort(self) -> None:
        """Make a blocked or later call of the owning thread fail at once. From any thread; does not block."""
        with suppress(OSError):
            # Not SSLSocket's own: that one drops its TLS state, and the owner would take ciphertext as text.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def end(self, limit_s: float) -> None:
        """Send no more, and wait until the peer has dealt with all it got and closes as well, or ``limit_s`` pass.

        What it says meanwhile is thrown away. Nobody's cancellation or deadline ends this.
        """
        give_up = time.monotonic() + limit_s
        scratch = bytearray(64 << 10)
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            while time.monotonic() < give_up:
                try:
                    # The plain socket's, under TLS as well: what comes is not looked at.
                    if not socket.socket.recv_into(self._socket, scratch):
                        return
                except _NOTHING_MOVED:
                    continue

    def close(self) -> None:
        """Close the socket, without waiting for the peer."""
        with suppress(OSError):
            self._socket.close()

    def _receive_some(self, left: Sequence[memoryview], flags: int = 0) -> int:
        while True:
            try:
                if self._tls:
                    received = self._socket.recv_into(left[0])
                else:
                    some = left if len(left) <= _MAX_SEGMENTS else list(itertools.islice(left, _MAX_SEGMENTS))
                    received = self._socket.recvmsg_into(some, 0, flags)[0]
            except _NOTHING_MOVED:
                self.patience.waited()
                continue
            except _TLS_ENDS as error:
                raise ConnectionLostError("the server closed it") from error
            if received == 0:
                raise ConnectionLostError("the server closed it")
            self.received += received
            self.patience.moved()
            return received


def connect(address: Address, patience: Patience) -> socket.socket:
    """Connect a socket that waits in slices.

    Raises:
        OSError: it cannot be connected; TimeoutError when ``patience`` ended first.
    """
    connecting = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        connecting.setblocking(False)
        code = connecting.connect_ex(address.target)
        if code == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(connecting, select.POLLOUT)
            while not poll.poll(_SLICE_S * 1000):
                patience.waited()
            code = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        connecting.settimeout(_SLICE_S)
        if address.family != socket.AF_UNIX:
            connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connecting.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except BaseException:
        connecting.close()
        raise
    return connecting


def start_tls(plain: socket.socket, context: ssl.SSLContext, server_name: str, patience: Patience) -> ssl.SSLSocket:
    """Put TLS on a connected socket, which is closed when that fails.

    Raises:
        ssl.SSLError: no agreement, or the certificate is not accepted.
        TimeoutError: ``patience`` ended first.
    """
    try:
        secured = context.wrap_socket(plain, server_hostname=server_name, do_handshake_on_connect=False)
    except BaseException:
        plain.close()
        raise
    try:
        while True:
            try:
                secured.do_handshake()
            except TimeoutError:
                patience.waited()
            else:
                return secured
    except BaseException:
        secured.close()
        raise


def _views(buffers: Iterable[bytes | memoryview]) -> deque[memoryview]:
    return deque(memoryview(buffer) for buffer in buffers if len(buffer))


def _advance(left: deque[memoryview], nbytes: int) -> None:
    """Take ``nbytes`` off the front of a scatter/gather list."""
    while nbytes:
        if len(left[0]) > nbytes:
            left[0] = left[0][nbytes:]
            return
        nbytes -= len(left.popleft())
