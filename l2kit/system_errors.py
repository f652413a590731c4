"""From an errno to the error tree, for adapters on files and devices: what failed, where, and what to do about it."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Final

from l2kit.errors import (
    AuthError,
    BackendBusyError,
    BackendError,
    CapacityError,
    L2Error,
    TransientBackendError,
)

#: The file system is full, or this user's share of it.
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
#: This user may not.
REFUSED: Final = frozenset({errno.EACCES, errno.EPERM})
#: This process, or the system, has no file descriptor left.
NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})

_CAPACITY: Final = NO_SPACE | {errno.EFBIG}
_TRANSIENT: Final = frozenset({errno.ESTALE, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ENOMEM, errno.ENOLCK})


def translate_os_error(error: OSError, *, name: str, path: str, mend: Mapping[int, str]) -> L2Error:
    """The error of the tree for ``error``.

    Args:
        error: what the system said; its ``filename``, if it has one, is where.
        name: of the tier.
        path: where, else.
        mend: what to do about it, by errno.
    """
    text = f"{name}: {reason(error)} at {error.filename or path}{advice(error, mend)}"
    code = error.errno
    if code in _CAPACITY:
        return CapacityError(text)
    if code in REFUSED:
        return AuthError(text)
    if code in NO_DESCRIPTOR:
        return BackendBusyError(text)
    if code in _TRANSIENT:
        return TransientBackendError(text)
    return BackendError(text)


def reason(error: OSError) -> str:
    """What the system said, its code, and who asked."""
    code = errno.errorcode.get(error.errno or 0, str(error.errno))
    return f"{error.strerror or type(error).__name__} ({code}, user {os.geteuid()})"


def advice(error: OSError, mend: Mapping[int, str]) -> str:
    """What to do about it, as the end of a message; empty when nothing is known."""
    what = mend.get(error.errno or 0)
    return f"; {what}" if what else ""
