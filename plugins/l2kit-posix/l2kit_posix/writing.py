"""How objects get into files: past the page cache or through it, forced to the device or not, and their names.

What a loss of power may do to what was acknowledged is the policy's (``fsync``):

- ``none``: nothing is forced to the device. Any object may be missing or damaged.
- ``data``: an object's bytes are on the device before it gets its name. What is found is whole; an object that was
  stored shortly before may be missing, one that was deleted or replaced may be back.
- ``full``: its name is on the device, too, before the store is acknowledged, and so is a deletion. (An eviction is not:
  an object that comes back is intact, and goes again.)
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from l2kit_posix.config import FileConfig
from l2kit_posix.direct import PAGE_BYTES, DirectFiles
from l2kit_posix.files import CREATE, READ, object_status, publish, sync_folder
from l2kit_posix.staging import Staging
from l2kit_posix.tally import Tally
from l2kit_posix.vectors import Seal, read_file, write_file, write_sealed_file

_log = logging.getLogger(__name__)


class Unfinished(NamedTuple):
    """A complete file that has no object's name yet; ``written_ns`` is its time of modification."""

    path: str
    written_ns: int


class Transport:
    """Bytes to and from files, past the page cache (O_DIRECT) where that was asked for and works. Thread-safe.

    Attributes:
        direct: whether O_DIRECT is in effect.
        direct_errno: why it is not, although it was asked for.
        read_flags: what a file is opened with to be read.
    """

    def __init__(self, checkpoint: Callable[[], None]) -> None:
        """``checkpoint`` is called between system calls and may raise to stop."""
        self.direct = False
        self.direct_errno: int | None = None
        self.read_flags = READ
        self.write_flags = CREATE
        self._checkpoint: Final = checkpoint
        self._direct_files: Final = DirectFiles(checkpoint)

    def probe_direct(self, path: str) -> None:
        """Turn O_DIRECT on if a file at ``path`` can be written and read with it; else warn once, with the reason.

        Raises:
            OSError: the file system fails for another reason.
        """
        data = memoryview(os.urandom(PAGE_BYTES + 1))
        back = memoryview(bytearray(len(data)))
        try:
            try:
                fd = os.open(path, CREATE | os.O_DIRECT, 0o600)
                try:
                    self._direct_files.write(fd, [data])
                finally:
                    os.close(fd)
                fd = os.open(path, READ | os.O_DIRECT)
                try:
                    same = self._direct_files.read(fd, [back], len(data)) == len(data) and back == data
                finally:
                    os.close(fd)
                if not same:
                    raise OSError(errno.EIO, "O_DIRECT brings back other bytes than were written", path)
            finally:
                with suppress(FileNotFoundError):
                    Path(path).unlink()
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.direct_errno = error.errno
            _log.warning(
                "%s: O_DIRECT is refused (%s, errno %d); objects go through the page cache",
                path,
                errno.errorcode[error.errno],
                error.errno,
            )
        else:
            self.direct = True
            self.read_flags = READ | os.O_DIRECT
            self.write_flags = CREATE | os.O_DIRECT

    def read(self, fd: int, into: Sequence[memoryview], size: int, arrived: Callable[[int], None] | None = None) -> int:
        """Fill ``into`` from a file of ``size`` bytes that was opened with :attr:`read_flags`. See `read_file`.

        Past the page cache nothing is in the processor's cache, and ``arrived`` hears nothing.
        """
        if self.direct:
            return self._direct_files.read(fd, into, size)
        return read_file(fd, into, self._checkpoint, arrived)

    def write(self, fd: int, data: Sequence[memoryview], seal: Seal | None) -> None:
        """Write ``data`` to a file that was opened with :attr:`write_flags`. See `write_file`, `write_sealed_file`."""
        if self.direct:
            if seal is not None:
                seal.finish()
            self._direct_files.write(fd, data)
        elif seal is not None:
            write_sealed_file(fd, data, seal, self._checkpoint)
        else:
            write_file(fd, data, self._checkpoint)

    def clear(self) -> None:
        """Free memory."""
        self._direct_files.clear()


class Writing:
    """Files under names of our own, and the step that makes objects of them. Thread-safe."""

    def __init__(
        self,
        config: FileConfig,
        staging: Staging,
        tally: Tally,
        transport: Transport,
        rejoin: Callable[[], None],
    ) -> None:
        """``rejoin`` is called when the staging folder had to be made anew."""
        self._file_mode: Final = config.file_mode_bits
        self._folder_mode: Final = config.folder_mode_bits
        self._reserves: Final = config.max_bytes is not None
        self._syncs_data: Final = config.fsync != "none"
        self._syncs_names: Final = config.fsync == "full"
        self._staging: Final = staging
        self._tally: Final = tally
        self._transport: Final = transport
        self._rejoin: Final = rejoin

    def write(self, data: Sequence[memoryview], seal: Seal | None, now_ns: Callable[[], int]) -> Unfinished:
        """Write a file under a name of our own, for :meth:`publish`; its bytes are as safe as the policy says.

        Raises:
            OSError: it could not be written; nothing is left of it.
        """
        path = self._staging.new_path()
        try:
            fd = os.open(path, self._transport.write_flags, self._file_mode)
        except FileNotFoundError:  # somebody cleared the directory while we had it open
            if self._staging.renew():
                self._rejoin()
            path = self._staging.new_path()
            fd = os.open(path, self._transport.write_flags, self._file_mode)
        try:
            try:
                if self._file_mode & 0o077:
                    os.fchmod(fd, self._file_mode)  # the process's umask took bits away at creation
                self._transport.write(fd, data, seal)
                written_ns = now_ns()
                os.utime(fd, ns=(written_ns, written_ns))  # the kernel's own clock gives equal times to neighbours
                if self._syncs_data:
                    os.fsync(fd)
            finally:
                os.close(fd)  # some network file systems report here that there was no space
        except BaseException:
            with suppress(OSError):
                Path(path).unlink()
            raise
        return Unfinished(path, written_ns)

    def publish(self, unfinished: str, path: str, size: int) -> None:
        """Give a finished file of ``size`` bytes its object's name; called under the key's lock.

        Raises:
            OSError: it is no object; the old one or none is there. Or, with ``full``: nobody knows whether a loss of
                power would leave it there.
        """
        tally = self._tally
        with tally:
            tally.publishing(size, reserved=self._reserves)
            try:
                before = object_status(path) if tally.shared else None
                made_folders = publish(unfinished, path, self._folder_mode)
            except BaseException:
                tally.not_published(size, reserved=self._reserves)
                raise
            tally.published(size, before.st_size if before is not None else 0)
        if self._syncs_names:
            self._sync_names(path, up_to_root=made_folders)

    def remove(self, path: str) -> None:
        """Remove an object; called under the key's lock.

        Raises:
            OSError: it is there and cannot be removed, or is not there.
        """
        with self._tally as tally:
            size = os.lstat(path).st_size if tally.shared else 0
            os.unlink(path)  # noqa: PTH108 - on the way of every deletion; making paths takes twice as long
            tally.removed(size)
        if self._syncs_names:
            self._sync_names(path, up_to_root=False)

    def _sync_names(self, path: str, *, up_to_root: bool) -> None:
        fan_out = Path(path).parent
        folders = [fan_out, fan_out.parent, fan_out.parent.parent, fan_out.parent.parent.parent]
        for folder in folders if up_to_root else folders[:1]:
            sync_folder(str(folder))
