"""Eviction policies (entry-point group ``l2kit.policies``): in which order L1 gives objects up.

A policy only orders keys; `L1Manager` knows sizes, leases and memory, and skips what is leased.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from l2kit.keys import ObjectKey

_log = logging.getLogger(__name__)


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


class GuardedPolicy(EvictionPolicy):
    """Any policy, behind which L1 is safe: when it raises, that is logged and LRU takes its place for good."""

    def __init__(self, policy: EvictionPolicy) -> None:
        """Stand in front of ``policy``."""
        self._policy = policy
        self._keys: dict[ObjectKey, int] = {}  # with their sizes, oldest first

    def inserted(self, key: ObjectKey, nbytes: int) -> None:
        """Pass it on."""
        self._keys[key] = nbytes
        try:
            self._policy.inserted(key, nbytes)
        except Exception:
            self._replace()

    def touched(self, key: ObjectKey) -> None:
        """Pass it on."""
        try:
            self._policy.touched(key)
        except Exception:
            self._replace()

    def removed(self, key: ObjectKey) -> None:
        """Pass it on."""
        self._keys.pop(key, None)
        try:
            self._policy.removed(key)
        except Exception:
            self._replace()

    def victims(self) -> Iterator[ObjectKey]:
        """What the policy offers, as far as it is there, each key once."""
        offered: set[ObjectKey] = set()
        try:
            for key in self._policy.victims():
                if key in self._keys and key not in offered:
                    offered.add(key)
                    yield key
        except Exception:
            self._replace()
            yield from (key for key in self._policy.victims() if key not in offered)

    def _replace(self) -> None:
        _log.exception("the eviction policy %s failed; LRU takes its place", type(self._policy).__name__)
        self._policy = LRUPolicy()
        for key, nbytes in self._keys.items():
            self._policy.inserted(key, nbytes)
