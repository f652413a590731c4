"""Objects of one call on their way, and how one thread moves small ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from l2kit.keys import ObjectKey
from l2kit_nvme.geometry import UNIT_BYTES
from l2kit_nvme.transfers import Transfer

ObjectT = TypeVar("ObjectT")


class Storing(NamedTuple):
    """One object to be stored: ``data`` makes its bytes, in the thread that writes."""

    key: ObjectKey
    nbytes: int
    data: Callable[[], Sequence[memoryview]]


class Loading(NamedTuple):
    """One object to be loaded: ``verify`` is called with its size in the thread that has read it."""

    key: ObjectKey
    into: Sequence[memoryview]
    verify: Callable[[int], None]


def one_by_one(
    objects: Sequence[ObjectT],
    sizes: Sequence[int],
    plan: Callable[[Sequence[ObjectT]], list[Transfer]],
    move: Callable[[Transfer], None],
    finish: Callable[[], None],
    check: Callable[[Sequence[ObjectT]], None],
) -> None:
    """Plan, move and check some of ``objects``, about a transfer's worth, then the next ones; finish all together."""
    start = nbytes = 0
    for position, size in enumerate(sizes):
        nbytes += size
        if nbytes < UNIT_BYTES and position + 1 < len(sizes):
            continue
        some = objects[start : position + 1]
        for transfer in plan(some):
            move(transfer)
        check(some)
        start, nbytes = position + 1, 0
    finish()
