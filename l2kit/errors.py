"""The one error tree of l2kit.

Foreign exceptions are translated into these at one seam per backend (`L2Adapter.translate_error`), so callers only
ever handle this tree. Each message says what failed, where, and what to do about it; none carries a secret.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class L2Error(Exception):
    """Root of every error that l2kit raises on purpose."""


class ConfigError(L2Error, ValueError):
    """A configuration value is wrong; the message names the field and the nearest valid choice."""


class AdapterNotFoundError(ConfigError):
    """No installed distribution claims this adapter, codec or policy name."""


class AdapterConflictError(ConfigError):
    """Two installed distributions claim the same name; l2kit never picks one of them."""


class AdapterImportError(L2Error, ImportError):
    """A distribution claims the name but its module cannot be imported (the cause is chained)."""


class AdapterContractError(L2Error, TypeError):
    """A plugin object breaks the adapter contract, or was built for another API version."""


class BackendError(L2Error):
    """The storage backend failed; the operation had no confirmed effect."""


class TransientBackendError(BackendError):
    """The backend failed in a way that a later attempt may not (connection lost, server loading)."""


class BackendTimeoutError(TransientBackendError, TimeoutError):
    """The backend did not answer before the deadline."""


class BackendBusyError(TransientBackendError):
    """The backend refused the operation because it has too much to do."""


class AuthError(BackendError):
    """The backend refused our credentials. Never reported as a miss."""


class CapacityError(L2Error):
    """There is no room for the object, in the tier or in the destination buffer."""


class CorruptObjectError(L2Error):
    """Stored bytes contradict their envelope.

    Attributes:
        reason: one of ``envelope.CORRUPTION_REASONS``; metrics use it as a label.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class TaskCancelledError(L2Error):
    """The key was still unfinished when its task was cancelled."""


class ClosedError(L2Error, RuntimeError):
    """The object is used before it was opened, after it was closed, or in a forked child."""


def first_error(error: Exception) -> Exception:
    """Return the error itself, or the first one inside an exception group: no group crosses a public boundary."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest of ``choices``, or list them all when nothing is close."""
    known = sorted(choices)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.55)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are: {', '.join(known)}" if known else ""
