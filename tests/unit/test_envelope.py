"""Envelopes: golden files decode for ever, and no damage of any kind goes through."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from l2kit import envelope
from l2kit.envelope import CORRUPTION_REASONS, HEADER_BYTES
from l2kit.errors import CapacityError, CorruptObjectError
from l2kit.framing import LoadFrame, seal
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.serde import CodecChain

GOLDEN = sorted((Path(__file__).parent.parent / "golden").glob("envelope-v*.bin"))
KEY = ObjectKey("ns", bytes(range(16)))
OTHER = ObjectKey("ns", bytes(range(1, 17)))
DATA = b"forty bytes of payload, no more, no less"
LAYOUT = Layout.raw(len(DATA))


class Golden(msgspec.Struct, frozen=True):
    """What a golden file must decode to."""

    key: str
    layout: Layout
    alignment: int
    metadata: str
    payload: str


def stored(key: ObjectKey = KEY, data: bytes = DATA, alignment: int = 1) -> bytes:
    return b"".join(seal(key, MemoryObj.wrap(data, Layout.raw(len(data))), CodecChain(), alignment))


def open_sealed(blob: bytes, key: ObjectKey = KEY, room: int = len(DATA)) -> bytes:
    """What a backend and the framework do together: fill the buffers, then verify."""
    target = MemoryObj.wrap(bytearray(room), Layout.raw(room))
    frame = LoadFrame(key, target, CodecChain(), 1)
    rest = memoryview(blob)
    for segment in frame.into:
        part = rest[: len(segment)]
        segment[: len(part)] = part
        rest = rest[len(part) :]
    assert frame.finish(len(blob)), "the chain and the alignment are those of the frame"
    return target.tobytes()[: frame.nbytes]


def reason_of(blob: bytes, key: ObjectKey = KEY) -> str:
    with pytest.raises(CorruptObjectError) as caught:
        open_sealed(blob, key)
    assert caught.value.reason in CORRUPTION_REASONS
    return caught.value.reason


class TestGolden:
    def test_there_are_some_of_every_format_version(self) -> None:
        versions = {path.name.split("-")[1] for path in GOLDEN}
        assert versions == {f"v{version}" for version in range(1, envelope.FORMAT_VERSION + 1)}
        assert len(GOLDEN) >= 8

    @pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
    def test_it_decodes(self, path: Path) -> None:
        blob, facts = path.read_bytes(), self._facts(path)
        header = envelope.parse(blob)
        assert header.layout == facts.layout
        assert header.total_bytes == len(blob)
        metadata = blob[HEADER_BYTES : HEADER_BYTES + header.metadata_length]
        payload = blob[header.payload_offset :]
        envelope.verify(header, ObjectKey.parse(facts.key), metadata, [memoryview(payload)], len(blob))
        assert metadata.decode() == facts.metadata
        assert payload.hex() == facts.payload
        key = ObjectKey.parse(facts.key)
        assert header.layer_start == (key.layer or 0)
        assert header.layer_stop == header.layer_start + facts.layout.layers

    @pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
    def test_what_we_write_is_what_we_wrote(self, path: Path) -> None:
        if f"-v{envelope.FORMAT_VERSION}-" not in path.name:
            pytest.skip("an older format version, which is only read")
        facts = self._facts(path)
        payload = bytes.fromhex(facts.payload)
        head = envelope.seal(
            ObjectKey.parse(facts.key),
            facts.layout,
            [memoryview(payload)],
            metadata=facts.metadata.encode(),
            alignment=facts.alignment,
        )
        assert head + payload == path.read_bytes()

    def _facts(self, path: Path) -> Golden:
        return msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Golden)


class TestDamage:
    def test_undamaged(self) -> None:
        assert open_sealed(stored()) == DATA

    def test_every_single_bit_flip_is_noticed(self) -> None:
        blob = stored()
        for bit in range(8 * len(blob)):
            damaged = bytearray(blob)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(CorruptObjectError):
                open_sealed(bytes(damaged))

    @pytest.mark.parametrize("path", [p for p in GOLDEN if p.stem.endswith("coded")], ids=lambda path: path.stem)
    def test_every_flip_in_header_and_codec_metadata_is_noticed(self, path: Path) -> None:
        blob = path.read_bytes()
        key, end = ObjectKey("golden", bytes(range(16))), HEADER_BYTES + envelope.parse(blob).metadata_length
        for bit in range(8 * end):
            damaged = bytearray(blob)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(CorruptObjectError):
                self._verify(bytes(damaged), key)

    def test_every_truncation_is_noticed(self) -> None:
        blob = stored()
        reasons = {reason_of(blob[:length]) for length in range(len(blob))}
        assert reasons == {"truncated"}

    def test_a_tail_is_noticed(self) -> None:
        assert reason_of(stored() + b"\0") == "length"
        assert reason_of(stored() + stored()) == "length"

    def test_another_key_is_noticed(self) -> None:
        assert reason_of(stored(OTHER)) == "key"
        assert reason_of(stored(), OTHER) == "key"

    @pytest.mark.parametrize("field", ["namespace", "shard", "group", "layer"])
    def test_a_key_that_differs_in_one_field_is_noticed(self, field: str) -> None:
        other = {
            "namespace": ObjectKey("ms", KEY.chunk_hash),
            "shard": ObjectKey("ns", KEY.chunk_hash, 0, 2),
            "group": ObjectKey("ns", KEY.chunk_hash, group=1),
            "layer": ObjectKey("ns", KEY.chunk_hash, layer=0),
        }[field]
        assert reason_of(stored(other)) == "key"

    def test_a_swapped_payload_is_noticed(self) -> None:
        one, other = stored(), stored(OTHER, DATA[::-1])
        assert reason_of(one[:HEADER_BYTES] + other[HEADER_BYTES:]) == "checksum"

    def test_a_torn_object_is_noticed(self) -> None:
        old, new = stored(data=b"o" * 40), stored(data=b"n" * 40)
        for cut in range(HEADER_BYTES + 1, len(new)):
            assert reason_of(new[:cut] + old[cut:]) == "checksum"

    @pytest.mark.parametrize("blob", [b"", b"OK", b"<html>" * 100, bytes(296), b"\xff" * 296, b"L2KITOBJ" * 37])
    def test_foreign_bytes_are_noticed(self, blob: bytes) -> None:
        assert reason_of(blob) in ("truncated", "magic", "header")

    @pytest.mark.parametrize(("field", "value"), [(8, 9), (10, 64)])
    def test_only_an_intact_header_of_another_format_is_unsupported(self, field: int, value: int) -> None:
        """A flipped bit must not pass for a newer format: that is kept, and a damaged object would never heal."""
        body = bytearray(stored()[: HEADER_BYTES - 16])
        body[field] = value
        assert reason_of(bytes(body) + xxhash.xxh3_128_digest(bytes(body)) + DATA) == "unsupported"
        assert reason_of(bytes(body) + stored()[HEADER_BYTES - 16 :]) == "header"

    @given(st.binary(max_size=600) | st.binary(max_size=400).map(lambda tail: stored()[:HEADER_BYTES] + tail))
    def test_any_bytes_raise_nothing_but_corruption(self, blob: bytes) -> None:
        if blob != stored():
            assert reason_of(blob) in CORRUPTION_REASONS

    @given(st.binary(max_size=HEADER_BYTES - 24))
    def test_a_header_with_a_good_checksum_and_bad_fields(self, fields: bytes) -> None:
        """Whoever can write to the backend can also compute checksums: nothing but corruption may come of it."""
        body = stored()[:8] + fields.ljust(HEADER_BYTES - 24, b"\0")
        # The version and the header's length are kept, so that the fields behind them are reached.
        body = body[:8] + stored()[8:12] + body[12:]
        assert reason_of(body + xxhash.xxh3_128_digest(body) + DATA) in CORRUPTION_REASONS

    def test_the_layout_must_be_the_one_asked_for(self) -> None:
        layout = Layout.kv(layers=1, tokens=5, kv_heads=1, head_dim=4, dtype="uint8")
        head = seal(KEY, MemoryObj.wrap(DATA, layout), CodecChain(), 1)
        for other in (
            Layout.kv(layers=1, tokens=5, kv_heads=1, head_dim=4, dtype="int8"),
            Layout.kv(layers=1, tokens=4, kv_heads=1, head_dim=5, dtype="uint8"),
            Layout.mla(layers=1, tokens=5, latent_dim=8, dtype="uint8"),
        ):
            frame = LoadFrame(KEY, MemoryObj.allocate(other), CodecChain(), 1)
            frame.into[0][:] = head[0]
            frame.into[1][:] = DATA
            with pytest.raises(CorruptObjectError) as caught:
                frame.finish(HEADER_BYTES + len(DATA))
            assert caught.value.reason == "layout"

    def test_a_short_destination_is_no_corruption(self) -> None:
        with pytest.raises(CapacityError):
            open_sealed(stored(), room=39)
        with pytest.raises(CapacityError):
            open_sealed(stored(), room=0)

    def test_a_roomy_destination(self) -> None:
        assert open_sealed(stored(), room=1000) == DATA

    def test_another_alignment_must_be_read_as_a_whole(self) -> None:
        blob = stored(alignment=512)
        frame = LoadFrame(KEY, MemoryObj.allocate(LAYOUT), CodecChain(), 1)
        frame.into[0][:] = blob[:HEADER_BYTES]
        assert not frame.finish(len(blob))

    def test_a_hostile_length_is_not_read_as_a_whole(self) -> None:
        frame = LoadFrame(KEY, MemoryObj.allocate(LAYOUT), CodecChain(), 1)
        frame.into[0][:] = stored(alignment=512)[:HEADER_BYTES]
        with pytest.raises(CorruptObjectError) as caught:
            frame.finish(1 << 40)
        assert caught.value.reason == "length"

    def _verify(self, blob: bytes, key: ObjectKey) -> None:
        header = envelope.parse(blob)
        metadata = blob[HEADER_BYTES : HEADER_BYTES + header.metadata_length]
        envelope.verify(header, key, metadata, [memoryview(blob)[header.payload_offset :]], len(blob))


def test_the_payload_starts_at_the_alignment() -> None:
    assert envelope.payload_offset(0) == HEADER_BYTES == 256
    assert envelope.payload_offset(50) == 306
    assert envelope.payload_offset(50, 64) == 320
    assert envelope.payload_offset(0, 4096) == 4096


def test_the_checksum_does_not_depend_on_segments() -> None:
    whole = envelope.checksum(b"metadata", [DATA])
    assert envelope.checksum(b"metadata", [DATA[:7], b"", DATA[7:]]) == whole
    assert envelope.checksum(b"", [b"metadata", DATA]) == whole
    assert envelope.checksum(b"", [DATA]) != whole
