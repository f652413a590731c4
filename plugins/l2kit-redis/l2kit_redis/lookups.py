"""Conversations about many keys at once: what lies under them, how long it lives, what is to go. They block.

A lookup is one round trip for existence, sizes, heads and a lease; see `Found` for what it learns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from l2kit_redis.connection import Connection
from l2kit_redis.faults import ServerError
from l2kit_redis.resp import pipeline, request
from l2kit_redis.stripes import HEAD_BYTES, HEAD_RANGE, Head, parse_head

#: Keys asked in one pipeline. The server keeps its replies until they are taken, so neither side blocks the other.
_FIND_KEYS: Final = 8192
_FIND_TRIES: Final = 4
#: In place of what an object begins with: longer than a head, so it is none.
_NOT_ASKED: Final = bytes(HEAD_BYTES + 1)


class Found(NamedTuple):
    """What lies under a name.

    Attributes:
        what: length of the value, the head that it is, or None.
        extended: whether it would have expired before the lease ends, and does no longer.
    """

    what: int | Head | None
    extended: bool = False

    @property
    def size(self) -> int | None:
        """Bytes of the whole object."""
        return self.what.size if isinstance(self.what, Head) else self.what


NOT_FOUND: Final = Found(None)


def is_no_object(answer: object) -> bool:
    """True when the server says that what is there is another type than a string."""
    return isinstance(answer, ServerError) and answer.code == "WRONGTYPE"


def find(
    connection: Connection, names: Sequence[bytes], lease_ms: int | None = None, *, heads: bool = True
) -> list[Found]:
    """What lies under each name, in one round trip; what is there stays for ``lease_ms``, if that is not None.

    Args:
        connection: to the server that has them.
        names: distinct keys.
        lease_ms: see above.
        heads: whether heads are to be expected. When they are not, but there are some, it takes a second round trip.

    Raises:
        ServerError: the server answered with an error.
    """
    found: list[Found] = []
    for start in range(0, len(names), _FIND_KEYS):
        found += _find(connection, names[start : start + _FIND_KEYS], lease_ms, heads=heads)
    return found


def extend(connection: Connection, names: Sequence[bytes], ttl_ms: Mapping[bytes, int]) -> list[bool]:
    """Let each of ``names`` live for at least so long from now; True where it would have expired before.

    Raises:
        ServerError: the server answered with an error.
    """
    connection.send([_extension(connection, names, ttl_ms)], len(names))
    return _extended(connection, names, ttl_ms)


def settle(connection: Connection, names: Sequence[bytes], kept: Mapping[bytes, int | None]) -> list[int]:
    """Give each of ``names`` the time to live that ``kept`` has for it, None for no end; delete those not in it.

    Raises:
        ServerError: the server answered with an error.
    """
    commands: list[Sequence[bytes]] = []
    for name in names:
        if name not in kept:
            commands.append((b"UNLINK", name))
        elif (ttl_ms := kept[name]) is None:
            commands.append((b"PERSIST", name))
        else:
            commands.append((b"PEXPIRE", name, b"%d" % ttl_ms))
    return _integers(connection.call_each(commands))


def _find(connection: Connection, names: Sequence[bytes], lease_ms: int | None, *, heads: bool) -> list[Found]:
    seen = _look(connection, names, lease_ms, heads=heads)
    if None not in seen:
        return [each or NOT_FOUND for each in seen]
    found = dict(zip(names, seen, strict=True))
    for _ in range(_FIND_TRIES):
        unclear = [name for name, what in found.items() if what is None]
        if not unclear:
            break
        # What the first look has extended does not say so twice: the lease of a head is for its stripes to follow.
        found.update(zip(unclear, _look(connection, unclear, lease_ms, heads=True, extended=True), strict=True))
    return [what or NOT_FOUND for what in found.values()]


def _look(
    connection: Connection, names: Sequence[bytes], lease_ms: int | None, *, heads: bool, extended: bool = False
) -> list[Found | None]:
    """One round trip; None for what may be a head and was not asked, or was replaced in the middle of it."""
    ttl_ms = {} if lease_ms is None else dict.fromkeys(names, lease_ms)
    questions = [pipeline(b"STRLEN", names)]
    if heads:
        questions.append(pipeline(b"GETRANGE", names, *HEAD_RANGE))
    if ttl_ms:
        questions.append(_extension(connection, names, ttl_ms))
    connection.send([b"".join(questions)], len(questions) * len(names))
    sizes = connection.take_integers(len(names))
    starts = connection.take_strings(len(names)) if heads else []
    lives = _extended(connection, names, ttl_ms) if ttl_ms else [False] * len(names)
    if not heads:  # what is no head has one size for all objects of a model: it is judged once
        seen = set(zip(sizes, lives, strict=True))
        known = {each: _found(each[0], _NOT_ASKED, each[1] or extended) for each in seen}
        return [known[each] for each in zip(sizes, lives, strict=True)]
    return [
        Found(size, lived or extended)
        if type(size) is int and size > HEAD_BYTES and type(start) is bytes and len(start) != HEAD_BYTES
        else _found(size, start, lived or extended)
        for size, start, lived in zip(sizes, starts, lives, strict=True)
    ]


def _found(size: int | ServerError, start: bytes | ServerError | None, extended: bool) -> Found | None:
    for answer in (size, start):
        if isinstance(answer, ServerError):
            if is_no_object(answer):
                return NOT_FOUND
            raise answer
    assert isinstance(size, int)
    assert not isinstance(start, ServerError)
    if start and len(start) == HEAD_BYTES:
        return Found(parse_head(start) or HEAD_BYTES, extended)
    if size == HEAD_BYTES and start:
        return None
    return Found(size, extended) if size and start else NOT_FOUND  # no object is empty


def _extension(connection: Connection, names: Sequence[bytes], ttl_ms: Mapping[bytes, int]) -> bytes:
    """The requests that extend, or where the server cannot compare, ask for what would be compared."""
    if not connection.compares_expiry:
        return pipeline(b"PTTL", names)
    lives = {ttl_ms[name] for name in names}
    if len(lives) == 1:
        return pipeline(b"PEXPIRE", names, b"%d" % lives.pop(), b"GT")
    return b"".join([request(b"PEXPIRE", name, b"%d" % ttl_ms[name], b"GT") for name in names])


def _extended(connection: Connection, names: Sequence[bytes], ttl_ms: Mapping[bytes, int]) -> list[bool]:
    """Take the replies to :func:`_extension` and do what is left to do."""
    compared = connection.compares_expiry
    answers = connection.take_integers(len(names))
    if compared and any(isinstance(answer, ServerError) and answer.code == "ERR" for answer in answers):
        compared = connection.compares_expiry = False
        answers = connection.call_integers(b"PTTL", names)
    if compared:
        return [answer == 1 for answer in _integers(answers)]
    left_ms = dict(zip(names, _integers(answers), strict=True))
    due = [name for name in names if 0 <= left_ms[name] < ttl_ms[name]]  # negative: gone, or without an end
    done = _integers(connection.call_each([(b"PEXPIRE", name, b"%d" % ttl_ms[name]) for name in due]))
    extended = dict(zip(due, done, strict=True))
    return [extended.get(name) == 1 for name in names]


def _integers(answers: Sequence[int | ServerError]) -> list[int]:
    numbers: list[int] = []
    for answer in answers:
        if isinstance(answer, ServerError):
            raise answer
        numbers.append(answer)
    return numbers
