"""Codec chains: what goes in comes out, and a payload is never believed about sizes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l2kit.errors import ConfigError, CorruptObjectError
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.serde import Codec, CodecChain, RawCodec
from tests.unit.small_codecs import Codecs, HalfCodec, XorCodec, ZlibCodec

KEY = ObjectKey("ns", bytes(16))
CHAINS: list[list[Codec]] = [
    [],
    [RawCodec()],
    [ZlibCodec()],
    [XorCodec()],
    [ZlibCodec(), XorCodec(7)],
    [XorCodec(7), ZlibCodec()],
    [RawCodec(), ZlibCodec(), XorCodec(1), ZlibCodec(), XorCodec(2)],
]
IDS = ["+".join(codec.codec_id for codec in codecs) or "none" for codecs in CHAINS]


def encode(chain: CodecChain, data: bytes, *cuts: int, layout: Layout | None = None) -> bytes:
    segments = [memoryview(data)[a:b] for a, b in zip((0, *cuts), (*cuts, len(data)), strict=True)]
    return b"".join(chain.encode(segments, KEY, layout or Layout.raw(len(data))))


def decode(chain: CodecChain, payload: bytes, nbytes: int, layout: Layout | None = None) -> bytes:
    buffer = memoryview(bytearray(nbytes))
    chain.decode(memoryview(payload), [buffer[: nbytes // 3], buffer[nbytes // 3 :]], KEY, layout or Layout.raw(nbytes))
    return bytes(buffer)


@pytest.mark.parametrize("codecs", CHAINS, ids=IDS)
class TestEveryChain:
    @pytest.mark.parametrize("data", [b"", b"x", b"compressible " * 300, bytes(range(256)) * 16], ids=len)
    def test_round_trip(self, codecs: Sequence[Codec], data: bytes) -> None:
        chain = CodecChain(codecs)
        payload = encode(chain, data, len(data) // 2)
        assert len(payload) <= chain.estimate(Layout.raw(len(data)))
        assert decode(chain, payload, len(data)) == data

    def test_a_reader_rebuilds_it_from_the_envelope(self, codecs: Sequence[Codec]) -> None:
        chain = CodecChain(codecs)
        rebuilt = CodecChain.from_metadata(chain.metadata, Codecs())
        assert rebuilt.metadata == chain.metadata
        assert decode(rebuilt, encode(chain, b"data" * 9), 36) == b"data" * 9

    def test_raw_is_nothing(self, codecs: Sequence[Codec]) -> None:
        chain = CodecChain(codecs)
        assert chain.is_raw == all(isinstance(codec, RawCodec) for codec in codecs)
        assert chain.is_raw == (chain.metadata == b"")

    def test_a_payload_cut_anywhere_is_corrupt(self, codecs: Sequence[Codec]) -> None:
        chain = CodecChain(codecs)
        payload = encode(chain, b"data" * 9)
        for length in range(len(payload)):
            with pytest.raises(CorruptObjectError) as caught:
                decode(chain, payload[:length], 36)
            assert caught.value.reason == "codec"

    def test_a_payload_of_another_size_is_corrupt(self, codecs: Sequence[Codec]) -> None:
        chain = CodecChain(codecs)
        for nbytes in (35, 37, 0):
            with pytest.raises(CorruptObjectError):
                decode(chain, encode(chain, b"data" * 9), nbytes)

    @given(st.binary(max_size=100))
    def test_any_payload_raises_nothing_but_corruption(self, codecs: Sequence[Codec], payload: bytes) -> None:
        try:
            decode(CodecChain(codecs), payload, 36)
        except CorruptObjectError:
            return
        assert CodecChain(codecs).is_raw or len(payload) > 16


class TestChains:
    def test_the_empty_chain_copies_nothing(self) -> None:
        segment = memoryview(bytearray(b"data"))
        assert CodecChain().encode([segment], KEY, Layout.raw(4))[0] is segment

    def test_order_and_parameters_are_the_identity(self) -> None:
        chains: list[list[Codec]] = [
            [ZlibCodec(), XorCodec()],
            [XorCodec(), ZlibCodec()],
            [XorCodec(1)],
            [XorCodec(2)],
            [ZlibCodec()],
            [],
        ]
        assert len({CodecChain(codecs).metadata for codecs in chains}) == len(chains)

    def test_a_lossy_codec_first(self) -> None:
        layout = Layout.kv(layers=1, tokens=2, kv_heads=1, head_dim=3, dtype="bfloat16")
        data = bytes(range(layout.nbytes))
        chain = CodecChain([HalfCodec(), ZlibCodec()])
        assert decode(chain, encode(chain, data, layout=layout), layout.nbytes, layout) == bytes(
            byte if n % 2 else 0 for n, byte in enumerate(data)
        )

    def test_an_element_type_that_it_does_not_take(self) -> None:
        chain = CodecChain([HalfCodec(), ZlibCodec()])
        chain.check_layout(Layout.mla(layers=1, tokens=1, latent_dim=1, dtype="bfloat16"))
        with pytest.raises(ConfigError, match=r"'half' takes \['bfloat16'\], not float16"):
            chain.check_layout(Layout.mla(layers=1, tokens=1, latent_dim=1, dtype="float16"))
        CodecChain().check_layout(Layout.raw(1))

    @pytest.mark.parametrize("claim", [1000, 1 << 33, (1 << 64) - 1])
    def test_a_claimed_inner_size_is_not_allocated(self, claim: int) -> None:
        chain = CodecChain([ZlibCodec(), ZlibCodec()])
        payload = struct.pack("<Q", claim) + encode(CodecChain([ZlibCodec()]), b"x" * 100)
        with pytest.raises(CorruptObjectError, match="exceeds"):
            decode(chain, payload, 36)

    def test_a_bomb_does_not_explode(self) -> None:
        bomb = encode(CodecChain([ZlibCodec()]), bytes(50_000_000))
        with pytest.raises(CorruptObjectError):
            decode(CodecChain([ZlibCodec()]), bomb, 36)

    def test_a_payload_made_for_another_key(self) -> None:
        chain = CodecChain([XorCodec()])
        payload = b"".join(chain.encode([memoryview(b"data")], ObjectKey("ns", bytes(15) + b"x"), Layout.raw(4)))
        with pytest.raises(CorruptObjectError, match="another key"):
            decode(chain, payload, 4)


class TestMetadata:
    @pytest.mark.parametrize(
        "metadata",
        [b"{}", b"[1]", b"\xff\xfe", b"[{}]", b'[{"id":7,"version":1}]', b'[{"id":"zlib","version":"1"}]', b"[" * 5000],
    )
    def test_unreadable(self, metadata: bytes) -> None:
        with pytest.raises(CorruptObjectError) as caught:
            CodecChain.from_metadata(metadata, Codecs())
        assert caught.value.reason == "codec"

    def test_a_codec_that_is_not_installed(self) -> None:
        with pytest.raises(CorruptObjectError, match="'xor'") as caught:
            CodecChain.from_metadata(CodecChain([XorCodec()]).metadata, Codecs(ZlibCodec))
        assert caught.value.reason == "unsupported"

    def test_a_newer_version_than_ours(self) -> None:
        metadata = CodecChain([ZlibCodec()]).metadata.replace(b'"version":1', b'"version":2')
        with pytest.raises(CorruptObjectError, match="newer than ours") as caught:
            CodecChain.from_metadata(metadata, Codecs())
        assert caught.value.reason == "unsupported"
