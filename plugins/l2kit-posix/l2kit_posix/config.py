"""Options of ``file://``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from l2kit.config import AdapterConfig, PositiveInt
from l2kit.errors import ConfigError

#: Three octal digits as ``chmod`` takes them; the owner must read and write. Text, because a decimal 640 would silently
#: be another mode.
FileMode = Annotated[str, msgspec.Meta(pattern=r"^0?[67][0-7]{2}$")]

#: What an acknowledged store survives: the process being killed, or the machine losing power as well.
Fsync = Literal["none", "data", "full"]


class FileConfig(AdapterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``file:///DIRECTORY?option=value``, besides those that every adapter has.

    Attributes:
        path: absolute path of the directory that holds the objects; required. It and its parents are made when they
            are missing. Processes that name the same directory share its objects; so do nodes, on a file system that
            they share.
        max_bytes: most bytes of objects, as their file sizes add up, in bytes or as ``10GiB``. By default there is no
            limit and the objects grow until the file system is full. Before an object is written, the least recently
            used ones make room for it; one that is larger than the limit is dropped. Too small a limit evicts objects
            before they are read again. On a file system of this machine it is one for all processes together: each
            counts what all of them wrote and have set aside. On a network file system, each node keeps it over what it
            found when it opened the directory, wrote, looked up or loaded; others can take the directory beyond it.
        file_mode: permissions of new files in octal, ``600`` by default: only this user reads what prompts left
            behind. Directories get the same with search permission, so ``660`` is for users who share a group.
        direct: go around the page cache (O_DIRECT), for a cache that is much larger than the memory to spare, or that
            should leave that memory to others. Off by default: then what was written or read lately comes from memory.
            Where the file system refuses, one warning says so with the errno, and the page cache is used.
        fsync: what an acknowledged store survives. ``none``, the default: the process being killed at any instant;
            after a loss of power any object may be missing, or damaged, which its checksum tells when it is loaded.
            ``data``: each object's bytes are on the device before it gets its name; after a loss of power what is found
            is whole, and objects that were stored shortly before may be missing. ``full``: names are as well, and so
            are deletions, but not evictions: what was acknowledged is there. ``data`` costs one flush of the device for
            each object, ``full`` two.
        exclusive: keep the directory to this process: others on this machine that open it meanwhile are refused, and so
            is this one while others have it open. In return lookups and locks take no system call, and stores count
            nothing together. Off by default: then any number of processes share the directory. What is removed by hand
            is found out when it is loaded, not when it is looked up. Only on a file system of this machine.
        max_open_files: most objects that lookups may keep locked at once; each takes one file descriptor. By default
            half of the process's soft limit (``ulimit -n``) when the adapter is opened. A lookup beyond it reports a
            miss, which costs a recomputation, and counts ``lease_limit``; too large a value starves the process of
            descriptors for sockets and other files.
    """

    path: str
    max_bytes: PositiveInt | None = None
    file_mode: FileMode = "600"
    direct: bool = False
    fsync: Fsync = "none"
    exclusive: bool = False
    max_open_files: PositiveInt | None = None

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ConfigError(f"path: {self.path!r} is not absolute; write file:///DIRECTORY with three slashes")
        if "\0" in self.path:
            raise ConfigError(f"path: {self.path!r} holds a zero byte, which no file name may")

    @property
    def file_mode_bits(self) -> int:
        """:attr:`file_mode` as a number."""
        return int(self.file_mode, 8)

    @property
    def folder_mode_bits(self) -> int:
        """The same for directories: who may read may also search."""
        return self.file_mode_bits | (self.file_mode_bits & 0o444) >> 2
