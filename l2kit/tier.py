"""One L2 tier of a storage manager: an open adapter, how much patience it deserves, and its counters."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any, Final, Literal

import anyio

from l2kit.adapter import L2Adapter
from l2kit.batches import Lane
from l2kit.errors import BackendError, BackendTimeoutError, L2Error, TaskCancelledError
from l2kit.metrics import Counters
from l2kit.supervision import Supervisor

TIER_COUNTERS: Final = (
    "lookup_hits",
    "lookup_misses",
    "lookup_failures",
    "loaded_objects",
    "loaded_bytes",
    "load_misses",
    "load_corrupt",
    "load_failures",
    "hedged_loads",
    "hedges_won",
    "stored_objects",
    "stored_bytes",
    "store_present",
    "store_drops",
    "store_failures",
)

#: A tier may answer one kind of work and hang in another, so health and trust are kept for each kind apart.
Work = Literal["lookup", "load", "store"]

_LANES: Final[dict[Work, Lane]] = {"lookup": "read", "load": "read", "store": "write"}
_LOG_INTERVAL_S: Final = 10.0
_log = logging.getLogger(__name__)


class Tier:
    """An adapter in its place among the tiers. Loop-bound, except for ``counters``."""

    def __init__(self, adapter: L2Adapter[Any]) -> None:
        """``adapter`` is entered by the storage manager."""
        self.adapter: Final = adapter
        self.name: Final = adapter.name
        self.counters: Final = Counters(TIER_COUNTERS)
        self.supervisor: Final = Supervisor(f"tier {adapter.name}")
        self._errors: dict[Work, L2Error] = {}  # the last error of each kind of work that has not succeeded since
        self._failed_at: dict[Work, float] = {}  # in seconds of time.monotonic
        self._quiet_until: dict[Work, float] = {}
        self._overdue: set[Work] = set()
        self._unanswered: Counter[Work] = Counter()
        self._usual_wait_s = 0.0

    @property
    def healthy(self) -> bool:
        """False after some kind of work failed or timed out, until it works again, and while there is trouble."""
        return self.last_error is None

    @property
    def last_error(self) -> L2Error | None:
        """The last failure that nothing has made good since, or the trouble in the background; None when healthy."""
        for work, error in reversed(list(self._errors.items())):  # one step: other threads ask too
            if self._failed_at[work] >= self.adapter.worked_again_at(_LANES[work]):
                return error
        return self.supervisor.trouble or self.adapter.trouble

    def trusted(self, work: Work) -> bool:
        """False while an answer of this kind is overdue: nobody waits for the next one.

        One unanswered request stays out as the probe that ends this; more would only pile up.
        """
        return work not in self._overdue

    def worth_asking(self, work: Work) -> bool:
        """False for an overdue tier that has a request of this kind out already."""
        return work not in self._overdue or self._unanswered[work] == 0

    def asked(self, work: Work) -> None:
        """A request went out."""
        self._unanswered[work] += 1

    def answered(self, work: Work) -> None:
        """A request ended, however it did."""
        self._unanswered[work] -= 1

    def succeeded(self, work: Work) -> None:
        """The backend did what it was asked for."""
        self._errors.pop(work, None)
        self._overdue.discard(work)

    def failed(self, work: Work, error: L2Error) -> None:
        """The backend failed. Logged when it did not fail before, and not more often than now and then.

        What was cancelled says nothing about the backend.
        """
        if isinstance(error, TaskCancelledError):
            return
        now = time.monotonic()
        if self._errors.pop(work, None) is None and now >= self._quiet_until.get(work, 0.0):
            self._quiet_until[work] = now + _LOG_INTERVAL_S
            _log.warning("tier %s: a %s failed: %s", self.name, work, error)
        self._failed_at[work] = now
        self._errors[work] = error

    def broke(self, work: Work, error: Exception) -> None:
        """The adapter raised where it must hand out a task: closed, or a bug of the plugin."""
        if not isinstance(error, L2Error):
            _log.error("tier %s: the adapter failed to take a %s", self.name, work, exc_info=error)
            error = BackendError(f"{self.name}: the adapter failed to take a {work}: {type(error).__name__}")
        self.failed(work, error)

    def overdue(self, work: Work, error: L2Error | None = None) -> None:
        """The backend gave nothing by the deadline: besides its health, this costs it the patience of others."""
        self._overdue.add(work)
        self.failed(work, error or BackendTimeoutError(f"{self.name}: no answer to a {work} by the deadline"))

    def waited(self, wait_s: float) -> None:
        """So long passed between two objects of a load, or before its first."""
        self._usual_wait_s = max(wait_s, 0.95 * self._usual_wait_s)

    def patience_s(self, least_s: float) -> float:
        """How long to wait for the next object of a load before somebody else is asked for it, too."""
        return max(least_s, 2 * self._usual_wait_s)

    def deadline(self) -> float:
        """When work without a deadline of its own must end."""
        timeout_s: float = self.adapter.config.timeout_s
        return anyio.current_time() + timeout_s
