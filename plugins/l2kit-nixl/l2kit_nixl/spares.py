"""`Spares`: things of which a thread takes one for a job and gives it back; what broke meanwhile is thrown away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar


class Spare(Protocol):
    """What can be taken and given back."""

    @property
    def usable(self) -> bool:
        """False when nobody may use it again."""

    def close(self) -> None:
        """Give up what it holds; harmless when repeated."""


SpareT = TypeVar("SpareT", bound=Spare)


class Spares(Generic[SpareT]):
    """As many as threads ask for at once, made at need, kept until closed.

    Thread-safe; one lock, never held while one is made, used or closed.
    """

    def __init__(self, make: Callable[[], SpareT]) -> None:
        """``make`` blocks and may raise."""
        self._make = make
        self._lock = threading.Lock()
        self._unused: list[SpareT] = []

    @contextmanager
    def borrowed(self) -> Iterator[SpareT]:
        """One for the ``with`` block; the last one that was given back, so that few are kept busy."""
        with self._lock:
            one = self._unused.pop() if self._unused else None
        if one is None:
            one = self._make()
        try:
            yield one
        finally:
            if one.usable:
                with self._lock:
                    self._unused.append(one)
            else:
                one.close()

    def discard(self) -> None:
        """Close all that nobody uses now."""
        with self._lock:
            unused, self._unused = self._unused, []
        for one in unused:
            one.close()
