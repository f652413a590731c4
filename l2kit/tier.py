"""One L2 tier of a storage manager: an open adapter, how much patience it deserves, and its counters."""

from __future__ import annotations

from typing import Any, Final

import anyio

from l2kit.adapter import L2Adapter
from l2kit.errors import BackendTimeoutError, L2Error
from l2kit.metrics import Counters

TIER_COUNTERS: Final = (
    "lookup_hits",
    "lookup_misses",
    "lookup_failures",
    "loaded_objects",
    "loaded_bytes",
    "load_misses",
    "load_corrupt",
    "load_failures",
    "stored_objects",
    "stored_bytes",
    "store_present",
    "store_drops",
    "store_failures",
)


class Tier:
    """An adapter in its place among the tiers. Loop-bound, except for ``counters``."""

    def __init__(self, adapter: L2Adapter[Any]) -> None:
        """``adapter`` is entered by the storage manager."""
        self.adapter: Final = adapter
        self.name: Final = adapter.name
        self.counters: Final = Counters(TIER_COUNTERS)
        self.last_error: L2Error | None = None
        self._suspect = False
        self._unanswered = 0

    @property
    def healthy(self) -> bool:
        """False after an operation failed or timed out, until one succeeds."""
        return self.last_error is None

    @property
    def worth_waiting_for(self) -> bool:
        """False while the tier owes an answer that is overdue: lookups then go on without it.

        One unanswered lookup stays out as the probe that ends this; more would only pile up.
        """
        return not self._suspect

    @property
    def worth_asking(self) -> bool:
        """False for an overdue tier that has a lookup out already."""
        return not self._suspect or self._unanswered == 0

    def asked(self) -> None:
        """A lookup went out."""
        self._unanswered += 1

    def answered(self) -> None:
        """A lookup ended, however it did."""
        self._unanswered -= 1

    def succeeded(self) -> None:
        """The backend answered."""
        self.last_error = None
        self._suspect = False

    def failed(self, error: L2Error) -> None:
        """The backend failed; a time-out also costs it the patience of others."""
        self.last_error = error
        if isinstance(error, BackendTimeoutError):
            self._suspect = True

    def overdue(self) -> None:
        """A lookup was given up on before the tier answered."""
        self.failed(BackendTimeoutError(f"{self.name}: no answer by the deadline"))

    def deadline(self) -> float:
        """When work without a deadline of its own must end."""
        timeout_s: float = self.adapter.config.timeout_s
        return anyio.current_time() + timeout_s
