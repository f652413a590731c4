"""For all tests of this repository: asyncio only, and nothing may stay behind."""

from __future__ import annotations

import pytest
from hypothesis import settings

from l2kit.testing.leaks import leak_check, task_check, thread_and_file_check

__all__ = ["leak_check", "task_check", "thread_and_file_check"]

# How long an example takes depends on what else the machine does: it proves nothing.
settings.register_profile("l2kit", deadline=None)
settings.load_profile("l2kit")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
