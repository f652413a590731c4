"""Faults in dealing with hostile payloads."""

from __future__ import annotations

import zlib

from l2kit.errors import CorruptObjectError
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from tests.unit.broken_codecs.base import HEAD, BrokenCodec, Source


class MakesUpTheEnd(BrokenCodec):
    """A payload that is cut decodes to an object that ends in zeros."""

    caught_by = "test_a_payload_cut_anywhere_is_corrupt"

    def deserialize(self, src: memoryview, dst: Source, key: ObjectKey, layout: Layout) -> None:
        whole = bytes(src).ljust(HEAD.size + layout.nbytes, b"\0")
        super().deserialize(memoryview(whole), dst, key, layout)


class IgnoresTheRest(BrokenCodec):
    """Decodes what it needs and ignores what follows."""

    caught_by = "test_a_payload_with_more_behind_it_is_corrupt"

    def deserialize(self, src: memoryview, dst: Source, key: ObjectKey, layout: Layout) -> None:
        super().deserialize(src[: HEAD.size + layout.nbytes], dst, key, layout)


class TakesNothingForZeros(BrokenCodec):
    """No payload means an object of zeros."""

    caught_by = "test_an_empty_payload_is_corrupt"

    def deserialize(self, src: memoryview, dst: Source, key: ObjectKey, layout: Layout) -> None:
        if not src:
            self.fill(dst, bytes(layout.nbytes))
        else:
            super().deserialize(src, dst, key, layout)


class FitsWhatItGets(BrokenCodec):
    """Cuts or fills up an object of another size."""

    caught_by = "test_a_payload_of_another_size_is_corrupt"

    def deserialize(self, src: memoryview, dst: Source, key: ObjectKey, layout: Layout) -> None:
        if len(src) < HEAD.size or len(src) != HEAD.size + HEAD.unpack_from(src)[1]:
            raise CorruptObjectError("codec", "no framed payload")
        self.fill(dst, bytes(src[HEAD.size :])[: layout.nbytes].ljust(layout.nbytes, b"\0"))


class AssertsItsMark(BrokenCodec):
    """A damaged payload ends in an error that is not ours."""

    caught_by = "test_a_flipped_bit_is_harmless"

    def deserialize(self, src: memoryview, dst: Source, key: ObjectKey, layout: Layout) -> None:
        if bytes(src[:1]) not in (b"F", b""):
            raise ValueError("not a framed payload")
        super().deserialize(src, dst, key, layout)


class OnlySaysThatItDetects(BrokenCodec):
    """Promises to notice every change, and has no checksum."""

    caught_by = "test_a_flipped_bit_is_harmless"
    detects_damage = True


class BelievesSizes(BrokenCodec):
    """Allocates what a payload says that it needs."""

    caught_by = "test_sizes_that_a_payload_claims_are_not_believed"

    def deserialize(self, src: memoryview, dst: Source, key: ObjectKey, layout: Layout) -> None:
        if len(src) >= HEAD.size:
            bytes(HEAD.unpack_from(src)[1])
        super().deserialize(src, dst, key, layout)


class InflatesWithoutEnd(BrokenCodec):
    """Inflates first and looks at the size then."""

    caught_by = "test_a_payload_that_grows_without_end_is_corrupt"

    def estimate_serialized_size(self, layout: Layout) -> int:
        return 64 + layout.nbytes + layout.nbytes // 1000

    def serialize(self, src: Source, dst: memoryview, key: ObjectKey, layout: Layout) -> int:
        packed = zlib.compress(b"".join(src))
        dst[: len(packed)] = packed
        return len(packed)

    def deserialize(self, src: memoryview, dst: Source, key: ObjectKey, layout: Layout) -> None:
        inflate = zlib.decompressobj()
        try:
            data = inflate.decompress(src)
        except zlib.error as error:
            raise CorruptObjectError("codec", str(error)) from error
        if not inflate.eof or inflate.unused_data or len(data) != layout.nbytes:
            raise CorruptObjectError("codec", "no payload of this size")
        self.fill(dst, data)


class ReadsTextInItsPayload(BrokenCodec):
    """Bytes that nobody encoded end in an error of the language."""

    caught_by = "test_any_bytes_are_harmless"

    def deserialize(self, src: memoryview, dst: Source, key: ObjectKey, layout: Layout) -> None:
        bytes(src[:1]).decode("ascii")
        super().deserialize(src, dst, key, layout)


class PassesOnItsLibrarysErrors(InflatesWithoutEnd):
    """A payload that its library does not understand ends in that library's error."""

    caught_by = "test_encoded_noise_is_harmless"

    def deserialize(self, src: memoryview, dst: Source, key: ObjectKey, layout: Layout) -> None:
        zlib.decompressobj().decompress(src, layout.nbytes + 1)
        super().deserialize(src, dst, key, layout)
