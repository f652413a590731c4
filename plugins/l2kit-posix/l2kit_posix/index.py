"""What this process knows about the objects of one directory: sizes, order of use, and the bytes they take.

An object costs an entry of one dictionary, its short key (see `Names`), and five numbers in arrays that are indexed by
its slot: about 210 bytes. The order of use is a ring through two of the arrays; slot 0 is no object, but where the ring
begins and ends.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

_RING: Final = 0


class Found(NamedTuple):
    """One object as the file system shows it: ``size`` in bytes, ``saved_ns`` the file's time of modification."""

    short: bytes
    size: int
    saved_ns: int


class Index:
    """Objects by short key, least recently used first, with the bytes that they and the unfinished stores take.

    Thread-safe; one lock, held for memory operations only and never around a system call. It is told of what happens in
    the file system and does nothing there itself.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._changed = threading.Condition()
        self._slots: Final[dict[bytes, int]] = {}
        self._shorts: Final[list[bytes]] = [b""]
        self._sizes: Final = array("Q", [0])
        #: When the object was used last, and what of that its file's time of modification says.
        self._used_ns: Final = array("Q", [0])
        self._saved_ns: Final = array("Q", [0])
        self._newer: Final = array("I", [_RING])
        self._older: Final = array("I", [_RING])
        self._free: Final[list[int]] = []
        self._used_bytes = 0
        self._reserved_bytes = 0
        self._reservations = 0
        self._version = 0
        self._clock_ns = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, short: bytes) -> bool:
        return short in self._slots

    @property
    def used_bytes(self) -> int:
        """Bytes of all known objects."""
        return self._used_bytes

    @property
    def version(self) -> int:
        """Counts what may give another store its room; see :meth:`wait_for_change`."""
        return self._version

    def now_ns(self) -> int:
        """The time, in nanoseconds since 1970, never the same twice: equal times would lose the order of use."""
        with self._changed:
            return self._now_ns()

    def fill(self, found: Iterable[Found]) -> None:
        """Take over what a scan finds, into an empty index; the files' times of modification give the order."""
        with self._changed:
            for short, size, saved_ns in found:
                self._put(short, size, saved_ns)
            newer, older, last = self._newer, self._older, _RING
            for slot in sorted(range(1, len(self._shorts)), key=self._used_ns.__getitem__):
                newer[last], older[slot] = slot, last
                last = slot
            newer[last], older[_RING] = _RING, last
            self._announce()

    def put(self, short: bytes, size: int, saved_ns: int, *, reserved: int | None = None) -> None:
        """The object is there, of this size, and is now the most recently used. ``reserved``: its reservation ends."""
        with self._changed:
            self._put(short, size, saved_ns)
            if reserved is not None:
                self._unreserve(reserved)
            self._announce()

    def remove(self, short: bytes) -> int:
        """The object is gone; returns the size that was known of it, 0 of an unknown one."""
        with self._changed:
            slot = self._slots.get(short)
            if slot is None:
                return 0
            size = self._sizes[slot]
            self._drop(slot)
            self._announce()
            return size

    def size(self, short: bytes) -> int | None:
        """The object's size in bytes as we last knew it; None for an unknown object. Takes no lock."""
        slot = self._slots.get(short)
        return None if slot is None else self._sizes[slot]

    def sizes(self, shorts: Sequence[bytes]) -> list[int | None]:
        """As :meth:`size`, of many."""
        slots, sizes = self._slots, self._sizes
        return [None if (slot := slots.get(short)) is None else sizes[slot] for short in shorts]

    def use(self, objects: Iterable[tuple[bytes, int]]) -> list[bytes]:
        """Objects, each with the size that it was found to have, were used just now, one after the other.

        Returns those of which no object of that size is known.
        """
        unknown: list[bytes] = []
        slots, sizes, used_ns = self._slots, self._sizes, self._used_ns
        newer, older = self._newer, self._older
        with self._changed:
            now_ns = self._now_ns()
            for short, size in objects:
                slot = slots.get(short)
                if slot is None or sizes[slot] != size:
                    unknown.append(short)
                    continue
                before, after = older[slot], newer[slot]
                if after != _RING:
                    newer[before], older[after] = after, before
                    last = older[_RING]
                    newer[last] = older[_RING] = slot
                    older[slot], newer[slot] = last, _RING
                now_ns += 1
                used_ns[slot] = now_ns
            self._clock_ns = now_ns
        return unknown

    def unsaved(self) -> list[tuple[bytes, int]]:
        """Objects whose last use does not stand in their file's time of modification, with that time.

        It does from now on, as far as the index knows: the caller sees to it.
        """
        # Some 50 ms for a million objects, so it is looked for without the lock, and made sure under it.
        slots = [
            slot for slot, (used, saved) in enumerate(zip(self._used_ns, self._saved_ns, strict=False)) if used > saved
        ]
        found: list[tuple[bytes, int]] = []
        for slot in slots:
            with self._changed:
                short, used_ns = self._shorts[slot], self._used_ns[slot]
                if short and used_ns > self._saved_ns[slot]:
                    self._saved_ns[slot] = used_ns
                    found.append((short, used_ns))
        return found

    def saved_ns(self, short: bytes) -> int | None:
        """The time of modification that the object's file had when we last knew; None for an unknown object."""
        with self._changed:
            slot = self._slots.get(short)
            return None if slot is None else self._saved_ns[slot]

    def used_elsewhere(self, short: bytes, saved_ns: int) -> None:
        """Another process used the object: it is no longer the next to go."""
        with self._changed:
            slot = self._slots.get(short)
            if slot is not None:
                self._saved_ns[slot] = saved_ns
                self._used_ns[slot] = max(self._used_ns[slot], saved_ns)
                self._unlink(slot)
                self._link(slot)

    def oldest(self, excepted: Callable[[bytes], bool]) -> bytes | None:
        """The least recently used object for which ``excepted`` is false."""
        with self._changed:
            slot = self._newer[_RING]
            while slot != _RING:
                short = self._shorts[slot]
                if not excepted(short):
                    return short
                slot = self._newer[slot]
            return None

    def shorts(self) -> list[bytes]:
        """Every known object."""
        with self._changed:
            return list(self._slots)

    def excess_bytes(self, limit: int) -> int:
        """Bytes of objects and unfinished stores beyond ``limit``; negative when there is room."""
        with self._changed:
            return self._used_bytes + self._reserved_bytes - limit

    def reserve(self, size: int, limit: int | None) -> bool:
        """Set ``size`` bytes aside for a store, if that keeps everything together within ``limit``."""
        with self._changed:
            if limit is not None and self._used_bytes + self._reserved_bytes + size > limit:
                return False
            self._reserved_bytes += size
            self._reservations += 1
            return True

    def unreserve(self, size: int) -> None:
        """The store came to nothing."""
        with self._changed:
            self._unreserve(size)
            self._announce()

    def wait_for_change(self, version: int, timeout_s: float) -> bool:
        """Wait until another store has ended since ``version``, or for ``timeout_s``.

        Returns:
            False, at once, when no other store is under way: then nothing will change by itself.
        """
        with self._changed:
            if self._version != version:
                return True
            if not self._reservations:
                return False
            self._changed.wait(timeout_s)
            return True

    # --- all below is called with the lock held --------------------------------------------------------------------

    def _now_ns(self) -> int:
        self._clock_ns = max(time.time_ns(), self._clock_ns + 1)
        return self._clock_ns

    def _put(self, short: bytes, size: int, saved_ns: int) -> None:
        slot = self._slots.get(short)
        if slot is not None:
            self._used_bytes -= self._sizes[slot]
            self._unlink(slot)
        elif self._free:
            slot = self._slots[short] = self._free.pop()
            self._shorts[slot] = short
        else:
            slot = self._slots[short] = len(self._shorts)
            self._shorts.append(short)
            for numbers in (self._sizes, self._used_ns, self._saved_ns, self._newer, self._older):
                numbers.append(0)
        self._sizes[slot] = size
        self._used_ns[slot] = self._saved_ns[slot] = saved_ns
        self._used_bytes += size
        self._link(slot)

    def _drop(self, slot: int) -> None:
        del self._slots[self._shorts[slot]]
        self._shorts[slot] = b""
        self._used_bytes -= self._sizes[slot]
        self._unlink(slot)
        self._free.append(slot)

    def _link(self, slot: int) -> None:
        last = self._older[_RING]
        self._newer[last] = self._older[_RING] = slot
        self._older[slot], self._newer[slot] = last, _RING

    def _unlink(self, slot: int) -> None:
        before, after = self._older[slot], self._newer[slot]
        self._newer[before], self._older[after] = after, before

    def _unreserve(self, size: int) -> None:
        self._reserved_bytes -= size
        self._reservations -= 1

    def _announce(self) -> None:
        self._version += 1
        self._changed.notify_all()
