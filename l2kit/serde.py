"""Serde codecs and their chains: KV-shaped bytes to payload bytes and back.

A chain's identity (codec ids, versions, parameters) stands in the envelope of every object, and decoding follows the
envelope, never the reader's configuration. No chain at all (``raw``) means that objects travel without a copy.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol

import msgspec

from l2kit.errors import ConfigError, CorruptObjectError
from l2kit.keys import ObjectKey
from l2kit.layout import Layout


class Codec(ABC):
    """Both directions of one serde codec; stateless, thread-safe, called in worker threads.

    Implementations subclass this and register under the entry-point group ``l2kit.codecs``. Options arrive as keyword
    arguments of the constructor; ``params`` returns those that decoding needs.
    """

    #: Stable id; stands in envelopes, so it never changes its meaning.
    codec_id: ClassVar[str]
    #: Raised whenever the payload format changes; old versions stay decodable.
    version: ClassVar[int] = 1
    #: Element types that it takes; None for any bytes.
    dtypes: ClassVar[frozenset[str] | None] = None
    #: True when decoding gives back exactly the encoded bytes.
    lossless: ClassVar[bool] = True

    def params(self) -> Mapping[str, int | float | str | bool]:
        """Parameters that a decoder must know; they become part of the envelope."""
        return {}

    @abstractmethod
    def estimate_serialized_size(self, layout: Layout) -> int:
        """Upper bound in bytes of the payload of any object of ``layout``. Cheap; called per object."""

    @abstractmethod
    def serialize(self, src: Sequence[memoryview], dst: memoryview, key: ObjectKey, layout: Layout) -> int:
        """Encode ``src`` (read-only use) into ``dst`` and return the bytes written.

        ``len(dst)`` is at least :meth:`estimate_serialized_size`. Neither buffer is kept.
        """

    @abstractmethod
    def deserialize(self, src: memoryview, dst: Sequence[memoryview], key: ObjectKey, layout: Layout) -> None:
        """Decode ``src``, exactly one payload, into ``dst``, exactly ``layout.nbytes`` bytes.

        Raises:
            CorruptObjectError: reason ``codec``; ``src`` is no payload of this codec. Hostile input must neither
                crash nor allocate more than about ``layout.nbytes``.
        """


class RawCodec(Codec):
    """The identity. A chain of only ``raw`` is the empty chain, so its objects are never copied."""

    codec_id = "raw"

    def estimate_serialized_size(self, layout: Layout) -> int:
        """Exactly the object's size."""
        return layout.nbytes

    def serialize(self, src: Sequence[memoryview], dst: memoryview, key: ObjectKey, layout: Layout) -> int:
        """Copy (only used inside a longer chain)."""
        position = 0
        for segment in src:
            dst[position : position + len(segment)] = segment
            position += len(segment)
        return position

    def deserialize(self, src: memoryview, dst: Sequence[memoryview], key: ObjectKey, layout: Layout) -> None:
        """Copy back (only used inside a longer chain)."""
        if len(src) != sum(map(len, dst)):
            raise CorruptObjectError("codec", f"raw payload of {len(src)} bytes for {sum(map(len, dst))}")
        position = 0
        for segment in dst:
            segment[:] = src[position : position + len(segment)]
            position += len(segment)


class CodecSpec(msgspec.Struct, frozen=True):
    """Identity of one codec in a chain, as it stands in the envelope."""

    id: str
    version: int
    params: dict[str, Any] = msgspec.field(default_factory=dict)


class CodecSource(Protocol):
    """Where a chain finds codecs by id when it follows an envelope (the registry, in practice)."""

    def codec(self, codec_id: str, params: Mapping[str, Any]) -> Codec:
        """Make the codec ``codec_id``.

        Raises:
            ConfigError: it is not installed, or takes no such parameters.
        """
        ...


class CodecChain:
    """Codecs applied one after the other; the empty chain moves nothing."""

    def __init__(self, codecs: Sequence[Codec] = ()) -> None:
        """``raw`` entries are dropped: they change nothing."""
        self.codecs: Final = tuple(codec for codec in codecs if not isinstance(codec, RawCodec))
        specs = [CodecSpec(c.codec_id, c.version, dict(sorted(c.params().items()))) for c in self.codecs]
        self.metadata: Final = msgspec.json.encode(specs) if specs else b""

    @property
    def is_raw(self) -> bool:
        """True when payloads are the objects' bytes as they are."""
        return not self.codecs

    @classmethod
    def from_metadata(cls, metadata: bytes, source: CodecSource) -> CodecChain:
        """Build the chain that an envelope names.

        Raises:
            CorruptObjectError: reason ``codec`` for unreadable metadata, ``unsupported`` for a codec or version that
                is not installed here.
        """
        if not metadata:
            return cls()
        try:
            specs = msgspec.json.decode(metadata, type=list[CodecSpec])
            codecs = [source.codec(spec.id, spec.params) for spec in specs]
        except msgspec.MsgspecError as error:
            raise CorruptObjectError("codec", f"the codec metadata is unreadable: {error}") from error
        except ConfigError as error:
            raise CorruptObjectError("unsupported", f"the object's codecs are not all here: {error}") from error
        for spec, codec in zip(specs, codecs, strict=True):
            if codec.version < spec.version:
                raise CorruptObjectError(
                    "unsupported", f"codec {spec.id!r} version {spec.version} is newer than ours ({codec.version})"
                )
        return cls(codecs)

    def check_layout(self, layout: Layout) -> None:
        """Refuse a layout that some codec of the chain does not take.

        Raises:
            ConfigError: names the codec and the element types that it takes.
        """
        first = self.codecs[0] if self.codecs else None
        if first is not None and first.dtypes is not None and layout.dtype not in first.dtypes:
            raise ConfigError(f"codecs: {first.codec_id!r} takes {sorted(first.dtypes)}, not {layout.dtype}")

    def estimate(self, layout: Layout) -> int:
        """Upper bound in bytes of the payload of any object of ``layout``."""
        if self.is_raw:
            return layout.nbytes
        return self._bounds(layout)[-1] + 8 * (len(self.codecs) - 1)

    def encode(self, src: Sequence[memoryview], key: ObjectKey, layout: Layout) -> list[memoryview]:
        """Return the payload; for the empty chain that is ``src`` itself, uncopied. CPU-bound.

        A chain of several codecs puts the sizes of its intermediate results in front, 8 bytes each.
        """
        payload = list(src)
        shape = layout
        sizes: list[int] = []
        for codec, bound in zip(self.codecs, self._bounds(layout), strict=False):
            dst = memoryview(bytearray(bound))
            sizes.append(codec.serialize(payload, dst, key, shape))
            payload = [dst[: sizes[-1]]]
            shape = Layout.raw(sizes[-1])
        if len(sizes) > 1:
            payload.insert(0, memoryview(struct.pack(f"<{len(sizes) - 1}Q", *sizes[:-1])))
        return payload

    def decode(self, payload: memoryview, dst: Sequence[memoryview], key: ObjectKey, layout: Layout) -> None:
        """Decode a verified payload into ``dst``, exactly ``layout.nbytes`` bytes. CPU-bound.

        Raises:
            CorruptObjectError: reason ``codec``.
        """
        codecs = self.codecs or (RawCodec(),)
        inner = struct.Struct(f"<{len(codecs) - 1}Q")
        if len(payload) < inner.size:
            raise CorruptObjectError("codec", f"{len(payload)} bytes cannot hold a payload of {len(codecs)} codecs")
        sizes = inner.unpack_from(payload)
        source = payload[inner.size :]
        bounds = self._bounds(layout)
        for index in range(len(codecs) - 1, 0, -1):
            size = sizes[index - 1]
            if size > bounds[index - 1]:  # never allocate what a payload merely claims
                raise CorruptObjectError("codec", f"an inner payload of {size} bytes exceeds {bounds[index - 1]}")
            buffer = memoryview(bytearray(size))
            codecs[index].deserialize(source, [buffer], key, Layout.raw(size))
            source = buffer
        codecs[0].deserialize(source, dst, key, layout)

    def _bounds(self, layout: Layout) -> list[int]:
        bounds: list[int] = []
        shape = layout
        for codec in self.codecs:
            bounds.append(codec.estimate_serialized_size(shape))
            shape = Layout.raw(bounds[-1])
        return bounds
