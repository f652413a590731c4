"""From a `MemoryObj` to the bytes that a backend stores, and back with every check: envelope and codec chain together.

Pure and CPU-bound; the adapter base runs it off the event loop for large objects. For the empty chain the payload is
the caller's own memory in both directions.
"""

from __future__ import annotations

from l2kit import envelope
from l2kit.envelope import Envelope, RunningChecksum
from l2kit.errors import CapacityError, CorruptObjectError
from l2kit.keys import ObjectKey
from l2kit.memory import MemoryObj, first_bytes
from l2kit.serde import CodecChain, CodecSource

#: A stored object larger than twice its decoded size plus this is hostile: no codec expands like that.
_EXPANSION_SLACK_BYTES = 1 << 20


def seal(key: ObjectKey, obj: MemoryObj, chain: CodecChain, alignment: int) -> list[memoryview]:
    """Return what to store for ``obj``: the head, then the payload (the caller's own memory when ``chain`` is raw)."""
    payload = chain.encode(obj.segments, key, obj.layout)
    head = envelope.seal(key, obj.layout, payload, metadata=chain.metadata, alignment=alignment)
    return [memoryview(head), *payload]


class Sealing:
    """An uncoded object on its way out in pieces, whose checksum is made on the way. One thread at a time.

    Attributes:
        data: what :func:`seal` returns; its first part is complete only after :meth:`finish`, so that goes last.
    """

    def __init__(self, key: ObjectKey, obj: MemoryObj, alignment: int) -> None:
        """Nothing of ``obj`` is looked at yet."""
        self._key = key
        self._layout = obj.layout
        self._alignment = alignment
        self._head = bytearray(envelope.payload_offset(0, alignment))
        self._checksum = RunningChecksum(b"", obj.segments)
        self.data = [memoryview(self._head), *obj.segments]

    def advance(self, until: int) -> None:
        """Hash :attr:`data` up to byte ``until``, from where the last call has left off. CPU-bound."""
        self._checksum.advance(until - len(self._head))

    def finish(self) -> None:
        """Hash what is left, and complete the head. CPU-bound."""
        self._checksum.advance(self._layout.nbytes)
        self._head[:] = envelope.head_of(
            self._key, self._layout, self._layout.nbytes, self._checksum.digest(), alignment=self._alignment
        )


class LoadFrame:
    """The read side of one object: buffers for the backend to fill, then verification and decoding.

    The buffers assume that the object was stored with the tier's own chain. If its envelope says otherwise (mixed
    history), :meth:`finish` answers False, and the object is read again as a whole for :meth:`finish_whole`.
    """

    def __init__(self, key: ObjectKey, target: MemoryObj, chain: CodecChain, alignment: int) -> None:
        """``target`` receives the decoded object; for a raw ``chain`` the backend fills it in place."""
        self._key = key
        self._target = target
        self._chain = chain
        offset = envelope.payload_offset(len(chain.metadata), alignment)
        self._head = memoryview(bytearray(offset))
        self._payload = (
            list(target.segments) if chain.is_raw else [memoryview(bytearray(chain.estimate(target.layout)))]
        )
        self.nbytes = 0

    @property
    def into(self) -> list[memoryview]:
        """Writable buffers for the stored bytes, in order."""
        return [self._head, *self._payload]

    def running_checksum(self) -> RunningChecksum:
        """Of the payload that arrives behind the head, which has arrived."""
        return RunningChecksum(bytes(self._metadata), self._payload)

    @property
    def head_bytes(self) -> int:
        """Bytes of the head, which is the first of :attr:`into`."""
        return len(self._head)

    @property
    def _metadata(self) -> memoryview:
        return self._head[envelope.HEADER_BYTES : envelope.HEADER_BYTES + len(self._chain.metadata)]

    def finish(self, stored_bytes: int, running: RunningChecksum | None = None) -> bool:
        """Verify and decode after the backend filled :attr:`into` from an object of ``stored_bytes``.

        ``running`` is of the same bytes, from the same head to as far as it got, if somebody made it on the way.

        Returns:
            True when the target holds the object (:attr:`nbytes` says how long it is); False when the object was stored
            with another chain or alignment and must be read as a whole.

        Raises:
            CorruptObjectError: the bytes are not this object.
            CapacityError: the target is too small for it.
        """
        header = self._parse(self._head, stored_bytes)
        if header.payload_offset != len(self._head) or header.chain_id != envelope.chain_id(self._chain.metadata):
            if stored_bytes > 2 * header.nbytes + _EXPANSION_SLACK_BYTES:
                raise CorruptObjectError("length", f"{stored_bytes} bytes are stored for {header.nbytes}")
            return False
        payload = first_bytes(self._payload, header.stored_length)
        content = None
        if running is not None and running.done_bytes <= header.stored_length:
            running.advance(header.stored_length)
            content = running.digest()
        envelope.verify_content(header, self._metadata, payload, stored_bytes, content)
        if not self._chain.is_raw:
            self._decode(self._chain, payload[0] if payload else memoryview(b""), header)
        elif header.stored_length != header.nbytes:
            raise CorruptObjectError("length", "an uncoded payload differs in length from its object")
        self.nbytes = header.nbytes
        return True

    def finish_whole(self, stored: memoryview, stored_bytes: int, source: CodecSource) -> None:
        """Verify and decode from the whole stored object, following the chain in its envelope.

        Raises:
            CorruptObjectError: the bytes are not this object, or its chain cannot be decoded here.
            CapacityError: the target is too small for it.
        """
        header = self._parse(stored, stored_bytes)
        metadata = stored[envelope.HEADER_BYTES : envelope.HEADER_BYTES + header.metadata_length]
        payload = stored[header.payload_offset :]
        envelope.verify_content(header, metadata, [payload], stored_bytes)
        self._decode(CodecChain.from_metadata(bytes(metadata), source), payload, header)
        self.nbytes = header.nbytes

    def _parse(self, head: memoryview, stored_bytes: int) -> Envelope:
        header = envelope.parse(head[:stored_bytes])
        if header.key_digest != self._key.digest:
            raise CorruptObjectError("key", "the stored object belongs to another key")
        wanted = self._target.layout
        if wanted != header.layout and wanted.kind != "raw":
            raise CorruptObjectError("layout", f"{header.layout} is stored, {wanted} was asked for")
        if self._target.nbytes < header.nbytes:
            raise CapacityError(f"the destination holds {self._target.nbytes} bytes, the object has {header.nbytes}")
        return header

    def _decode(self, chain: CodecChain, payload: memoryview, header: Envelope) -> None:
        chain.decode(payload, first_bytes(self._target.segments, header.nbytes), self._key, header.layout)
