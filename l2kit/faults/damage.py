"""Damage to bytes in lists of buffers. Pure: which bytes are hurt is the caller's decision."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

_GARBAGE_BYTES: Final = 4096


def total(parts: Sequence[memoryview]) -> int:
    """Bytes in all of ``parts``."""
    return sum(map(len, parts))


def between(parts: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """The bytes from ``start`` to ``stop``, without copying them; fewer when ``parts`` end before."""
    kept: list[memoryview] = []
    for part in parts:
        piece = part[max(start, 0) : max(stop, 0)]
        if len(piece):
            kept.append(piece)
        start -= len(part)
        stop -= len(part)
    return kept


def flip_bit(parts: Sequence[memoryview], bit: int) -> None:
    """Flip one bit in place."""
    [byte] = between(parts, bit // 8, bit // 8 + 1)
    byte[0] ^= 1 << bit % 8


def with_flipped_bit(parts: Sequence[memoryview], bit: int) -> list[memoryview]:
    """``parts`` with one bit flipped: a copy of the part that holds it, and the others as they are."""
    flipped = list(parts)
    start = 0
    for index, part in enumerate(parts):
        if start <= bit // 8 < start + len(part):
            flipped[index] = memoryview(bytearray(part))
        start += len(part)
    flip_bit(flipped, bit)
    return flipped


def garble(parts: Sequence[memoryview], random: Random) -> None:
    """Overwrite ``parts`` with bytes that nobody stored."""
    garbage = random.randbytes(_GARBAGE_BYTES)
    for part in parts:
        for start in range(0, len(part), _GARBAGE_BYTES):
            piece = part[start : start + _GARBAGE_BYTES]
            piece[:] = garbage[: len(piece)]
