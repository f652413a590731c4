"""An object's bytes as numpy arrays, and what part of a transfer it takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from l2kit.memory import MemoryObj


@dataclass(frozen=True, slots=True)
class Span:
    """One object and the pages that its tokens lie in.

    Attributes:
        obj: the object.
        pages: tensor indices of the pages, in token order.
        first: place of the object's first token in ``pages[0]``.
        tokens: tokens that the object holds.
        skip: how many of them, from the first, are not written.
    """

    obj: MemoryObj
    pages: npt.NDArray[np.int64]
    first: int
    tokens: int
    skip: int = 0


class ObjectBytes:
    """Pieces of an object's memory. A piece in one segment is that memory itself; one across segments is a copy."""

    __slots__ = ("_ends", "_parts")

    def __init__(self, obj: MemoryObj) -> None:
        """View the segments of ``obj``, which must outlive this."""
        self._parts = [np.frombuffer(segment, np.uint8) for segment in obj.segments]
        self._ends = np.cumsum([len(part) for part in self._parts])

    def pieces(self, offset: int, nbytes: int) -> list[npt.NDArray[Any]]:
        """Return the object's own memory for bytes ``[offset, offset + nbytes)``, one array per segment."""
        found = []
        index = int(np.searchsorted(self._ends, offset, side="right"))
        while nbytes > 0:
            part = self._parts[index]
            start = offset - (int(self._ends[index]) - len(part))
            found.append(part[start : start + nbytes])
            offset, nbytes, index = offset + len(found[-1]), nbytes - len(found[-1]), index + 1
        return found

    def read(self, offset: int, nbytes: int) -> npt.NDArray[Any]:
        """Return bytes ``[offset, offset + nbytes)`` as one array that is not to be written to."""
        pieces = self.pieces(offset, nbytes)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.empty(0, np.uint8)])

    @contextlib.contextmanager
    def writing(self, offset: int, nbytes: int) -> Iterator[npt.NDArray[Any]]:
        """Lend ``nbytes`` contiguous bytes that are in the object at ``offset`` when the block ends."""
        pieces = self.pieces(offset, nbytes)
        if len(pieces) == 1:
            yield pieces[0]
            return
        whole = np.empty(nbytes, np.uint8)
        yield whole
        at = 0
        for piece in pieces:
            piece[...] = whole[at : at + len(piece)]
            at += len(piece)
