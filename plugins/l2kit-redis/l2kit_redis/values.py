"""Conversations about values: what is sent for an object or a stripe, and what the replies mean. They block.

A value is sent from, and received into, the memory that the caller names, without a copy. Replies that matter at the
same moment are one transaction; those that only save time are a pipeline, which is kept short: some requests ahead, the
server has always something to do; with many of them it spends its time on queues of replies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Final

from l2kit.memory import first_bytes
from l2kit_redis.connection import Connection
from l2kit_redis.faults import ProtocolError, ServerError
from l2kit_redis.lookups import is_no_object
from l2kit_redis.resp import Reply, pipeline, request, value_request
from l2kit_redis.stripes import HEAD_BYTES, HEAD_RANGE, Head, parse_head

_MULTI: Final = request(b"MULTI")
_EXEC: Final = request(b"EXEC")
#: A store, in one piece because there are many. The old head is read in the same moment, or its stripes would stay for
#: ever when two replace it at once.
_PUT: Final = (
    _MULTI
    + b"*4\r\n$8\r\nGETRANGE\r\n$%%d\r\n%%b\r\n$1\r\n0\r\n$%d\r\n%b\r\n" % (len(HEAD_RANGE[1]), HEAD_RANGE[1])
    + b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n"
)
#: The replies to a store, up to what it has replaced; and all of them when that is nothing.
_STORED: Final = b"+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n"
_STORED_ANEW: Final = _STORED + b"$0\r\n\r\n+OK\r\n"


#: Values asked for or sent ahead of the reply that is next: so many, and of so many bytes.
_AHEAD: Final = 16
_AHEAD_BYTES: Final = 3 << 20
#: Small values are sent together, up to here: a system call for each costs as much as the copy.
_TOGETHER_BYTES: Final = 256 << 10


class Unread(Enum):
    """In place of the length of a value that was not read."""

    UNREAD = "unread"


UNREAD: Final = Unread.UNREAD


def put(connection: Connection, name: bytes, data: Sequence[bytes | memoryview], ttl_ms: int | None) -> Head | None:
    """Make ``data`` the value under ``name``, and return the head that it has replaced, if it was one.

    Raises:
        ServerError: the server answered with an error; the old value is still there, if there was one.
    """
    [answer] = put_each(connection, [(name, data)], ttl_ms)
    if isinstance(answer, ServerError):
        raise answer
    return answer


def put_each(
    connection: Connection, values: Iterable[tuple[bytes, Sequence[bytes | memoryview]]], ttl_ms: int | None
) -> list[Head | ServerError | None]:
    """:func:`put` for several small values in one pipeline, errors as values; ``values`` is taken one by one."""
    expiry = _expiry(ttl_ms)
    back = b"\r\n%b%b" % (b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in expiry]), _EXEC)
    answers: list[Head | ServerError | None] = []
    buffers: list[bytes | memoryview] = []
    unsent = unsent_bytes = sent = 0
    connection.writing = True
    for name, parts in values:
        size = sum(map(len, parts))
        buffers += [_PUT % (len(name), name, 3 + len(expiry), len(name), name, size), *parts, back]
        unsent, unsent_bytes = unsent + 1, unsent_bytes + size
        if unsent_bytes >= _TOGETHER_BYTES or unsent >= _AHEAD:
            connection.send(buffers, 4 * unsent)
            sent += unsent
            buffers, unsent, unsent_bytes = [], 0, 0
            while sent - len(answers) > _AHEAD:
                answers.append(_take_put(connection))
    if buffers:
        connection.send(buffers, 4 * unsent)
        sent += unsent
    while len(answers) < sent:
        answers.append(_take_put(connection))
    connection.writing = False
    return answers


def get(connection: Connection, name: bytes, into: Sequence[memoryview]) -> int | Head | None:
    """Receive a value into ``into``, as much as fits, and return its length, or the head that it is; None for none.

    Raises:
        ServerError: the server answered with an error.
    """
    connection.send([request(b"GET", name)], 1)
    answer = _take_value(connection, into)
    if isinstance(answer, ServerError):
        if is_no_object(answer):
            return None
        raise answer
    return answer


def get_each(
    connection: Connection,
    names: Sequence[bytes],
    into: Sequence[Sequence[memoryview]],
    received: Callable[[int, int], None],
) -> list[int | Head | ServerError | Unread | None]:
    """:func:`get` for several small values in one pipeline, errors as values.

    What comes after a value that was far too long to be received is lost with it: those are UNREAD.

    Args:
        connection: to the server that has them.
        names: their keys.
        into: for each, buffers that are filled, and may be larger.
        received: called with the number and the length of each object that was received, before the next one is.
    """
    answers: list[int | Head | ServerError | Unread | None] = []
    ahead = Ahead(connection, names, [sum(map(len, parts)) for parts in into])
    for index, parts in enumerate(into):
        if connection.is_cut:
            answers.append(UNREAD)
            continue
        ahead.ask(index)
        answer = _take_value(connection, parts, partial(ahead.ask, index + 1))
        answers.append(answer)
        if type(answer) is int:
            received(index, answer)
    return answers


def put_stripes(
    connection: Connection,
    names: Sequence[bytes],
    data: Sequence[Sequence[memoryview]],
    ttl_ms: int,
    before: Callable[[int], None] | None = None,
) -> list[bool]:
    """Write stripes, a few ahead of their replies.

    ``before`` is called with the number of each stripe that is about to be sent.

    Raises:
        ServerError: the server has refused one.
    """
    refusal: ServerError | None = None
    sent = answered = 0
    ahead = max(1, _AHEAD_BYTES // max(sum(map(len, data[0])), 1)) if data else 1
    for index, (name, parts) in enumerate(zip(names, data, strict=True)):
        if before is not None:
            before(index)
        front, back = value_request((b"SET", name), sum(map(len, parts)), _expiry(ttl_ms))
        connection.send([front, *parts, back], 1)
        sent += 1
        if sent - answered > ahead:
            refusal = connection.take_status("SET")
            answered += 1
            if refusal is not None:
                break
    for _ in range(sent - answered):
        refusal = connection.take_status("SET") or refusal
    if refusal is not None:
        raise refusal
    return [True] * len(names)


def get_stripes(
    connection: Connection,
    names: Sequence[bytes],
    into: Sequence[Sequence[memoryview]],
    lengths: Sequence[int],
    received: Callable[[int], None] | None = None,
) -> list[bool]:
    """Receive stripes, asked for a few ahead; False for one that is not there as a whole. After one no more are asked.

    ``received`` is called with the number of each stripe that has come as a whole.

    Raises:
        ServerError: the server answered with an error.
    """
    there = [False] * len(names)
    failure: ServerError | None = None
    ahead = Ahead(connection, names, lengths)
    for index, (parts, length) in enumerate(zip(into, lengths, strict=True)):
        ahead.ask(index)
        if index >= ahead.asked or connection.is_cut:
            break
        answer = connection.receive_value(parts, near_end=partial(ahead.ask, index + 1))
        there[index] = answer == length
        if not there[index]:
            ahead.ends = True
        elif received is not None:
            received(index)
        if isinstance(answer, ServerError) and not is_no_object(answer):
            failure = answer
    if failure is not None:
        raise failure
    return there


def take_away(connection: Connection, name: bytes) -> tuple[bool, Head | None]:
    """Delete what lies under ``name``: whether there was anything, and the head that it was, if it was one."""
    words = request(b"GETRANGE", name, *HEAD_RANGE) + request(b"UNLINK", name)
    connection.send([_MULTI + words + _EXEC], 4)
    match connection.take_transaction(2):
        case [old, int() as deleted]:
            return deleted > 0, _head(old)
        case ServerError() as error if is_no_object(error):
            return True, None
        case ServerError() as error:
            raise error
        case _:
            raise ProtocolError("UNLINK was not answered with a number")


def take_away_head(connection: Connection, name: bytes, head: Head) -> bool:
    """Delete ``head`` if it still lies under ``name``."""
    connection.watching = True
    connection.call(b"WATCH", name)
    if connection.call_bytes(b"GETRANGE", name, *HEAD_RANGE) != head.pack():
        connection.call(b"UNWATCH")
        connection.watching = False
        return False
    connection.send([_MULTI + request(b"UNLINK", name) + _EXEC], 3)
    done = connection.take_transaction(1)
    connection.watching = False
    if isinstance(done, ServerError):
        raise done
    return done is not None


class Ahead:
    """Asks for values some steps before their replies are taken.

    Attributes:
        asked: how many were asked for.
        ends: set to ask for no more.
    """

    __slots__ = ("_connection", "_lengths", "_names", "_taken", "_waiting_bytes", "asked", "ends")

    def __init__(self, connection: Connection, names: Sequence[bytes], lengths: Sequence[int]) -> None:
        """``lengths`` are how many bytes of each are expected."""
        self._connection = connection
        self._names = names
        self._lengths = lengths
        self._taken = 0
        self._waiting_bytes = 0
        self.asked = 0
        self.ends = False

    def ask(self, index: int) -> None:
        """Call before value number ``index`` is taken: asks for it, if that was not done, and for some after it."""
        lengths = self._lengths
        while self._taken < min(index, self.asked):
            self._waiting_bytes -= lengths[self._taken]
            self._taken += 1
        start = asked = self.asked
        if self.ends or 2 * (asked - index) > _AHEAD or 2 * self._waiting_bytes > _AHEAD_BYTES:
            return
        while asked < len(lengths) and asked - index < _AHEAD:
            if asked > index and self._waiting_bytes + lengths[asked] > _AHEAD_BYTES:
                break
            self._waiting_bytes += lengths[asked]
            asked += 1
        if asked > start:
            self.asked = asked
            self._connection.send([pipeline(b"GET", self._names[start:asked])], asked - start)


def _take_put(connection: Connection) -> Head | ServerError | None:
    if connection.take_expected(_STORED_ANEW, 4):
        return None
    done = connection.take_list(_STORED, 4, 2) or connection.take_transaction(2)
    match done:
        case ServerError() as error:
            return error
        case [old, b"OK"]:
            return _head(old)
        case [_, ServerError() as error]:
            return error
        case _:
            raise ProtocolError("SET was not answered with OK")


def _take_value(
    connection: Connection, into: Sequence[memoryview], near_end: Callable[[], None] | None = None
) -> int | Head | ServerError | None:
    answer = connection.receive_value(into, length_of_head=HEAD_BYTES, near_end=near_end)
    if not isinstance(answer, bytes):
        return answer
    head = parse_head(answer)
    if head is not None:
        return head
    rest = memoryview(answer)  # a damaged head, or what is left of an object: for the envelope's check to find out
    for segment in first_bytes(into, HEAD_BYTES):
        segment[:] = rest[: len(segment)]
        rest = rest[len(segment) :]
    return HEAD_BYTES


def _head(value: Reply) -> Head | None:
    return parse_head(value) if isinstance(value, bytes) else None


def _expiry(ttl_ms: int | None) -> tuple[bytes, ...]:
    return () if ttl_ms is None else (b"PX", b"%d" % ttl_ms)
