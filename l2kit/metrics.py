"""Counters that any thread may add to. Every series exists at zero: "never happened" is not "not measured"."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Counters:
    """A closed set of named totals."""

    def __init__(self, names: Iterable[str]) -> None:
        """All ``names`` start at zero; no other name can be counted."""
        self._lock = threading.Lock()
        self._values = dict.fromkeys(names, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Add ``amount`` to the total ``name``.

        Raises:
            KeyError: ``name`` was not declared.
        """
        with self._lock:
            self._values[name] += amount

    def snapshot(self) -> dict[str, int]:
        """A consistent copy."""
        with self._lock:
            return dict(self._values)
