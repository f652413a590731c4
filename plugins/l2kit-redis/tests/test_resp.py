"""The protocol on a pair of sockets: any fragmentation gives the same replies, anything else is refused."""

from __future__ import annotations

import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l2kit_redis.adapter import glob_escape
from l2kit_redis.faults import ConnectionLostError, ProtocolError, ServerError
from l2kit_redis.resp import Reply, ReplyReader, request, value_request
from l2kit_redis.stream import Patience, Stream


@contextmanager
def reading(data: bytes, cuts: tuple[int, ...] = ()) -> Iterator[ReplyReader]:
    """A reader that receives ``data``, cut at these places, and then the end of the stream."""
    ours, theirs = socket.socketpair()
    ours.settimeout(0.02)
    places = [0, *sorted({min(cut, len(data)) for cut in cuts}), len(data)]

    def write() -> None:
        try:
            for start, stop in itertools.pairwise(places):
                theirs.sendall(data[start:stop])
            theirs.shutdown(socket.SHUT_WR)
        except OSError:  # the reader has seen enough
            pass

    thread = threading.Thread(target=write)
    thread.start()
    stream = Stream(ours, Patience(math.inf, 5.0, lambda: None))
    try:
        yield ReplyReader(stream)
    finally:
        stream.close()
        thread.join()
        theirs.close()


def wire(reply: Reply) -> bytes:
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case list():
            return b"*%d\r\n%b" % (len(reply), b"".join(map(wire, reply)))
    raise AssertionError(reply)


REPLIES = st.recursive(
    st.none() | st.integers(-(1 << 63), (1 << 63) - 1) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)
CUTS = st.lists(st.integers(0, 1000), max_size=12).map(tuple)


@settings(deadline=None, max_examples=60)
@given(st.lists(REPLIES, max_size=5), CUTS)
def test_replies_survive_any_fragmentation(replies: list[Reply], cuts: tuple[int, ...]) -> None:
    with reading(b"".join(map(wire, replies)), cuts) as reader:
        assert [reader.reply() for _ in replies] == replies
        assert reader.empty


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=3000), st.lists(st.integers(0, 1500), max_size=5), CUTS)
def test_a_value_fills_its_segments(data: bytes, sizes: list[int], cuts: tuple[int, ...]) -> None:
    """Whatever the segments are, the value lies in them one after the other and the rest is untouched."""
    segments = [bytearray(b"\xa5" * size) for size in [*sizes, len(data)]]
    with reading(wire(data) + b":7\r\n", cuts) as reader:
        assert reader.value_length() == len(data)
        reader.value([memoryview(segment) for segment in segments], len(data))
        assert reader.reply() == 7
    joined = b"".join(segments)
    assert joined[: len(data)] == data
    assert set(joined[len(data) :]) <= {0xA5}


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 1 << 40), max_size=300), CUTS)
def test_integers_survive_any_fragmentation(numbers: list[int], cuts: tuple[int, ...]) -> None:
    with reading(b"".join(map(wire, numbers)) + b"+next\r\n", cuts) as reader:
        assert reader.integers(len(numbers)) == numbers
        assert reader.reply() == b"next"


def test_more_replies_than_the_buffer_holds() -> None:
    count = 30_000
    with reading(b":123456\r\n" * count) as reader:
        assert reader.integers(count) == [123456] * count
        assert reader.empty


def test_errors_are_values_among_integers() -> None:
    with reading(b":1\r\n-WRONGTYPE not a string\r\n:3\r\n") as reader:
        one, error, three = reader.integers(3)
    assert (one, three) == (1, 3)
    assert isinstance(error, ServerError)
    assert error.code == "WRONGTYPE"


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46\r\n",
        b"$-2\r\n",
        b"$1_0\r\n",
        b"$ 5\r\nhello\r\n",
        b"$+5\r\nhello\r\n",
        b"$99999999999999999999999\r\n",
        b"$17000000\r\n",
        b"$5\r\nhelloXX",
        b"*-7\r\n",
        b"*999999\r\n",
        b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n",
        b":\r\n",
        b":1.5\r\n",
        b":-\r\n",
        b"\r\n",
        b"+" + b"x" * 70_000,
    ],
)
def test_what_is_no_reply_is_refused(data: bytes) -> None:
    with reading(data) as reader, pytest.raises(ProtocolError):
        reader.reply()


@pytest.mark.parametrize("data", [b"", b"$", b"$5\r\nhel", b"$5\r\nhello", b"$5\r\nhello\r", b"*2\r\n:1\r\n", b":12"])
@pytest.mark.parametrize("take", [ReplyReader.reply, lambda reader: reader.integers(1)])
def test_a_stream_that_ends_early_is_a_lost_connection(data: bytes, take: Callable[[ReplyReader], object]) -> None:
    expected = (ConnectionLostError, ProtocolError) if take is not ReplyReader.reply else ConnectionLostError
    with reading(data) as reader, pytest.raises(expected):
        take(reader)


def test_requests() -> None:
    assert request(b"GET", b"a b") == b"*2\r\n$3\r\nGET\r\n$3\r\na b\r\n"
    front, back = value_request((b"SET", b"k"), 5, (b"PX", b"10"))
    assert front + b"hello" + back == request(b"SET", b"k", b"hello", b"PX", b"10")


@given(st.binary(max_size=40))
def test_an_escaped_prefix_holds_no_bare_glob_character(literal: bytes) -> None:
    escaped = glob_escape(literal)
    plain = bytearray()
    position = 0
    while position < len(escaped):  # the server's own rule: a backslash makes the next byte stand for itself
        if escaped[position : position + 1] == b"\\":
            position += 1
        else:
            assert escaped[position : position + 1] not in (b"*", b"?", b"[")
        plain += escaped[position : position + 1]
        position += 1
    assert bytes(plain) == literal


def test_patience_ends_at_the_deadline_while_bytes_trickle() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(0.02)
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.005):
            theirs.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    started = time.monotonic()
    stream = Stream(ours, Patience(started + 0.2, 5.0, lambda: None))
    try:
        with pytest.raises(TimeoutError):
            stream.receive([memoryview(bytearray(1 << 20))])
        assert 0.2 <= time.monotonic() - started < 1
        assert stream.received > 0
    finally:
        stop.set()
        thread.join()
        stream.close()
        theirs.close()
