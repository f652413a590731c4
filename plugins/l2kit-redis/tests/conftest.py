"""Servers, leak checks, and a place of its own on a server for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from l2kit.testing.leaks import leak_check, task_check, thread_and_file_check
from l2kit.testing.servers import RespServer, redis_server, run_server, valkey_server

__all__ = ["leak_check", "redis_server", "task_check", "thread_and_file_check", "valkey_server"]


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks where the repository's own configuration is not at hand."""
    config.addinivalue_line("markers", "service: needs a Redis or Valkey server")
    config.addinivalue_line("markers", "slow: takes more than a second or two")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> Iterator[str]:
    """A key prefix that no other test has; what is left under it afterwards is removed."""
    prefix = f"l2kit-test-{os.urandom(6).hex()}:"
    yield prefix
    for name in ("redis_server", "valkey_server"):
        if name in request.fixturenames:
            server: RespServer = request.getfixturevalue(name)
            remove_all(server, prefix)


@pytest.fixture
def url(redis_server: RespServer, prefix: str) -> str:
    return f"{redis_server.url()}?key_prefix={prefix}"


@pytest.fixture
def own_server() -> Iterator[RespServer]:
    with run_server("redis") as server:
        if not server.manageable:
            pytest.skip("needs a server that may be stopped")
        yield server


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
