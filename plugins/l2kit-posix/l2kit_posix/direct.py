"""Files past the page cache (O_DIRECT): which of the caller's memory goes as it is, and which through aligned memory.

The kernel wants memory, place in the file and length in whole pages. Objects begin with one page of envelope, so their
payload lies right in the file, and mostly in memory as well; the rest is copied, and the end is filled up and cut off.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from l2kit.memory import first_bytes
from l2kit_posix.vectors import CALL_BYTES, IOV_MAX, finish_write, without

PAGE_BYTES: Final = 4096
#: Below this a copy by Python is over before others could have used the interpreter.
_SMALL_COPY_BYTES: Final = 32 << 10
#: Buffers that are kept for the next transfer; each takes memory only where it was used.
_KEPT: Final = 16


class Part(NamedTuple):
    """A piece of a file: ``view`` as it lies in memory, or, None, ``nbytes`` that are copied from or to ``copied``."""

    view: memoryview | None
    copied: list[memoryview]
    nbytes: int


def calls(segments: Sequence[memoryview], address_of: Callable[[memoryview], int | None]) -> Iterator[list[Part]]:
    """Cut a scatter/gather list into parts for one system call each; pure.

    All parts but the very last have whole pages. ``address_of`` says None for memory that is to be copied anyway.
    """
    parts: list[Part] = []
    copied: list[memoryview] = []
    copied_bytes = position = 0
    room = CALL_BYTES
    for segment in segments:
        address = address_of(segment) if len(segment) >= PAGE_BYTES else None
        start = 0
        while start < len(segment):
            rest = len(segment) - start
            fits = address is not None and (address + start - position) % PAGE_BYTES == 0
            if fits and position % PAGE_BYTES == 0 and rest >= PAGE_BYTES:
                length = min(rest // PAGE_BYTES * PAGE_BYTES, room)
                if copied:
                    parts.append(Part(None, copied, copied_bytes))
                    copied, copied_bytes = [], 0
                parts.append(Part(segment[start : start + length], [], length))
            else:
                length = min(rest, room)
                if fits and position % PAGE_BYTES:
                    length = min(length, -position % PAGE_BYTES)
                copied.append(segment[start : start + length])
                copied_bytes += length
            start += length
            position += length
            room -= length
            if room == 0 or (len(parts) >= IOV_MAX - 2 and position % PAGE_BYTES == 0):
                yield [*parts, Part(None, copied, copied_bytes)] if copied else parts
                parts, copied, copied_bytes, room = [], [], 0, CALL_BYTES
    if copied:
        parts.append(Part(None, copied, copied_bytes))
    if parts:
        yield parts


class DirectFiles:
    """Whole files past the page cache, through as many aligned buffers as threads do so at once. Thread-safe."""

    def __init__(self, checkpoint: Callable[[], None]) -> None:
        """``checkpoint`` is called between system calls and may raise to stop."""
        self._checkpoint: Final = checkpoint
        self._lock: Final = threading.Lock()
        self._kept: list[memoryview] = []

    def write(self, fd: int, data: Sequence[memoryview]) -> None:
        """As `write_file`; ``fd`` was opened with O_DIRECT.

        Raises:
            OSError: not everything could be written; the file's content is undefined.
        """
        buffer = self._take()
        try:
            offset = 0
            for parts in calls(data, address_of):
                self._checkpoint()
                vector = _vector(parts, buffer)
                _fill(buffer, parts)
                padded = sum(map(len, vector))
                written = 0
                while written < padded:
                    moved = os.pwritev(fd, vector, offset + written)
                    if moved == 0:
                        break
                    written += moved
                    vector = without(vector, moved)
                finish_write(written, padded)
                offset += sum(part.nbytes for part in parts)
            if offset % PAGE_BYTES:
                os.ftruncate(fd, offset)
        finally:
            self._give_back(buffer)

    def read(self, fd: int, into: Sequence[memoryview], size: int) -> int:
        """As `read_file`; ``fd`` was opened with O_DIRECT, and the file has ``size`` bytes.

        The page that the file ends in goes through a copy: the device would fill all of it.

        Raises:
            OSError: the file cannot be read.
        """
        buffer = self._take()
        try:
            total = 0
            for parts in calls(first_bytes(into, size), address_of):
                self._checkpoint()
                vector = _vector(parts, buffer)
                wanted = sum(part.nbytes for part in parts)
                read = 0
                while read < wanted:
                    moved = os.preadv(fd, vector, total + read)
                    read += moved
                    if moved == 0 or moved % PAGE_BYTES:  # only the end of a file is no whole page
                        break
                    vector = without(vector, moved)
                _drain(buffer, parts, read)
                total += min(read, wanted)
                if read < wanted:
                    break
            return total
        finally:
            self._give_back(buffer)

    def clear(self) -> None:
        """Free the buffers."""
        with self._lock:
            self._kept.clear()

    def _take(self) -> memoryview:
        with self._lock:
            if self._kept:
                return self._kept.pop()
        return memoryview(mmap.mmap(-1, CALL_BYTES + PAGE_BYTES))

    def _give_back(self, buffer: memoryview) -> None:
        with self._lock:
            if len(self._kept) < _KEPT:
                self._kept.append(buffer)


def address_of(view: memoryview) -> int | None:
    """Where the memory of a view begins; None for read-only memory, whose address Python does not tell."""
    return None if view.readonly or not len(view) else ctypes.addressof(ctypes.c_char.from_buffer(view))


def _vector(parts: Sequence[Part], buffer: memoryview) -> list[memoryview]:
    """What to hand to the system call: the parts' own memory, or pieces of ``buffer``, filled up to whole pages."""
    vector: list[memoryview] = []
    position = 0
    for part in parts:
        if part.view is not None:
            vector.append(part.view)
            continue
        padded = part.nbytes + -part.nbytes % PAGE_BYTES
        vector.append(buffer[position : position + padded])
        position += padded
    return vector


def _fill(buffer: memoryview, parts: Sequence[Part]) -> None:
    """Before writing: copy in what does not go as it is."""
    position = 0
    for part in parts:  # only the last part of all is no whole number of pages
        for view in part.copied:
            _move(buffer[position : position + len(view)], view)
            position += len(view)


def _drain(buffer: memoryview, parts: Sequence[Part], read: int) -> None:
    """After ``read`` bytes were read: copy out what does not go as it is, and nothing that was not read."""
    position = 0
    for part in parts:
        if part.view is not None:
            read -= part.nbytes
        for view in part.copied:
            length = max(0, min(len(view), read))
            _move(view[:length], buffer[position : position + length])
            position += len(view)
            read -= len(view)


def _move(target: memoryview, source: memoryview) -> None:
    addresses = (address_of(target), address_of(source)) if len(source) > _SMALL_COPY_BYTES else (None, None)
    if addresses[0] is None or addresses[1] is None:
        target[:] = source
    else:
        ctypes.memmove(addresses[0], addresses[1], len(source))
