"""Making room: which objects go, when, and how a store gets its bytes set aside."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Final

from l2kit_posix.failures import ABSENT
from l2kit_posix.index import Index
from l2kit_posix.leases import Leases
from l2kit_posix.names import Names
from l2kit_posix.tally import Tally

#: Enough that threads seldom meet at one lock.
_LOCKS: Final = 64
#: How often a store that waits for others' room looks whether it was cancelled.
_WAIT_S: Final = 0.1
_BLOCK_BYTES: Final = 512  # the unit of st_blocks


class Eviction:
    """Removes the least recently used objects of one directory that are not locked. Thread-safe.

    It also owns the locks under which a key's file and its place in the index change together. Locks are taken in this
    order: a key's, the tally's, the index's.
    """

    def __init__(
        self,
        index: Index,
        leases: Leases,
        tally: Tally,
        names: Names,
        limit: int | None,
        checkpoint: Callable[[], None],
        count: Callable[[str, int], None],
    ) -> None:
        """``limit``: most bytes of all objects and unfinished stores.

        ``count`` hears of what was evicted; ``checkpoint`` may raise to stop long work.
        """
        self._index = index
        self._leases = leases
        self._tally = tally
        self._names = names
        self._limit = limit
        self._checkpoint = checkpoint
        self._count = count
        self._locks = [threading.Lock() for _ in range(_LOCKS)]

    def lock_of(self, short: bytes) -> threading.Lock:
        """The lock under which this object's file is published or removed and the index is told."""
        return self._locks[hash(short) % _LOCKS]

    def reserve(self, size: int, look_again: Callable[[], None]) -> bool:
        """Set ``size`` bytes aside for a store, evicting what must go for it.

        - Unfinished stores count against the limit as well, those of other processes on this machine included: it
          holds at every moment, not only afterwards.
        - Where nothing is left that this process knows, ``look_again`` finds what others wrote and what is gone.
        - Where only other unfinished stores are in the way, it waits for them: they can be evicted once they are done.
        - False when the object is larger than the limit, or when everything that could go is locked.

        Raises:
            OSError: an object that should go cannot be removed. The next store tries another one.
        """
        limit = self._limit
        if limit is None:  # others' limits are of no use where this process has none
            return self._index.reserve(size, None)
        if size > limit:
            return False
        looked = False
        while not self._set_aside(size, limit):
            self._checkpoint()
            version = self._index.version
            if self._evict_oldest() is not None:
                continue
            if self._tally.shared and not looked:
                look_again()
                looked = True
            elif self._index.wait_for_change(version, _WAIT_S):
                continue
            elif self._others_write():
                time.sleep(_WAIT_S)
            else:  # the last of them may just have ended
                return self._set_aside(size, limit)
        return True

    def unreserve(self, size: int) -> None:
        """The store came to nothing."""
        if self._limit is not None:
            with self._tally:
                self._tally.unreserve(size)
        self._index.unreserve(size)

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

    def shrink(self) -> None:
        """Evict until all objects together are within the limit.

        Raises:
            OSError: an object that should go cannot be removed.
        """
        while self._limit is not None and self._excess_bytes(self._limit) > 0:
            self._checkpoint()
            if self._evict_oldest() is None:
                return

    def forget(self, short: bytes) -> None:
        """An object that should be there is not; called under its lock.

        Who removed it? If not another process, which would have told the tally, then somebody by hand.
        """
        size = self._index.remove(short)
        if size and self._tally.shared:
            with self._tally:
                if self._tally.others_removed_nothing:
                    self._tally.removed(size)

    def _set_aside(self, size: int, limit: int) -> bool:
        with self._tally as tally:
            if not tally.reserve(size, limit):
                return False
            own_limit = None if tally.shared else limit
        if self._index.reserve(size, own_limit):
            return True
        with self._tally as tally:
            tally.unreserve(size)
        return False

    def _excess_bytes(self, limit: int) -> int:
        if not self._tally.shared:
            return self._index.excess_bytes(limit)
        with self._tally:
            return self._tally.excess_bytes(limit)

    def _others_write(self) -> bool:
        if not self._tally.shared:
            return False
        with self._tally:
            return self._tally.others_write

    def _evict_oldest(self) -> int | None:
        """Remove one object; returns the bytes that the file system got back, None when there is nothing to remove.

        0 when it turned out that another process had removed or used the object: then the next one may be asked for.
        """
        short = self._index.oldest(self._leases.holds)
        if short is None:
            return None
        path = self._names.path(short)
        with self.lock_of(short):
            saved_ns = self._index.saved_ns(short)
            if saved_ns is None:  # another thread was faster
                return 0
            try:
                if not self._leases.condemn(short):
                    return 0
                with self._tally:
                    status = os.lstat(path)
                    if status.st_mtime_ns > saved_ns:
                        self._index.used_elsewhere(short, status.st_mtime_ns)
                        return 0
                    os.unlink(path)  # noqa: PTH108 - as os.lstat, without the making of paths
                    self._tally.removed(status.st_size)
            except OSError as error:
                if error.errno not in ABSENT:
                    self._index.used_elsewhere(short, saved_ns)
                    raise
                self.forget(short)
                return 0
            else:
                self._index.remove(short)
            finally:
                self._leases.absolve(short)
        self._count("evicted", 1)
        self._count("evicted_bytes", status.st_size)
        return status.st_blocks * _BLOCK_BYTES
