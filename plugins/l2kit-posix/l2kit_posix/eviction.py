"""Making room: which objects go, when, and how a store gets its bytes set aside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from l2kit.keys import ObjectKey
from l2kit_posix.failures import ABSENT
from l2kit_posix.index import Index
from l2kit_posix.leases import Leases
from l2kit_posix.names import object_path

#: Enough that threads seldom meet at one lock.
_LOCKS: Final = 64
#: How often a store that waits for others' room looks whether it was cancelled.
_WAIT_S: Final = 0.1
_BLOCK_BYTES: Final = 512  # the unit of st_blocks


class Eviction:
    """Removes the least recently used objects of one directory that are not locked. Thread-safe.

    It also owns the locks under which a key's file and its place in the index change together.
    """

    def __init__(
        self,
        index: Index,
        leases: Leases,
        objects: str,
        checkpoint: Callable[[], None],
        count: Callable[[str, int], None],
    ) -> None:
        """``count`` hears of what was evicted; ``checkpoint`` may raise to stop long work."""
        self._index = index
        self._leases = leases
        self._objects = objects
        self._checkpoint = checkpoint
        self._count = count
        self._locks = [threading.Lock() for _ in range(_LOCKS)]

    def lock_of(self, key: ObjectKey) -> threading.Lock:
        """The lock under which this key's file is published or removed and the index is told."""
        return self._locks[hash(key) % _LOCKS]

    def reserve(self, size: int, limit: int | None) -> bool:
        """Set ``size`` bytes aside for a store, evicting what must go for it.

        - Unfinished stores count against the limit as well: it holds at every moment, not only afterwards.
        - Where only other unfinished stores are in the way, it waits for them: they can be evicted once they are done.
        - False when the object is larger than the limit, or when everything that could go is locked.

        Raises:
            OSError: an object that should go cannot be removed. The next store tries another one.
        """
        if limit is not None and size > limit:
            return False
        while not self._index.reserve(size, limit):
            self._checkpoint()
            version = self._index.version
            if self._evict_oldest() is None and not self._index.wait_for_change(version, _WAIT_S):
                return False
        return True

    def free(self, size: int) -> bool:
        """Evict until the file system has got ``size`` bytes back, as far as that is possible; False if nothing went.

        Raises:
            OSError: an object that should go cannot be removed.
        """
        freed = 0
        while freed < size:
            self._checkpoint()
            evicted = self._evict_oldest()
            if evicted is None:
                break
            freed += evicted
        return freed > 0

    def shrink_to(self, limit: int) -> None:
        """Evict until all objects together are within ``limit``.

        Raises:
            OSError: an object that should go cannot be removed.
        """
        while self._index.excess_bytes(limit) > 0:
            self._checkpoint()
            if self._evict_oldest() is None:
                return

    def _evict_oldest(self) -> int | None:
        """Remove one object; returns the bytes that the file system got back, None when there is nothing to remove.

        0 when it turned out that another process had removed or used the object: then the next one may be asked for.
        """
        key = self._index.oldest(self._leases.holds)
        if key is None:
            return None
        path = Path(object_path(self._objects, key))
        with self.lock_of(key):
            saved_ns = self._index.saved_ns(key)
            if saved_ns is None:  # another thread was faster
                return 0
            try:
                status = path.lstat()
                if status.st_mtime_ns > saved_ns:
                    self._index.used_elsewhere(key, status.st_mtime_ns)
                    return 0
                path.unlink()
            except OSError as error:
                if error.errno not in ABSENT:
                    self._index.used_elsewhere(key, saved_ns)
                    raise
                self._index.remove(key)
                return 0
            self._index.remove(key)
        self._count("evicted", 1)
        self._count("evicted_bytes", status.st_size)
        return status.st_blocks * _BLOCK_BYTES
