"""Waiting for what a test needs: a predicate, never a time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 15.0) -> None:
    """Wait until ``condition`` holds, and fail the test when it does not within ``timeout_s``."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up:
            pytest.fail(f"{what} did not happen within {timeout_s:.0f} s")
        time.sleep(0.005)
