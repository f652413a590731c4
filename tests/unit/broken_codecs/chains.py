"""Faults that show beside other codecs."""

from __future__ import annotations

import mmap

from l2kit.layout import Layout
from tests.unit.broken_codecs.base import BrokenCodec, Source


class NeedsShapes(BrokenCodec):
    """Says that it takes any bytes, and looks for heads and tokens in what another codec made."""

    caught_by = "test_it_works_in_a_chain"

    def pack(self, data: bytes, layout: Layout) -> bytes:
        if layout.kind == "raw":
            raise IndexError(layout.shape)
        return data


class TakesOnlyByteArrays(BrokenCodec):
    """Finds the address of a destination in a way that arenas, which are memory maps, do not have."""

    caught_by = "test_it_works_in_an_envelope"

    def fill(self, dst: Source, data: bytes) -> None:
        if any(isinstance(part.obj, mmap.mmap) for part in dst):
            raise TypeError("expected a bytearray")
        super().fill(dst, data)
