"""One directory of objects, in plain blocking calls: what the adapter runs in its threads.

- An object is a file that was written under another name, as a whole, and then renamed. A reader sees the old object,
  the new one or none, whatever happens to the writer; after a power failure the envelope's checksum tells.
- What the index says of a key changes together with the key's file, under one of a few locks, so within this process
  they never part. Other processes change files behind our back: every answer asks the file system, and mends the index
  where it differs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit_posix.config import FileConfig
from l2kit_posix.eviction import Eviction
from l2kit_posix.failures import ABSENT, NO_DESCRIPTOR, NO_SPACE
from l2kit_posix.files import OpenObject, object_status, open_object, publish
from l2kit_posix.index import Found, Index
from l2kit_posix.leases import Leases, default_max_open
from l2kit_posix.names import object_path
from l2kit_posix.scan import Folder, list_folder, object_folders
from l2kit_posix.staging import Staging, make_folder, sweep
from l2kit_posix.vectors import read_file, write_file

_EVENTS: Final = ("evicted", "evicted_bytes", "orphans_swept", "lease_limit", "touch_failed")
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_log = logging.getLogger(__name__)


class ObjectDirectory:
    """The objects below one path. Every method blocks; all are thread-safe between :meth:`open` and :meth:`close`.

    Shared between threads: the index, the leases and the staging folder, each with a lock of its own; ``events``, under
    ``_events_lock``; the files, under the lock of their key. No thread holds two keys' locks.

    Attributes:
        events: what happened, by name: ``evicted``, ``evicted_bytes``, ``orphans_swept``, ``lease_limit`` (hits that
            were reported as misses), ``touch_failed`` (times of use that could not be saved).
    """

    def __init__(self, config: FileConfig, checkpoint: Callable[[], None]) -> None:
        """Does no I/O. ``checkpoint`` is called between pieces of long work and may raise to stop it."""
        self.root: Final = os.path.normpath(config.path)
        self.objects: Final = f"{self.root}/objects"
        self.events: Final = Counter(dict.fromkeys(_EVENTS, 0))
        self._events_lock: Final = threading.Lock()
        self._checkpoint: Final = checkpoint
        self._file_mode: Final = config.file_mode_bits
        self._folder_mode: Final = config.folder_mode_bits
        self._max_bytes: Final = config.max_bytes
        self._staging: Final = Staging(Path(self.root, "staging"), self._folder_mode)
        self._index: Final = Index()
        self._leases: Final = Leases(config.max_open_files or default_max_open())
        self._eviction: Final = Eviction(self._index, self._leases, self.objects, checkpoint, self._count)

    def open(self) -> None:
        """Make the folders, sweep what dead processes left, rebuild the index and evict down to the limit.

        Raises:
            OSError: the directory cannot be made, written to or read; nothing of ours stays behind then.
        """
        for path in (self.root, f"{self.root}/staging", self.objects):
            make_folder(Path(path), self._folder_mode)
        self._staging.open()
        try:
            self._count("orphans_swept", sweep(Path(self.root, "staging")))
            found: list[Found] = []
            for folder in self.folders():
                self._checkpoint()
                found += list_folder(folder)
            self._index.fill(found)
            if self._max_bytes is not None:
                self._eviction.shrink_to(self._max_bytes)
        except BaseException:
            self._staging.close()
            raise

    def close(self) -> None:
        """Close every file, remove the staging folder, and save the order of use. Harmless when repeated."""
        for opened in self._leases.release_all():
            self._leases.give_back(opened)
        self._staging.close()
        for key, used_ns in self._index.unsaved():
            self._checkpoint()
            self._save_use(object_path(self.objects, key), used_ns)

    def store(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """Write one object.

        - ALREADY_PRESENT when the file is there with the full size; a file of another size is replaced.
        - DROPPED when it exceeds the limit, or when all that could make room is locked.
        - A full file system evicts as much as the object takes, and tries once more.

        Raises:
            OSError: it could not be written; the old object or none is there, and no unfinished file.
        """
        size = sum(map(len, data))
        path = object_path(self.objects, key)
        if self._is_complete(key, path, size):
            return StoreStatus.ALREADY_PRESENT
        if not self._eviction.reserve(size, self._max_bytes):
            return StoreStatus.DROPPED
        published = False
        try:
            try:
                self._write(key, path, data, size)
            except OSError as error:
                if error.errno not in NO_SPACE or not self._eviction.free(size):
                    raise
                self._write(key, path, data, size)
            published = True
        finally:
            if not published:
                self._index.unreserve(size)
        return StoreStatus.STORED

    def load(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """Read one object into ``into`` and return its size in bytes; None for a miss. A locked one outlives its name.

        Raises:
            OSError: it is there and cannot be read.
        """
        path = object_path(self.objects, key)
        found = self._current(key, path)
        if found is not None:
            opened, status = found
        else:
            self._absent(key, path)
            locked = self._leases.borrow(key)
            if locked is None:
                return None
            opened, status = locked, None
        try:
            if status is None:
                size = os.fstat(opened.fd).st_size
            else:
                size = status.st_size
                self._used(key, path, size)
            read = read_file(opened.fd, into, self._checkpoint)
        finally:
            self._leases.give_back(opened)
        # Somebody may cut the file while it is read: then what was read is all there is, and verification says so.
        return size if read == min(size, sum(map(len, into))) else read

    def lookup(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Each object's size in bytes, or None.

        Raises:
            OSError: for some key it cannot be said.
        """
        sizes: list[int | None] = []
        for key in keys:
            self._checkpoint()
            path = object_path(self.objects, key)
            status = object_status(path)
            if status is None:
                self._absent(key, path)
            else:
                self._used(key, path, status.st_size)
            sizes.append(None if status is None else status.st_size)
        return sizes

    def acquire(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Look up and lock; each hit must be released once.

        Raises:
            OSError: for some key it cannot be said; then none is locked.
        """
        sizes: list[int | None] = []
        try:
            for key in keys:
                self._checkpoint()
                sizes.append(self._acquire(key))
        except BaseException:
            taken = [key for key, size in zip(keys, sizes, strict=False) if size is not None]
            self.give_back(self.release(taken))
            raise
        return sizes

    def release(self, keys: Sequence[ObjectKey]) -> list[OpenObject]:
        """Undo one lock per key. Does not block; what it returns goes to :meth:`give_back`, which does."""
        return self._leases.release(keys)

    def give_back(self, released: Sequence[OpenObject]) -> None:
        """Close what nobody uses any more."""
        for opened in released:
            self._leases.give_back(opened)

    def delete(self, key: ObjectKey) -> bool:
        """Remove one object; False when there was none.

        Raises:
            OSError: it is there and cannot be removed.
        """
        path = object_path(self.objects, key)
        with self._eviction.lock_of(key):
            try:
                Path(path).unlink()
            except OSError as error:
                if error.errno not in ABSENT:
                    raise
                self._index.remove(key)
                return False
            self._index.remove(key)
            return True

    def folders(self) -> Iterator[Folder]:
        """The folders that objects lie in; `list_folder` reads one."""
        return object_folders(self.objects)

    def usage(self) -> tuple[int, int]:
        """Bytes and number of the objects that lie in the directory now, whoever wrote them.

        Raises:
            OSError: it cannot be read.
        """
        used_bytes = objects = 0
        for folder in self.folders():
            self._checkpoint()
            for found in list_folder(folder):
                used_bytes += found.size
                objects += 1
        return used_bytes, objects

    def _write(self, key: ObjectKey, path: str, data: Sequence[memoryview], size: int) -> None:
        """Write under a name of our own, then publish."""
        unfinished = self._staging.new_path()
        try:
            fd = os.open(unfinished, _CREATE, self._file_mode)
        except FileNotFoundError:  # somebody cleared the directory while we had it open
            self._staging.renew()
            unfinished = self._staging.new_path()
            fd = os.open(unfinished, _CREATE, self._file_mode)
        try:
            try:
                if self._file_mode & 0o077:
                    os.fchmod(fd, self._file_mode)  # the process's umask took bits away at creation
                write_file(fd, data, self._checkpoint)
                now_ns = self._index.now_ns()
                os.utime(fd, ns=(now_ns, now_ns))  # the kernel's own clock gives equal times to neighbours
            finally:
                os.close(fd)  # some network file systems report here that there was no space
            with self._eviction.lock_of(key):
                publish(unfinished, path, self._folder_mode)
                self._index.put(key, size, now_ns, reserved=True)
        except BaseException:
            with suppress(OSError):
                Path(unfinished).unlink()
            raise

    def _is_complete(self, key: ObjectKey, path: str, size: int) -> bool:
        status = object_status(path)
        if status is None or status.st_size != size:
            return False
        self._used(key, path, size)
        return True

    def _acquire(self, key: ObjectKey) -> int | None:
        path = object_path(self.objects, key)
        try:
            found = self._current(key, path)
        except OSError as error:
            if error.errno not in NO_DESCRIPTOR:
                raise
            self._unlockable()
            return None
        if found is None:
            self._absent(key, path)
            return None
        opened, status = found
        try:
            if not self._leases.add(key, opened):
                self._unlockable()
                return None
        finally:
            self._leases.give_back(opened)
        self._used(key, path, status.st_size)
        return status.st_size

    def _current(self, key: ObjectKey, path: str) -> tuple[OpenObject, os.stat_result] | None:
        """The object that lies at ``path`` now, through its lock's file where that is still the same one."""
        locked = self._leases.borrow(key)
        if locked is not None:
            try:
                status = object_status(path)
            except BaseException:
                self._leases.give_back(locked)
                raise
            if status is not None and (status.st_dev, status.st_ino) == locked.identity:
                return locked, status
            self._leases.give_back(locked)
        return open_object(path)

    def _used(self, key: ObjectKey, path: str, size: int) -> None:
        now_ns = self._index.now_ns()
        due = self._index.touch(key, size, now_ns)
        if due is None:  # another process wrote or replaced it: from now on it counts
            with self._eviction.lock_of(key), suppress(OSError):
                status = object_status(path)
                if status is not None:
                    self._index.put(key, status.st_size, status.st_mtime_ns)
                    due = self._index.touch(key, status.st_size, now_ns)
        if due:
            self._save_use(path, now_ns)

    def _absent(self, key: ObjectKey, path: str) -> None:
        """Mend the index after a miss, unless a store has just put the object there."""
        if key in self._index:
            with self._eviction.lock_of(key), suppress(OSError):
                if object_status(path) is None:
                    self._index.remove(key)

    def _save_use(self, path: str, used_ns: int) -> None:
        try:
            os.utime(path, ns=(used_ns, used_ns), follow_symlinks=False)
        except FileNotFoundError:
            pass
        except OSError:  # another user's file: only the order of eviction after a restart suffers
            self._count("touch_failed", 1)

    def _unlockable(self) -> None:
        if not self.events["lease_limit"]:
            _log.warning(
                "%s: no file descriptor is left to lock another object with; lookups report it as a miss. "
                "Raise max_open_files or the limit of the process (ulimit -n).",
                self.root,
            )
        self._count("lease_limit", 1)

    def _count(self, event: str, number: int) -> None:
        with self._events_lock:
            self.events[event] += number
