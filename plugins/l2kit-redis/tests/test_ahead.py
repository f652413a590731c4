"""Values that are asked for ahead of their replies: never many at once, each into its own memory, however they come."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l2kit_redis import values
from l2kit_redis.connection import Connection
from l2kit_redis.faults import ServerError
from l2kit_redis.stream import Patience, Stream

UNTOUCHED = 0xA5

#: What a server may say to GET: a value, none, or an error.
ANSWERS = st.one_of(
    st.integers(0, 700).map(lambda size: bytes(index % 251 for index in range(size))),
    st.none(),
    st.just(ServerError("WRONGTYPE no string")),
)


def wire(answer: bytes | ServerError | None) -> bytes:
    if isinstance(answer, ServerError):
        return b"-%b\r\n" % str(answer).encode()
    return b"$-1\r\n" if answer is None else b"$%d\r\n%b\r\n" % (len(answer), answer)


@contextmanager
def server(answer: Callable[[bytes], bytes], piece: int) -> Iterator[Connection]:
    """A connection to one that answers each GET by its key, in pieces of so many bytes."""
    ours, theirs = socket.socketpair()
    ours.settimeout(0.02)

    def serve() -> None:
        with theirs, theirs.makefile("rb") as requests:
            while requests.readline():  # *2
                words = [requests.read(int(requests.readline()[1:]) + 2)[:-2] for _ in range(2)]
                assert words[0] == b"GET"
                reply = answer(words[1])
                try:
                    for start in range(0, len(reply), piece):
                        theirs.sendall(reply[start : start + piece])
                except OSError:
                    return

    thread = threading.Thread(target=serve)
    thread.start()
    connection = Connection(Stream(ours, Patience(math.inf, 5.0, lambda: None)))
    try:
        yield connection
    finally:
        connection.close()
        thread.join()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(ANSWERS, st.integers(-3, 3)), max_size=40), st.integers(1, 400))
def test_each_reply_is_its_own(cases: list[tuple[bytes | ServerError | None, int]], piece: int) -> None:
    """Whether it has the expected length, another one, or none: it goes where it belongs, and a miss goes nowhere."""
    answers = [answer for answer, _ in cases]
    names = [b"%d" % number for number in range(len(cases))]
    room = [max(0, len(a) + more) if isinstance(a, bytes) else 100 for a, more in cases]
    targets = [bytearray([UNTOUCHED]) * size for size in room]
    seen: list[int] = []
    with server(lambda name: wire(answers[int(name)]), piece) as connection:
        got = values.get_each(
            connection, names, [[memoryview(target)] for target in targets], lambda index, _: seen.append(index)
        )
        assert connection.settled
    for answer, taken, target in zip(answers, got, targets, strict=True):
        if isinstance(answer, bytes):
            assert taken == len(answer)
            kept = min(len(answer), len(target))
            assert target[:kept] == answer[:kept]
            assert set(target[kept:]) <= {UNTOUCHED}
        else:
            assert set(target) <= {UNTOUCHED}, "a miss was written to"
            assert taken is None if answer is None else isinstance(taken, ServerError)
    assert seen == [index for index, answer in enumerate(answers) if isinstance(answer, bytes)]


@pytest.mark.parametrize("nbytes", [65_000, 1_000_000, 5_000_000])
def test_long_values_come_whole(nbytes: int) -> None:
    data = [bytes([number]) * nbytes for number in range(5)]
    targets = [bytearray(nbytes) for _ in data]
    with server(lambda name: wire(data[int(name)]), 1 << 20) as connection:
        into = [[memoryview(target)[:1000], memoryview(target)[1000:]] for target in targets]
        names = [b"%d" % number for number in range(5)]
        assert values.get_each(connection, names, into, lambda _, size: None) == [nbytes] * 5
        assert targets == data
        stripes = [bytearray(nbytes) for _ in data]
        into = [[memoryview(target)] for target in stripes]
        arrived: list[int] = []
        assert values.get_stripes(connection, names, into, [nbytes] * 5, arrived.append) == [True] * 5
        assert stripes == data
        assert arrived == [0, 1, 2, 3, 4]
        assert connection.settled


@pytest.mark.parametrize("missing", range(5))
@pytest.mark.parametrize("answer", [b"$-1\r\n", b"$3\r\nabc\r\n", b"-WRONGTYPE no\r\n"])
def test_after_a_stripe_that_is_not_there_the_connection_is_settled(missing: int, answer: bytes) -> None:
    data = [bytes([number]) * 3000 for number in range(5)]
    with server(lambda name: answer if int(name) == missing else wire(data[int(name)]), 1000) as connection:
        names = [b"%d" % number for number in range(5)]
        there = values.get_stripes(connection, names, [[memoryview(bytearray(3000))] for _ in data], [3000] * 5)
        assert there[: missing + 1] == [True] * missing + [False]
        assert connection.settled


@pytest.mark.parametrize("lengths", [[100] * 100, [1 << 20] * 20, [4 << 20] * 4, [100, 5 << 20, 100, 1 << 20] * 5])
def test_no_more_is_asked_for_than_the_server_sends_well(lengths: Sequence[int]) -> None:
    asked: list[int] = []

    class Recorder(Connection):
        __slots__ = ()

        def __init__(self) -> None:
            """No socket: nothing is sent."""

        def send(self, buffers: Sequence[bytes | memoryview], replies: int) -> None:
            asked.append(replies)

    ahead = values.Ahead(Recorder(), [b"x"] * len(lengths), lengths)
    for index in range(len(lengths)):
        ahead.ask(index)
        waiting = lengths[index : ahead.asked]
        assert ahead.asked > index
        assert len(waiting) <= 16
        assert len(waiting) == 1 or sum(waiting) <= 3 << 20
    assert sum(asked) == len(lengths)
    if max(lengths) < 1 << 20:
        assert len(asked) <= 1 + len(lengths) // 8, "they are asked for several at a time"
