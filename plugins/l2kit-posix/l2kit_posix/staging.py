"""Where unfinished files lie: one folder per open adapter, and the sweep of folders whose owner is gone.

``staging/BOOT-PID-TOKEN/`` holds the unfinished files of one adapter and a file ``lock`` that its process keeps locked
(``flock``), so the kernel says who is alive, across containers and whatever the process ids are. A folder of another
boot or host, and any folder where the file system knows no locks, counts as abandoned only when nothing in it has
changed for `ORPHAN_AGE_S`: some network file systems keep locks to one host. A store outlives even a wrong sweep: it
fails and leaves nothing behind, and the next one makes the folder anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Final

#: Longer than any single store takes.
ORPHAN_AGE_S: Final = 3600.0

_LOCK: Final = "lock"
#: Until its lock is held, a folder has another name, so that nobody finds it unlocked.
_UNLOCKED: Final = "new-"
_NAME: Final = re.compile(rf"(?P<unlocked>{_UNLOCKED})?(?P<boot>[0-9a-f]{{12}})-\d+-[0-9a-f]{{16}}")
_TOKEN_DIGITS: Final = 16
_log = logging.getLogger(__name__)


class Staging:
    """This adapter's own folder for unfinished files. Thread-safe; one lock, held while the folder is made."""

    def __init__(self, parent: Path, folder_mode: int) -> None:
        """Does nothing yet; ``parent`` must exist when :meth:`open` is called."""
        self._parent = parent
        self._folder_mode = folder_mode
        self._making = threading.Lock()
        self._serial = itertools.count()
        self._folder: Path | None = None
        self._lock_fd = -1

    def open(self) -> None:
        """Make the folder and lock it. It proves that the directory takes new files.

        Raises:
            OSError: it cannot be made.
        """
        name = f"{_boot()}-{os.getpid()}-{secrets.token_hex(_TOKEN_DIGITS // 2)}"
        made = self._parent / f"{_UNLOCKED}{name}"
        make_folder(made, self._folder_mode)
        fd = -1
        try:
            fd = os.open(f"{made}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):  # no locks on this file system: then age decides
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._folder = made.rename(self._parent / name)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            shutil.rmtree(made, ignore_errors=True)
            raise
        self._lock_fd = fd

    def renew(self) -> bool:
        """Make the folder again if somebody removed it; False when another thread was faster.

        Raises:
            OSError: it cannot be made.
        """
        with self._making:
            if self._folder is not None and self._folder.exists():
                return False
            self.close()
            make_folder(self._parent, self._folder_mode)
            self.open()
            return True

    @property
    def token(self) -> int:
        """What tells this adapter from all others; of the folder's name."""
        return 0 if self._folder is None else int(self._folder.name[-_TOKEN_DIGITS:], 16)

    def living(self) -> set[int]:
        """The tokens of all adapters that have the directory open now, on this machine, this one included.

        Raises:
            OSError: it cannot be said.
        """
        with os.scandir(self._parent) as entries:
            names = [entry.name for entry in entries if _NAME.fullmatch(entry.name)]
        return {int(name[-_TOKEN_DIGITS:], 16) for name in names if _locked(self._parent / name)}

    def new_path(self) -> str:
        """A path in the folder that nothing has been written to, ever."""
        return f"{self._folder}/{next(self._serial)}"

    def close(self) -> None:
        """Remove the folder and give up its lock. Never raises: what stays behind is swept by the next one to open."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def make_folder(path: Path, mode: int) -> None:
    """Make ``path`` with exactly ``mode``, parents as needed; harmless when it exists.

    Raises:
        OSError: it cannot be made, or is no directory.
    """
    if path.is_dir():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        path.chmod(mode)  # mkdir would mask it, and a directory that a group cannot write to is of no use to it


def sweep(parent: Path) -> int:
    """Remove the staging folders whose owners are gone; returns how many. Strangers' files and folders are left alone.

    Raises:
        OSError: ``parent`` cannot be read.
    """
    swept = 0
    with os.scandir(parent) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is None or not _abandoned(Path(entry.path), match):
                continue
            shutil.rmtree(entry.path, ignore_errors=True)
            if Path(entry.path).exists():
                _log.warning("cannot remove the abandoned staging folder %s", entry.path)
            else:
                swept += 1
    return swept


def _locked(folder: Path) -> bool:
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:  # another user's
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _abandoned(folder: Path, match: re.Match[str]) -> bool:
    try:
        if match["unlocked"]:
            return _old(folder)
        try:
            fd = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return _old(folder)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return _old(folder)
        finally:
            os.close(fd)
        return match["boot"] == _boot() or _old(folder)
    except OSError:  # it vanished under our hands, or belongs to another user who must sweep it himself
        return False


def _old(folder: Path) -> bool:
    newest = max(path.stat(follow_symlinks=False).st_mtime for path in (folder, *folder.iterdir()))
    return time.time() - newest > ORPHAN_AGE_S


def _boot() -> str:
    """Twelve hexadecimal digits for the running kernel: within one, file locks are reliable."""
    try:
        identity = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        identity = socket.gethostname()
    return hashlib.blake2b(identity.encode(), digest_size=6, person=b"l2kit-boot").hexdigest()
