"""Faults in dealing with the caller's memory."""

from __future__ import annotations

import zlib

from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from tests.unit.broken_codecs.base import HEAD, BrokenCodec, Source


class EstimatesTheUsualRatio(BrokenCodec):
    """Compresses, and takes what it usually reaches for the most that it needs."""

    caught_by = "test_the_estimate_is_an_upper_bound"

    def estimate_serialized_size(self, layout: Layout) -> int:
        return 64 + layout.nbytes * 3 // 4

    def pack(self, data: bytes, layout: Layout) -> bytes:
        return zlib.compress(data)

    def deserialize(self, src: memoryview, dst: Source, key: ObjectKey, layout: Layout) -> None:
        self.fill(dst, zlib.decompress(src[HEAD.size :]))


class FillsAllTheRoom(BrokenCodec):
    """Its payload is as long as the buffer that it was given."""

    caught_by = "test_more_room_than_the_estimate_changes_nothing"

    def serialize(self, src: Source, dst: memoryview, key: ObjectKey, layout: Layout) -> int:
        super().serialize(src, dst, key, layout)
        return len(dst)


class WritesBehindItsRoom(BrokenCodec):
    """Writes whole words, the last one beyond the end of its buffer."""

    caught_by = "test_more_room_than_the_estimate_changes_nothing"

    def serialize(self, src: Source, dst: memoryview, key: ObjectKey, layout: Layout) -> int:
        if isinstance(dst.obj, bytearray) and len(dst.obj) > len(dst):
            dst.obj[-1] = 0
        return super().serialize(src, dst, key, layout)


class CountsOnZeroedRoom(BrokenCodec):
    """Leaves out zeros when it encodes: the buffer is full of them, is it not."""

    caught_by = "test_serialize_returns_what_it_wrote"

    def serialize(self, src: Source, dst: memoryview, key: ObjectKey, layout: Layout) -> int:
        data = b"".join(src)
        dst[: HEAD.size] = HEAD.pack(b"F", len(data))
        for position, byte in enumerate(data, HEAD.size):
            if byte:
                dst[position] = byte
        return HEAD.size + len(data)


class ReadsOneSegment(BrokenCodec):
    """Encodes the first segment of its source."""

    caught_by = "test_scatter_gather_lists"

    def serialize(self, src: Source, dst: memoryview, key: ObjectKey, layout: Layout) -> int:
        first = bytes(src[0]) if src else b""
        return super().serialize([memoryview(first.ljust(layout.nbytes, b"\0"))], dst, key, layout)


class FillsOneSegment(BrokenCodec):
    """Decodes into the first segment of its destination."""

    caught_by = "test_scatter_gather_lists"

    def fill(self, dst: Source, data: bytes) -> None:
        dst[0][:] = data[: len(dst[0])]


class WorksInItsSource(BrokenCodec):
    """Shuffles the bytes of the object in the caller's memory."""

    caught_by = "test_a_source_is_only_read"

    def serialize(self, src: Source, dst: memoryview, key: ObjectKey, layout: Layout) -> int:
        nbytes = super().serialize(src, dst, key, layout)
        for part in src:
            if not part.readonly:
                part[:] = bytes(part)[::-1]
        return nbytes


class WorksInItsPayload(BrokenCodec):
    """Decodes in place, in the payload that it was given."""

    caught_by = "test_a_source_is_only_read"

    def deserialize(self, src: memoryview, dst: Source, key: ObjectKey, layout: Layout) -> None:
        super().deserialize(src, dst, key, layout)
        if not src.readonly:
            src[:] = bytes(len(src))


class KeepsItsSource(BrokenCodec):
    """Keeps the last source, to compare the next one with it."""

    caught_by = "test_no_buffer_is_kept"

    def serialize(self, src: Source, dst: memoryview, key: ObjectKey, layout: Layout) -> int:
        self.last = src
        return super().serialize(src, dst, key, layout)


class KeepsItsPayload(BrokenCodec):
    """Keeps the last payload that it decoded."""

    caught_by = "test_no_buffer_is_kept"

    def deserialize(self, src: memoryview, dst: Source, key: ObjectKey, layout: Layout) -> None:
        self.last = src
        super().deserialize(src, dst, key, layout)


class CountsOnAZeroedObject(BrokenCodec):
    """Leaves out zeros when it decodes: an earlier object shines through."""

    caught_by = "test_deserialize_fills_the_whole_object"

    def fill(self, dst: Source, data: bytes) -> None:
        position = 0
        for part in dst:
            for index in range(len(part)):
                if data[position]:
                    part[index] = data[position]
                position += 1
