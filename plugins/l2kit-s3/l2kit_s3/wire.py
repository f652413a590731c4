"""HTTP/1.1 from the caller's memory to the socket and back, without a copy: just what a signed GET or PUT needs.

A connection is used by one thread at a time. It goes back to the pool only when every byte of the answer was taken;
after anything else it is closed. Waiting happens in short slices, between which a thread looks whether it is still
wanted; a peer that moves no byte for ``idle_timeout_s`` is given up.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from l2kit_s3.objects import CheckWanted

_SLICE_S: Final = 0.05
_SLICE_BYTES: Final = 1 << 20
_TLS_SLICE_BYTES: Final = 256 << 10
_MAX_HEAD_BYTES: Final = 64 << 10
_MAX_TEXT_BYTES: Final = 64 << 10
_MAX_PARTS: Final = 64
_MAX_KEPT_S: Final = 20.0
#: How long an answer is waited for that decides whether something was stored, although nobody wants it any more.
_LANDING_S: Final = 2.0


class ProtocolError(Exception):
    """What came back is no answer to what was asked."""


class ConnectionLostError(ConnectionError):
    """The peer closed the connection in the middle, or before the answer."""


class Address(NamedTuple):
    """Where to connect to."""

    host: str
    port: int
    tls: bool


class Request(NamedTuple):
    """One request.

    Attributes:
        method: in capitals.
        target: path and query, quoted.
        headers: besides Host and Content-Length.
        body: what is sent, straight from this memory.
        into: what the body of a 200 or 206 fills.
        lands: True when the answer decides whether something changed: it is waited for, cancelled or not.
    """

    method: str
    target: str
    headers: Mapping[str, str] = {}
    body: Sequence[memoryview] = ()
    into: Sequence[memoryview] = ()
    lands: bool = False


class Answer(NamedTuple):
    """What the server said.

    Attributes:
        status: of HTTP.
        headers: by name in lower case.
        text: the body of an answer without payload: an explanation, cut off at 64 KiB.
        filled: bytes of the body that went into the caller's memory.
    """

    status: int
    headers: dict[str, str]
    text: bytes = b""
    filled: int = 0


class Wire:
    """Connections to one address, kept for the next request. Any thread: the lock guards the list of idle ones."""

    def __init__(
        self,
        address: Address,
        *,
        connect_timeout_s: float,
        idle_timeout_s: float,
        tls: ssl.SSLContext | None,
        check_wanted: CheckWanted,
    ) -> None:
        """Does no I/O. ``tls`` is needed where ``address`` says so."""
        self._address: Final = address
        self._connect_timeout_s: Final = connect_timeout_s
        self._idle_timeout_s: Final = idle_timeout_s
        self._tls: Final = tls
        self._check_wanted: Final = check_wanted
        self._lock = threading.Lock()
        self._idle: list[tuple[float, Connection]] = []

    def ask(self, request: Request) -> Answer:
        """Send ``request`` and take the answer. A kept connection that turns out to be closed costs no failure.

        Raises:
            OSError: no connection, or it broke, or fell silent (TimeoutError).
            ProtocolError: the answer is no HTTP, or not what was asked for.
        """
        while True:
            connection, kept = self._take()
            try:
                answer = connection.exchange(request)
            except (ConnectionLostError, ConnectionResetError, BrokenPipeError):
                connection.close()
                if kept and not connection.answered:
                    continue
                raise
            except BaseException:
                connection.close()
                raise
            if connection.reusable:
                with self._lock:
                    self._idle.append((time.monotonic(), connection))
            else:
                connection.close()
            return answer

    def close(self) -> None:
        """Close what is idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def _take(self) -> tuple[Connection, bool]:
        while True:
            with self._lock:
                if not self._idle:
                    break
                since, connection = self._idle.pop()
            if time.monotonic() - since < _MAX_KEPT_S and not connection.readable():
                return connection, True
            connection.close()
        return self._connect(), False

    def _connect(self) -> Connection:
        host, port, tls = self._address
        plain = socket.create_connection((host, port), timeout=self._connect_timeout_s)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not tls:
                return Connection(plain, host, port, self._idle_timeout_s, self._check_wanted)
            assert self._tls is not None
            secured = self._tls.wrap_socket(plain, server_hostname=host)
            return Connection(secured, host, port, self._idle_timeout_s, self._check_wanted)
        except BaseException:
            plain.close()
            raise


class Connection:
    """One connection. One thread at a time.

    Attributes:
        answered: whether a byte of the answer to the last request has come.
        reusable: whether the last answer was taken to its end, and the server keeps the connection.
    """

    def __init__(
        self, sock: socket.socket, host: str, port: int, idle_timeout_s: float, check_wanted: CheckWanted
    ) -> None:
        """Take ``sock``, connected, as one's own."""
        self.answered = False
        self.reusable = False
        self._sock: Final = sock
        self._idle_timeout_s: Final = idle_timeout_s
        self._check_wanted: Final = check_wanted
        self._landing_until: float | None = None
        self._rest = b""  # what came behind the head
        self._tls: Final = isinstance(sock, ssl.SSLSocket)
        name = f"[{host}]" if ":" in host else host
        self._host: Final = name if port == (443 if self._tls else 80) else f"{name}:{port}"
        if self._tls:
            sock.settimeout(_SLICE_S)
        else:
            sock.settimeout(None)
            patience = struct.pack("ll", 0, int(_SLICE_S * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def readable(self) -> bool:
        """Whether something lies there to be read; of an idle connection this is its end."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0)) or (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0)

    def exchange(self, request: Request) -> Answer:
        """See `Wire.ask`."""
        self.answered = self.reusable = False
        self._landing_until = None
        self._rest = b""
        nbytes = sum(map(len, request.body))
        lines = [f"{request.method} {request.target} HTTP/1.1", f"Host: {self._host}"]
        if nbytes or request.method == "PUT":
            lines.append(f"Content-Length: {nbytes}")
        lines += [f"{name}: {value}" for name, value in request.headers.items()]
        head = "\r\n".join([*lines, "", ""]).encode("ascii")
        # The head never travels alone: some stores take a body that ends before its first byte for an empty object.
        whole = self._send([memoryview(head), *request.body], listening=nbytes > _SLICE_BYTES)
        if request.lands and whole:
            self._landing_until = time.monotonic() + _LANDING_S
        while True:
            status, headers = self._take_head()
            if status >= 200:
                return self._take_body(request, status, headers, keep=whole)

    def _send(self, parts: Sequence[memoryview], *, listening: bool = False) -> bool:
        """Send all parts; False when the server answered before it had them, which saves sending the rest."""
        waiting = [part for part in parts if len(part)]
        waiting.reverse()
        moved_at = time.monotonic()
        while waiting:
            try:
                sent = self._send_some(waiting)
            except (BlockingIOError, TimeoutError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                self._keep_waiting(moved_at)
                continue
            moved_at = time.monotonic()
            while sent:
                part = waiting.pop()
                if sent < len(part):
                    waiting.append(part[sent:])
                    break
                sent -= len(part)
            if waiting:  # after the last byte only the answer says whether it was stored
                self._check_wanted()
                if listening and self.readable():
                    return False
        return True

    def _send_some(self, waiting: Sequence[memoryview]) -> int:
        batch: list[memoryview] = []
        room = _TLS_SLICE_BYTES if self._tls else _SLICE_BYTES
        for part in reversed(waiting):
            batch.append(part[:room])
            room -= len(batch[-1])
            if room == 0 or len(batch) == _MAX_PARTS:
                break
        return self._sock.send(b"".join(batch)) if self._tls else self._sock.sendmsg(batch)

    def _take_head(self) -> tuple[int, dict[str, str]]:
        received = self._rest
        while (end := received.find(b"\r\n\r\n")) < 0:
            if len(received) > _MAX_HEAD_BYTES:
                raise ProtocolError("the head of the answer does not end")
            room = memoryview(bytearray(16 << 10))
            count = self._receive(room, whole=False)
            received += room[:count]
            self.answered = True
        self._rest = received[end + 4 :]
        first, *lines = received[:end].decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if version not in ("HTTP/1.1", "HTTP/1.0") or not rest[:3].isdigit():
            raise ProtocolError("the answer is not HTTP/1.1")
        headers = {"connection": "close"} if version == "HTTP/1.0" else {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        return int(rest[:3]), headers

    def _take_body(self, request: Request, status: int, headers: dict[str, str], *, keep: bool) -> Answer:
        keep = keep and headers.get("connection", "").lower() != "close"
        if request.method == "HEAD" or status in (204, 304):
            self.reusable = keep and not self._rest
            return Answer(status, headers)
        payload = bool(request.into) and status in (200, 206)
        if "chunked" in headers.get("transfer-encoding", "").lower():
            if payload:
                raise ProtocolError("the object came in chunks of unknown length; a proxy must not change bodies")
            text = self._take_chunks()
            self.reusable = keep and not self._rest
            return Answer(status, headers, text)
        length = headers.get("content-length")
        if length is None or not (length.isascii() and length.isdigit()):
            if payload:
                raise ProtocolError("the answer does not say how long it is")
            return Answer(status, headers, self._rest[:_MAX_TEXT_BYTES])
        left = int(length)
        if not payload:
            text = self._take_text(min(left, _MAX_TEXT_BYTES))
            self.reusable = keep and left <= _MAX_TEXT_BYTES and not self._rest
            return Answer(status, headers, text)
        filled = 0
        for segment in request.into:
            view = segment[: left - filled]
            self._fill(view)
            filled += len(view)
        self.reusable = keep and filled == left and not self._rest
        return Answer(status, headers, filled=filled)

    def _fill(self, view: memoryview) -> None:
        """Fill all of ``view``."""
        if self._rest and view:
            ready = self._rest[: len(view)]
            self._rest = self._rest[len(ready) :]
            view[: len(ready)] = ready
            view = view[len(ready) :]
        while view:
            view = view[self._receive(view, whole=True) :]

    def _take_text(self, nbytes: int) -> bytes:
        text = bytearray(nbytes)
        self._fill(memoryview(text))
        return bytes(text)

    def _take_chunks(self) -> bytes:
        text = b""
        while True:
            size_text = self._take_line().partition(b";")[0].strip()
            try:
                size = int(size_text, 16)
            except ValueError:
                raise ProtocolError("the answer's chunks are malformed") from None
            if size == 0:
                while self._take_line():
                    pass
                return text
            if len(text) + size > _MAX_TEXT_BYTES:
                raise ProtocolError("the explanation of the server does not end")
            text += self._take_text(size)
            self._take_line()

    def _take_line(self) -> bytes:
        while b"\r\n" not in self._rest:
            if len(self._rest) > _MAX_HEAD_BYTES:
                raise ProtocolError("the answer's chunks are malformed")
            room = memoryview(bytearray(4 << 10))
            self._rest += room[: self._receive(room, whole=False)]
        line, _, self._rest = self._rest.partition(b"\r\n")
        return line

    def _receive(self, view: memoryview, *, whole: bool) -> int:
        """Receive at least a byte; with ``whole`` as much of ``view`` as comes in a slice of time."""
        moved_at = time.monotonic()
        while True:
            try:
                if self._tls:
                    count = self._sock.recv_into(view[:_TLS_SLICE_BYTES])
                else:
                    flags = socket.MSG_WAITALL if whole else 0
                    count = self._sock.recv_into(view[:_SLICE_BYTES], 0, flags)
            except (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self._keep_waiting(moved_at)
                continue
            if count == 0:
                raise ConnectionLostError("the server closed the connection in mid-answer")
            if self._landing_until is None:
                self._check_wanted()
            return count

    def _keep_waiting(self, moved_at: float) -> None:
        """Raise when enough was waited, or nobody wants it."""
        now = time.monotonic()
        if now - moved_at > self._idle_timeout_s:
            raise TimeoutError(f"nothing came and nothing went for {self._idle_timeout_s:g} s")
        if self._landing_until is None or now > self._landing_until:
            self._check_wanted()
