"""Servers, leak checks, and a place of its own on a server for each test."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest

from l2kit.testing.leaks import no_leaked_tasks, no_leaked_threads_or_files
from l2kit.testing.servers import RespServer, redis_server, valkey_server

__all__ = ["redis_server", "valkey_server"]


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks where the repository's own configuration is not at hand."""
    config.addinivalue_line("markers", "service: needs a Redis or Valkey server")
    config.addinivalue_line("markers", "slow: takes more than a second or two")


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


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> Iterator[str]:
    """A key prefix that no other test has; what is left under it afterwards is removed."""
    prefix = f"l2kit-test-{os.urandom(6).hex()}:"
    yield prefix
    for name in ("redis_server", "valkey_server"):
        if name in request.fixturenames:
            server: RespServer = request.getfixturevalue(name)
            remove_all(server, prefix)


def remove_all(server: RespServer, prefix: str) -> None:
    cursor = "0"
    while True:
        match server.command("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", 1000):
            case [bytes() as following, list() as names]:
                keys = [name for name in names if isinstance(name, bytes)]
                if keys:
                    server.command("UNLINK", *keys)
                cursor = following.decode()
            case reply:
                raise AssertionError(reply)
        if cursor == "0":
            return
