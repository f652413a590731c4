"""What these tests need where the repository's own configuration is not at hand."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from l2kit.errors import AdapterImportError
from l2kit.testing.leaks import leak_check, task_check, thread_and_file_check
from l2kit_nixl.agent import TransferAgent
from l2kit_nixl.testing import PoolProcess, running_pool

__all__ = ["leak_check", "task_check", "thread_and_file_check"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "service: needs a server")
    config.addinivalue_line("markers", "slow: takes more than a second or two")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def nixl_is_imported() -> None:
    """What NIXL imports is out of the way of the leak checks, which collect garbage after each test."""
    try:
        TransferAgent("POSIX", {}).close()
    except AdapterImportError as error:
        pytest.skip(str(error))
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[PoolProcess]:
    """One pool for all tests that can share one."""
    with running_pool() as running:
        yield running
