"""Open files that keep objects readable while they are locked, whatever happens to their names."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Sequence
from typing import Final

from l2kit_posix.files import OpenObject

#: Assumed where the limit of open files is unlimited.
_MANY_FILES: Final = 1 << 16


def default_max_open() -> int:
    """Half of the process's soft limit of open files, as it is now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (_MANY_FILES if soft == resource.RLIM_INFINITY else soft) // 2)


class _Lease:
    __slots__ = ("holders", "opened")

    def __init__(self, opened: OpenObject | None) -> None:
        self.opened = opened
        self.holders = 1


class Leases:
    """Locked objects by short key, each with the number of locks on it and one open file.

    Whoever has the directory for itself does without the file (:meth:`pin`): nobody else removes an object, and its own
    removals are bracketed by :meth:`condemn` and :meth:`absolve`.

    Thread-safe; one lock, never held around a system call. An :class:`OpenObject` that a method returns must be handed
    to :meth:`give_back` once.
    """

    def __init__(self, max_open: int) -> None:
        """Keep at most ``max_open`` files open."""
        self._lock = threading.Lock()
        self._leases: dict[bytes, _Lease] = {}
        self._condemned: set[bytes] = set()
        self._max_open = max_open

    def __len__(self) -> int:
        return len(self._leases)

    def holds(self, short: bytes) -> bool:
        """True while the object is locked."""
        return short in self._leases

    def borrow(self, short: bytes) -> OpenObject | None:
        """The open file of a locked object, for a reader."""
        if short not in self._leases:  # most are not: no lock for them
            return None
        with self._lock:
            lease = self._leases.get(short)
            if lease is None or lease.opened is None:
                return None
            lease.opened.users += 1
            return lease.opened

    def add(self, found: Sequence[tuple[bytes, OpenObject]]) -> tuple[list[bool], list[OpenObject]]:
        """Lock each object once more, from now on through the file that comes with it, which is handed over.

        Returns:
            For each whether it is locked (it is not when that would be one file too many), and the files that nobody
            uses on that account any more.
        """
        locked: list[bool] = []
        spare: list[OpenObject] = []
        leases = self._leases
        with self._lock:
            for short, opened in found:
                lease = leases.get(short)
                if lease is None:
                    locked.append(len(leases) < self._max_open)
                    if locked[-1]:
                        leases[short] = _Lease(opened)
                    else:
                        spare.append(opened)
                    continue
                if lease.opened is not None:
                    spare.append(lease.opened)
                lease.opened = opened  # where the object was replaced since, the newer one is as good or better
                lease.holders += 1
                locked.append(True)
        return locked, spare

    def pin(self, shorts: Sequence[bytes]) -> list[bytes]:
        """Lock each object once more, without a file of its own; returns those that are going, and are not locked."""
        leases = self._leases
        with self._lock:
            going = [short for short in shorts if short in self._condemned] if self._condemned else []
            for short in shorts:
                if going and short in going:
                    continue
                lease = leases.get(short)
                if lease is None:
                    leases[short] = _Lease(None)
                else:
                    lease.holders += 1
        return going

    def condemn(self, short: bytes) -> bool:
        """The object is about to be removed: until :meth:`absolve`, nobody can pin it. False if somebody has it locked.

        One thread at a time for an object: under its lock.
        """
        with self._lock:
            self._condemned.add(short)
            return short not in self._leases

    def absolve(self, short: bytes) -> None:
        """It was removed, or was not: it can be pinned again."""
        with self._lock:
            self._condemned.discard(short)

    def keep(self, short: bytes, opened: OpenObject) -> list[OpenObject]:
        """A condemned object that is locked: from now on it is there through ``opened``, which is handed over.

        Returns what is to be given back: ``opened`` itself when the object is not locked any more or has a file.
        """
        with self._lock:
            lease = self._leases.get(short)
            if lease is None or lease.opened is not None:
                return [opened]
            lease.opened = opened
            return []

    def release(self, shorts: Sequence[bytes]) -> list[OpenObject]:
        """Undo one lock per key; returns what must be given back, outside the event loop."""
        released: list[OpenObject] = []
        with self._lock:
            for short in shorts:
                lease = self._leases.get(short)
                if lease is None:
                    continue
                lease.holders -= 1
                if lease.holders == 0:
                    del self._leases[short]
                    if lease.opened is not None:
                        released.append(lease.opened)
        return released

    def release_all(self) -> list[OpenObject]:
        """Undo every lock; as :meth:`release`."""
        with self._lock:
            released = [lease.opened for lease in self._leases.values() if lease.opened is not None]
            self._leases.clear()
        return released

    def give_back(self, files: Sequence[OpenObject]) -> None:
        """One user less of each; the last one closes the file. System calls: never on the event loop."""
        last: list[int] = []
        with self._lock:
            for opened in files:
                opened.users -= 1
                if opened.users == 0:
                    last.append(opened.fd)
        for fd in last:
            os.close(fd)
