"""What these tests need where the repository's own configuration is not at hand."""

from __future__ import annotations

import pytest

from l2kit.testing.leaks import leak_check, task_check, thread_and_file_check

__all__ = ["leak_check", "task_check", "thread_and_file_check"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "service: needs a server")
    config.addinivalue_line("markers", "slow: takes more than a second or two")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
