"""The self-describing header in front of every stored payload.

On the wire: a fixed 256-byte little-endian header, the codec metadata, zero padding up to ``payload_offset``, the
payload. A reader checks the header's own checksum, the key digest, the layout, the lengths and the XXH3-128 checksum
of metadata and payload before an object may become readable; each mismatch has its own reason. Bytes of every
``FORMAT_VERSION`` ever released lie in ``tests/golden`` and must decode for ever.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
import xxhash

from l2kit.errors import CorruptObjectError
from l2kit.keys import ObjectKey
from l2kit.layout import DTYPES, KIND_CODES, Kind, Layout
from l2kit.memory import split

MAGIC: Final = b"L2KITOBJ"
FORMAT_VERSION: Final = 1
HEADER_BYTES: Final = 256
MAX_METADATA_BYTES: Final = 64 << 10

#: The closed set of reasons that a `CorruptObjectError` can carry.
CORRUPTION_REASONS: Final = (
    "truncated",
    "magic",
    "header",
    "key",
    "layout",
    "length",
    "codec",
    "checksum",
    "unsupported",
)

#: Of these, those that leave the object intact: others can read it, or under another layout. It is never deleted.
INTACT_REASONS: Final = frozenset({"layout", "unsupported"})

_MAX_DIMS: Final = 6
_DESCRIPTION: Final = struct.Struct("<8sHHIBBBxIIIIQQ6Q")
_IDENTITY: Final = struct.Struct("<16s16s16s")  # follows it: key digest, chain id, checksum
_HEADER_CHECKSUM_OFFSET: Final = HEADER_BYTES - 16
_KINDS: Final[dict[int, Kind]] = {code: kind for kind, code in KIND_CODES.items()}
_DTYPE_NAMES: Final = {code: name for name, (code, _) in DTYPES.items()}
_NO_CHAIN: Final = bytes(16)


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed header.

    Attributes:
        key_digest: `ObjectKey.digest` of the object.
        layout: what the bytes are once decoded.
        nbytes: how many these are.
        layer_start, layer_stop: the layer range covered.
        metadata: the codec chain as its canonical bytes; empty means the payload is the object's bytes as they are.
        payload_offset: bytes from the start of the stored object to its payload.
        stored_length: bytes of the payload.
        checksum: XXH3-128 of metadata and payload.
    """

    key_digest: bytes
    layout: Layout
    nbytes: int
    layer_start: int
    layer_stop: int
    metadata_length: int
    chain_id: bytes
    payload_offset: int
    stored_length: int
    checksum: bytes

    @property
    def total_bytes(self) -> int:
        """Size of the whole stored object."""
        return self.payload_offset + self.stored_length


def chain_id(metadata: bytes) -> bytes:
    """16 bytes that name a codec chain with its parameters; all zero for no codec."""
    return hashlib.blake2b(metadata, digest_size=16, person=b"l2kit-chain").digest() if metadata else _NO_CHAIN


def payload_offset(metadata_length: int, alignment: int = 1) -> int:
    """Where the payload starts: after header and metadata, rounded up to ``alignment`` bytes."""
    return -(-(HEADER_BYTES + metadata_length) // alignment) * alignment


def checksum(metadata: bytes | memoryview, segments: Iterable[bytes | memoryview]) -> bytes:
    """XXH3-128 (https://xxhash.com) over the codec metadata and then the payload; releases the GIL while hashing."""
    state = xxhash.xxh3_128(metadata)
    for segment in segments:
        state.update(segment)
    return state.digest()


class RunningChecksum:
    """:func:`checksum` of a payload that comes or goes in pieces, each hashed while it is in the processor's cache.

    One thread at a time. What was hashed must not change any more.
    """

    __slots__ = ("_left", "_state", "done_bytes")

    def __init__(self, metadata: bytes | memoryview, payload: Sequence[memoryview]) -> None:
        """Nothing of ``payload`` is looked at before :meth:`advance`."""
        self._state = xxhash.xxh3_128(metadata)
        self._left = list(payload)
        self.done_bytes = 0

    def advance(self, until: int) -> None:
        """Hash the payload up to byte ``until``, from where the last call has left off."""
        if until > self.done_bytes:
            pieces, self._left = split(self._left, until - self.done_bytes)
            for piece in pieces:
                self._state.update(piece)
                self.done_bytes += len(piece)

    def digest(self) -> bytes:
        """The checksum of the first :attr:`done_bytes`."""
        return self._state.digest()


def seal(
    key: ObjectKey, layout: Layout, payload: Sequence[memoryview], *, metadata: bytes = b"", alignment: int = 1
) -> bytes:
    """Make the head (header, metadata, padding) that goes in front of ``payload``.

    ``payload`` holds the encoded bytes; it is only read. CPU-bound: one pass over the payload.
    """
    content = checksum(metadata, payload)
    return head_of(key, layout, sum(map(len, payload)), content, metadata=metadata, alignment=alignment)


def head_of(
    key: ObjectKey, layout: Layout, stored_length: int, content: bytes, *, metadata: bytes = b"", alignment: int = 1
) -> bytes:
    """The head for a payload of ``stored_length`` bytes whose :func:`checksum`, over ``metadata`` too, is known."""
    offset = payload_offset(len(metadata), alignment)
    description = _describe(layout, key.layer or 0, len(metadata), offset, stored_length)
    header = b"%b%b%b%b" % (description, key.digest, chain_id(metadata), content)
    header = header.ljust(_HEADER_CHECKSUM_OFFSET, b"\0")
    return (header + xxhash.xxh3_128_digest(header) + metadata).ljust(offset, b"\0")


@lru_cache(maxsize=256)  # objects of one model differ in nothing of it
def _describe(layout: Layout, layer_start: int, metadata_length: int, offset: int, stored_length: int) -> bytes:
    """The header up to what names this one object."""
    return _DESCRIPTION.pack(
        MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        offset,
        KIND_CODES[layout.kind],
        DTYPES[layout.dtype][0],
        len(layout.shape),
        layout.tokens,
        layer_start,
        layer_start + layout.layers,
        metadata_length,
        layout.nbytes,
        stored_length,
        *layout.shape,
        *(0,) * (_MAX_DIMS - len(layout.shape)),
    )


def parse(head: bytes | bytearray | memoryview) -> Envelope:
    """Parse and check a header by itself; nothing in it is trusted before its checksum holds.

    Raises:
        CorruptObjectError: reason ``truncated``, ``magic``, ``unsupported``, ``header``, ``layout``, ``length``
            or ``codec``.
    """
    if len(head) < HEADER_BYTES:
        raise CorruptObjectError("truncated", f"{len(head)} bytes are less than one {HEADER_BYTES}-byte header")
    if head[: len(MAGIC)] != MAGIC:
        raise CorruptObjectError("magic", "the stored bytes are no l2kit object")
    header = bytes(head[:HEADER_BYTES])
    if xxhash.xxh3_128_digest(header[:_HEADER_CHECKSUM_OFFSET]) != header[_HEADER_CHECKSUM_OFFSET:]:
        raise CorruptObjectError("header", "the header's checksum does not match its bytes")
    # After the checksum: a flipped bit must not pass for a newer format, which is kept. Newer formats keep the place
    # of the checksum.
    description = _read_description(header[: _DESCRIPTION.size])
    key_digest, chain, content = _IDENTITY.unpack_from(header, _DESCRIPTION.size)
    return Envelope(
        key_digest=key_digest,
        layout=description.layout,
        nbytes=description.nbytes,
        layer_start=description.layer_start,
        layer_stop=description.layer_stop,
        metadata_length=description.metadata_length,
        chain_id=chain,
        payload_offset=description.payload_offset,
        stored_length=description.stored_length,
        checksum=content,
    )


class _Description(NamedTuple):
    """What objects of one kind have in common."""

    layout: Layout
    nbytes: int
    layer_start: int
    layer_stop: int
    metadata_length: int
    payload_offset: int
    stored_length: int


@lru_cache(maxsize=256)
def _read_description(described: bytes) -> _Description:
    """The inverse of :func:`_describe`."""
    _, version, header_bytes, offset, kind, dtype, ndim, tokens, start, stop, metadata_length, raw, stored, *dims = (
        _DESCRIPTION.unpack(described)
    )
    if version != FORMAT_VERSION or header_bytes != HEADER_BYTES:
        raise CorruptObjectError(
            "unsupported", f"envelope format {version} is not readable here (known: {FORMAT_VERSION})"
        )
    try:
        layout = Layout(_KINDS[kind], _DTYPE_NAMES[dtype], tuple(dims[:ndim]), tokens)
    except (KeyError, ValueError) as error:
        raise CorruptObjectError("layout", f"the header describes no known layout: {error}") from error
    if raw != layout.nbytes or offset < HEADER_BYTES + metadata_length:
        raise CorruptObjectError("length", f"lengths contradict each other: raw {raw}, layout {layout.nbytes}")
    if metadata_length > MAX_METADATA_BYTES:
        raise CorruptObjectError("codec", f"{metadata_length} bytes of codec metadata exceed {MAX_METADATA_BYTES}")
    return _Description(layout, raw, start, stop, metadata_length, offset, stored)


def verify(
    envelope: Envelope, key: ObjectKey, metadata: bytes | memoryview, payload: Sequence[memoryview], stored_bytes: int
) -> None:
    """Check that these bytes are the object ``key``, whole and undamaged. CPU-bound: one pass over the payload.

    Args:
        envelope: the parsed header.
        key: the name under which the object was asked for.
        metadata: the codec metadata as stored.
        payload: exactly the stored payload.
        stored_bytes: size of the whole stored object as the backend reports it.

    Raises:
        CorruptObjectError: reason ``key``, ``truncated``, ``length``, ``codec`` or ``checksum``.
    """
    if envelope.key_digest != key.digest:
        raise CorruptObjectError("key", "the stored object belongs to another key")
    verify_content(envelope, metadata, payload, stored_bytes)


def verify_content(
    envelope: Envelope,
    metadata: bytes | memoryview,
    payload: Sequence[memoryview],
    stored_bytes: int,
    content: bytes | None = None,
) -> None:
    """:func:`verify` for who has compared the key already, and may know the :func:`checksum` of what is there."""
    if stored_bytes < envelope.total_bytes:
        raise CorruptObjectError("truncated", f"{stored_bytes} of {envelope.total_bytes} bytes are there")
    if stored_bytes > envelope.total_bytes or sum(map(len, payload)) != envelope.stored_length:
        raise CorruptObjectError("length", f"{stored_bytes} bytes are there, the header says {envelope.total_bytes}")
    if envelope.chain_id != chain_id(bytes(metadata)):
        raise CorruptObjectError("codec", "the codec metadata is not the one that the header names")
    if (content or checksum(metadata, payload)) != envelope.checksum:
        raise CorruptObjectError("checksum", "the payload's checksum does not match its bytes")
