"""Moving bytes between a file and a scatter/gather list, by as few and as large system calls as is good."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

#: Most segments that one system call takes.
IOV_MAX: Final = min(os.sysconf("SC_IOV_MAX"), 1024)
#: Most bytes of one call, so that a cancelled transfer ends within one such piece; the system call is lost in it.
CALL_BYTES: Final = 8 << 20
#: Most bytes of one call where somebody looks at them at once: they stay in the processor's cache for it.
CACHED_BYTES: Final = 1 << 20
#: What moves in some microseconds is not worth a look whether somebody still waits for it.
SMALL_BYTES: Final = 256 << 10


def write_file(fd: int, data: Sequence[memoryview], checkpoint: Callable[[], None]) -> None:
    """Write ``data``, one segment after the other, to the beginning of ``fd``, straight from the caller's memory.

    ``checkpoint`` is called before each piece and may raise to stop.

    Raises:
        OSError: not everything could be written; the file's content is undefined.
    """
    finish_write(_transfer(os.pwritev, fd, data, checkpoint), sum(map(len, data)))


class Seal(Protocol):
    """What completes the first segment of an object from all others, on their way. See `l2kit.framing.Sealing`."""

    def advance(self, until: int) -> None:
        """Take the object's bytes up to ``until`` into account."""

    def finish(self) -> None:
        """Complete the first segment."""


def write_sealed_file(fd: int, data: Sequence[memoryview], seal: Seal, checkpoint: Callable[[], None]) -> None:
    """As :func:`write_file`; the first segment goes last, when ``seal`` has seen all others just before they went.

    Raises:
        OSError: not everything could be written; the file's content is undefined.
    """
    offset = len(data[0])
    for vector in vectors(data[1:], IOV_MAX, CACHED_BYTES):
        checkpoint()
        nbytes = sum(map(len, vector))
        seal.advance(offset + nbytes)
        finish_write(_move(os.pwritev, fd, vector, nbytes, offset), nbytes)
        offset += nbytes
    seal.finish()
    finish_write(_move(os.pwritev, fd, [data[0]], len(data[0]), 0), len(data[0]))


def finish_write(moved: int, wanted: int) -> None:
    """Was everything written?

    Raises:
        OSError: it was not, although no system call failed.
    """
    if moved != wanted:
        raise OSError(errno.EIO, "the file system accepts no more bytes and says no reason")


def read_file(
    fd: int,
    into: Sequence[memoryview],
    checkpoint: Callable[[], None],
    arrived: Callable[[int], None] | None = None,
) -> int:
    """Fill ``into`` from the beginning of ``fd``, straight into the caller's memory; return the bytes read.

    Less than ``into`` holds are read when the file is shorter. ``checkpoint`` as in :func:`write_file`. ``arrived``
    hears how many bytes are there so far, while the last ones are in the processor's cache.

    Raises:
        OSError: the file cannot be read.
    """
    return _transfer(os.preadv, fd, into, checkpoint, arrived)


def vectors(segments: Sequence[memoryview], max_segments: int, max_bytes: int) -> Iterator[list[memoryview]]:
    """Cut a scatter/gather list into lists for one system call each; pure."""
    vector: list[memoryview] = []
    room = max_bytes
    for segment in segments:
        position = 0
        while position < len(segment):
            piece = segment[position : position + room]
            vector.append(piece)
            position += len(piece)
            room -= len(piece)
            if room == 0 or len(vector) == max_segments:
                yield vector
                vector, room = [], max_bytes
    if vector:
        yield vector


def _transfer(
    call: Callable[[int, list[memoryview], int], int],
    fd: int,
    segments: Sequence[memoryview],
    checkpoint: Callable[[], None],
    arrived: Callable[[int], None] | None = None,
) -> int:
    nbytes = sum(map(len, segments))
    small = (
        nbytes < SMALL_BYTES and len(segments) <= IOV_MAX
    )  # mostly one call does it: no cutting, and nothing to stop
    most = CALL_BYTES if arrived is None else CACHED_BYTES
    offset = 0
    for vector in [list(segments)] if small else vectors(segments, IOV_MAX, most):
        if not small:
            checkpoint()
        wanted = nbytes if small else sum(map(len, vector))
        moved = _move(call, fd, vector, wanted, offset)
        offset += moved
        if moved < wanted:
            return offset
        if arrived is not None:
            arrived(offset)
    return offset


def _move(
    call: Callable[[int, list[memoryview], int], int], fd: int, vector: list[memoryview], nbytes: int, offset: int
) -> int:
    """Move all of ``vector``, which has ``nbytes``; less are moved only where the file says no more."""
    left = nbytes
    while left:
        moved = call(fd, vector, offset + nbytes - left)
        if moved == 0:
            break
        left -= moved
        if left:
            vector = without(vector, moved)
    return nbytes - left


def without(vector: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of ``vector`` after its first ``nbytes``: system calls may move less than they were given."""
    for index, segment in enumerate(vector):
        if nbytes < len(segment):
            return [segment[nbytes:], *vector[index + 1 :]]
        nbytes -= len(segment)
    return []
