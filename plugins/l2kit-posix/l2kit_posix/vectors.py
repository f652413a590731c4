"""Moving bytes between a file and a scatter/gather list, by as few and as large system calls as is good."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final

#: Most segments that one system call takes.
_IOV_MAX: Final = min(os.sysconf("SC_IOV_MAX"), 1024)
#: Most bytes of one call, so that a cancelled transfer ends within one such piece; the system call is lost in it.
_CALL_BYTES: Final = 8 << 20


def write_file(fd: int, data: Sequence[memoryview], checkpoint: Callable[[], None]) -> None:
    """Write ``data``, one segment after the other, to the beginning of ``fd``, straight from the caller's memory.

    ``checkpoint`` is called before each piece and may raise to stop.

    Raises:
        OSError: not everything could be written; the file's content is undefined.
    """
    moved = _transfer(os.pwritev, fd, data, checkpoint)
    if moved != sum(map(len, data)):
        raise OSError(errno.EIO, "the file system accepts no more bytes and says no reason")


def read_file(fd: int, into: Sequence[memoryview], checkpoint: Callable[[], None]) -> int:
    """Fill ``into`` from the beginning of ``fd``, straight into the caller's memory; return the bytes read.

    Less than ``into`` holds are read when the file is shorter. ``checkpoint`` as in :func:`write_file`.

    Raises:
        OSError: the file cannot be read.
    """
    return _transfer(os.preadv, fd, into, checkpoint)


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
) -> int:
    offset = 0
    for vector in vectors(segments, _IOV_MAX, _CALL_BYTES):
        checkpoint()
        rest = vector
        while rest:
            moved = call(fd, rest, offset)
            if moved == 0:
                return offset
            offset += moved
            rest = _without(rest, moved)
    return offset


def _without(vector: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of ``vector`` after its first ``nbytes``: system calls may move less than they were given."""
    for index, segment in enumerate(vector):
        if nbytes < len(segment):
            return [segment[nbytes:], *vector[index + 1 :]]
        nbytes -= len(segment)
    return []
