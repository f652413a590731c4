"""RESP2: requests to bytes, a stream to replies.

The protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/. Every length that a peer
announces is bounded before anything is allocated for it. Whatever is not exactly the protocol raises
`ProtocolError`; the stream is then of no use any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from l2kit.memory import first_bytes, split
from l2kit_redis.faults import ProtocolError, ServerError
from l2kit_redis.stream import Stream

Reply = bytes | int | None | ServerError | list["Reply"]

_BUFFER_BYTES: Final = 128 << 10
_MAX_LINE_BYTES: Final = 64 << 10
_MAX_REPLY_BYTES: Final = 16 << 20
_MAX_REPLY_ITEMS: Final = 1 << 17
_MAX_DEPTH: Final = 4
_MAX_DIGITS: Final = 20
_STRING: Final = ord("$")
#: No reply to GET is shorter: that of a missing value.
_LEAST_REPLY_BYTES: Final = 5
#: When so much of a long value is left, it is about to end.
NEAR_END_BYTES: Final = 1 << 20
#: What a first read for a value takes along; the part that is payload is copied once, so it is kept small.
_VALUE_FIRST_READ_BYTES: Final = 512


def request(*words: bytes) -> bytes:
    """One command."""
    return b"*%d\r\n%b" % (len(words), b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words]))


def pipeline(command: bytes, keys: Sequence[bytes], *rest: bytes) -> bytes:
    """The same command for each key, one after the other, with the same words ``rest`` behind the key."""
    head = b"*%d\r\n$%d\r\n%b\r\n" % (2 + len(rest), len(command), command)
    tail = b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in rest])
    if not keys:
        return b""
    between = tail + head
    return b"%b%b%b" % (head, between.join([b"$%d\r\n%b\r\n" % (len(key), key) for key in keys]), tail)


def value_request(before: Sequence[bytes], value_bytes: int, after: Sequence[bytes] = ()) -> tuple[bytes, bytes]:
    """One command around a value that is sent separately: the bytes to send in front of it and behind it."""
    words = len(before) + 1 + len(after)
    front = [b"$%d\r\n%b\r\n" % (len(word), word) for word in before]
    back = [b"$%d\r\n%b\r\n" % (len(word), word) for word in after]
    return b"*%d\r\n%b$%d\r\n" % (words, b"".join(front), value_bytes), b"\r\n" + b"".join(back)


class ReplyReader:
    """Takes replies off a stream through one small buffer; long values go past it, straight to the caller."""

    __slots__ = ("_buffer", "_bytes", "_end", "_start", "_stream")

    def __init__(self, stream: Stream) -> None:
        """Read from ``stream``, which nobody else reads from."""
        self._stream = stream
        self._bytes = bytearray(_BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._start = 0
        self._end = 0

    @property
    def empty(self) -> bool:
        """True when no byte was received that is not part of a reply taken so far."""
        return self._start == self._end

    def reply(self, depth: int = 0) -> Reply:
        """Take one reply; an error reply is returned, not raised. For small replies."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ServerError(rest.decode(errors="replace"))
        if kind == b":":
            return _integer(rest)
        if kind == b"$":
            length = _length(rest, _MAX_REPLY_BYTES)
            return None if length is None else self._bulk(length)
        if kind == b"*" and depth < _MAX_DEPTH:
            count = _length(rest, _MAX_REPLY_ITEMS)
            return None if count is None else [self.reply(depth + 1) for _ in range(count)]
        raise ProtocolError(f"a reply begins with {kind!r}")

    def integers(self, count: int) -> list[int | ServerError]:
        """Take ``count`` replies that are integers or errors; fast for many."""
        taken: list[int | ServerError] = []
        while len(taken) < count:
            block = self._lines(count - len(taken))
            # Most are the same: sizes of one model's objects, ones and zeros. Errors are not shared: they get a node.
            known = {line: _integer(line[1:]) for line in set(block) if line[:1] == b":"}
            taken += [known[line] if line in known else _error_line(line) for line in block]
        return taken

    def strings(self, count: int) -> list[bytes | ServerError | None]:
        """Take ``count`` replies that are short strings, errors or nothing; fast for many."""
        taken: list[bytes | ServerError | None] = []
        while len(taken) < count:
            stop = self._bytes.find(b"\r\n", self._start, self._end)
            if stop > 0 and self._bytes[self._start] == _STRING:
                digits = bytes(self._buffer[self._start + 1 : stop])
                end = stop + 2 + int(digits) if digits.isdigit() and len(digits) <= _MAX_DIGITS else self._end
                if end + 2 <= self._end and self._bytes.startswith(b"\r\n", end):
                    taken.append(bytes(self._buffer[stop + 2 : end]))
                    self._start = end + 2
                    continue
            reply = self.reply()  # cut off by the end of the buffer, or no string
            if not isinstance(reply, bytes | ServerError | None):
                raise ProtocolError("no string where one was due")
            taken.append(reply)
        return taken

    def literal(self, expected: bytes) -> bool:
        """Take ``expected``, which is one or more complete replies, if that is what comes next."""
        while (held := self._end - self._start) < len(expected):
            if not expected.startswith(self._bytes[self._start : self._end]):
                return False
            self._fill(_BUFFER_BYTES - held)
        if not self._bytes.startswith(expected, self._start, self._end):
            return False
        self._start += len(expected)
        return True

    def value_length(self) -> int | ServerError | None:
        """Take the head of a value's reply: its length, None for no value; :meth:`value` takes the rest."""
        if self.empty:
            self._fill(_VALUE_FIRST_READ_BYTES)
        line = self._line()
        if line[:1] == b"-":
            return ServerError(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise ProtocolError(f"{line[:1]!r} in place of a value")
        return _length(line[1:], None)

    def value_of(
        self,
        into: Sequence[memoryview],
        length: int,
        more: Callable[[], bool],
        near_end: Callable[[], None] | None = None,
    ) -> bool:
        """Take a value, if it has exactly ``length`` bytes, which ``into`` holds; in one system call, if it is there.

        When it is not, nothing is taken; ``into`` is overwritten then only by another value of about that length. For
        ``near_end`` see :meth:`value`.

        Args:
            into: where it goes.
            length: what to expect.
            more: whether another reply is due after this one: what it begins with is taken along.
            near_end: see above.
        """
        expected = b"$%d\r\n" % length
        while True:
            held = self._end - self._start
            if held >= len(expected) or not expected.startswith(self._bytes[self._start : self._end]):
                return False
            if held >= _LEAST_REPLY_BYTES:
                break
            self._fill(_LEAST_REPLY_BYTES - held)
        begin = bytes(self._buffer[self._start : self._end])
        rest, trailer = memoryview(bytearray(len(expected) - held)), memoryview(bytearray(2))
        following = self._buffer[: _LEAST_REPLY_BYTES if more() else 0]
        parts = [rest, *into, trailer, following]
        nbytes = len(rest) + length + 2 + len(following)
        room = _BUFFER_BYTES - held
        received = self._stream.receive_some(parts if nbytes <= room else first_bytes(parts, room), expected=True)
        if received < len(rest) or bytes(rest) != expected[held:]:
            taken = begin + b"".join(first_bytes(parts, received))
            self._start, self._end = 0, len(taken)
            self._buffer[: self._end] = taken
            return False
        if received < nbytes:
            nbytes -= received
            parts = split(parts, received)[1]
            if near_end is not None and nbytes > 2 * NEAR_END_BYTES:
                front, parts = split(parts, nbytes - NEAR_END_BYTES)
                self._stream.receive(front)
                near_end()
                if not following and more():
                    following = self._buffer[:_LEAST_REPLY_BYTES]
                    parts.append(following)
            self._stream.receive(parts)
        _check_end(trailer)
        self._start, self._end = 0, len(following)
        return True

    def value(self, into: Sequence[memoryview], length: int, near_end: Callable[[], None] | None = None) -> None:
        """Take a value of ``length`` bytes, which ``into`` can hold, and the end of its reply.

        In a long one ``near_end`` is called when about `NEAR_END_BYTES` of it are left.
        """
        trailer = memoryview(bytearray(2))
        parts = [*first_bytes(into, length), trailer]
        if near_end is not None and length > 2 * NEAR_END_BYTES:
            front, parts = split(parts, length - NEAR_END_BYTES)
            self.value_part(front)
            near_end()
        self.value_part(parts)
        _check_end(trailer)

    def value_part(self, into: Sequence[memoryview]) -> None:
        """Fill ``into`` with the next bytes of the stream, whatever they are."""
        left: list[memoryview] = []
        for segment in into:
            buffered = min(len(segment), self._end - self._start)
            segment[:buffered] = self._buffer[self._start : self._start + buffered]
            self._start += buffered
            left.append(segment[buffered:])
        self._stream.receive(left)

    def _bulk(self, length: int) -> bytes:
        data = bytearray(length)
        self.value([memoryview(data)], length)
        return bytes(data)

    def _line(self) -> bytes:
        return self._lines(1)[0]

    def _lines(self, limit: int) -> list[bytes]:
        """Take 1 to ``limit`` complete lines without their ends."""
        search = self._bytes.find if limit == 1 else self._bytes.rfind
        while (stop := search(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start >= _MAX_LINE_BYTES:
                raise ProtocolError("a line without an end")
            self._fill(_BUFFER_BYTES)
        lines = bytes(self._buffer[self._start : stop]).split(b"\r\n", limit)
        del lines[limit:]  # what is left over when more lines are here than were asked for
        self._start += sum(map(len, lines)) + 2 * len(lines)
        return lines

    def _fill(self, limit: int) -> None:
        held = self._end - self._start
        if self._start:
            self._buffer[:held] = self._buffer[self._start : self._end]
            self._start, self._end = 0, held
        self._end += self._stream.receive_some([self._buffer[held : min(_BUFFER_BYTES, held + limit)]])


def _error_line(line: bytes) -> ServerError:
    if line[:1] != b"-":
        raise ProtocolError(f"{line[:1]!r} in place of an integer")
    return ServerError(line[1:].decode(errors="replace"))


def _check_end(trailer: memoryview) -> None:
    if bytes(trailer) != b"\r\n":
        raise ProtocolError("a value that does not end where it should")


def _integer(digits: bytes) -> int:
    unsigned = digits[1:] if digits[:1] == b"-" else digits
    if not unsigned.isdigit() or len(unsigned) > _MAX_DIGITS:  # int() alone takes blanks and underscores too
        raise ProtocolError("a number that is none")
    return int(digits)


def _length(digits: bytes, limit: int | None) -> int | None:
    length = _integer(digits)
    if length == -1:
        return None
    if length < 0 or (limit is not None and length > limit):
        raise ProtocolError(f"a length of {length}")
    return length
