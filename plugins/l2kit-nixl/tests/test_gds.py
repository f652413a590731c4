"""The adapter contract for ``nixl+gds://``, where the machine has the driver and cuFile."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from l2kit import ObjectKey
from l2kit.testing import AdapterConformance
from l2kit.testing.groups.base import Adapter

try:
    for library in ("libcuda.so.1", "libcufile.so.0"):
        ctypes.CDLL(library)
except OSError as error:
    pytest.skip(f"NIXL's plugin GDS needs a library that is missing here: {error}", allow_module_level=True)


@pytest.mark.slow
class TestNixlGds(AdapterConformance):
    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"nixl+gds://{tmp_path}/cache?max_bytes=1GiB"

    def raw_read(self, adapter: Adapter, key: ObjectKey) -> bytes | None:
        path = self._path(adapter, key)
        return path.read_bytes() if path.exists() else None

    def raw_write(self, adapter: Adapter, key: ObjectKey, data: bytes) -> None:
        self._path(adapter, key).write_bytes(data)

    def raw_unfinished(self, adapter: Adapter) -> list[str]:
        return [str(path) for path in Path(adapter.config.path, "unfinished").iterdir()]

    def _path(self, adapter: Adapter, key: ObjectKey) -> Path:
        return Path(adapter._files._path(key))  # type: ignore[attr-defined]
