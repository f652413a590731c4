"""One connection: commands out, their own replies in, and the knowledge whether it can be used again."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from enum import Enum
from typing import Final

from l2kit_redis.faults import ProtocolError, ServerError
from l2kit_redis.resp import Reply, ReplyReader, pipeline, request, value_request
from l2kit_redis.stream import Patience, Stream

#: The end of a value that is longer than its destination is read and thrown away up to here; beyond it a new
#: connection is cheaper.
_MAX_DRAIN_BYTES: Final = 1 << 20
#: Commands in flight at once: their replies fit into the kernel's buffers, so neither side blocks the other.
_PIPELINE_COMMANDS: Final = 1024


class Unread(Enum):
    """In place of the length of a value that was not read."""

    UNREAD = "unread"


UNREAD: Final = Unread.UNREAD


class Connection:
    """A RESP2 conversation: what is sent next, a command or a pipeline, waits for all replies to the last.

    One thread at a time, except for :meth:`abort`.
    """

    __slots__ = ("_cut", "_outstanding", "_replies", "_stream")

    def __init__(self, stream: Stream) -> None:
        """Take ownership of ``stream``."""
        self._stream = stream
        self._replies = ReplyReader(stream)
        self._outstanding = 0
        self._cut = False  # a reply was left unread in the middle

    @property
    def settled(self) -> bool:
        """True when every reply was taken to its last byte, and nothing else came. Only then use it again."""
        return self._outstanding == 0 and self._replies.empty

    @property
    def answered(self) -> bool:
        """True when anything was received since :meth:`begin`."""
        return self._stream.received > 0

    def begin(self, patience: Patience) -> None:
        """Start a conversation that may take as long as ``patience`` allows."""
        patience.moved()
        self._stream.patience = patience
        self._stream.received = 0

    def is_alive(self) -> bool:
        """False when the server has closed the connection, or said something that nobody asked for."""
        return self._stream.is_quiet()

    def call(self, *words: bytes) -> Reply:
        """Send one small command and return its reply.

        Raises:
            ServerError: the server answered with an error.
        """
        self._send([request(*words)], 1)
        return self._take_reply()

    def call_integer(self, *words: bytes) -> int:
        """As :meth:`call`, for commands that are answered with a number."""
        reply = self.call(*words)
        if not isinstance(reply, int):
            raise ProtocolError("no integer where one was due")
        return reply

    def call_bytes(self, *words: bytes) -> bytes:
        """As :meth:`call`, for commands that are answered with a string."""
        reply = self.call(*words)
        if not isinstance(reply, bytes):
            raise ProtocolError("no string where one was due")
        return reply

    def log_in(self, *words: bytes) -> None:
        """Send a command that holds a secret. Nothing of its reply but a known code gets into the error.

        Raises:
            ServerError: the server refused it.
        """
        self._send([request(*words)], 1)
        reply = self._replies.reply()
        self._outstanding -= 1
        if isinstance(reply, ServerError):
            raise ServerError(str(reply), secret=True)
        if reply != b"OK":
            raise ProtocolError("AUTH was not answered with OK")

    def call_integers(self, command: bytes, keys: Sequence[bytes]) -> list[int | ServerError]:
        """Send ``command`` for each key in pipelines and return the integers, or errors, in key order."""
        answers: list[int | ServerError] = []
        for start in range(0, len(keys), _PIPELINE_COMMANDS):
            part = keys[start : start + _PIPELINE_COMMANDS]
            self._send([pipeline(command, part)], len(part))
            answers += self._replies.integers(len(part))
            self._outstanding -= len(part)
        return answers

    def set_value(self, key: bytes, data: Sequence[memoryview], ttl_ms: int | None) -> None:
        """Write a value from where it lies in memory.

        Raises:
            ServerError: the server answered with an error; the old value is still there, if there was one.
        """
        expiry = (b"PX", b"%d" % ttl_ms) if ttl_ms is not None else ()
        front, back = value_request((b"SET", key), sum(map(len, data)), expiry)
        self._send([front, *data, back], 1)
        if self._take_reply() != b"OK":
            raise ProtocolError("SET was not answered with OK")

    def get_value(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        """Receive a value into ``into``, as much as fits, and return its full length; None for no value.

        Raises:
            ServerError: the server answered with an error.
        """
        self._send([request(b"GET", key)], 1)
        length = self._receive_value(into)
        if isinstance(length, ServerError):
            raise length
        return length

    def set_values(
        self, keys: Sequence[bytes], data: Sequence[Sequence[memoryview]], ttl_ms: int | None
    ) -> list[ServerError | None]:
        """Write several small values in one pipeline; per key the server's error, or None."""
        expiry = (b"PX", b"%d" % ttl_ms) if ttl_ms is not None else ()
        buffers: list[bytes | memoryview] = []
        for key, parts in zip(keys, data, strict=True):
            front, back = value_request((b"SET", key), sum(map(len, parts)), expiry)
            buffers += [front, *parts, back]
        self._send(buffers, len(keys))
        errors: list[ServerError | None] = []
        for _ in keys:
            reply = self._replies.reply()
            self._outstanding -= 1
            if not isinstance(reply, ServerError) and reply != b"OK":
                raise ProtocolError("SET was not answered with OK")
            errors.append(reply if isinstance(reply, ServerError) else None)
        return errors

    def get_values(
        self, keys: Sequence[bytes], into: Sequence[Sequence[memoryview]]
    ) -> list[int | ServerError | Unread | None]:
        """Receive several small values in one pipeline; per key what :meth:`get_value` returns, or the server's error.

        What comes after a value that was far too long to be received is lost with it: those are UNREAD.
        """
        self._send([pipeline(b"GET", keys)], len(keys))
        lengths: list[int | ServerError | Unread | None] = []
        for parts in into:
            lengths.append(UNREAD if self._cut else self._receive_value(parts))
        return lengths

    def abort(self) -> None:
        """Make the conversation in progress fail at once. From any thread."""
        self._stream.abort()

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def _send(self, buffers: Sequence[bytes | memoryview], replies: int) -> None:
        self._outstanding += replies
        try:
            self._stream.send(buffers)
        except ConnectionError:
            self._raise_last_words()
            raise

    def _receive_value(self, into: Sequence[memoryview]) -> int | ServerError | None:
        length = self._replies.value_length()
        if length is None or isinstance(length, ServerError):
            self._outstanding -= 1
            return length
        beyond = length - sum(map(len, into))
        if beyond > _MAX_DRAIN_BYTES:
            self._replies.value_part(into)
            self._cut = True
            return length  # the reply stays outstanding: whoever owns the connection closes it
        self._replies.value([*into, memoryview(bytearray(beyond))] if beyond > 0 else into, length)
        self._outstanding -= 1
        return length

    def _take_reply(self) -> Reply:
        reply = self._replies.reply()
        self._outstanding -= 1
        if isinstance(reply, ServerError):
            raise reply
        return reply

    def _raise_last_words(self) -> None:
        """Raise why the server hung up in the middle of a request, if it has said so and that can be read."""
        try:
            reply = self._replies.reply()
        except ssl.SSLError as alert:
            raise alert from None
        except (OSError, ProtocolError):
            return
        if isinstance(reply, ServerError):
            raise reply from None
