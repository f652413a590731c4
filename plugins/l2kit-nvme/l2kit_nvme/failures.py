"""From an errno to the error tree: what failed, where, and what to do about it. The one seam of this plugin."""

from __future__ import annotations

import errno
import os
from typing import Final

from l2kit.errors import (
    AuthError,
    BackendBusyError,
    BackendError,
    CapacityError,
    ConfigError,
    L2Error,
    TransientBackendError,
)

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
_CAPACITY: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM})
_NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
_TRANSIENT: Final = frozenset({errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ENOMEM})
#: Errors of opening the slab that another value of ``path`` would mend.
_WRONG_PATH: Final = _REFUSED | {
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
    text = f"{name}: {_reason(error)} at {error.filename or path}{_mend(error)}"
    code = error.errno
    if code in _CAPACITY:
        return CapacityError(text)
    if code in _REFUSED:
        return AuthError(text)
    if code in _NO_DESCRIPTOR:
        return BackendBusyError(text)
    if code in _TRANSIENT:
        return TransientBackendError(text)
    return BackendError(text)


def translate_at_open(error: OSError, *, name: str, path: str) -> L2Error:
    """The same while the slab is opened: what another ``path`` would mend names that option."""
    if error.errno not in _WRONG_PATH:
        return translate(error, name=name, path=path)
    where = error.filename or path
    return ConfigError(f"{name}: path: cannot keep a slab at {where}: {_reason(error)}{_mend(error)}")


def _reason(error: OSError) -> str:
    code = errno.errorcode.get(error.errno or 0, str(error.errno))
    return f"{error.strerror or type(error).__name__} ({code}, user {os.geteuid()})"


def _mend(error: OSError) -> str:
    mend = _MEND.get(error.errno or 0)
    return f"; {mend}" if mend else ""
