"""Open files that keep objects readable while they are locked, whatever happens to their names."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Sequence
from typing import Final

from l2kit.keys import ObjectKey
from l2kit_posix.files import OpenObject

#: Assumed where the limit of open files is unlimited.
_MANY_FILES: Final = 1 << 16


def default_max_open() -> int:
    """Half of the process's soft limit of open files, as it is now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (_MANY_FILES if soft == resource.RLIM_INFINITY else soft) // 2)


class _Lease:
    __slots__ = ("holders", "opened")

    def __init__(self, opened: OpenObject) -> None:
        self.opened = opened
        self.holders = 0


class Leases:
    """Locked objects by key, each with one open file and the number of locks on it.

    Thread-safe; one lock, never held around a system call. An :class:`OpenObject` that a method returns must be handed
    to :meth:`give_back` once.
    """

    def __init__(self, max_open: int) -> None:
        """Keep at most ``max_open`` files open."""
        self._lock = threading.Lock()
        self._leases: dict[ObjectKey, _Lease] = {}
        self._max_open = max_open

    def __len__(self) -> int:
        return len(self._leases)

    def holds(self, key: ObjectKey) -> bool:
        """True while the object is locked."""
        return key in self._leases

    def borrow(self, key: ObjectKey) -> OpenObject | None:
        """The open file of a locked object, for a reader."""
        with self._lock:
            lease = self._leases.get(key)
            if lease is None:
                return None
            lease.opened.users += 1
            return lease.opened

    def add(self, key: ObjectKey, opened: OpenObject) -> bool:
        """Lock ``key`` once more, from now on through ``opened``. False when that would be one file too many."""
        before: OpenObject | None = None
        with self._lock:
            lease = self._leases.get(key)
            if lease is None:
                if len(self._leases) >= self._max_open:
                    return False
                lease = self._leases[key] = _Lease(opened)
                opened.users += 1
            elif lease.opened is not opened:  # the object was replaced since: the newer one is as good or better
                before, lease.opened = lease.opened, opened
                opened.users += 1
            lease.holders += 1
        if before is not None:
            self.give_back(before)
        return True

    def release(self, keys: Sequence[ObjectKey]) -> list[OpenObject]:
        """Undo one lock per key; returns what must be given back, outside the event loop."""
        released: list[OpenObject] = []
        with self._lock:
            for key in keys:
                lease = self._leases.get(key)
                if lease is None:
                    continue
                lease.holders -= 1
                if lease.holders == 0:
                    released.append(self._leases.pop(key).opened)
        return released

    def release_all(self) -> list[OpenObject]:
        """Undo every lock; as :meth:`release`."""
        with self._lock:
            released = [lease.opened for lease in self._leases.values()]
            self._leases.clear()
        return released

    def give_back(self, opened: OpenObject) -> None:
        """One user less; the last one closes the file. A system call: never on the event loop."""
        with self._lock:
            opened.users -= 1
            last = opened.users == 0
        if last:
            os.close(opened.fd)
