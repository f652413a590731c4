"""Resilience as adapters around adapters: breaker, byte budget, retries, deadlines, reopening, in this order inwards.

`resilient` puts all of them around an adapter; storage managers do that to every tier. Each is of use alone, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from l2kit.adapter import L2Adapter
from l2kit.resilience.breaker import BreakerAdapter
from l2kit.resilience.byte_budget import ByteBudgetAdapter
from l2kit.resilience.config import ResilienceConfig
from l2kit.resilience.deadline import DeadlineAdapter
from l2kit.resilience.reopening import ReopeningAdapter
from l2kit.resilience.retry import RetryAdapter

__all__ = [
    "BreakerAdapter",
    "ByteBudgetAdapter",
    "DeadlineAdapter",
    "ReopeningAdapter",
    "ResilienceConfig",
    "RetryAdapter",
    "resilient",
]


def resilient(make: Callable[[], L2Adapter[Any]], config: ResilienceConfig) -> L2Adapter[Any]:
    """Put around the adapter that ``make`` makes, not entered yet, what ``config`` asks for.

    - A backend that is not there is opened later, by another adapter that ``make`` makes.
    - A deadline covers one call of the backend; a retry is a new call.
    - The byte budget is held while a key is retried, so retries never add to what is in flight.
    - The breaker stands outside: what it answers waits for nothing, and it judges what became of a key in the end.
    """
    if not config.enabled:
        return make()
    adapter = ReopeningAdapter(make, config) if config.reopen else make()
    adapter = DeadlineAdapter(adapter, config)
    if config.max_retries:
        adapter = RetryAdapter(adapter, config)
    adapter = ByteBudgetAdapter(adapter, config)
    return BreakerAdapter(adapter, config) if config.breaker else adapter
