"""From an errno to the error tree: what failed, where, and what to do about it. The one seam of this plugin."""

from __future__ import annotations

import errno
from typing import Final

from l2kit.errors import ConfigError, L2Error
from l2kit.system_errors import REFUSED, advice, reason, translate_os_error

#: There is no such file. A symbolic link where a file should be is no object either.
ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})

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
#: Errors of opening the directory that another value of ``path`` would mend.
_WRONG_PATH: Final = REFUSED | {
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
    return translate_os_error(error, name=name, path=path, mend=_MEND)


def translate_at_open(error: OSError, *, name: str, path: str) -> L2Error:
    """The same while the directory is opened: what another ``path`` would mend names that option."""
    if error.errno not in _WRONG_PATH:
        return translate(error, name=name, path=path)
    where = "" if error.filename in (None, path) else f" at {error.filename}"
    return ConfigError(f"{name}: path: cannot keep objects in {path}: {reason(error)}{where}{advice(error, _MEND)}")
