"""Faults in what stands in an envelope, and in threads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self

from l2kit.errors import CorruptObjectError
from l2kit.layout import Layout
from tests.unit.broken_codecs.base import BrokenCodec


class NamesItselfAnew(BrokenCodec):
    """Has another id each time that it is made."""

    caught_by = "test_its_id_and_version_are_the_class_s"

    def __init__(self) -> None:
        self.codec_id = f"framed-{id(self)}"  # type: ignore[misc]


class HasNoVersion(BrokenCodec):
    """Begins to count its versions at 0."""

    caught_by = "test_its_id_and_version_are_the_class_s"
    version = 0


class TakesUnknownTypes(BrokenCodec):
    """Spells an element type in its own way, so that no object ever has it."""

    caught_by = "test_what_it_declares_is_well_formed"
    dtypes = frozenset({"bf16", "uint8"})


class HasBytesAsParameter(BrokenCodec):
    """A parameter that an envelope gives back as something else."""

    caught_by = "test_its_parameters_survive_json"

    def params(self) -> Mapping[str, Any]:
        return {"table": b"\x01\x02"}


class ForgetsAParameter(BrokenCodec):
    """Decoding needs a parameter that does not stand in the envelope."""

    caught_by = "test_a_codec_made_from_its_parameters_decodes"

    def __init__(self, mask: int = 0) -> None:
        self.mask = mask

    @classmethod
    def make(cls) -> Self:
        return cls(7)

    def pack(self, data: bytes, layout: Layout) -> bytes:
        return bytes(byte ^ self.mask for byte in data)

    unpack = pack


class LearnsWhenItEncodes(BrokenCodec):
    """Decodes only what the same process encoded before."""

    caught_by = "test_decoding_needs_no_encoding_before"
    learnt: bytes | None = None

    def pack(self, data: bytes, layout: Layout) -> bytes:
        self.learnt = b""
        return data

    def unpack(self, data: bytes, layout: Layout) -> bytes:
        if self.learnt is None:
            raise CorruptObjectError("codec", "an unknown dictionary")
        return data


class IgnoresItsKey(BrokenCodec):
    """Promises to bind a payload to its key, and does not: ciphertexts can be swapped."""

    caught_by = "test_a_payload_of_another_key_is_corrupt"
    binds_key = True


class SharesItsScratch(BrokenCodec):
    """Two threads work in the same scratch memory."""

    caught_by = "test_many_threads_use_one_codec"
    scratch = b""

    def pack(self, data: bytes, layout: Layout) -> bytes:
        self.scratch = data
        time.sleep(0.0005)
        return self.scratch
