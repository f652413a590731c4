"""One directory of objects, in plain blocking calls: what the adapter runs in its threads.

- An object is a file that was written under another name, as a whole, and then renamed. A reader sees the old object,
  the new one or none, whatever happens to the writer; what a loss of power may do is `Writing`'s to say.
- What the index says of a key changes together with the key's file, under one of a few locks, so within this process
  they never part. Other processes change files behind our back: what is said to be there was opened, what is said to be
  missing was looked for, unless the tally says that nobody else has published anything that we do not know.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from l2kit.inventory import DatedKeyInfo, counts_as_use
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit.system_errors import NO_DESCRIPTOR, NO_SPACE
from l2kit_posix.config import FileConfig
from l2kit_posix.eviction import Eviction
from l2kit_posix.failures import ABSENT
from l2kit_posix.files import OpenObject, object_status, open_object
from l2kit_posix.index import Found, Index
from l2kit_posix.leases import Leases, default_max_open
from l2kit_posix.names import Names
from l2kit_posix.scan import Folder, list_folder, object_folders
from l2kit_posix.staging import Staging, make_folder, sweep
from l2kit_posix.tally import Tally
from l2kit_posix.vectors import Seal
from l2kit_posix.writing import Transport, Writing

_EVENTS: Final = ("evicted", "evicted_bytes", "orphans_swept", "lease_limit", "touch_failed", "recounts")
#: So many keys are looked up between two looks whether somebody still waits for them.
_KEYS_AT_ONCE: Final = 64
#: What a full file system takes for an object besides its bytes: blocks of its own, and those of a new folder.
_OVERHEAD_BYTES: Final = 64 << 10
_log = logging.getLogger(__name__)


class ObjectDirectory:
    """The objects below one path. Every method blocks; all are thread-safe between :meth:`open` and :meth:`close`.

    Shared between threads: the index, the leases, the tally and the staging folder, each with a lock of its own;
    ``events``, under ``_events_lock``; the files, under the lock of their key. No thread holds two keys' locks.

    Attributes:
        events: what happened, by name: ``evicted``, ``evicted_bytes``, ``orphans_swept``, ``lease_limit`` (hits that
            were reported as misses), ``touch_failed`` (times of use that could not be saved), ``recounts``.
        transport: how bytes go to and from files; says whether O_DIRECT is in effect.
        recount_s: how long the last look through the whole directory took.
    """

    def __init__(self, config: FileConfig, checkpoint: Callable[[], None]) -> None:
        """Does no I/O. ``checkpoint`` is called between pieces of long work and may raise to stop it."""
        self.root: Final = os.path.normpath(config.path)
        self.objects: Final = f"{self.root}/objects"
        self.events: Final = Counter(dict.fromkeys(_EVENTS, 0))
        self.transport: Final = Transport(checkpoint)
        self.recount_s = 0.0
        self._events_lock: Final = threading.Lock()
        self._recounting: Final = threading.Lock()
        self._checkpoint: Final = checkpoint
        self._folder_mode: Final = config.folder_mode_bits
        self._asks_for_direct: Final = config.direct
        self._exclusive: Final = config.exclusive
        self._names: Final = Names(self.objects)
        self._staging: Final = Staging(Path(self.root, "staging"), self._folder_mode)
        self._tally: Final = Tally(f"{self.root}/staging/tally", config.file_mode_bits, checkpoint)
        self._index: Final = Index()
        self._leases: Final = Leases(config.max_open_files or default_max_open())
        self._eviction: Final = Eviction(
            self._index, self._leases, self._tally, self._names, config.max_bytes, checkpoint, self._count
        )
        self._writing: Final = Writing(config, self._staging, self._tally, self.transport, self._rejoin)

    @property
    def limit_is_shared(self) -> bool:
        """Whether the limit is kept together with all processes of this machine."""
        return self._tally.shared

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
            if self._asks_for_direct:
                self.transport.probe_direct(self._staging.new_path())
            self._join()
            self._index.fill(self._look_through())
            self._tally.settle(self._index.used_bytes, complete=True)
            self._eviction.shrink()
        except BaseException:
            self._tally.close()
            self._staging.close()
            raise

    def close(self) -> None:
        """Close every file, remove the staging folder, and save the order of use. Harmless when repeated."""
        self._leases.give_back(self._leases.release_all())
        self._tally.close()
        self._staging.close()
        self.transport.clear()
        self.save_uses()

    def save_uses(self) -> None:
        """Write the times of use that are not there yet into the files' times of modification."""
        for short, used_ns in self._index.unsaved():
            self._checkpoint()
            self._save_use(self._names.path(short), used_ns)

    def store(self, key: ObjectKey, data: Sequence[memoryview], seal: Seal | None = None) -> StoreStatus:
        """Write one object. ``seal`` completes the first segment of ``data`` while the others are written.

        - ALREADY_PRESENT when the file is there with the full size; a file of another size is replaced.
        - DROPPED when it exceeds the limit, or when all that could make room is locked.
        - A full file system evicts as much as the object takes, and tries once more.

        Raises:
            OSError: it could not be written; the old object or none is there, and no unfinished file.
        """
        size = sum(map(len, data))
        short, path = self._names.place(key)
        status = object_status(path)
        if status is not None and status.st_size == size:
            self._used([(short, size)])
            return StoreStatus.ALREADY_PRESENT
        if not self._eviction.reserve(size, self.recount):
            return StoreStatus.DROPPED
        published = False
        try:
            try:
                self._write(short, path, data, seal, size)
            except OSError as error:
                if error.errno not in NO_SPACE or not self._eviction.free(size + _OVERHEAD_BYTES):
                    raise
                self._write(short, path, data, seal, size)
            published = True
        finally:
            if not published:
                self._eviction.unreserve(size)
        return StoreStatus.STORED

    def load(
        self, key: ObjectKey, into: Sequence[memoryview], arrived: Callable[[int], None] | None = None
    ) -> int | None:
        """Read one object into ``into`` and return its size in bytes; None for a miss. A locked one outlives its name.

        ``arrived`` hears now and then how many bytes are there, from the beginning.

        Raises:
            OSError: it is there and cannot be read.
        """
        short, path = self._names.place(key)
        if self._leases.holds(short):
            return self._load_locked(short, path, into, arrived)
        try:
            fd = os.open(path, self.transport.read_flags)
        except OSError as error:
            if error.errno not in ABSENT:
                raise
            self._absent(short, path)
            return None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                self._absent(short, path)
                return None
            read = self.transport.read(fd, into, status.st_size, arrived)
        finally:
            os.close(fd)
        if counts_as_use():
            self._used([(short, status.st_size)])
        return _loaded(status.st_size, read, into)

    def lookup(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Each object's size in bytes, or None.

        Raises:
            OSError: for some key it cannot be said.
        """
        sizes: list[int | None] = []
        used: list[tuple[bytes, int]] = []
        complete = self._tally.is_complete
        for number, key in enumerate(keys):
            if number % _KEYS_AT_ONCE == 0:
                self._checkpoint()
            short, path = self._names.place(key)
            status = None if complete and short not in self._index else object_status(path)
            if status is None:
                self._absent(short, path)
                sizes.append(None)
            else:
                used.append((short, status.st_size))
                sizes.append(status.st_size)
        self._used(used)
        return sizes

    def acquire(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Look up and lock; each hit must be released once.

        Raises:
            OSError: for some key it cannot be said; then none is locked.
        """
        if self._exclusive:
            return self._pin(keys)
        sizes: list[int | None] = [None] * len(keys)
        found: list[tuple[bytes, OpenObject]] = []
        positions: list[int] = []
        complete = self._tally.is_complete
        place, index = self._names.place, self._index
        try:
            for number, key in enumerate(keys):
                if number % _KEYS_AT_ONCE == 0:
                    self._checkpoint()
                short, path = place(key)
                if complete and short not in index:
                    continue
                try:
                    opened = self._open_current(short, path)
                except OSError as error:
                    if error.errno not in NO_DESCRIPTOR:
                        raise
                    self._unlockable()
                    continue
                if opened is not None:
                    found.append((short, opened))
                    positions.append(number)
        except BaseException:
            self._leases.give_back([opened for _, opened in found])
            raise
        locked, spare = self._leases.add(found)
        used: list[tuple[bytes, int]] = []
        for number, (short, opened), is_locked in zip(positions, found, locked, strict=True):
            if is_locked:
                sizes[number] = size = opened.status.st_size
                used.append((short, size))
            else:
                self._unlockable()
        self._leases.give_back(spare)
        try:
            self._used(used)
        except BaseException:
            self.give_back(self._leases.release([short for short, _ in used]))
            raise
        return sizes

    def release(self, keys: Sequence[ObjectKey]) -> list[OpenObject]:
        """Undo one lock per key. Does not block; what it returns goes to :meth:`give_back`, which does."""
        return self._leases.release([self._names.short(key) for key in keys])

    def give_back(self, released: Sequence[OpenObject]) -> None:
        """Close what nobody uses any more."""
        self._leases.give_back(released)

    def delete(self, key: ObjectKey) -> bool:
        """Remove one object; False when there was none.

        Raises:
            OSError: it is there and cannot be removed.
        """
        short, path = self._names.place(key)
        with self._eviction.lock_of(short):
            try:
                if not self._leases.condemn(short) and self._exclusive:  # it stays for those who have it locked
                    opened = open_object(path, self.transport.read_flags)
                    if opened is not None:
                        self._leases.give_back(self._leases.keep(short, opened))
                self._writing.remove(path)
            except OSError as error:
                if error.errno not in ABSENT:
                    raise
                self._eviction.forget(short)
                return False
            else:
                self._index.remove(short)
                return True
            finally:
                self._leases.absolve(short)

    def folders(self) -> Iterator[Folder]:
        """The folders that objects lie in; :meth:`list_folder` reads one."""
        return object_folders(self.objects)

    def list_folder(self, folder: Folder) -> list[DatedKeyInfo]:
        """The objects in one folder, with the times of use that their files have: up to half a minute behind.

        Raises:
            OSError: it cannot be read.
        """
        return [
            DatedKeyInfo(self._names.key(one.short), one.size, one.saved_ns / 1e9)
            for one in list_folder(folder, self._names)
        ]

    def usage(self) -> tuple[int, int]:
        """Bytes and number of the objects that lie in the directory now, whoever wrote them.

        Raises:
            OSError: it cannot be read.
        """
        used_bytes = objects = 0
        for folder in self.folders():
            self._checkpoint()
            for found in list_folder(folder, self._names):
                used_bytes += found.size
                objects += 1
        return used_bytes, objects

    def should_recount(self) -> bool:
        """Whether others have published what we do not know, or the tally has lost its way.

        Raises:
            OSError: it cannot be said.
        """
        if not self._tally.shared:
            return False
        if self._tally.is_lost:
            self._rejoin()
        if not self._tally.is_complete:
            return True
        with self._tally:
            return self._tally.used_bytes != self._index.used_bytes

    def recount(self) -> None:
        """Look through the whole directory: learn what others wrote, forget what is gone, put the tally right.

        Raises:
            OSError: it cannot be read.
        """
        with self._recounting:
            started = time.monotonic()
            with self._tally:
                before = self._tally.marks
            found = list(self._look_through())
            there = {one.short for one in found}
            for short in self._index.shorts():
                if short not in there:
                    self._absent(short, self._names.path(short))
            for one in sorted(found, key=lambda one: one.saved_ns):
                if self._index.size(one.short) != one.size:
                    self._learn(one.short)
            living = self._staging.living()
            with self._tally:
                self._tally.recounted(sum(one.size for one in found), living, before)
            self._count("recounts", 1)
            self.recount_s = time.monotonic() - started

    def _join(self) -> None:
        try:
            self._tally.open(self._staging.token, self._staging.living, exclusive=self._exclusive)
        except OSError as error:
            if self._exclusive or error.errno == errno.EBUSY:
                raise
            _log.warning("%s: no tally can be kept (%s); the limit is over what this process knows", self.root, error)

    def _rejoin(self) -> None:
        """The tally is gone, and with it perhaps all else; the index still knows what was there."""
        self._join()
        self._tally.settle(self._index.used_bytes, complete=False)

    def _look_through(self) -> Iterator[Found]:
        for folder in self.folders():
            self._checkpoint()
            yield from list_folder(folder, self._names)

    def _write(self, short: bytes, path: str, data: Sequence[memoryview], seal: Seal | None, size: int) -> None:
        unfinished = self._writing.write(data, seal, self._index.now_ns)
        try:
            with self._eviction.lock_of(short):
                self._writing.publish(unfinished.path, path, size)
                self._index.put(short, size, unfinished.written_ns, reserved=size)
        except BaseException:
            with suppress(OSError):
                Path(unfinished.path).unlink()
            raise

    def _load_locked(
        self, short: bytes, path: str, into: Sequence[memoryview], arrived: Callable[[int], None] | None
    ) -> int | None:
        """The object that lies at ``path`` now; the locked one when there is none."""
        opened = self._open_current(short, path)
        is_there = opened is not None
        if opened is None:
            opened = self._leases.borrow(short)
        if opened is None:
            return None
        try:
            size = os.fstat(opened.fd).st_size
            read = self.transport.read(opened.fd, into, size, arrived)
        finally:
            self._leases.give_back([opened])
        if is_there and counts_as_use():
            self._used([(short, size)])
        return _loaded(size, read, into)

    def _pin(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Look up and lock in memory, for nobody else removes anything."""
        index, short_of = self._index, self._names.short
        shorts = [short_of(key) for key in keys]
        there = [short for short in shorts if short in index]
        going = self._leases.pin(there)
        # What was pinned and is still known stays; what is not known any more was removed in between.
        sizes = dict(zip(there, index.sizes(there), strict=True))
        for short in going:
            del sizes[short]
        lost = [short for short, size in sizes.items() if size is None]
        if lost:
            self.give_back(self._leases.release(lost))
        self._used([(short, size) for short, size in sizes.items() if size is not None])
        return [sizes.get(short) for short in shorts]

    def _open_current(self, short: bytes, path: str) -> OpenObject | None:
        """The object that lies at ``path`` now, through its lock's file where that is still the same one."""
        locked = self._leases.borrow(short)
        if locked is not None:
            current = False
            try:
                current = locked.is_at(path)
            finally:
                if not current:
                    self._leases.give_back([locked])
            if current:
                return locked
        opened = open_object(path, self.transport.read_flags)
        if opened is None:
            self._absent(short, path)
        return opened

    def _used(self, objects: Sequence[tuple[bytes, int]]) -> None:
        """Objects were used that were found with these sizes."""
        unknown = self._index.use(objects)
        if unknown:  # another process wrote or replaced it: from now on it counts
            for short in unknown:
                self._learn(short)
            sizes = dict(objects)
            self._index.use([(short, sizes[short]) for short in unknown])

    def _learn(self, short: bytes) -> None:
        path = self._names.path(short)
        with self._eviction.lock_of(short), suppress(OSError):
            status = object_status(path)
            if status is not None:
                self._index.put(short, status.st_size, status.st_mtime_ns)

    def _absent(self, short: bytes, path: str) -> None:
        """Mend the index after a miss, unless a store has just put the object there."""
        if short in self._index:
            with self._eviction.lock_of(short), suppress(OSError):
                if object_status(path) is None:
                    self._eviction.forget(short)

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


def _loaded(size: int, read: int, into: Sequence[memoryview]) -> int:
    # Somebody may cut the file while it is read: then what was read is all there is, and verification says so.
    return size if read == min(size, sum(map(len, into))) else read
