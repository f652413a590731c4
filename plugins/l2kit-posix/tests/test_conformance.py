"""The adapter contract, as the published suite checks it, with and without a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from l2kit import ObjectKey
from l2kit.testing import AdapterConformance
from l2kit.testing.groups.base import Adapter
from l2kit_posix.names import object_path


@pytest.mark.slow
class TestFile(AdapterConformance):
    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/cache"

    def raw_read(self, adapter: Adapter, key: ObjectKey) -> bytes | None:
        path = self._path(adapter, key)
        return path.read_bytes() if path.exists() else None

    def raw_write(self, adapter: Adapter, key: ObjectKey, data: bytes) -> None:
        self._path(adapter, key).write_bytes(data)

    def raw_unfinished(self, adapter: Adapter) -> list[str]:
        staged = Path(adapter.config.path, "staging").rglob("*")
        return [str(path) for path in staged if path.is_file() and path.name != "lock"]

    def _path(self, adapter: Adapter, key: ObjectKey) -> Path:
        return Path(object_path(f"{adapter.config.path}/objects", key))


@pytest.mark.slow
class TestFileWithLimit(TestFile):
    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/cache?max_bytes=1GiB"
