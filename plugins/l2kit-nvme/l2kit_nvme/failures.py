"""From an errno to the error tree: what failed, where, and what to do about it. The one seam of this plugin."""

from __future__ import annotations

import errno
from typing import Final

from l2kit.errors import ConfigError, L2Error
from l2kit.system_errors import REFUSED, advice, reason, translate_os_error

_MEND: Final = {
    errno.ENOSPC: "free space there, or set a smaller size_bytes",
    errno.EDQUOT: "raise the quota, or set a smaller size_bytes",
    errno.EFBIG: "raise the file size limit (ulimit -f) of this process, or set a smaller size_bytes",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the whole system has too many open files; raise fs.file-max",
    errno.EACCES: "give this user the permission, or name another path",
    errno.EPERM: "give this user the permission, or name another path",
    errno.EROFS: "it is read-only; remount it, or name another path",
    errno.EIO: "the device failed; see the kernel's log",
    errno.ENOTDIR: "a part of the path is a file; name another path",
    errno.ENOENT: "there is no such file or device; give size_bytes to make a file",
    errno.EISDIR: "it is a directory; name a file in it, which will be made",
    errno.ENOLCK: "the file system knows no locks, and a slab needs one; use a local file system",
}
#: Errors of opening the slab that another value of ``path`` would mend.
_WRONG_PATH: Final = REFUSED | {
    errno.EROFS,
    errno.ENOTDIR,
    errno.ENOENT,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENXIO,
    errno.ENOLCK,
}


def translate(error: OSError, *, name: str, path: str) -> L2Error:
    """The error of the tree for ``error``; ``name`` is the tier, ``path`` its first file or device."""
    return translate_os_error(error, name=name, path=path, mend=_MEND)


def translate_at_open(error: OSError, *, name: str, path: str) -> L2Error:
    """The same while the slab is opened: what another ``path`` would mend names that option."""
    if error.errno not in _WRONG_PATH:
        return translate(error, name=name, path=path)
    where = error.filename or path
    return ConfigError(f"{name}: path: cannot keep a slab at {where}: {reason(error)}{advice(error, _MEND)}")
