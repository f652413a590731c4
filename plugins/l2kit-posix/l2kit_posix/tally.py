"""How many bytes all processes of one machine together keep in a directory: the page that they share.

One small file in the staging folder, changed under its lock (``flock``) only. It holds the bytes of all objects, how
often one was published, and a row for each open adapter with the bytes that its unfinished stores have set aside.

- **The bytes are never fewer than there are**, wherever a process is killed: what may turn out not to have happened is
  counted before, and taken off after. Too many are put right by the next recount.
- Whoever finds that nobody else has published since it looked at the directory last knows all objects that there are.
- Only on file systems of this machine: elsewhere neither locks nor pages can be trusted at this price. Where it is not
  kept, each process goes by what it knows itself.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_MAGIC: Final = int.from_bytes(b"l2kitT\0\1", "little")
#: Where in the page, in words of 8 bytes: bytes of all objects, how often and how many bytes were published, and how
#: many were removed.
_BYTES, _PUBLISHED, _PUBLISHED_BYTES, _REMOVED_BYTES = 1, 2, 3, 4
#: Not 0 when the one adapter that has a row keeps all others out.
_EXCLUSIVE: Final = 5
#: Rows of two words: the token of an adapter, and the bytes that its unfinished stores have set aside.
_FIRST_ROW: Final = 8
_WORDS: Final = 128
_PAGE_BYTES: Final = 8 * _WORDS
_WAIT_S: Final = 0.0005
#: How mountinfo writes a space, and a few others.
_ESCAPED: Final = re.compile(rb"\\([0-7]{3})")

#: File systems whose locks and pages all processes of this machine see alike.
_LOCAL: Final = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "f2fs", "zfs", "overlay", "bcachefs", "jfs", "nilfs2"}
)


class Marks(NamedTuple):
    """Where the page was at some moment.

    Attributes:
        published_bytes, removed_bytes: what all had published and removed until then.
        others: how often others had published.
        others_removed: how many bytes others had removed.
    """

    published_bytes: int
    removed_bytes: int
    others: int
    others_removed: int


class Tally:
    """This adapter's view of the shared page. Thread-safe: ``with tally:`` takes a lock, and the file's.

    What changes or reads the page is called inside. Where it is not shared, only what this adapter has set aside is
    kept, for a page that comes later: somebody may remove it, and it is made anew.

    Attributes:
        shared: whether there is such a page, and others may use it.
        exclusive: whether others are kept out: then there is nothing to share.
    """

    def __init__(self, path: str, file_mode: int, checkpoint: Callable[[], None]) -> None:
        """Does no I/O. ``checkpoint`` is called while others hold the lock, and may raise."""
        self.shared = self.exclusive = False
        self._path: Final = path
        self._file_mode: Final = file_mode
        self._checkpoint: Final = checkpoint
        self._lock: Final = threading.Lock()
        self._fd = -1
        self._page = array("Q", bytes(_PAGE_BYTES))
        self._row = _FIRST_ROW
        self._reserved = 0
        #: How often this adapter has published, and how many bytes it has removed.
        self._own = 0
        self._own_removed = 0
        self._counts_alone = False
        #: The marks of the moment when this adapter knew all objects; None: there was none.
        self._seen: Marks | None = None
        self._at_open: Marks | None = None

    def open(self, token: int, living: Callable[[], set[int]], *, exclusive: bool = False) -> None:
        """Find or make the page and enter ``token``; rows that are of no ``living`` adapter go.

        ``exclusive`` keeps everybody else out, until :meth:`close`.

        Who finds no page that counts keeps the file's lock until :meth:`settle`: whoever comes next must not go by what
        is not counted yet.

        Raises:
            OSError: the page cannot be kept; :attr:`shared` is false then. EBUSY: another adapter has the directory
                open, and it or this one wants it for itself. EOPNOTSUPP: here nobody can have it for himself.
        """
        if not is_local(self._path):
            if exclusive:
                raise OSError(errno.EOPNOTSUPP, "only a file system of this machine can be exclusive", self._path)
            return
        with self._lock:
            self._give_up()
            try:
                self._find_page()
                self._enter(token, living() - {token}, exclusive=exclusive)
            except BaseException:
                self._give_up()
                raise

    def settle(self, used_bytes: int, *, complete: bool) -> None:
        """Since :meth:`open` it was found that objects take ``used_bytes``; ``complete``: all objects are known.

        Raises:
            OSError: the page cannot be kept.
        """
        with self._lock:
            if not self.shared:
                return
            self._seen = self._at_open if complete else None
            if self._counts_alone:
                self._counts_alone = False
                self._page[_BYTES] = used_bytes
                self._save()
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give up the row, and the page when nobody else has one. Never raises; harmless when repeated."""
        if self._counts_alone or self.exclusive:
            with suppress(OSError):
                if _is_at(self._fd, self._path):
                    Path(self._path).unlink()
        elif self.shared:
            with suppress(OSError), self:
                self._page[self._row] = self._reserved = 0
                if not any(self._page[_FIRST_ROW::2]) and _is_at(self._fd, self._path):
                    Path(self._path).unlink()
        self._give_up()

    def __enter__(self) -> Tally:
        self._lock.acquire()
        if self.shared and not self._counts_alone:  # who counts has the file's lock already, and keeps it
            try:
                self._take_file_lock()
                self._page = array("Q", os.pread(self._fd, _PAGE_BYTES, 0))
            except BaseException:
                self._lock.release()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.shared:
                try:
                    self._save()
                finally:
                    if not self._counts_alone:
                        fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._lock.release()

    @property
    def is_complete(self) -> bool:
        """Whether nobody else has published an object since this process knew all that there are.

        One system call; none where nobody else can.
        """
        seen = self._seen
        if self.exclusive or seen is None:
            return self.exclusive
        try:
            published = int.from_bytes(os.pread(self._fd, 8, 8 * _PUBLISHED), "little")
        except OSError:
            return False
        return published - self._own == seen.others

    @property
    def marks(self) -> Marks:
        """For :meth:`recounted`, from before the directory is looked through."""
        page = self._page
        removed = page[_REMOVED_BYTES]
        return Marks(page[_PUBLISHED_BYTES], removed, page[_PUBLISHED] - self._own, removed - self._own_removed)

    @property
    def is_lost(self) -> bool:
        """Whether somebody removed the page: whoever comes new will not find this one."""
        return self.shared and not _is_at(self._fd, self._path)

    @property
    def others_removed_nothing(self) -> bool:
        """Whether nobody else has removed an object, and said so, since this adapter knew all objects."""
        return self.shared and self._seen is not None and self.marks.others_removed == self._seen.others_removed

    @property
    def others_write(self) -> bool:
        """Whether stores of other adapters are under way."""
        return self.shared and sum(self._page[_FIRST_ROW + 1 :: 2]) > self._page[self._row + 1]

    @property
    def used_bytes(self) -> int:
        """Bytes of all objects."""
        return self._page[_BYTES]

    def reserve(self, size: int, limit: int) -> bool:
        """Set ``size`` bytes aside, if that keeps all processes together within ``limit``, as far as they are known."""
        page = self._page
        if self.shared and page[_BYTES] + sum(page[_FIRST_ROW + 1 :: 2]) + size > limit:
            return False
        self._reserved += size
        return True

    def unreserve(self, size: int) -> None:
        """The store came to nothing."""
        self._reserved -= size

    def publishing(self, size: int, *, reserved: bool) -> None:
        """It is an object from now on, and no longer set aside if it was; said before it is one."""
        self._reserved -= size if reserved else 0
        if self.shared:
            self._page[_BYTES] += size
            self._save()

    def not_published(self, size: int, *, reserved: bool) -> None:
        """It is none, after all."""
        self._reserved += size if reserved else 0
        self.removed(size)

    def published(self, size: int, replaced: int) -> None:
        """It is one, in place of one of ``replaced`` bytes."""
        if self.shared:
            self._own += 1
            self._page[_PUBLISHED] += 1
            self._page[_PUBLISHED_BYTES] += size
            self.removed(replaced)

    def removed(self, size: int) -> None:
        """An object of that size is gone."""
        if self.shared:
            self._page[_BYTES] -= min(size, self._page[_BYTES])
            self._page[_REMOVED_BYTES] += size
            self._own_removed += size

    def excess_bytes(self, limit: int) -> int:
        """Bytes of objects and unfinished stores of all processes beyond ``limit``."""
        return self._page[_BYTES] + sum(self._page[_FIRST_ROW + 1 :: 2]) - limit

    def recounted(self, used_bytes: int, living: set[int], before: Marks) -> None:
        """The directory was looked through since the moment ``before``, and ``used_bytes`` were found in it.

        What was published meanwhile may have been found or not: it counts. What was removed meanwhile, too; but then
        what the page says already may be nearer to the truth.
        """
        if not self.shared:
            return
        page = self._page
        most = used_bytes + page[_PUBLISHED_BYTES] - before.published_bytes
        page[_BYTES] = most if page[_REMOVED_BYTES] == before.removed_bytes else min(most, page[_BYTES])
        _clear_dead(page, living | {page[self._row]})
        self._seen = before

    def _find_page(self) -> None:
        while True:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, self._file_mode)
            self._take_file_lock()
            if _is_at(self._fd, self._path):
                return
            self._give_up()  # the last one who had it open has just removed it

    def _enter(self, token: int, others: set[int], *, exclusive: bool) -> None:
        page = array("Q", os.pread(self._fd, _PAGE_BYTES, 0).ljust(_PAGE_BYTES, b"\0"))
        fresh = page[0] != _MAGIC or not others
        if fresh:
            page = array("Q", bytes(_PAGE_BYTES))
            page[0] = _MAGIC
            if self._file_mode & 0o077:
                os.fchmod(self._fd, self._file_mode)  # the process's umask took bits away at creation
        if others and (exclusive or page[_EXCLUSIVE]):
            wish = "this one wants" if exclusive else "wants"
            raise OSError(errno.EBUSY, f"another process has it open, and {wish} it for itself (exclusive)", self._path)
        _clear_dead(page, others)
        free = [row for row in range(_FIRST_ROW, _WORDS, 2) if not page[row]]
        if not free:
            raise OSError(errno.EUSERS, f"more than {_WORDS // 2 - _FIRST_ROW // 2} adapters have it open", self._path)
        self._row, self._page = free[0], page
        page[self._row] = token
        page[_EXCLUSIVE] = exclusive
        self._save()
        self._own = self._own_removed = 0
        self._seen, self._at_open = None, self.marks
        self._counts_alone = fresh and not exclusive
        self.shared = not exclusive
        self.exclusive = exclusive
        if not self._counts_alone:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _save(self) -> None:
        self._page[self._row + 1] = self._reserved
        os.pwrite(self._fd, self._page, 0)

    def _take_file_lock(self) -> None:
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._checkpoint()
                time.sleep(_WAIT_S)
            else:
                return

    def _give_up(self) -> None:
        self.shared = self.exclusive = self._counts_alone = False
        self._seen = None
        if self._fd >= 0:
            os.close(self._fd)  # and with it the lock
            self._fd = -1


def _clear_dead(page: array[int], living: set[int]) -> None:
    for row in range(_FIRST_ROW, _WORDS, 2):
        if page[row] not in living:
            page[row] = page[row + 1] = 0


def is_local(path: str) -> bool:
    """Whether ``path`` lies on a file system of this machine, as far as one can tell."""
    real = os.fsencode(os.path.realpath(path))
    kind, longest = b"", -1
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    for line in lines:
        mount, _, source = line.partition(b" - ")
        where = _ESCAPED.sub(lambda octal: bytes([int(octal[1], 8)]), mount.split(b" ")[4])
        inside = real == where or real.startswith(where.rstrip(b"/") + b"/")
        if inside and len(where) >= longest:  # later lines lie over earlier ones
            kind, longest = source.split(b" ")[0], len(where)
    return kind.decode("ascii", "replace") in _LOCAL


def _is_at(fd: int, path: str) -> bool:
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    own = os.fstat(fd)
    return (there.st_ino, there.st_dev) == (own.st_ino, own.st_dev)
