"""Which local memory is registered with a NIXL agent, and for how long.

Memory that lies in a memory map is registered as a whole map, once: L1's arena is one, so each agent registers the
arena at first use and never again. Nothing here keeps a map alive, and a map that was closed is deregistered before any
other memory is: so memory that later comes to lie at the same address is never taken for it. Of memory of any other
kind nobody can tell when it goes; it is registered for one transfer. Small pieces of it, which objects' headers are, go
by way of a map of our own: copying some kilobytes costs less than telling a network card about them.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

#: Most maps that stay registered; beyond it the one that was used longest ago goes. A program has few.
_MAX_MAPS: Final = 64

#: Loose pieces up to this size are copied, as far as there is room: for the headers of some hundred objects.
_SMALL_BYTES: Final = 8192
_DESK_BYTES: Final = 1 << 20
_BYTE: Final = ctypes.c_char

#: Address, bytes, device and a name.
Descriptor = tuple[int, int, int, str]


class _Map(NamedTuple):
    owner: weakref.ref[mmap.mmap]
    start: int
    stop: int
    handle: Any


class _Desk:
    """Memory of our own that small pieces are copied through; its pages cost nothing before they are used."""

    def __init__(self) -> None:
        self.map: Final = mmap.mmap(-1, _DESK_BYTES)
        self._bytes: Final = memoryview(self.map)
        self._base: Final = address_of(self.map)
        self.pieces: list[tuple[memoryview, memoryview]] = []
        self._used = 0

    def clear(self) -> None:
        self.pieces.clear()
        self._used = 0

    def place(self, view: memoryview) -> int | None:
        """Where a small piece lies on the desk; None for one that is not small, or when there is no room."""
        offset, stop = self._used, self._used + len(view)
        if len(view) > _SMALL_BYTES or stop > _DESK_BYTES:
            return None
        self.pieces.append((view, self._bytes[offset:stop]))
        self._used = stop
        return self._base + offset

    def copy_in(self) -> None:
        for view, ours in self.pieces:
            ours[:] = view

    def copy_out(self) -> None:
        for view, ours in self.pieces:
            view[:] = ours


class Regions:
    """The registered memory of one agent; used by one thread at a time."""

    def __init__(self, register: Callable[[Sequence[Descriptor]], Any], deregister: Callable[[Any], None]) -> None:
        """``register`` answers with what ``deregister`` takes."""
        self._register: Final = register
        self._deregister: Final = deregister
        self._maps: OrderedDict[int, _Map] = OrderedDict()  # by id of the map, least recently used first
        self._desk: Final = _Desk()
        #: Set when the agent is gone, and with it all that was registered.
        self.abandoned = False

    def __len__(self) -> int:
        """How many maps are registered."""
        return len(self._maps)

    @contextmanager
    def covering(self, views: Sequence[memoryview], *, copy_in: bool) -> Iterator[list[int]]:
        """See to it that all of ``views`` is registered during the ``with`` block; the address of each for a transfer.

        Small pieces have an address on our own desk: with ``copy_in`` they are copied there now, without it copied from
        there when the block has ended well.
        """
        self._drop_dead()
        addresses = [address_of(view) for view in views]
        used: set[int] = set()
        loose: list[tuple[int, int]] = []
        last: object = None
        for index, (view, start) in enumerate(zip(views, addresses, strict=True)):
            owner, stop = view.obj, start + len(view)
            if owner is last:
                continue
            if isinstance(owner, mmap.mmap):
                used.add(self.keep(owner))
                last = owner
            elif (place := self._desk.place(view)) is not None:
                addresses[index] = place
            elif not any(one.start <= start and stop <= one.stop for one in self._maps.values()):
                loose.append((start, stop))
        if self._desk.pieces:
            used.add(self.keep(self._desk.map))
            if copy_in:
                self._desk.copy_in()
        self._drop_oldest(used)
        spans = merged(loose)
        handle = self._register([(start, stop - start, 0, "") for start, stop in spans]) if spans else None
        try:
            yield addresses
            if not copy_in:
                self._desk.copy_out()
        finally:
            self._desk.clear()  # it holds on to nobody's memory
            if handle is not None and not self.abandoned:
                self._deregister(handle)

    def drop_all(self) -> None:
        """Deregister every map."""
        while self._maps:
            _, known = self._maps.popitem()
            self._deregister(known.handle)

    def keep(self, owner: mmap.mmap) -> int:
        """Register a memory map until it is closed; a number for it."""
        number = id(owner)
        if number in self._maps:
            self._maps.move_to_end(number)
        else:
            start, nbytes = address_of(owner), len(owner)
            handle = self._register([(start, nbytes, 0, "")])
            self._maps[number] = _Map(weakref.ref(owner), start, start + nbytes, handle)
        return number

    def _drop_dead(self) -> None:
        for number, known in list(self._maps.items()):
            owner = known.owner()
            if owner is None or owner.closed:
                del self._maps[number]
                self._deregister(known.handle)

    def _drop_oldest(self, used: set[int]) -> None:
        for number in list(self._maps):
            if len(self._maps) <= _MAX_MAPS:
                return
            if number not in used:
                self._deregister(self._maps.pop(number).handle)


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Where memory lies; it must not be empty."""
    try:
        return ctypes.addressof(_BYTE.from_buffer(memory))
    except TypeError:  # read-only memory; there is nothing in the standard library that tells where it lies
        import numpy as np

        address: int = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]
        return address


def merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Overlapping and adjoining ``(start, stop)`` as one, in order: NIXL wants no byte registered twice. Pure."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined
