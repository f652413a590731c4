"""What the broken codecs have in common."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Sequence
from typing import ClassVar, Final, Self

from l2kit.errors import CorruptObjectError
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.serde import Codec, RawCodec

#: One module each, in the order of the suite.
GROUPS: Final = ("round_trip", "buffers", "damage", "identity", "chains")

HEAD: Final = struct.Struct("<cQ")

Source = Sequence[memoryview]


class BrokenCodec(Codec):
    """No fault yet."""

    caught_by: ClassVar[str]
    binds_key: ClassVar[bool] = False
    detects_damage: ClassVar[bool] = False
    codec_id = "framed"

    @classmethod
    def make(cls) -> Self:
        return cls()

    def estimate_serialized_size(self, layout: Layout) -> int:
        return HEAD.size + layout.nbytes

    def pack(self, data: bytes, layout: Layout) -> bytes:
        return data

    def unpack(self, data: bytes, layout: Layout) -> bytes:
        return data

    def serialize(self, src: Source, dst: memoryview, key: ObjectKey, layout: Layout) -> int:
        data = self.pack(b"".join(src), layout)
        payload = HEAD.pack(b"F", len(data)) + data
        dst[: len(payload)] = payload
        return len(payload)

    def deserialize(self, src: memoryview, dst: Source, key: ObjectKey, layout: Layout) -> None:
        if len(src) < HEAD.size:
            raise CorruptObjectError("codec", "no head")
        mark, nbytes = HEAD.unpack_from(src)
        if mark != b"F" or len(src) != HEAD.size + nbytes or nbytes != layout.nbytes:
            raise CorruptObjectError("codec", "no framed payload")
        self.fill(dst, self.unpack(bytes(src[HEAD.size :]), layout))

    def fill(self, dst: Source, data: bytes) -> None:
        RawCodec().deserialize(memoryview(data), dst, ObjectKey("none", bytes(16)), Layout.raw(len(data)))


def every_broken_codec() -> list[type[BrokenCodec]]:
    """All that have a fault, group by group."""
    modules = [importlib.import_module(f"tests.unit.broken_codecs.{group}") for group in GROUPS]
    return [
        found
        for module in modules
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, BrokenCodec) and found.__module__ == module.__name__
    ]
