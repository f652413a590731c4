"""Codecs for tests: one of variable length, one with a parameter, one for one element type."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from l2kit.errors import ConfigError, CorruptObjectError
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.serde import Codec, RawCodec


class ZlibCodec(Codec):
    """Payloads shorter or longer than the object."""

    codec_id = "zlib"
    level = 1

    def estimate_serialized_size(self, layout: Layout) -> int:
        return layout.nbytes + layout.nbytes // 1000 + 64

    def serialize(self, src: Sequence[memoryview], dst: memoryview, key: ObjectKey, layout: Layout) -> int:
        packed = zlib.compress(b"".join(src), self.level)
        dst[: len(packed)] = packed
        return len(packed)

    def deserialize(self, src: memoryview, dst: Sequence[memoryview], key: ObjectKey, layout: Layout) -> None:
        inflate = zlib.decompressobj()
        try:
            data = inflate.decompress(src, layout.nbytes + 1)
        except zlib.error as error:
            raise CorruptObjectError("codec", f"zlib: {error}") from error
        if not inflate.eof or inflate.unused_data or len(data) != layout.nbytes:
            raise CorruptObjectError("codec", f"zlib: no payload of {layout.nbytes} bytes")
        RawCodec().deserialize(memoryview(data), dst, key, layout)


class QuickZlibCodec(ZlibCodec):
    """The same payload format; only framed, which is quick and longer than the object."""

    level = 0


class XorCodec(Codec):
    """A parameter that decoding needs, and the key as associated data."""

    codec_id = "xor"

    def __init__(self, mask: int = 0x5A) -> None:
        self.mask = mask

    def params(self) -> Mapping[str, int]:
        return {"mask": self.mask}

    def estimate_serialized_size(self, layout: Layout) -> int:
        return layout.nbytes + 16

    def serialize(self, src: Sequence[memoryview], dst: memoryview, key: ObjectKey, layout: Layout) -> int:
        data = key.digest + bytes(byte ^ self.mask for byte in b"".join(src))
        dst[: len(data)] = data
        return len(data)

    def deserialize(self, src: memoryview, dst: Sequence[memoryview], key: ObjectKey, layout: Layout) -> None:
        if bytes(src[:16]) != key.digest:
            raise CorruptObjectError("codec", "xor: the payload was made for another key")
        data = bytes(byte ^ self.mask for byte in src[16:])
        RawCodec().deserialize(memoryview(data), dst, key, layout)


class HalfCodec(Codec):
    """Lossy and for one element type: keeps the upper byte of each bfloat16."""

    codec_id = "half"
    dtypes = frozenset({"bfloat16"})
    lossless = False

    def estimate_serialized_size(self, layout: Layout) -> int:
        return layout.nbytes // 2

    def serialize(self, src: Sequence[memoryview], dst: memoryview, key: ObjectKey, layout: Layout) -> int:
        kept = b"".join(src)[1::2]
        dst[: len(kept)] = kept
        return len(kept)

    def deserialize(self, src: memoryview, dst: Sequence[memoryview], key: ObjectKey, layout: Layout) -> None:
        data = bytes(byte for kept in src for byte in (0, kept))
        RawCodec().deserialize(memoryview(data), dst, key, layout)


class Codecs:
    """Finds the codecs of this module, as the registry would."""

    def __init__(self, *classes: type[Codec]) -> None:
        self._classes = {kind.codec_id: kind for kind in classes or (ZlibCodec, XorCodec, HalfCodec, RawCodec)}

    def codec(self, codec_id: str, params: Mapping[str, Any]) -> Codec:
        if codec_id not in self._classes:
            raise ConfigError(f"codecs: no installed distribution offers {codec_id!r}")
        return self._classes[codec_id](**params)
