"""Archives: any number of sealed objects in one file, for ``l2kit export`` and ``l2kit import``.

All numbers are little-endian, all checksums XXH3-128. One after the other::

    head     8s "L2KITARC"   u32 format version (1)   u32 zero   16s checksum of the 16 bytes before it
    record   8s "L2KITREC"   u32 key bytes   u32 zero   u64 object bytes   16s checksum of the object
             the key's canonical text   16s checksum of all of the record so far
             the object: its envelope and payload, exactly as a backend stores them
    …
    end      8s "L2KITEND"   u64 records   u64 object bytes in all   16s checksum over the second checksums of records
             16s checksum of the 40 bytes before it

A reader trusts no length before the checksum over it holds. Behind damage it looks for the next record whose checksum
holds, so a damaged place costs the objects that it touches. Without an end record an archive is truncated.

Blocking and single-threaded: whoever is on an event loop calls this in a thread.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

import xxhash

from l2kit.errors import ConfigError, L2Error
from l2kit.keys import MAX_KEY_CHARS, ObjectKey
from l2kit.sealed import MAX_SEALED_BYTES

FORMAT_VERSION: Final = 1

_HEAD_MAGIC: Final = b"L2KITARC"
_RECORD_MAGIC: Final = b"L2KITREC"
_END_MAGIC: Final = b"L2KITEND"
_HEAD: Final = struct.Struct("<8sII")
_RECORD: Final = struct.Struct("<8sIIQ16s")
_END: Final = struct.Struct("<8sQQ16s")
_MAGIC: Final = re.compile(b"L2KIT(?:REC|END)")
_CHECKSUM_BYTES: Final = 16
_PIECE_BYTES: Final = 1 << 20


class ArchiveError(L2Error):
    """A file is no archive that can be read here; the message says why."""


class Source(Protocol):
    """What an archive is read from; it need not be seekable."""

    def read(self, nbytes: int, /) -> bytes:
        """Up to ``nbytes`` more bytes; none at the end."""
        ...


class Sink(Protocol):
    """What an archive is written to; it need not be seekable."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Write all of ``data``."""
        ...


class Record(NamedTuple):
    """One object, its bytes as they were put in. Whether they are that object, `check_sealed` says."""

    key: ObjectKey
    stored: memoryview


class Damage(NamedTuple):
    """A place in an archive that is not what was written.

    Attributes:
        offset: in bytes from the start of the archive.
        key: whose record it is, as far as that can still be told.
        what: for people.
    """

    offset: int
    key: ObjectKey | None
    what: str


class ArchiveWriter:
    """Writes one archive; memory for no object but the one in hand."""

    def __init__(self, sink: Sink) -> None:
        """Begin an archive: writes its head."""
        self._sink = sink
        self._heads = xxhash.xxh3_128()
        self.objects = 0
        self.object_bytes = 0
        head = _HEAD.pack(_HEAD_MAGIC, FORMAT_VERSION, 0)
        sink.write(head + _checksum(head))

    def add(self, key: ObjectKey, stored: memoryview) -> None:
        """Append one object, checked before. Nothing of ``stored`` is kept.

        Raises:
            OSError: it could not be written; the archive is of no use then.
        """
        text = key.encode().encode()
        head = _RECORD.pack(_RECORD_MAGIC, len(text), 0, len(stored), _checksum(stored)) + text
        seal = _checksum(head)
        self._sink.write(head + seal)
        self._sink.write(stored)
        self._heads.update(seal)
        self.objects += 1
        self.object_bytes += len(stored)

    def finish(self) -> None:
        """Write the end record: without it the archive counts as truncated."""
        end = _END.pack(_END_MAGIC, self.objects, self.object_bytes, self._heads.digest())
        self._sink.write(end + _checksum(end))


class _RecordHead(NamedTuple):
    """A record's own account of itself, its checksum holds."""

    key: ObjectKey
    head_bytes: int
    object_bytes: int
    content: bytes
    seal: bytes


class ArchiveReader:
    """Reads one archive from its start to its end, once.

    - Iterating gives every record whose checksums hold, and a `Damage` for every place where something else is, in the
      order of the file; of an archive as it was written, no `Damage`.
    - Memory: one object twice, and never more than really is in the file.
    """

    def __init__(self, source: Source, *, max_object_bytes: int = MAX_SEALED_BYTES) -> None:
        """Read and check the head. A record that claims more than ``max_object_bytes`` is damage.

        Raises:
            ArchiveError: it is no archive, or one of a newer format.
            OSError: it cannot be read.
        """
        self._source = source
        self._max_object_bytes = max_object_bytes
        self._window = bytearray()
        self._offset = 0  # of the window's first byte
        self._head_is_whole = self._read_head()

    def __iter__(self) -> Iterator[Record | Damage]:
        objects, object_bytes, seals = 0, 0, xxhash.xxh3_128()
        if not self._head_is_whole:
            yield Damage(0, None, "the head of the archive is damaged")
            self._seek()
        while self._holds(1):
            head = self._record_head()
            if head is not None:
                stored = self._content(head)
                if stored is not None:
                    self._drop(head.head_bytes + head.object_bytes)
                    objects += 1
                    object_bytes += len(stored)
                    seals.update(head.seal)
                    yield Record(head.key, stored)
                    continue
                yield Damage(self._offset, head.key, "its record in the archive is damaged or cut off")
                # Bytes may be missing inside of it: where the next record begins, its length does not say.
                self._drop(head.head_bytes)
            elif (end := self._end()) is not None:
                if end != (objects, object_bytes, seals.digest()):
                    yield Damage(self._offset, None, f"{objects} of the archive's {end[0]} objects are here as written")
                self._drop(_END.size + _CHECKSUM_BYTES)
                if self._holds(1):
                    yield Damage(self._offset, None, "something follows the end of the archive")
                return
            else:
                yield Damage(self._offset, None, "an unreadable record")
                self._drop(1)
            self._seek()
        yield Damage(self._offset, None, "the archive is cut off: it has no end record")

    def _read_head(self) -> bool:
        """False when the head is damaged, but an archive's."""
        if not self._holds(len(_HEAD_MAGIC)) or not self._window.startswith(_HEAD_MAGIC):
            raise ArchiveError("this is no l2kit archive")
        nbytes = _HEAD.size + _CHECKSUM_BYTES
        if not self._holds(nbytes) or _checksum(self._window[: _HEAD.size]) != self._window[_HEAD.size : nbytes]:
            self._drop(len(_HEAD_MAGIC))
            return False
        version = _HEAD.unpack_from(self._window)[1]
        if version != FORMAT_VERSION:
            raise ArchiveError(f"archive format {version} is not readable here (known: {FORMAT_VERSION})")
        self._drop(nbytes)
        return True

    def _record_head(self) -> _RecordHead | None:
        """The record that begins here; None when none does, or its head is damaged."""
        if not self._holds(_RECORD.size) or not self._window.startswith(_RECORD_MAGIC):
            return None
        _, key_bytes, _, object_bytes, content = _RECORD.unpack_from(self._window)
        if key_bytes > MAX_KEY_CHARS or object_bytes > self._max_object_bytes:
            return None
        covered = _RECORD.size + key_bytes
        if not self._holds(covered + _CHECKSUM_BYTES):
            return None
        seal = bytes(self._window[covered : covered + _CHECKSUM_BYTES])
        if _checksum(self._window[:covered]) != seal:
            return None
        try:
            key = ObjectKey.parse(self._window[_RECORD.size : covered].decode("ascii"))
        except (ConfigError, UnicodeDecodeError):
            return None
        return _RecordHead(key, covered + _CHECKSUM_BYTES, object_bytes, content, seal)

    def _content(self, head: _RecordHead) -> memoryview | None:
        """The object of the record that begins here, when it is whole."""
        whole = head.head_bytes + head.object_bytes
        if not self._holds(whole):
            return None
        stored = bytes(memoryview(self._window)[head.head_bytes : whole])
        return memoryview(stored) if _checksum(stored) == head.content else None

    def _end(self) -> tuple[int, int, bytes] | None:
        """Objects, their bytes and the checksum over their records, as the end record says that begins here."""
        if not self._holds(_END.size + _CHECKSUM_BYTES) or not self._window.startswith(_END_MAGIC):
            return None
        if _checksum(self._window[: _END.size]) != self._window[_END.size : _END.size + _CHECKSUM_BYTES]:
            return None
        _, objects, object_bytes, seals = _END.unpack_from(self._window)
        return objects, object_bytes, seals

    def _seek(self) -> None:
        """Drop bytes until a record or the end begins here that is what it says, or nothing is left."""
        while self._holds(1):
            found = _MAGIC.search(self._window)
            if found is None:
                kept = len(_RECORD_MAGIC) - 1  # of what may be the beginning of one
                self._drop(max(len(self._window) - kept, 0))
                if not self._holds(len(_RECORD_MAGIC)):
                    self._drop(len(self._window))
                continue
            self._drop(found.start())
            if self._record_head() is not None or self._end() is not None:
                return
            self._drop(1)

    def _holds(self, nbytes: int) -> bool:
        """Have at least ``nbytes`` in the window; False when the archive ends before."""
        while len(self._window) < nbytes:
            piece = self._source.read(_PIECE_BYTES)
            if not piece:
                return False
            self._window += piece
        return True

    def _drop(self, nbytes: int) -> None:
        del self._window[:nbytes]
        self._offset += nbytes


def _checksum(data: bytes | bytearray | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)
