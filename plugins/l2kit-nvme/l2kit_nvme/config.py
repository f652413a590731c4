"""Options of ``nvme://``."""

from __future__ import annotations

from typing import Literal

from l2kit.config import AdapterConfig, PositiveInt
from l2kit.errors import ConfigError

#: What an acknowledged store survives: the process being killed, or the machine losing power as well.
Durability = Literal["none", "data"]

_MAX_MEMBERS = 16


class NvmeConfig(AdapterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``nvme:///FILE_OR_DEVICE?option=value``, besides those that every adapter has.

    Attributes:
        path: absolute path of the slab: a file, which is made when it is missing, or a block device; required.
        paths: further files or devices that the slab is striped over, comma-separated in a URL. All of them are needed
            to open it again, in any order. One that is lost takes all objects with it.
        size_bytes: size of each file, in bytes or as ``100GiB``; allocated as a whole when the slab is made. Required
            then, unless every path is a device, which is used as a whole by default. Of an existing slab it may be left
            out; another value than the slab has is an error, never a resize.
        max_bytes: most bytes that objects may take, envelope and rounding included; by default all that the slab has
            room for. It may change from one opening to the next; the least recently used objects go first. Too small a
            limit evicts objects before they are read again.
        max_objects: how many objects the slab can list, fixed when it is made: 512 bytes of the slab for each. By
            default one for each 32 KiB. With too few, small objects are evicted while there is room; too many take
            room from the objects.
        durability: what an acknowledged store or delete survives. ``none``: the process being killed at any instant,
            not a loss of power, after which objects may be missing or damaged (then they are found out when they are
            loaded). ``data``: both; it costs two flushes of the device for each group of stores.
        direct: go around the page cache (O_DIRECT). Where the file system refuses, one warning says so, and the page
            cache is used. Turn it off for a slab that is much smaller than the memory that is to spare.
        prefill: write zeros over the whole slab when it is made: takes as long as the device takes, once. The first
            write to a part of a fresh file is several times slower than the second; this pays for it in advance.
        trim: tell the device, or the file system, which space holds nothing (TRIM, hole punching), in the background.
            By default for block devices only: a file gives the space back, and may not get it again.
        reset: make the slab anew over whatever lies there. All objects are lost, at **every** opening, so this is for
            one run of a tool and not for a configuration file.
    """

    path: str
    paths: tuple[str, ...] = ()
    size_bytes: PositiveInt | None = None
    max_bytes: PositiveInt | None = None
    max_objects: PositiveInt | None = None
    durability: Durability = "none"
    direct: bool = True
    prefill: bool = False
    trim: bool | None = None
    reset: bool = False

    def __post_init__(self) -> None:
        members = self.members
        for path in members:
            if not path.startswith("/"):
                raise ConfigError(f"path: {path!r} is not absolute; write nvme:///FILE_OR_DEVICE with three slashes")
            if "\0" in path:
                raise ConfigError(f"path: {path!r} holds a zero byte, which no file name may")
            if members.count(path) > 1:
                raise ConfigError(f"paths: {path} is named twice; a slab is striped over different files or devices")
        if len(members) > _MAX_MEMBERS:
            raise ConfigError(f"paths: {len(members)} files or devices are more than {_MAX_MEMBERS}")

    @property
    def members(self) -> tuple[str, ...]:
        """All files and devices of the slab."""
        return (self.path, *self.paths)
