"""The file of one object: looked at, opened, given its name. Only a regular file is an object; no link is followed."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from l2kit_posix.failures import ABSENT
from l2kit_posix.staging import make_folder

#: NONBLOCK: a pipe that lies where an object should be must not hang the thread that opens it.
READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class OpenObject:
    """A file descriptor of one object, shared by leases and readers; the last one that lets go closes it.

    Attributes:
        fd: open for reading.
        status: what the file system said of it when it was opened.
        users: how many there are; whoever opens it is the first.
    """

    __slots__ = ("fd", "status", "users")

    def __init__(self, fd: int, status: os.stat_result) -> None:
        self.fd: Final = fd
        self.status: Final = status
        self.users = 1

    def is_at(self, path: str) -> bool:
        """Whether this is still the file that ``path`` names.

        Raises:
            OSError: it cannot be said.
        """
        there = object_status(path)
        own = self.status
        return there is not None and (there.st_ino, there.st_dev) == (own.st_ino, own.st_dev)


def open_object(path: str, flags: int) -> OpenObject | None:
    """Open the object at ``path`` with ``flags``; None when there is none (a folder or a pipe is none either).

    Raises:
        OSError: it cannot be said, or it is there and cannot be read.
    """
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise
    try:
        status = os.fstat(fd)
    except OSError:
        os.close(fd)
        raise
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        return None
    return OpenObject(fd, status)


def object_status(path: str) -> os.stat_result | None:
    """What the file system says of the object at ``path``; None when there is none.

    Raises:
        OSError: it cannot be said.
    """
    try:
        status = os.lstat(path)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise
    return status if stat.S_ISREG(status.st_mode) else None


def publish(unfinished: str, path: str, folder_mode: int) -> bool:
    """Give a finished file its object's name, in place of an older object; folders are made as needed.

    Returns:
        Whether folders were made.

    Raises:
        OSError: it keeps its old name, or somebody removed it.
    """
    try:
        os.replace(unfinished, path)  # noqa: PTH105 - on the way of every store; making paths takes twice as long
    except FileNotFoundError:
        fan_out = Path(path).parent
        for folder in (fan_out.parent.parent, fan_out.parent, fan_out):
            make_folder(folder, folder_mode)
        Path(unfinished).replace(path)
        return True
    return False


def sync_folder(path: str) -> None:
    """Force what a folder lists to the device.

    Raises:
        OSError: nobody knows whether it is there.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
