"""`Circuit`: when to leave a backend alone, and when to ask it again. Pure: time comes in, decisions come out.

After M. Nygard, "Release It!" (2007), chapter 5, with the failure share over the latest calls in place of a count.
"""

from __future__ import annotations

import random
from collections import deque
from enum import StrEnum
from typing import Final

from l2kit.errors import L2Error
from l2kit.resilience.config import ResilienceConfig


class CircuitState(StrEnum):
    """Closed lets calls through, open rejects them, half-open rejects all but the probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Circuit:
    """One circuit. Loop-bound; reading :attr:`state` and :attr:`error` is safe from any thread."""

    def __init__(self, config: ResilienceConfig) -> None:
        """Closed, and without a past."""
        self._config = config
        self._calls: deque[bool] = deque(maxlen=config.breaker_calls)  # True for a failure
        self._needed: Final = max(1, config.breaker_calls // 4)
        self._pause_s = config.breaker_pause_s
        self.state = CircuitState.CLOSED
        self.error: L2Error | None = None

    @property
    def closed(self) -> bool:
        """Whether calls go through."""
        return self.state is CircuitState.CLOSED

    def succeeded(self) -> None:
        """A call was answered. Late answers of an open circuit do not count: the probe decides."""
        if self.closed:
            self._calls.append(False)

    def failed(self, error: L2Error) -> bool:
        """A call failed; True when that opened the circuit."""
        if not self.closed:
            return False
        self._calls.append(True)
        failures = sum(self._calls)
        if len(self._calls) < self._needed or failures < self._config.breaker_failures * len(self._calls):
            return False
        self.state, self.error = CircuitState.OPEN, error
        return True

    def next_pause_s(self) -> float:
        """How long to wait before the next probe: with jitter, so that many nodes do not ask at once."""
        return self._pause_s * random.uniform(0.75, 1.25)

    def probing(self) -> None:
        """The pause is over and a probe is on its way."""
        self.state = CircuitState.HALF_OPEN

    def probe_failed(self, error: L2Error) -> None:
        """Open again, for longer."""
        self.state, self.error = CircuitState.OPEN, error
        self._pause_s = min(2 * self._pause_s, self._config.breaker_max_pause_s)

    def probe_succeeded(self) -> None:
        """Closed, and what was before is forgotten."""
        self.state, self.error = CircuitState.CLOSED, None
        self._calls.clear()
        self._pause_s = self._config.breaker_pause_s
