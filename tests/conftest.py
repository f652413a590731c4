"""For all tests of this repository: asyncio only, and nothing may stay behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import settings

from l2kit.testing.leaks import no_leaked_tasks, no_leaked_threads_or_files

# How long an example takes depends on what else the machine does: it proves nothing.
settings.register_profile("l2kit", deadline=None)
settings.load_profile("l2kit")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def thread_and_file_check() -> Iterator[None]:
    with no_leaked_threads_or_files():
        yield


@pytest.fixture
async def task_check(thread_and_file_check: None) -> AsyncIterator[None]:
    async with no_leaked_tasks():
        yield


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest, thread_and_file_check: None) -> None:
    """Check tasks too where there is an event loop; only then can an async fixture be asked for."""
    if "anyio_backend" in request.fixturenames:
        request.getfixturevalue("task_check")
