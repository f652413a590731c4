"""Faults in what comes back."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from tests.unit.broken_codecs.base import BrokenCodec, Source


class WorksOnPairs(BrokenCodec):
    """Takes bytes two by two and loses an odd one."""

    caught_by = "test_every_layout_comes_back"

    def pack(self, data: bytes, layout: Layout) -> bytes:
        return data[: len(data) // 2 * 2] + bytes(len(data) % 2)


class NeedsWritableSources(BrokenCodec):
    """Hands the source to a C library that asks for a writable buffer."""

    caught_by = "test_every_layout_comes_back"

    def serialize(self, src: Source, dst: memoryview, key: ObjectKey, layout: Layout) -> int:
        if any(part.readonly for part in src):
            raise TypeError("underlying buffer is not writable")
        return super().serialize(src, dst, key, layout)


class LosesMoreThanItSays(BrokenCodec):
    """Lossy, and far beyond its bound."""

    caught_by = "test_every_layout_comes_back"
    lossless = False

    def pack(self, data: bytes, layout: Layout) -> bytes:
        return bytes(byte & 0xF0 for byte in data)


def _each_float16(data: bytes, layout: Layout, change: Callable[[int], int]) -> bytes:
    if layout.dtype != "float16":
        return data
    return b"".join(change(pattern).to_bytes(2, "little") for (pattern,) in struct.iter_unpack("<H", data))


class MergesNotANumbers(BrokenCodec):
    """Every NaN becomes the same one: a conversion to another float type and back does that."""

    caught_by = "test_awkward_values_come_back"

    def pack(self, data: bytes, layout: Layout) -> bytes:
        return _each_float16(data, layout, lambda pattern: 0x7E00 if pattern & 0x7FFF > 0x7C00 else pattern)


class FlushesDenormals(BrokenCodec):
    """Denormals become zero."""

    caught_by = "test_awkward_values_come_back"

    def pack(self, data: bytes, layout: Layout) -> bytes:
        return _each_float16(data, layout, lambda pattern: pattern & 0x8000 if not pattern & 0x7C00 else pattern)


class LosesTheSignOfZero(BrokenCodec):
    """-0.0 becomes 0.0."""

    caught_by = "test_awkward_values_come_back"

    def pack(self, data: bytes, layout: Layout) -> bytes:
        return _each_float16(data, layout, lambda pattern: 0 if pattern == 0x8000 else pattern)


class WorksOnOneBlock(BrokenCodec):
    """Encodes the first 64 KiB of an object."""

    caught_by = "test_an_object_of_a_whole_chunk_comes_back"

    def pack(self, data: bytes, layout: Layout) -> bytes:
        return data[:65536] + bytes(max(0, len(data) - 65536))


class KeepsItsScaleToItself(BrokenCodec):
    """Decodes with the scale of the object that was encoded last."""

    caught_by = "test_different_objects_stay_different"
    scale = 0

    def pack(self, data: bytes, layout: Layout) -> bytes:
        self.scale = data[0] if data else 0
        return bytes(byte ^ self.scale for byte in data)

    def unpack(self, data: bytes, layout: Layout) -> bytes:
        return bytes(byte ^ self.scale for byte in data)


class DithersWhenItDecodes(BrokenCodec):
    """Lossy within its bound, and another object each time."""

    caught_by = "test_decoding_is_deterministic"
    lossless = False

    def unpack(self, data: bytes, layout: Layout) -> bytes:
        return bytes(byte ^ random.getrandbits(1) for byte in data)
