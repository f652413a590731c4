"""Which bytes of the caller's memory go where on which member, in how large pieces; pure.

Objects that lie one behind the other become one transfer; a large one becomes several, so that a few threads keep the
device, or several, busy with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from l2kit_nvme.geometry import PAGE_BYTES, UNIT_BYTES, Geometry

#: No transfer is larger than this.
MAX_TRANSFER_BYTES: Final = UNIT_BYTES + UNIT_BYTES // 2


class Extent(NamedTuple):
    """Memory for consecutive bytes of the address space."""

    address: int
    views: Sequence[memoryview]


class Transfer(NamedTuple):
    """One system call: ``nbytes`` at ``offset`` of a member, from or to ``views``."""

    member: int
    offset: int
    views: list[memoryview]
    nbytes: int


class Run(NamedTuple):
    """A part of a transfer: ``view`` as it is, or, None, ``nbytes`` of aligned memory that ``copied`` goes through."""

    view: memoryview | None
    copied: list[memoryview]
    nbytes: int


def transfers(extents: Sequence[Extent], geometry: Geometry, padding: memoryview) -> list[Transfer]:
    """Cut and join ``extents``, which do not overlap, into transfers of about a unit each.

    Each extent is filled up to a page with ``padding``, a page, so that all transfers are aligned.
    """
    joined: list[tuple[int, list[memoryview], int]] = []
    for extent in sorted(extents, key=lambda one: one.address):
        nbytes = sum(map(len, extent.views))
        views = [*extent.views, padding[: -nbytes % PAGE_BYTES]]
        nbytes += -nbytes % PAGE_BYTES
        if joined and joined[-1][0] + joined[-1][2] == extent.address:
            address, before, length = joined.pop()
            joined.append((address, before + views, length + nbytes))
        else:
            joined.append((extent.address, views, nbytes))
    result: list[Transfer] = []
    for address, views, nbytes in joined:
        end = address + nbytes
        pieces = max(1, round(nbytes / UNIT_BYTES))
        size = -(-nbytes // (pieces * PAGE_BYTES)) * PAGE_BYTES
        cutter = _Cutter(views)
        while address < end:
            length = min(size, end - address)
            if geometry.members > 1:  # a unit is all that lies together on one member
                length = min(end - address, UNIT_BYTES - address % UNIT_BYTES)
            member, offset = geometry.locate(address)
            result.append(Transfer(member, offset, cutter.take(length), length))
            address += length
    return result


def runs(views: Sequence[memoryview], address_of: Callable[[memoryview], int]) -> list[Run]:
    """Which parts of a transfer the device can reach where they are, and which must be copied.

    A part goes as it is when both its memory and its place in the transfer are page-aligned, in whole pages.
    """
    result: list[Run] = []
    copied: list[memoryview] = []
    pending = 0
    for view in views:
        if not len(view):
            continue
        address = address_of(view)
        position = 0
        while position < len(view):
            ahead = -pending % PAGE_BYTES  # up to the next page of the transfer
            left = len(view) - position
            if (address + position + ahead) % PAGE_BYTES or left - ahead < PAGE_BYTES:
                copied.append(view[position:] if position else view)
                pending += left
                break
            if ahead:
                copied.append(view[position : position + ahead])
                pending += ahead
                position += ahead
                left -= ahead
            if pending:
                result.append(Run(None, copied, pending))
                copied, pending = [], 0
            whole = left - left % PAGE_BYTES
            result.append(Run(view[position : position + whole], [], whole))
            position += whole
    if pending:
        result.append(Run(None, copied, pending))
    return result


class SharedWork:
    """Transfers that several threads carry out together; :meth:`run` is what each does. One lock, for the count."""

    def __init__(
        self, work: Sequence[Transfer], move: Callable[[Transfer], None], finish: Callable[[], None], threads: int
    ) -> None:
        """``finish`` runs once, in the thread that is ready last, and not at all when a transfer failed."""
        self._left: Final = iter(work)
        self._move: Final = move
        self._finish: Final = finish
        self._lock: Final = threading.Lock()
        self._running = threads

    def run(self) -> None:
        """Take the next transfer until there is none left."""
        for transfer in self._left:
            self._move(transfer)
        with self._lock:
            self._running -= 1
            last = not self._running
        if last:
            self._finish()


class _Cutter:
    """Takes the next bytes off a list of views."""

    def __init__(self, views: list[memoryview]) -> None:
        self._views = views
        self._index = 0
        self._position = 0

    def take(self, nbytes: int) -> list[memoryview]:
        taken: list[memoryview] = []
        while nbytes:
            view = self._views[self._index]
            piece = view[self._position : self._position + nbytes]
            if len(piece):
                taken.append(piece)
                nbytes -= len(piece)
                self._position += len(piece)
            if self._position == len(view):
                self._index += 1
                self._position = 0
        return taken
