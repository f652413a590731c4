"""Objects that go and come in pieces: checksums made on the way are worth what those made at once are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from l2kit.envelope import RunningChecksum, checksum
from l2kit.framing import Sealing, seal
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.memory import MemoryObj, split
from l2kit.serde import CodecChain
from tests.unit.dict_adapter import DictAdapter, make

KEY = ObjectKey("pieces", b"p" * 16)
cuts = st.lists(st.integers(0, 1200), max_size=8)
bodies = st.lists(st.binary(max_size=300), min_size=1, max_size=4)


def views(parts: list[bytes]) -> list[memoryview]:
    return [memoryview(part) for part in parts]


@given(bodies, st.binary(max_size=20), cuts)
def test_a_running_checksum_is_the_checksum(parts: list[bytes], metadata: bytes, until: list[int]) -> None:
    running = RunningChecksum(metadata, views(parts))
    total = sum(map(len, parts))
    for position in until:
        before = running.done_bytes
        running.advance(position)
        assert running.done_bytes == max(before, min(position, total))
        assert running.digest() == checksum(metadata, [b"".join(parts)[: running.done_bytes]])
    running.advance(total)
    assert running.digest() == checksum(metadata, parts)


@given(bodies, st.integers(0, 1500))
def test_a_list_is_split_anywhere(parts: list[bytes], nbytes: int) -> None:
    front, back = split(views(parts), nbytes)
    whole = b"".join(parts)
    assert (b"".join(front), b"".join(back)) == (whole[:nbytes], whole[nbytes:])


@given(bodies, st.sampled_from([1, 64, 512]), cuts)
def test_sealed_on_the_way_or_at_once_is_the_same(parts: list[bytes], alignment: int, until: list[int]) -> None:
    obj = MemoryObj.wrap(parts, Layout.raw(sum(map(len, parts))))
    sealing = Sealing(KEY, obj, alignment)
    for position in until:
        sealing.advance(position)
    sealing.finish()
    assert b"".join(sealing.data) == b"".join(seal(KEY, obj, CodecChain(), alignment))


def load_item(adapter: DictAdapter, nbytes: int) -> LoadItem:
    return LoadItem(KEY, MemoryObj.allocate(Layout.raw(nbytes)), adapter)


def arrive(item: LoadItem, stored: bytes, until: list[int]) -> None:
    """One attempt in which ``stored`` arrives, with a look at it after each of these many bytes."""
    receiving = item.receive()
    done = 0
    for position in [*sorted(until), len(stored)]:
        position = min(position, len(stored))
        rest = memoryview(stored)[done:position]
        for buffer in split(split(receiving.into, done)[1], position - done)[0]:
            buffer[:] = rest[: len(buffer)]
            rest = rest[len(buffer) :]
        done = position
        receiving.advance(done)
    receiving.finish(len(stored))


@given(st.binary(min_size=1, max_size=900), cuts, st.none() | st.integers(0, 1 << 20))
def test_what_arrives_in_pieces_is_intact_or_is_not(body: bytes, until: list[int], flipped: int | None) -> None:
    adapter = make(DictAdapter)
    stored = bytearray(b"".join(seal(KEY, MemoryObj.wrap(body, Layout.raw(len(body))), CodecChain(), 1)))
    item = load_item(adapter, len(body))
    if flipped is not None:
        stored[flipped % len(stored)] ^= 1 << flipped % 8
    arrive(item, bytes(stored), until)
    assert item.is_verified
    assert item.is_intact(len(stored)) == (flipped is None)
    assert not item.is_intact(len(stored) + 1)


@given(st.binary(min_size=1, max_size=900), st.binary(min_size=1, max_size=900), st.integers(0, 1200), cuts)
def test_a_repeated_attempt_begins_anew(body: bytes, junk: bytes, stopped_at: int, until: list[int]) -> None:
    adapter = make(DictAdapter)
    stored = b"".join(seal(KEY, MemoryObj.wrap(body, Layout.raw(len(body))), CodecChain(), 1))
    item = load_item(adapter, len(body))
    interrupted = item.receive()
    for buffer in interrupted.into:
        buffer[:] = (junk * (len(buffer) // len(junk) + 1))[: len(buffer)]
    interrupted.advance(stopped_at)
    arrive(item, stored, until)
    assert item.is_intact(len(stored))
    item.receive()
    assert not item.is_verified


def test_what_is_encoded_first_is_not_sealed_on_the_way() -> None:
    adapter = make(DictAdapter)
    item = StoreItem(KEY, MemoryObj.wrap(b"x", Layout.raw(1)), adapter)
    assert item.stored_bytes == 0
    assert item.begin() is not None
    assert item.stored_bytes == len(b"".join(item.data()))
    assert item.begin() is None
