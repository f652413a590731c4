"""Eviction policies (entry-point group ``l2kit.policies``): in which order L1 gives objects up.

A policy only orders keys; `L1Manager` knows sizes, leases and memory, and skips what is leased.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from l2kit.keys import ObjectKey


class EvictionPolicy(ABC):
    """Called under L1's lock: every method must be quick, must not block and must not raise."""

    @abstractmethod
    def inserted(self, key: ObjectKey, nbytes: int) -> None:
        """``key`` became readable."""

    @abstractmethod
    def touched(self, key: ObjectKey) -> None:
        """``key`` was read."""

    @abstractmethod
    def removed(self, key: ObjectKey) -> None:
        """``key`` is gone, evicted or not."""

    @abstractmethod
    def victims(self) -> Iterator[ObjectKey]:
        """Yield keys, the first to go first. No key is inserted, touched or removed while iterating."""


class LRUPolicy(EvictionPolicy):
    """Least recently used first. Prefixes are touched last chunk first, so a prefix loses its end before its start."""

    def __init__(self) -> None:
        """Start empty."""
        self._order: OrderedDict[ObjectKey, None] = OrderedDict()

    def inserted(self, key: ObjectKey, nbytes: int) -> None:
        """Most recent."""
        self._order[key] = None

    def touched(self, key: ObjectKey) -> None:
        """Most recent again."""
        if key in self._order:
            self._order.move_to_end(key)

    def removed(self, key: ObjectKey) -> None:
        """Forget it."""
        self._order.pop(key, None)

    def victims(self) -> Iterator[ObjectKey]:
        """Oldest first."""
        return iter(self._order)
