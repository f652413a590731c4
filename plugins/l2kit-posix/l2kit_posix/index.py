"""What this process knows about the objects of one directory: sizes, order of use, and the bytes they take."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from l2kit.keys import ObjectKey

#: A hit updates the file's time of use at most this often. A clean close writes the rest, so the order of use survives
#: it exactly; after a crash the order is true to this many seconds.
TOUCH_INTERVAL_NS: Final = 30 * 10**9


class Found(NamedTuple):
    """One object as the file system shows it: ``size`` in bytes, ``saved_ns`` the file's time of modification."""

    key: ObjectKey
    size: int
    saved_ns: int


class _Known:
    """``used_ns``: when the object was used last; ``saved_ns``: what of that the file's time of modification says."""

    __slots__ = ("saved_ns", "size", "used_ns")

    def __init__(self, size: int, used_ns: int, saved_ns: int) -> None:
        self.size = size
        self.used_ns = used_ns
        self.saved_ns = saved_ns


class Index:
    """Objects by key, least recently used first, with the bytes that they and the unfinished stores take.

    Thread-safe; one lock, held for dictionary operations only and never around a system call. It is told of what
    happens in the file system and does nothing there itself.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._changed = threading.Condition()
        self._known: OrderedDict[ObjectKey, _Known] = OrderedDict()
        self._used_bytes = 0
        self._reserved_bytes = 0
        self._reservations = 0
        self._version = 0
        self._clock_ns = 0

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._known

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
            self._clock_ns = max(time.time_ns(), self._clock_ns + 1)
            return self._clock_ns

    def fill(self, found: Iterable[Found]) -> None:
        """Take over what a scan found; the files' times of modification give the order."""
        for one in sorted(found, key=lambda item: item.saved_ns):
            self.put(one.key, one.size, one.saved_ns)

    def put(self, key: ObjectKey, size: int, saved_ns: int, *, reserved: bool = False) -> None:
        """The object is there, of this size, and is now the most recently used. ``reserved``: it had a reservation."""
        with self._changed:
            self._remove(key)
            self._known[key] = _Known(size, saved_ns, saved_ns)
            self._used_bytes += size
            if reserved:
                self._unreserve(size)
            self._announce()

    def remove(self, key: ObjectKey) -> None:
        """The object is gone; harmless for an unknown one."""
        with self._changed:
            self._remove(key)
            self._announce()

    def touch(self, key: ObjectKey, size: int, now_ns: int) -> bool | None:
        """The object was used.

        Returns:
            True when its file's time should be set to ``now_ns`` (the caller does it), False when that can wait, None
            when no object of this size is known under the key.
        """
        with self._changed:
            known = self._known.get(key)
            if known is None or known.size != size:
                return None
            self._known.move_to_end(key)
            known.used_ns = now_ns
            due = now_ns - known.saved_ns >= TOUCH_INTERVAL_NS
            if due:
                known.saved_ns = now_ns
            return due

    def unsaved(self) -> list[tuple[ObjectKey, int]]:
        """Objects whose last use does not stand in their file's time of modification, with that time."""
        with self._changed:
            return [(key, known.used_ns) for key, known in self._known.items() if known.used_ns > known.saved_ns]

    def saved_ns(self, key: ObjectKey) -> int | None:
        """The time of modification that the object's file had when we last knew; None for an unknown object."""
        known = self._known.get(key)
        return None if known is None else known.saved_ns

    def used_elsewhere(self, key: ObjectKey, saved_ns: int) -> None:
        """Another process used the object: it is no longer the next to go."""
        with self._changed:
            known = self._known.get(key)
            if known is not None:
                known.saved_ns = saved_ns
                known.used_ns = max(known.used_ns, saved_ns)
                self._known.move_to_end(key)

    def oldest(self, excepted: Callable[[ObjectKey], bool]) -> ObjectKey | None:
        """The least recently used object for which ``excepted`` is false."""
        with self._changed:
            return next((key for key in self._known if not excepted(key)), None)

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

    def _remove(self, key: ObjectKey) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._used_bytes -= known.size

    def _unreserve(self, size: int) -> None:
        self._reserved_bytes -= size
        self._reservations -= 1

    def _announce(self) -> None:
        self._version += 1
        self._changed.notify_all()
