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

#: The file system is full, or this user's share of it.
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
#: There is no such file. A symbolic link where a file should be is no object either.
ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
#: This process, or the system, has no file descriptor left.
NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})

_MEND: Final = {
    errno.ENOSPC: "free space there or set a smaller max_bytes",
    errno.EDQUOT: "raise the quota or set a smaller max_bytes",
    errno.EFBIG: "raise the file size limit (ulimit -f) of this process",
    errno.EMFILE: "raise the limit of open files (ulimit -n) or set a smaller max_open_files",
    errno.ENFILE: "the whole system has too many open files; raise fs.file-max",
    errno.EACCES: "give this user the permission, or name another directory",
    errno.EPERM: "give this user the permission, or name another directory",
    errno.EROFS: "the file system is mounted read-only; remount it, or name another directory",
    errno.EIO: "the device or the network failed; see the kernel's log",
    errno.EXDEV: "the directory must lie on one file system as a whole",
    errno.EEXIST: "there is a file where a directory should be; name another directory",
    errno.ENOTDIR: "a part of it is a file; name another directory",
    errno.ENOENT: "the directory cannot be made there; name another one",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.ELOOP: "symbolic links go round in a circle there; name another directory",
}
_CAPACITY: Final = NO_SPACE | {errno.EFBIG}
_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM})
_TRANSIENT: Final = frozenset({errno.ESTALE, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ENOMEM, errno.ENOLCK})
#: Errors of opening the directory that another value of ``path`` would mend.
_WRONG_PATH: Final = _REFUSED | {
    errno.EROFS,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.ENOENT,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
}


def translate(error: OSError, *, name: str, path: str) -> L2Error:
    """The error of the tree for ``error``; ``name`` is the tier, ``path`` its directory."""
    text = f"{name}: {_reason(error)} at {error.filename or path}{_mend(error)}"
    code = error.errno
    if code in _CAPACITY:
        return CapacityError(text)
    if code in _REFUSED:
        return AuthError(text)
    if code in NO_DESCRIPTOR:
        return BackendBusyError(text)
    if code in _TRANSIENT:
        return TransientBackendError(text)
    return BackendError(text)


def translate_at_open(error: OSError, *, name: str, path: str) -> L2Error:
    """The same while the directory is opened: what another ``path`` would mend names that option."""
    if error.errno not in _WRONG_PATH:
        return translate(error, name=name, path=path)
    where = "" if error.filename in (None, path) else f" at {error.filename}"
    return ConfigError(f"{name}: path: cannot keep objects in {path}: {_reason(error)}{where}{_mend(error)}")


def _reason(error: OSError) -> str:
    code = errno.errorcode.get(error.errno or 0, str(error.errno))
    return f"{error.strerror or type(error).__name__} ({code}, user {os.geteuid()})"


def _mend(error: OSError) -> str:
    mend = _MEND.get(error.errno or 0)
    return f"; {mend}" if mend else ""
