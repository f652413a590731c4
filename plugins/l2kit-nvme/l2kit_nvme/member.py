"""One file or block device of a slab: opened, owned, read, written and flushed. It knows offsets, not objects."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import mmap
import os
import socket
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from l2kit.errors import ConfigError, TransientBackendError
from l2kit_nvme.geometry import COPIES, HEADER_BYTES, MAGIC, OWNER_OFFSET, PAGE_BYTES, RECORD_BYTES

#: Most segments that one system call takes.
_IOV_MAX: Final = min(os.sysconf("SC_IOV_MAX"), 1024)
_ZERO_BYTES: Final = 4 << 20
_BLKDISCARD: Final = 0x1277
_FALLOC_KEEP_SIZE: Final = 1
_FALLOC_PUNCH_HOLE: Final = 2
#: What a kernel or file system without O_DIRECT answers.
_NO_DIRECT: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY})
_log = logging.getLogger(__name__)


class Member:
    """Thread-safe without locks: positioned system calls on disjoint ranges.

    Where payloads go around the page cache, records do as well, sector by sector, if the device has sectors of their
    size: a write through the page cache would wait for all payloads of the file to be written, and stop new ones.

    Attributes:
        path: of the file or device.
        size: its bytes.
        is_device: a block device.
        created: the file was made by this opening.
        direct: payloads go around the page cache.
        direct_sectors: single sectors of the table do so, too.
        direct_error: why O_DIRECT is not in effect, an errno; None when it is, or was not asked for.
    """

    def __init__(self, path: str) -> None:
        """Does no I/O."""
        self.path: Final = path
        self.size = 0
        self.is_device = False
        self.created = False
        self.direct = False
        self.direct_sectors = False
        self.direct_error: int | None = None
        self._fd = -1
        self._payload_fd = -1

    def open(self, *, create: bool) -> None:
        """Open and own it; with ``create``, a missing file is made, empty.

        Raises:
            TransientBackendError: another one has it open; names its process.
            ConfigError: it is neither a file nor a block device, or there is none.
            OSError: it cannot be opened.
        """
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            self._fd = os.open(self.path, flags)
        except FileNotFoundError:
            if not create:
                raise
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, flags | os.O_CREAT, 0o600)
            self.created = True
        status = os.fstat(self._fd)
        self.is_device = stat.S_ISBLK(status.st_mode)
        if not self.is_device and not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"path: {self.path} is neither a file nor a block device")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TransientBackendError(
                f"{self.path} is in use by {self._owner()}; a slab has one owner at a time: stop that one, or name "
                "another path"
            ) from None
        self.size = os.lseek(self._fd, 0, os.SEEK_END)

    def note_owner(self) -> None:
        """Write down who has it, for the message of the one who comes second."""
        note = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()[: PAGE_BYTES - 1]
        self.write_cached(OWNER_OFFSET, note.ljust(PAGE_BYTES, b"\0"))

    def use_direct(self) -> None:
        """Move payloads around the page cache from now on, if that can be done; needs a size of some pages."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            self.direct_error = error.errno
            return
        self._payload_fd = fd
        self.direct = True
        try:
            os.preadv(fd, [memoryview(mmap.mmap(-1, PAGE_BYTES))[:RECORD_BYTES]], OWNER_OFFSET)
        except OSError:
            self.direct_sectors = False
        else:
            self.direct_sectors = True

    def refuse_direct(self, code: int | None) -> None:
        """O_DIRECT was accepted and does not work: do without."""
        self.direct, self.direct_sectors, self.direct_error = False, False, code
        if self._payload_fd >= 0:
            os.close(self._payload_fd)
            self._payload_fd = -1

    def allocate(self, nbytes: int) -> None:
        """Make a file this long, its space set aside.

        Raises:
            OSError: there is not so much space; the file is as long as it was.
        """
        before = os.fstat(self._fd).st_size
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
            os.ftruncate(self._fd, nbytes)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, before)
            raise
        self.size = nbytes

    def superblock_copies(self) -> list[bytes]:
        """Both copies as they are; pages of zeros behind the end."""
        return [os.pread(self._fd, PAGE_BYTES, offset).ljust(PAGE_BYTES, b"\0") for offset in COPIES]

    def is_blank(self) -> bool:
        """Whether the header holds nothing, or the torn first page of a slab that never held an object."""
        header = os.pread(self._fd, HEADER_BYTES, 0)
        rest = header[PAGE_BYTES:OWNER_OFFSET] + header[OWNER_OFFSET + PAGE_BYTES :]
        return header[: len(MAGIC)] in (MAGIC, bytes(len(MAGIC)), b"") and not any(rest)

    def read_cached(self, offset: int, nbytes: int) -> bytes:
        """Header or table, through the page cache.

        Raises:
            OSError: they cannot be read.
        """
        data = os.pread(self._fd, nbytes, offset)
        if len(data) != nbytes:
            raise OSError(errno.EIO, f"the file ends at {offset + len(data)}", self.path)
        return data

    def write_cached(self, offset: int, data: bytes) -> None:
        """Header or table, through the page cache.

        Raises:
            OSError: not everything could be written.
        """
        if os.pwrite(self._fd, data, offset) != len(data):
            raise OSError(errno.EIO, "the kernel took a part of a record only", self.path)

    def clear(self, offset: int, nbytes: int) -> None:
        """Zeros."""
        zeros = bytes(min(nbytes, _ZERO_BYTES))
        for position in range(0, nbytes, len(zeros) or 1):
            self.write_cached(offset + position, zeros[: nbytes - position])

    def write(self, offset: int, vector: Sequence[memoryview]) -> None:
        """Payload.

        Raises:
            OSError: not everything could be written; what is there is undefined.
        """
        self._move(write=True, offset=offset, vector=vector)

    def read(self, offset: int, vector: Sequence[memoryview]) -> None:
        """Payload.

        Raises:
            OSError: not everything could be read.
        """
        self._move(write=False, offset=offset, vector=vector)

    def flush(self) -> None:
        """Everything written so far is on the medium, the device's own cache included."""
        os.fdatasync(self._fd)

    def discard(self, offset: int, nbytes: int) -> None:
        """Tell the device, or the file system, that these bytes are of no use.

        Raises:
            OSError: it does not take this.
        """
        if self.is_device:
            fcntl.ioctl(self._fd, _BLKDISCARD, struct.pack("QQ", offset, nbytes))
            return
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        mode = _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE
        if libc.fallocate(self._fd, mode, ctypes.c_long(offset), ctypes.c_long(nbytes)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), self.path)

    def close(self) -> None:
        """Give it up; harmless when repeated. The lock goes at once, even where a forked child has the file open."""
        if self._payload_fd >= 0:
            os.close(self._payload_fd)
            self._payload_fd = -1
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

    def _move(self, *, write: bool, offset: int, vector: Sequence[memoryview]) -> None:
        fd = self._payload_fd if self.direct else self._fd
        for first in range(0, len(vector), _IOV_MAX):
            rest = list(vector[first : first + _IOV_MAX])
            while rest:
                moved = os.pwritev(fd, rest, offset) if write else os.preadv(fd, rest, offset)
                if self.direct:
                    moved -= moved % RECORD_BYTES  # a part of a sector is moved again, as a whole
                if not moved:
                    raise OSError(errno.EIO, f"no more bytes are moved at offset {offset}", self.path)
                offset += moved
                rest = _without(rest, moved)

    def _owner(self) -> str:
        """Who has it open, as far as can be told."""
        try:
            note = json.loads(os.pread(self._fd, PAGE_BYTES, OWNER_OFFSET).rstrip(b"\0") or b"{}")
            pid, host = int(note["pid"]), str(note["host"])
        except (OSError, ValueError, KeyError, TypeError):
            return "another process, which has not said which one it is"
        if host != socket.gethostname():
            return f"process {pid} on {host}"
        return f"this process ({pid})" if pid == os.getpid() else f"process {pid}"


def _without(vector: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of ``vector`` after its first ``nbytes``."""
    for index, segment in enumerate(vector):
        if nbytes < len(segment):
            return [segment[nbytes:], *vector[index + 1 :]]
        nbytes -= len(segment)
    return []
