"""Servers, leak checks, and a place of its own on a server for each test."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from l2kit import Layout, MemoryObj, ObjectKey
from l2kit.adapter import L2Adapter
from l2kit.errors import L2Error, TransientBackendError
from l2kit.testing.clusters import redis_cluster, valkey_cluster
from l2kit.testing.leaks import leak_check, task_check, thread_and_file_check
from l2kit.testing.sentinels import redis_sentinels, valkey_sentinels
from l2kit.testing.servers import RespServer, redis_server, run_server, valkey_server

__all__ = [
    "leak_check",
    "redis_cluster",
    "redis_sentinels",
    "redis_server",
    "task_check",
    "thread_and_file_check",
    "valkey_cluster",
    "valkey_sentinels",
    "valkey_server",
]

_SERVERS = ("redis_server", "valkey_server", "redis_cluster", "valkey_cluster", "redis_sentinels", "valkey_sentinels")


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
    for name in _SERVERS:
        if name in request.fixturenames:
            request.getfixturevalue(name).delete_all(prefix)


@pytest.fixture
def url(redis_server: RespServer, prefix: str) -> str:
    return f"{redis_server.url()}?key_prefix={prefix}"


@pytest.fixture
def own_server() -> Iterator[RespServer]:
    with run_server("redis") as server:
        if not server.manageable:
            pytest.skip("needs a server that may be stopped")
        yield server


class Traffic:
    """Stores, looks up and loads objects over and over, and compares every byte that comes back.

    An object's content follows from its number, so nothing but a miss or that content is right.

    Attributes:
        counts: outcomes so far, e.g. ``load.loaded``.
        errors: what failed, as text.
        good_rounds: rounds without a miss and without a failure since the last round with one.
        slowest_s: longest time that a batch took.
    """

    def __init__(self, adapter: L2Adapter[Any], *, objects: int, nbytes: int) -> None:
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.good_rounds = 0
        self.slowest_s = 0.0
        self._adapter = adapter
        self._nbytes = nbytes
        self._keys = [ObjectKey("traffic", number.to_bytes(16, "little")) for number in range(objects)]
        self._ended = False

    def content(self, number: int) -> bytes:
        return hashlib.shake_128(b"%d" % number).digest(self._nbytes)

    def end(self) -> None:
        self._ended = True

    async def run(self) -> None:
        """Go on until `end`."""
        while not self._ended:
            await self.round()

    async def round(self) -> None:
        """Store all, look all up, load all."""
        before = self.counts.copy()
        layout = Layout.raw(self._nbytes)
        sources = [MemoryObj.wrap(self.content(number), layout) for number in range(len(self._keys))]
        for stored in await self._timed(self._adapter.submit_store_task(self._keys, sources)):
            self._note("store", "stored" if stored.present else "failed", stored.error)
        try:
            found = await self._timed(self._adapter.submit_lookup_and_lock_task(self._keys))
        except L2Error as error:
            self._note("lookup", "failed", error)
        else:
            self.counts["lookup.missed"] += sum(not outcome.hit for outcome in found)
            hits = [key for key, outcome in zip(self._keys, found, strict=True) if outcome.hit]
            await self._adapter.submit_unlock_task(hits)
        targets = [MemoryObj.wrap(bytearray(self._nbytes), layout) for _ in self._keys]
        loads = await self._timed(self._adapter.submit_load_task(self._keys, targets))
        for number, (loaded, target) in enumerate(zip(loads, targets, strict=True)):
            self._note("load", "missed" if loaded.error is None and not loaded.loaded else loaded.status, loaded.error)
            if loaded.loaded:
                assert target.tobytes() == self.content(number), f"wrong bytes in object {number}"
        bad = [name for name in self.counts - before if not name.endswith((".stored", ".loaded"))]
        self.good_rounds = 0 if bad else self.good_rounds + 1

    async def good(self, rounds: int = 3, timeout_s: float = 60.0) -> None:
        """Wait until so many rounds in a row from now on are without a miss and without a failure."""
        self.good_rounds = 0
        with anyio.fail_after(timeout_s):
            while self.good_rounds < rounds:  # noqa: ASYNC110 - the rounds of another task
                await anyio.sleep(0.01)

    async def _timed(self, task: Any) -> Any:
        started = anyio.current_time()
        try:
            return await task
        finally:
            self.slowest_s = max(self.slowest_s, anyio.current_time() - started)

    def _note(self, what: str, outcome: str, error: L2Error | None) -> None:
        self.counts[f"{what}.{outcome}"] += 1
        if error is not None:
            assert isinstance(error, TransientBackendError), repr(error)
            self.errors.append(f"{what}: {error}")


@pytest.fixture
def traffic() -> Callable[..., Traffic]:
    """Makes `Traffic` for an adapter."""

    def make(adapter: L2Adapter[Any], *, objects: int = 40, nbytes: int = 20_000) -> Traffic:
        return Traffic(adapter, objects=objects, nbytes=nbytes)

    return make
