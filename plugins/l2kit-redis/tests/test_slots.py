"""Which slot a key has, and what servers say of slots: known vectors, and replies that are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l2kit_redis.endpoint import Endpoint, announced_endpoint, parse_endpoint
from l2kit_redis.faults import ProtocolError, ServerError
from l2kit_redis.redirected import split_requests
from l2kit_redis.resp import Reply, request
from l2kit_redis.slots import SLOTS, Shard, SlotMap, redirection, slot_map, slot_of


@pytest.mark.parametrize(
    ("name", "slot"),
    [
        (b"123456789", 0x31C3),  # the specification's own vector
        (b"", 0),
        (b"foo", 12182),
        (b"bar", 5061),
        (b"hello", 866),
        (b"somekey", 11058),
        (b"foo{hash_tag}", 2515),
        (b"bar{hash_tag}", 2515),
        (b"hash_tag", 2515),
        (b"{user1000}.following", 3443),
        (b"{user1000}.followers", 3443),
        (b"user1000", 3443),
    ],
)
def test_known_keys_have_known_slots(name: bytes, slot: int) -> None:
    assert slot_of(name) == slot % SLOTS


@pytest.mark.parametrize(
    ("name", "hashed"),
    [
        (b"foo{}{bar}", b"foo{}{bar}"),  # an empty tag is none
        (b"foo{{bar}}zap", b"{bar"),
        (b"foo{bar}{zap}", b"bar"),
        (b"foo{bar", b"foo{bar"),
        (b"foo}bar{", b"foo}bar{"),
        (b"}{a}", b"a"),
    ],
)
def test_the_hash_tag_is_the_first_one_that_holds_anything(name: bytes, hashed: bytes) -> None:
    assert slot_of(name) == _slot_without_tags(hashed)


def _slot_without_tags(name: bytes) -> int:
    crc = 0
    for byte in name:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1) ^ 0x1021 if crc & 0x8000 else crc << 1
        crc &= 0xFFFF
    return crc % SLOTS


@given(st.binary(max_size=80).filter(lambda name: b"{" not in name))
def test_every_key_has_the_slot_that_the_specification_computes(name: bytes) -> None:
    assert slot_of(name) == _slot_without_tags(name)


# --- what servers say -----------------------------------------------------------------------------


def test_a_map_is_read() -> None:
    reply: Reply = [
        [0, 5, [b"10.0.0.1", 7000, b"id"], [b"10.0.0.2", 7001, b"id", [b"hostname", b"two"]]],
        [6, 16383, [None, 7002, b"id"], [b"?", 7003, b"id"]],
    ]
    found = slot_map(reply, "asked.example")
    first = Shard(Endpoint("10.0.0.1", 7000), (Endpoint("10.0.0.2", 7001),))
    second = Shard(Endpoint("asked.example", 7002))
    assert found.shards[0] == found.shards[5] == first
    assert found.shards[6] == found.shards[16383] == second
    assert found.complete
    assert found.distinct == [first, second]


def test_a_slot_that_nobody_serves_is_a_hole() -> None:
    found = slot_map([[1, 16383, [b"h", 1, b"id"]]], "h")
    assert not found.complete
    assert found.shards[0] is None
    assert not slot_map([], "h").distinct


@pytest.mark.parametrize(
    "reply",
    [
        None,
        b"OK",
        [1],
        [[0]],
        [[0, 16384, [b"h", 1]]],
        [[5, 4, [b"h", 1]]],
        [[-1, 4, [b"h", 1]]],
        [[0, 4, []]],
        [[0, 4, [b"h", 0]]],
        [[0, 4, [b"h", 65536]]],
        [[0, 4, [b"h", 1], b"replica"]],
    ],
)
def test_what_is_no_map_is_refused(reply: Reply) -> None:
    with pytest.raises(ProtocolError):
        slot_map(reply, "h")


def test_a_moved_slot_finds_the_shard_that_is_known() -> None:
    slots = slot_map([[0, 99, [b"a", 1], [b"b", 2]], [100, 16383, [b"c", 3]]], "h")
    slots.move(100, Endpoint("a", 1))
    assert slots.shards[100] == Shard(Endpoint("a", 1), (Endpoint("b", 2),))
    slots.move(101, Endpoint("new", 4))
    assert slots.shards[101] == Shard(Endpoint("new", 4))
    assert slots.has_primary(Endpoint("new", 4))
    assert not slots.has_primary(Endpoint("b", 2))
    assert not SlotMap().complete


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("MOVED 3999 127.0.0.1:6381", "127.0.0.1", 6381),
        ("ASK 3999 ::1:6381", "::1", 6381),
        ("MOVED 3999 node-2.example:6381", "node-2.example", 6381),
        ("MOVED 3999 :6381", "asked", 6381),
    ],
)
def test_a_redirection_is_read(text: str, host: str, port: int) -> None:
    assert redirection(ServerError(text), "asked") == (3999, (host, port))


@pytest.mark.parametrize("text", ["MOVED", "MOVED 1", "MOVED 16384 h:1", "MOVED x h:1", "ASK 1 h", "ASK 1 h:0"])
def test_a_redirection_to_nowhere_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        redirection(ServerError(text), "asked")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("h", "h", 1), ("h:2", "h", 2), ("[::1]:2", "::1", 2), ("[::1]", "::1", 1), ("::1", "::1", 1)],
)
def test_endpoints_in_options(text: str, host: str, port: int) -> None:
    endpoint = parse_endpoint(text, 1)
    assert endpoint == (host, port)
    assert parse_endpoint(str(endpoint), 9) == endpoint


@pytest.mark.parametrize("text", ["", ":1", "h:", "h:x", "h:0", "h:65536", "[::1", "[::1]2", "a b", "u@h", "h/1"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is"):
        parse_endpoint(text, 1)


def test_an_announced_address_may_be_in_brackets() -> None:
    assert announced_endpoint("[::1]:7000", "h") == Endpoint("::1", 7000)


@given(st.lists(st.lists(st.binary(max_size=12), min_size=1, max_size=4), max_size=5))
def test_pipelined_commands_are_cut_apart(commands: list[list[bytes]]) -> None:
    requests = [request(*words) for words in commands]
    assert split_requests(b"".join(requests)) == requests
