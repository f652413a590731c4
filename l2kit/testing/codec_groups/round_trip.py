"""What was encoded comes back: bit by bit, or as near as the codec promises."""

# ruff: noqa: D102 - the names of the tests say what they test

from __future__ import annotations

import pytest

from l2kit.layout import DTYPES, Layout
from l2kit.serde import Codec
from l2kit.testing.codec_groups.base import CodecSuite
from l2kit.testing.codec_groups.values import awkward, layouts_of, ordinary
from l2kit.testing.groups.base import same


class RoundTripTests(CodecSuite):
    """Round trips."""

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_layout_comes_back(self, codec: Codec, dtype: str) -> None:
        self._needs(codec, dtype)
        for layout in layouts_of(dtype):
            data = ordinary(layout)
            self.check(codec, data, self.decode(codec, self.encode(codec, data, layout), layout), layout)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_awkward_values_come_back(self, codec: Codec, dtype: str) -> None:
        """NaN payloads, infinities, denormals, both zeros, every byte: exact if lossless; a lossy codec takes them."""
        self._needs(codec, dtype)
        for layout in layouts_of(dtype):
            for name, data in awkward(layout).items():
                decoded = self.decode(codec, self.encode(codec, data, layout), layout)
                assert not codec.lossless or same(decoded, data), f"{name} in {layout} came back as other bytes"

    def test_an_object_of_a_whole_chunk_comes_back(self, codec: Codec) -> None:
        layout = Layout.kv(layers=4, tokens=256, kv_heads=2, head_dim=64, dtype=self.dtypes(codec)[-1])
        data = ordinary(layout)
        payload = self.encode(codec, data, layout, 1, 4095, 100_000)
        self.check(codec, data, self.decode(codec, payload, layout, 4097, 3), layout)

    def test_different_objects_stay_different(self, codec: Codec) -> None:
        """One after the other, with one codec: nothing of an object is left for the next."""
        for layout in self.layouts(codec):
            objects = [ordinary(layout, seed) for seed in range(3)]
            payloads = [self.encode(codec, data, layout) for data in objects]
            for data, payload in reversed(list(zip(objects, payloads, strict=True))):
                self.check(codec, data, self.decode(codec, payload, layout), layout)

    def test_decoding_is_deterministic(self, codec: Codec) -> None:
        for layout in self.layouts(codec):
            payload = self.encode(codec, ordinary(layout), layout)
            first = self.decode(codec, payload, layout)
            assert same(self.decode(codec, payload, layout), first), f"two answers for one payload: {layout}"
            again = self.encode(codec, ordinary(layout), layout)
            assert same(self.decode(codec, again, layout), first), f"encoded twice, it means two things: {layout}"

    def _needs(self, codec: Codec, dtype: str) -> None:
        if dtype not in self.dtypes(codec):
            self.skip(f"the element type {dtype} in the codec's dtypes")
