"""Options of ``file://``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from l2kit.config import AdapterConfig, PositiveInt
from l2kit.errors import ConfigError

#: Three octal digits as ``chmod`` takes them; the owner must read and write. Text, because a decimal 640 would silently
#: be another mode.
FileMode = Annotated[str, msgspec.Meta(pattern=r"^0?[67][0-7]{2}$")]


class FileConfig(AdapterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``file:///DIRECTORY?option=value``, besides those that every adapter has.

    Attributes:
        path: absolute path of the directory that holds the objects; required. It and its parents are made when they
            are missing. Processes that name the same directory share its objects; so do nodes, on a file system that
            they share.
        max_bytes: most bytes of objects, as their file sizes add up, in bytes or as ``10GiB``. By default there is no
            limit and the objects grow until the file system is full. Before an object is written, the least recently
            used ones make room for it; one that is larger than the limit is dropped. Too small a limit evicts objects
            before they are read again. A process counts what it finds when it opens the directory, what it writes, and
            what it looks up or loads later; what others write meanwhile can take the directory beyond the limit.
        file_mode: permissions of new files in octal, ``600`` by default: only this user reads what prompts left
            behind. Directories get the same with search permission, so ``660`` is for users who share a group.
        max_open_files: most objects that lookups may keep locked at once; each takes one file descriptor. By default
            half of the process's soft limit (``ulimit -n``) when the adapter is opened. A lookup beyond it reports a
            miss, which costs a recomputation, and counts ``lease_limit``; too large a value starves the process of
            descriptors for sockets and other files.
    """

    path: str
    max_bytes: PositiveInt | None = None
    file_mode: FileMode = "600"
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
