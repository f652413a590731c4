"""Which objects nobody shall try to load again: damaged ones that could not be deleted, and those not readable here."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from l2kit.keys import ObjectKey

_MAX_KEYS = 4096
#: Somebody else may have replaced the object meanwhile, so after this it gets another chance.
_TERM_S = 60.0


class Quarantine:
    """A bounded set of keys, each for a limited time. Loop-bound."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Empty; ``clock`` in seconds."""
        self._clock = clock
        self._until: OrderedDict[ObjectKey, float] = OrderedDict()
        self._damaged: set[ObjectKey] = set()

    def add(self, key: ObjectKey, *, damaged: bool) -> None:
        """Keep ``key`` out of lookups and loads; a ``damaged`` object must go before another one can come."""
        self.discard(key)
        self._until[key] = self._clock() + _TERM_S
        if damaged:
            self._damaged.add(key)
        if len(self._until) > _MAX_KEYS:
            self.discard(next(iter(self._until)))

    def discard(self, key: ObjectKey) -> None:
        """Let ``key`` be loaded again: its object was replaced, or is gone."""
        self._until.pop(key, None)
        self._damaged.discard(key)

    def is_damaged(self, key: ObjectKey) -> bool:
        """Whether what is stored under ``key`` is in the way of a good object."""
        return key in self and key in self._damaged

    def __contains__(self, key: ObjectKey) -> bool:
        until = self._until.get(key)
        if until is not None and self._clock() >= until:
            self.discard(key)
            return False
        return until is not None

    def __len__(self) -> int:
        return len(self._until)
