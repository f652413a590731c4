"""An object's bytes as numpy arrays, and what part of a transfer it takes."""

from __future__ import annotations

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
    """An object's own memory, piece by piece."""

    __slots__ = ("_parts",)

    def __init__(self, obj: MemoryObj) -> None:
        """View the segments of ``obj``, which must outlive this."""
        self._parts = [np.frombuffer(segment, np.uint8) for segment in obj.segments]

    def pieces(self, offset: int, nbytes: int) -> list[npt.NDArray[Any]]:
        """Return the object's own memory for bytes ``[offset, offset + nbytes)``, one array per segment."""
        if len(self._parts) == 1:
            return [self._parts[0][offset : offset + nbytes]]
        found = []
        for part in self._parts:
            if offset < len(part) and nbytes:
                found.append(part[offset : offset + nbytes])
                nbytes -= len(found[-1])
            offset = max(0, offset - len(part))
        return found
