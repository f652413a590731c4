"""One directory of objects as files: names, unfinished files, what is known of sizes and order of use, eviction.

Plain blocking calls, and no transfer: the bytes are moved by whoever asks for open files here.

- An object is a file that was written under another name, as a whole, and then renamed.
- Other processes change files behind our back: every answer asks the file system, and mends what is known.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import secrets
import stat
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from l2kit.adapter import KeyInfo
from l2kit.errors import ConfigError
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus

_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: NONBLOCK: a pipe that lies where an object should be must not hang the thread that opens it.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_NAMESPACE: Final = re.compile(r"[a-z0-9_-]{1,64}")
_FAN_OUT: Final = re.compile(r"[0-9a-f]{2}")
_UNFINISHED: Final = re.compile(r"[0-9a-f]{16}\.\d+")
#: Between making a file and locking it nothing says that it has an owner, so a young one is left alone.
_YOUNG_S: Final = 60.0
#: Where the file system knows no locks, only age tells; longer than any single store takes.
_ORPHAN_AGE_S: Final = 3600.0


class UnfinishedFile:
    """A file that is being written: open, locked, and under a name that no reader knows."""

    __slots__ = ("fd", "key", "path", "size")

    def __init__(self, key: ObjectKey, size: int, path: str, fd: int) -> None:
        self.key: Final = key
        self.size: Final = size
        self.path: Final = path
        self.fd: Final = fd


class OpenFile:
    """An object that is open for reading; ``size`` in bytes."""

    __slots__ = ("fd", "key", "size")

    def __init__(self, key: ObjectKey, size: int, fd: int) -> None:
        self.key: Final = key
        self.size: Final = size
        self.fd: Final = fd

    def close(self) -> None:
        """Once, by whoever opened it."""
        os.close(self.fd)


class ObjectFiles:
    """The objects below ``root``. Every method blocks; all are thread-safe between :meth:`open` and the end.

    Shared between threads, under one lock: what is known (sizes, in order of use), the bytes used and set aside, and
    ``events``. An object's file and what is known of it change together under it.

    Attributes:
        events: ``evicted``, ``evicted_bytes``, ``orphans_swept``.
    """

    def __init__(self, root: str, max_bytes: int | None) -> None:
        """Does no I/O."""
        self._root: Final = os.path.normpath(root)
        self._max_bytes: Final = max_bytes
        self._lock: Final = threading.Lock()
        self._known: OrderedDict[ObjectKey, int] = OrderedDict()  # sizes, least recently used first
        self._used_bytes = 0
        self._reserved_bytes = 0
        self._owner: Final = secrets.token_hex(8)
        self._serial: Final = itertools.count()
        self.events: Final = Counter({"evicted": 0, "evicted_bytes": 0, "orphans_swept": 0})

    def open(self) -> None:
        """Make the folders, sweep what dead writers left, learn what is there and evict down to the limit.

        Raises:
            OSError: the directory cannot be made, written to or read.
        """
        for folder in (self._root, f"{self._root}/objects", f"{self._root}/unfinished"):
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = self._unfinished_path()
        os.close(self._create(probe))
        Path(probe).unlink(missing_ok=True)
        self._sweep()
        found = sorted(self._scan(), key=lambda item: item[0])
        with self._lock:
            for _, info in found:
                self._learn(info.key, info.size)
            self._evict_for(0)

    def begin(self, key: ObjectKey, size: int) -> UnfinishedFile | StoreStatus:
        """A new file for an object of ``size`` bytes, which ends in :meth:`publish` or :meth:`drop`.

        ALREADY_PRESENT when an object of this size is there, DROPPED when there is no room for it.

        Raises:
            OSError: it cannot be made.
        """
        if self.size(key) == size:
            return StoreStatus.ALREADY_PRESENT
        with self._lock:
            if not self._evict_for(size):
                return StoreStatus.DROPPED
            self._reserved_bytes += size
        path = self._unfinished_path()
        try:
            fd = self._create(path)
        except BaseException:
            self._unreserve(size)
            raise
        return UnfinishedFile(key, size, path, fd)

    def publish(self, file: UnfinishedFile) -> None:
        """Give a finished file its object's name, in place of an older object.

        Raises:
            OSError: it could not be; the file is gone.
        """
        try:
            os.close(file.fd)  # some network file systems report here that there was no space
            path = self._path(file.key)
            with self._lock:
                try:
                    os.replace(file.path, path)  # noqa: PTH105 - on the way of every store
                except FileNotFoundError:
                    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    Path(file.path).replace(path)
                self._learn(file.key, file.size)
        except BaseException:
            with suppress(OSError):
                Path(file.path).unlink()
            raise
        finally:
            self._unreserve(file.size)

    def drop(self, file: UnfinishedFile) -> None:
        """The store came to nothing; never raises."""
        with suppress(OSError):
            os.close(file.fd)
        with suppress(OSError):
            Path(file.path).unlink()
        self._unreserve(file.size)

    def open_object(self, key: ObjectKey) -> OpenFile | None:
        """Open an object for reading; None when there is none.

        Raises:
            OSError: it is there and cannot be opened.
        """
        try:
            fd = os.open(self._path(key), _READ)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            self._forget(key)
            return None
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            return None
        with self._lock:
            self._learn(key, status.st_size)
        return OpenFile(key, status.st_size, fd)

    def size(self, key: ObjectKey) -> int | None:
        """An object's bytes, or None. It counts as a use of the object.

        Raises:
            OSError: it cannot be said.
        """
        try:
            status = os.lstat(self._path(key))
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            self._forget(key)
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        with self._lock:
            self._learn(key, status.st_size)
        return status.st_size

    def delete(self, key: ObjectKey) -> bool:
        """Remove one object; False when there was none.

        Raises:
            OSError: it is there and cannot be removed.
        """
        with self._lock:
            try:
                Path(self._path(key)).unlink()
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                self._unlearn(key)
                return False
            self._unlearn(key)
            return True

    def list_objects(self) -> list[KeyInfo]:
        """Every object in the directory, whoever wrote it.

        Raises:
            OSError: a folder cannot be read.
        """
        return [info for _, info in self._scan()]

    def has_room_for(self, nbytes: int) -> bool:
        """Whether the file system itself could take so many bytes: NIXL does not say why a write failed."""
        room = os.statvfs(self._root)
        return room.f_bavail * room.f_frsize > nbytes

    def _create(self, path: str) -> int:
        try:
            fd = os.open(path, _CREATE, 0o600)
        except FileNotFoundError:  # somebody cleared the directory while we had it open
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, _CREATE, 0o600)
        with suppress(OSError):  # no locks on this file system: then age decides
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd

    def _unfinished_path(self) -> str:
        return f"{self._root}/unfinished/{self._owner}.{next(self._serial)}"

    def _path(self, key: ObjectKey) -> str:
        namespace, chunk, part = key.encode().split("/")
        return f"{self._root}/objects/{namespace}/{_fan_out(chunk)}/{chunk}-{part}"

    def _sweep(self) -> None:
        with os.scandir(f"{self._root}/unfinished") as entries:
            for entry in entries:
                if _UNFINISHED.fullmatch(entry.name) and _is_abandoned(entry.path):
                    with suppress(OSError):
                        Path(entry.path).unlink()
                        self.events["orphans_swept"] += 1

    def _scan(self) -> Iterator[tuple[int, KeyInfo]]:
        """Time of writing and object; strangers' files are passed over."""
        objects = f"{self._root}/objects"
        for namespace in _names(objects, _NAMESPACE):
            for fan_out in _names(f"{objects}/{namespace}", _FAN_OUT):
                with suppress(FileNotFoundError), os.scandir(f"{objects}/{namespace}/{fan_out}") as entries:
                    for entry in entries:
                        key = _parse(namespace, fan_out, entry.name)
                        if key is None or not entry.is_file(follow_symlinks=False):
                            continue
                        with suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            yield status.st_mtime_ns, KeyInfo(key, status.st_size)

    # --- under the lock ---------------------------------------------------------------------------

    def _learn(self, key: ObjectKey, size: int) -> None:
        self._used_bytes += size - self._known.get(key, 0)
        self._known[key] = size
        self._known.move_to_end(key)

    def _unlearn(self, key: ObjectKey) -> None:
        self._used_bytes -= self._known.pop(key, 0)

    def _evict_for(self, size: int) -> bool:
        """Remove the least recently used objects until ``size`` more bytes are within the limit; False if they cannot.

        Raises:
            OSError: an object that should go cannot be removed.
        """
        limit = self._max_bytes
        if limit is None:
            return True
        if size + self._reserved_bytes > limit:  # what is being written cannot be evicted
            return False
        while self._used_bytes + self._reserved_bytes + size > limit:
            key, evicted_bytes = next(iter(self._known.items()))
            try:
                Path(self._path(key)).unlink()
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
            else:
                self.events["evicted"] += 1
                self.events["evicted_bytes"] += evicted_bytes
            self._unlearn(key)
        return True

    # --- taking the lock --------------------------------------------------------------------------

    def _unreserve(self, size: int) -> None:
        with self._lock:
            self._reserved_bytes -= size

    def _forget(self, key: ObjectKey) -> None:
        """After a miss, unless a store has just put the object there."""
        if key in self._known:
            with self._lock:
                if not os.path.lexists(self._path(key)):
                    self._unlearn(key)


def _fan_out(chunk: str) -> str:
    # Not the chunk hash's own first digits: hashes that other hosts bring may all begin alike.
    return f"{zlib.crc32(chunk.encode()) & 0xFF:02x}"


def _parse(namespace: str, fan_out: str, name: str) -> ObjectKey | None:
    chunk, dash, part = name.partition("-")
    if not dash or fan_out != _fan_out(chunk):
        return None
    try:
        return ObjectKey.parse(f"{namespace}/{chunk}/{part}")
    except ConfigError:
        return None


def _names(folder: str, pattern: re.Pattern[str]) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [one.name for one in entries if pattern.fullmatch(one.name) and one.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _is_abandoned(path: str) -> bool:
    """Whether nobody writes this unfinished file any more: its writer keeps a lock that dies with it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # it vanished under our hands, or belongs to another user who must sweep it himself
    age_s = 0.0
    try:
        age_s = time.time() - os.fstat(fd).st_mtime
        if age_s < _YOUNG_S:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return age_s > _ORPHAN_AGE_S
    finally:
        os.close(fd)
    return True
