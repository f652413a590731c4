"""A codec among others: in chains, and in the envelope of a stored object."""

# ruff: noqa: D102 - the names of the tests say what they test

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from l2kit.errors import ConfigError, CorruptObjectError
from l2kit.framing import LoadFrame, seal
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.serde import Codec, CodecChain, RawCodec
from l2kit.testing.codec_groups.base import CodecSuite
from l2kit.testing.codec_groups.values import ordinary
from l2kit.testing.groups.base import split


class _Mirror(Codec):
    """The object's bytes backwards, behind one more byte: a neighbour in chains."""

    codec_id = "conformance-mirror"

    def estimate_serialized_size(self, layout: Layout) -> int:
        return layout.nbytes + 1

    def serialize(self, src: Sequence[memoryview], dst: memoryview, key: ObjectKey, layout: Layout) -> int:
        data = b"M" + b"".join(src)[::-1]
        dst[: len(data)] = data
        return len(data)

    def deserialize(self, src: memoryview, dst: Sequence[memoryview], key: ObjectKey, layout: Layout) -> None:
        if bytes(src[:1]) != b"M":
            raise CorruptObjectError("codec", "no mirrored payload")
        RawCodec().deserialize(memoryview(bytes(src[1:])[::-1]), dst, key, layout)


class _Source:
    """Makes the codecs of a chain again, as a registry does."""

    def __init__(self, suite: CodecSuite, codec: Codec) -> None:
        self._suite = suite
        self._codec = codec

    def codec(self, codec_id: str, params: Mapping[str, Any]) -> Codec:
        if codec_id == _Mirror.codec_id:
            return _Mirror()
        if codec_id != self._codec.codec_id or dict(params) != dict(self._codec.params()):
            raise ConfigError(f"codecs: no {codec_id!r} with {params}")
        return self._suite.reopen(self._codec)


class ChainTests(CodecSuite):
    """Chains and envelopes."""

    @pytest.mark.parametrize("place", ["alone", "first", "second", "twice"])
    def test_it_works_in_a_chain(self, codec: Codec, place: str) -> None:
        if place in ("second", "twice") and codec.dtypes is not None:
            self.skip("a codec that takes any bytes (dtypes = None)")
        codecs = {"alone": [codec], "first": [codec, _Mirror()], "second": [_Mirror(), codec], "twice": [codec] * 2}
        chain = CodecChain(codecs[place])
        for layout in self.layouts(codec):
            data = ordinary(layout)
            chain.check_layout(layout)
            payload = b"".join(chain.encode(split(data, 3, 1), self.key(), layout))
            assert len(payload) <= chain.estimate(layout)
            reader = CodecChain.from_metadata(chain.metadata, _Source(self, codec))
            target = bytearray(layout.nbytes)
            reader.decode(memoryview(payload), split(target, 5), self.key(), layout)
            self.check(codec, data, bytes(target), layout)

    def test_it_works_in_an_envelope(self, codec: Codec) -> None:
        """Stored and loaded as adapters do it, by a reader with the same chain and by one with another."""
        chain = CodecChain([codec])
        for layout in self.layouts(codec):
            data = ordinary(layout)
            stored = b"".join(seal(self.key(), MemoryObj.wrap(data, layout), chain, alignment=64))
            target = MemoryObj.allocate(layout)
            frame = LoadFrame(self.key(), target, chain, alignment=64)
            rest = stored
            for part in frame.into:
                part[: len(rest)] = rest[: len(part)]
                rest = rest[len(part) :]
            assert frame.finish(len(stored))
            self.check(codec, data, target.tobytes(), layout)
            target = MemoryObj.allocate(layout)
            frame = LoadFrame(self.key(), target, CodecChain(), alignment=1)
            frame.finish_whole(memoryview(stored), len(stored), _Source(self, codec))
            self.check(codec, data, target.tobytes(), layout)
