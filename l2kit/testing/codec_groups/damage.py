"""Payloads that are cut, longer, changed, foreign or made up: reported as corrupt, and harmless in every case."""

# ruff: noqa: D102 - the names of the tests say what they test

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from l2kit.layout import Layout
from l2kit.serde import Codec
from l2kit.testing.codec_groups.base import CodecSuite
from l2kit.testing.codec_groups.values import awkward, ordinary

_SMALL_BYTES = 300
_LARGE_BYTES = 4 << 20


class DamageTests(CodecSuite):
    """Hostile payloads."""

    def test_a_payload_cut_anywhere_is_corrupt(self, codec: Codec) -> None:
        for layout in self._small(codec):
            for data in (ordinary(layout), bytes(layout.nbytes)):
                payload = self.encode(codec, data, layout)
                for length in range(len(payload)):
                    passed = self.survives(codec, payload[:length], layout)
                    assert not passed, f"{length} of {len(payload)} bytes pass for {layout}"

    def test_a_payload_with_more_behind_it_is_corrupt(self, codec: Codec) -> None:
        for layout in self._small(codec):
            payload = self.encode(codec, ordinary(layout), layout)
            for more in (b"\0", b"\xff" * 8, payload):
                assert not self.survives(codec, payload + more, layout), f"{len(more)} more bytes pass for {layout}"

    def test_an_empty_payload_is_corrupt(self, codec: Codec) -> None:
        for layout in self._small(codec):
            assert not self.survives(codec, b"", layout), f"no bytes at all pass for {layout}"

    def test_a_payload_of_another_size_is_corrupt(self, codec: Codec) -> None:
        for layout in self._small(codec):
            if layout.kind == "kv_2ltd":
                planes, layers, tokens, width = layout.shape
                longer = Layout("kv_2ltd", layout.dtype, (planes, layers, tokens + 1, width), tokens + 1)
                assert not self.survives(codec, self.encode(codec, ordinary(longer), longer), layout)
                assert not self.survives(codec, self.encode(codec, ordinary(layout), layout), longer)

    def test_a_flipped_bit_is_harmless(self, codec: Codec) -> None:
        """Corrupt, or other bytes of the same size, which the envelope's checksum notices."""
        for layout in self._small(codec)[:3]:
            payload = self.encode(codec, ordinary(layout), layout)
            for position in range(len(payload)):
                for bit in (0x01, 0x80):
                    damaged = bytearray(payload)
                    damaged[position] ^= bit
                    passed = self.survives(codec, bytes(damaged), layout)
                    assert not (passed and self.detects_damage), f"a flip in byte {position} passes for {layout}"

    def test_sizes_that_a_payload_claims_are_not_believed(self, codec: Codec) -> None:
        """Every number in the first bytes of a payload made huge: nobody allocates that."""
        for layout in self._small(codec)[:2]:
            payload = self.encode(codec, ordinary(layout), layout)
            for size in (2, 4, 8):
                for claim in (b"\xff" * size, b"\xff" * (size - 1) + b"\x7f", b"\x7f" + b"\xff" * (size - 1)):
                    for position in range(min(64, len(payload) - size + 1)):
                        self.survives(codec, payload[:position] + claim + payload[position + size :], layout)

    def test_a_payload_that_grows_without_end_is_corrupt(self, codec: Codec) -> None:
        """The payload of a large object of zeros, given for a small one: a decompression bomb."""
        small = self._small(codec)[0]
        dtype = small.dtype
        large = Layout.mla(layers=1, tokens=_LARGE_BYTES >> 10, latent_dim=128, dtype=dtype)
        bomb = self.encode(codec, bytes(large.nbytes), large)
        assert not self.survives(codec, bomb, small)

    def test_any_bytes_are_harmless(self, codec: Codec) -> None:
        layouts = self._small(codec)

        @settings(
            max_examples=150,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.sampled_from(layouts), st.binary(max_size=_SMALL_BYTES))
        def check(layout: Layout, payload: bytes) -> None:
            self.survives(codec, payload, layout)

        check()

    def test_encoded_noise_is_harmless(self, codec: Codec) -> None:
        """Payloads of one codec's own making with parts of others in them."""
        for layout in self._small(codec)[:3]:
            payloads = [self.encode(codec, data, layout) for data in awkward(layout).values()]
            for first in payloads:
                for second in payloads:
                    for cut in (1, len(first) // 2, len(first) - 1):
                        self.survives(codec, first[:cut] + second[cut:], layout)

    def _small(self, codec: Codec) -> list[Layout]:
        found = [layout for layout in self.layouts(codec) if 0 < layout.nbytes <= _SMALL_BYTES]
        return found[:8]
