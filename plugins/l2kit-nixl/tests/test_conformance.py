"""The adapter contract, as the published suite checks it, for files and for a memory pool."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from l2kit import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit.testing import AdapterConformance
from l2kit.testing.groups.base import Adapter
from l2kit_nixl import pool_protocol as say
from l2kit_nixl.pool_client import PoolLink, PoolTarget
from l2kit_nixl.testing import FilesUnderneath, PoolProcess


@pytest.mark.slow
class TestNixlPosix(FilesUnderneath, AdapterConformance):
    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"nixl+posix://{tmp_path}/cache?max_bytes=1GiB"


@pytest.mark.slow
class TestNixlUcx(AdapterConformance):
    """All tests share one pool; it evicts what earlier ones left."""

    @pytest.fixture
    def adapter_url(self, pool: PoolProcess) -> str:
        return pool.url

    def raw_read(self, adapter: Adapter, key: ObjectKey) -> bytes | None:
        with _link(adapter) as link:
            [size] = link.ask(say.Look([key.encode()], hold=False), say.Found).sizes
            if size is None:
                return None
            data = bytearray(size)
            assert link.load([(key, [memoryview(data)])], _go_on) == [size]
            return bytes(data)

    def raw_write(self, adapter: Adapter, key: ObjectKey, data: bytes) -> None:
        with _link(adapter) as link:
            link.ask(say.Delete([key.encode()]), say.Flags)
            assert link.store([(key, [memoryview(data)])], _go_on) == [StoreStatus.STORED]

    def raw_unfinished(self, adapter: Adapter) -> list[str]:
        with _link(adapter) as link:
            holding = link.ask(say.Report(), say.Holding)
        return ["a reservation"] * holding.writing + ["in quarantine"] * holding.quarantined


def _go_on() -> None:
    """Nobody cancels what goes around the adapter."""


@contextmanager
def _link(adapter: Adapter) -> Iterator[PoolLink]:
    """Another client of the adapter's pool."""
    config = adapter.config
    link = PoolLink(PoolTarget("raw", config.host, config.port, config.path, None, os.urandom(16), 5.0, 5.0))
    try:
        yield link
    finally:
        link.close()
