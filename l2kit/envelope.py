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
from typing import Final

import msgspec
import xxhash

from l2kit.errors import CorruptObjectError
from l2kit.keys import ObjectKey
from l2kit.layout import DTYPES, KIND_CODES, Kind, Layout

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
_HEADER: Final = struct.Struct("<8sHHIBBBxIIIIQQ6Q16s16s16s")
_HEADER_CHECKSUM_OFFSET: Final = HEADER_BYTES - 16
_KINDS: Final[dict[int, Kind]] = {code: kind for kind, code in KIND_CODES.items()}
_DTYPE_NAMES: Final = {code: name for name, (code, _) in DTYPES.items()}
_NO_CHAIN: Final = bytes(16)


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed header.

    Attributes:
        key_digest: `ObjectKey.digest` of the object.
        layout: what the bytes are once decoded.
        layer_start, layer_stop: the layer range covered.
        metadata: the codec chain as its canonical bytes; empty means the payload is the object's bytes as they are.
        payload_offset: bytes from the start of the stored object to its payload.
        stored_length: bytes of the payload.
        checksum: XXH3-128 of metadata and payload.
    """

    key_digest: bytes
    layout: Layout
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


def seal(
    key: ObjectKey, layout: Layout, payload: Sequence[memoryview], *, metadata: bytes = b"", alignment: int = 1
) -> bytes:
    """Make the head (header, metadata, padding) that goes in front of ``payload``.

    ``payload`` holds the encoded bytes; it is only read. CPU-bound: one pass over the payload.
    """
    offset = payload_offset(len(metadata), alignment)
    dims = layout.shape + (0,) * (_MAX_DIMS - len(layout.shape))
    layer_start = key.layer or 0
    header = _HEADER.pack(
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
        len(metadata),
        layout.nbytes,
        sum(len(segment) for segment in payload),
        *dims,
        key.digest,
        chain_id(metadata),
        checksum(metadata, payload),
    ).ljust(_HEADER_CHECKSUM_OFFSET, b"\0")
    return (header + xxhash.xxh3_128_digest(header) + metadata).ljust(offset, b"\0")


def parse(head: bytes | bytearray | memoryview) -> Envelope:
    """Parse and check a header by itself; nothing in it is trusted before its checksum holds.

    Raises:
        CorruptObjectError: reason ``truncated``, ``magic``, ``unsupported``, ``header``, ``layout``, ``length``
            or ``codec``.
    """
    if len(head) < HEADER_BYTES:
        raise CorruptObjectError("truncated", f"{len(head)} bytes are less than one {HEADER_BYTES}-byte header")
    fields = _HEADER.unpack_from(head)
    magic, version, header_bytes, offset, kind, dtype, ndim, tokens, start, stop, metadata_length, raw, stored = fields[
        :13
    ]
    if magic != MAGIC:
        raise CorruptObjectError("magic", "the stored bytes are no l2kit object")
    body = bytes(head[:_HEADER_CHECKSUM_OFFSET])
    if xxhash.xxh3_128_digest(body) != bytes(head[_HEADER_CHECKSUM_OFFSET:HEADER_BYTES]):
        raise CorruptObjectError("header", "the header's checksum does not match its bytes")
    # After the checksum: a flipped bit must not pass for a newer format, which is kept. Newer formats keep the place
    # of the checksum.
    if version != FORMAT_VERSION or header_bytes != HEADER_BYTES:
        raise CorruptObjectError(
            "unsupported", f"envelope format {version} is not readable here (known: {FORMAT_VERSION})"
        )
    try:
        layout = Layout(_KINDS[kind], _DTYPE_NAMES[dtype], tuple(fields[13 : 13 + ndim]), tokens)
    except (KeyError, ValueError) as error:
        raise CorruptObjectError("layout", f"the header describes no known layout: {error}") from error
    if raw != layout.nbytes or offset < HEADER_BYTES + metadata_length:
        raise CorruptObjectError("length", f"lengths contradict each other: raw {raw}, layout {layout.nbytes}")
    if metadata_length > MAX_METADATA_BYTES:
        raise CorruptObjectError("codec", f"{metadata_length} bytes of codec metadata exceed {MAX_METADATA_BYTES}")
    return Envelope(
        key_digest=fields[19],
        layout=layout,
        layer_start=start,
        layer_stop=stop,
        metadata_length=metadata_length,
        chain_id=fields[20],
        payload_offset=offset,
        stored_length=stored,
        checksum=fields[21],
    )


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
    if stored_bytes < envelope.total_bytes:
        raise CorruptObjectError("truncated", f"{stored_bytes} of {envelope.total_bytes} bytes are there")
    if stored_bytes > envelope.total_bytes or sum(map(len, payload)) != envelope.stored_length:
        raise CorruptObjectError("length", f"{stored_bytes} bytes are there, the header says {envelope.total_bytes}")
    if envelope.chain_id != chain_id(bytes(metadata)):
        raise CorruptObjectError("codec", "the codec metadata is not the one that the header names")
    if checksum(metadata, payload) != envelope.checksum:
        raise CorruptObjectError("checksum", "the payload's checksum does not match its bytes")
