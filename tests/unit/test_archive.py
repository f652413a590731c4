"""The archive format: what was written comes back, and whatever happens to a file, nothing else does."""

from __future__ import annotations

import io
import struct
import tracemalloc
from collections.abc import Sequence

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from l2kit.archive import ArchiveError, ArchiveReader, ArchiveWriter, Damage, Record
from l2kit.keys import ObjectKey

pytestmark = pytest.mark.timeout(120)

HEAD_BYTES = 32
Objects = list[tuple[ObjectKey, bytes]]

#: One object of three bytes; a reader of today must read this for ever.
PINNED = bytes.fromhex(
    "4c324b49544152430100000000000000030c41ed4c26549a66fc3abccc28c04a4c324b495452454325000000000000000300"
    "00000000000006b05ab6733a618578af5f94892f3950617263686976652f303030303030303030303030303030372f73306f"
    "66312e67302e616c6c38385d5a7b8c6571586af9160deddf9b6162634c324b4954454e440100000000000000030000000000"
    "00008f9c90e6b82a1bc95d78bb9d28e632ebc6a7af7b847e7518d2d6f66d4e57559e"
)


def key(number: int) -> ObjectKey:
    return ObjectKey("archive", number.to_bytes(8, "big"))


def written(objects: Sequence[tuple[ObjectKey, bytes]]) -> bytes:
    sink = io.BytesIO()
    writer = ArchiveWriter(sink)
    for name, data in objects:
        writer.add(name, memoryview(data))
    writer.finish()
    return sink.getvalue()


def read(data: bytes, **options: int) -> tuple[Objects, list[Damage]]:
    items = list(ArchiveReader(io.BytesIO(data), **options))
    whole = [(item.key, bytes(item.stored)) for item in items if isinstance(item, Record)]
    return whole, [item for item in items if isinstance(item, Damage)]


def some(count: int, nbytes: int = 300) -> Objects:
    return [(key(number), bytes([number + 1]) * nbytes) for number in range(count)]


objects_of_any_size = st.lists(st.binary(max_size=400), max_size=6).map(
    lambda parts: [(key(number), data) for number, data in enumerate(parts)]
)
#: Pieces that a reader must not fall for, among noise.
hostile = st.lists(
    st.one_of(
        st.binary(max_size=60), st.sampled_from([b"L2KITREC", b"L2KITEND", b"L2KITARC", b"L2KITOBJ", b"L2KITRE"])
    ),
    max_size=12,
).map(b"".join)


@given(objects_of_any_size)
def test_what_was_written_comes_back(objects: Objects) -> None:
    assert read(written(objects)) == (objects, [])


def test_the_format_is_pinned() -> None:
    """The bytes of format 1, as its description says, and as they once were."""
    name, data = key(7), b"abc"
    archive = written([(name, data)])

    def checksum(covered: bytes) -> bytes:
        return xxhash.xxh3_128_digest(covered)

    head = b"L2KITARC" + struct.pack("<II", 1, 0)
    text = b"archive/0000000000000007/s0of1.g0.all"
    record = b"L2KITREC" + struct.pack("<IIQ", len(text), 0, 3) + checksum(data) + text
    end = b"L2KITEND" + struct.pack("<QQ", 1, 3) + checksum(checksum(record))
    assert archive == head + checksum(head) + record + checksum(record) + data + end + checksum(end)
    assert archive == PINNED
    assert read(PINNED) == ([(name, data)], [])


def test_it_may_come_in_pieces_of_any_size() -> None:
    class Trickle(io.BytesIO):
        def read(self, nbytes: int | None = -1, /) -> bytes:
            return super().read(min(nbytes or 1, 7))

    objects = some(4)
    items = list(ArchiveReader(Trickle(written(objects))))
    assert [(item.key, bytes(item.stored)) for item in items if isinstance(item, Record)] == objects


# --- damage -----------------------------------------------------------------------------------------


def test_cut_off_anywhere_it_is_known_to_be_cut_off() -> None:
    objects = some(3, 40)
    archive = written(objects)
    for length in range(len(archive)):
        if length < 8:
            with pytest.raises(ArchiveError, match="no l2kit archive"):
                read(archive[:length])
            continue
        whole, damage = read(archive[:length])
        assert whole == objects[: len(whole)]
        assert damage, f"{length} of {len(archive)} bytes pass for a whole archive"


@given(st.data())
def test_a_flipped_bit_costs_one_object_and_is_reported(data: st.DataObject) -> None:
    objects = some(4, 100)
    archive = bytearray(written(objects))
    position = data.draw(st.integers(8, len(archive) - 1))
    archive[position] ^= 1 << data.draw(st.integers(0, 7))
    whole, damage = read(bytes(archive))
    assert damage
    assert len(whole) >= len(objects) - 1
    assert [item for item in objects if item in whole] == whole


@given(st.data())
def test_bytes_lost_or_added_are_reported_and_the_rest_is_read(data: st.DataObject) -> None:
    objects = some(5, 100)
    archive = written(objects)
    start = data.draw(st.integers(8, len(archive)))
    stop = data.draw(st.integers(start, min(start + 250, len(archive))))
    between = data.draw(hostile)
    changed = archive[:start] + between + archive[stop:]
    whole, damage = read(changed)
    assert bool(damage) == (changed != archive)
    assert [item for item in objects if item in whole] == whole, "an object that nobody wrote, or out of order"
    assert len(whole) >= len(objects) - 4


@given(st.data())
def test_pieces_of_one_in_any_order_give_nothing_that_was_not_written(data: st.DataObject) -> None:
    archive = written(some(3, 60))
    cuts = sorted(data.draw(st.lists(st.integers(32, len(archive)), max_size=6)))
    pieces = [archive[a:b] for a, b in zip([32, *cuts], [*cuts, len(archive)], strict=True)]
    whole, damage = read(archive[:32] + b"".join(data.draw(st.permutations(pieces))))
    assert all(item in some(3, 60) for item in whole)
    assert damage or whole == some(3, 60)


@given(hostile)
def test_noise_gives_nothing(noise: bytes) -> None:
    whole, damage = read(written([])[:HEAD_BYTES] + noise)
    assert whole == []
    assert damage
    with pytest.raises(ArchiveError):
        read(b"\0" + noise)


def test_damage_names_the_object_and_the_place() -> None:
    objects = some(3)
    archive = bytearray(written(objects))
    archive[archive.index(objects[1][1]) + 5] ^= 1
    whole, damage = read(bytes(archive))
    assert whole == [objects[0], objects[2]]
    assert [item.key for item in damage] == [key(1), None]
    assert bytes(archive)[damage[0].offset :].startswith(b"L2KITREC")
    assert "2 of the archive's 3 objects" in damage[1].what


def test_a_record_left_out_or_doubled_is_noticed() -> None:
    objects = some(3)
    archive = written(objects)
    starts = [position for position in range(len(archive)) if archive.startswith(b"L2KITREC", position)]
    whole, damage = read(archive[: starts[1]] + archive[starts[2] :])
    assert whole == [objects[0], objects[2]]
    assert ["2 of the archive's 3" in item.what for item in damage] == [True]
    whole, damage = read(archive[: starts[1]] + archive[starts[0] :])
    assert whole == [objects[0], *objects]
    assert damage


def test_what_follows_the_end_is_not_read() -> None:
    objects = some(2)
    whole, damage = read(written(objects) + written(some(3)))
    assert whole == objects
    assert ["follows the end" in item.what for item in damage] == [True]


def test_a_damaged_head_does_not_cost_the_objects() -> None:
    archive = bytearray(written(some(2)))
    archive[20] ^= 4
    whole, damage = read(bytes(archive))
    assert whole == some(2)
    assert "head" in damage[0].what


@pytest.mark.parametrize("data", [b"", b"L2KIT", b"PK\x03\x04" + bytes(100), b"L2KITOBJ" + bytes(300)])
def test_other_files_are_no_archives(data: bytes) -> None:
    with pytest.raises(ArchiveError, match="no l2kit archive"):
        read(data)


def test_a_newer_format_is_refused() -> None:
    head = b"L2KITARC" + struct.pack("<II", 2, 0)
    with pytest.raises(ArchiveError, match="format 2 is not readable here"):
        read(head + xxhash.xxh3_128_digest(head) + written(some(1))[HEAD_BYTES:])


# --- hostile lengths --------------------------------------------------------------------------------


def claiming(object_bytes: int, key_bytes: int | None = None) -> bytes:
    """A record head, its checksum right, in front of little."""
    text = key(1).encode().encode()
    head = b"L2KITREC" + struct.pack("<IIQ", len(text) if key_bytes is None else key_bytes, 0, object_bytes)
    head += bytes(16) + text
    return head + xxhash.xxh3_128_digest(head) + b"little"


@pytest.mark.parametrize(
    "record",
    [claiming(1 << 31), claiming(4 << 30), claiming((1 << 64) - 1), claiming(10, (1 << 32) - 1), claiming(10, 201)],
)
def test_memory_goes_by_what_is_there_not_by_what_is_claimed(record: bytes) -> None:
    archive = written([])[:HEAD_BYTES] + record + written(some(3))[HEAD_BYTES:]
    tracemalloc.start()
    try:
        whole, damage = read(archive)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert whole == some(3)
    assert damage
    assert peak < 4 << 20


def test_objects_above_the_limit_are_left_out() -> None:
    objects = [(key(0), b"a" * 100), (key(1), b"b" * 101), (key(2), b"c" * 100)]
    whole, damage = read(written(objects), max_object_bytes=100)
    assert whole == [objects[0], objects[2]]
    assert damage


def test_memory_for_one_object_at_a_time() -> None:
    archive = written(some(40, 1 << 20))
    tracemalloc.start()
    try:
        count = sum(isinstance(item, Record) for item in ArchiveReader(io.BytesIO(archive)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 40
    assert peak < 8 << 20


def test_a_key_in_another_spelling_is_no_key() -> None:
    text = b"archive/0000000000000007/s00of1.g0.all"
    record = b"L2KITREC" + struct.pack("<IIQ", len(text), 0, 0) + xxhash.xxh3_128_digest(b"") + text
    whole, damage = read(written([])[:HEAD_BYTES] + record + xxhash.xxh3_128_digest(record))
    assert whole == []
    assert damage
