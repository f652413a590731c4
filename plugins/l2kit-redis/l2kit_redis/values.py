"""Conversations about values: what is sent for an object or a stripe, and what the replies mean. They block.

A value is sent from, and received into, the memory that the caller names, without a copy. Replies that matter at the
same moment are one transaction; those that only save time are a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
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


class Unread(Enum):
    """In place of the length of a value that was not read."""

    UNREAD = "unread"


UNREAD: Final = Unread.UNREAD


def put(connection: Connection, name: bytes, data: Sequence[bytes | memoryview], ttl_ms: int | None) -> Head | None:
    """Make ``data`` the value under ``name``, and return the head that it has replaced, if it was one.

    Raises:
        ServerError: the server answered with an error; the old value is still there, if there was one.
    """
    [answer] = put_each(connection, [name], [data], ttl_ms)
    if isinstance(answer, ServerError):
        raise answer
    return answer


def put_each(
    connection: Connection, names: Sequence[bytes], data: Sequence[Sequence[bytes | memoryview]], ttl_ms: int | None
) -> list[Head | ServerError | None]:
    """:func:`put` for several small values in one pipeline, errors as values."""
    expiry = _expiry(ttl_ms)
    back = b"\r\n%b%b" % (b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in expiry]), _EXEC)
    buffers: list[bytes | memoryview] = []
    for name, parts in zip(names, data, strict=True):
        size = sum(map(len, parts))
        buffers += [_PUT % (len(name), name, 3 + len(expiry), len(name), name, size), *parts, back]
    connection.send(buffers, 4 * len(names))
    return [_take_put(connection) for _ in names]


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
    connection: Connection, names: Sequence[bytes], into: Sequence[Sequence[memoryview]]
) -> list[int | Head | ServerError | Unread | None]:
    """:func:`get` for several small values in one pipeline, errors as values.

    What comes after a value that was far too long to be received is lost with it: those are UNREAD.
    """
    connection.send([pipeline(b"GET", names)], len(names))
    return [UNREAD if connection.is_cut else _take_value(connection, parts) for parts in into]


def put_stripes(
    connection: Connection, names: Sequence[bytes], data: Sequence[Sequence[memoryview]], ttl_ms: int
) -> list[bool]:
    """Write stripes one after the other: what is sent ahead of a reply gains nothing, and loses on Redis 7.

    Raises:
        ServerError: the server has refused one.
    """
    for name, parts in zip(names, data, strict=True):
        front, back = value_request((b"SET", name), sum(map(len, parts)), _expiry(ttl_ms))
        connection.send([front, *parts, back], 1)
        if connection.take_reply() != b"OK":
            raise ProtocolError("SET was not answered with OK")
    return [True] * len(names)


def get_stripes(
    connection: Connection, names: Sequence[bytes], into: Sequence[Sequence[memoryview]], lengths: Sequence[int]
) -> list[bool]:
    """Receive stripes one after the other; False for one that is not there as a whole, and for all after it.

    Raises:
        ServerError: the server answered with an error.
    """
    there = [False] * len(names)
    for index, (name, parts, length) in enumerate(zip(names, into, lengths, strict=True)):
        connection.send([request(b"GET", name)], 1)
        answer = connection.receive_value(parts)
        if isinstance(answer, ServerError) and not is_no_object(answer):
            raise answer
        there[index] = answer == length
        if not there[index]:
            break
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


def _take_value(connection: Connection, into: Sequence[memoryview]) -> int | Head | ServerError | None:
    answer = connection.receive_value(into, length_of_head=HEAD_BYTES)
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
