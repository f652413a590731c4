from pathlib import Path
from typing import Any

import pytest

from l2kit import L2Adapter, ObjectKey
from l2kit.testing import AdapterConformance


class TestDirStore(AdapterConformance):
    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"dirstore://{tmp_path}/objects"

    def raw_read(self, adapter: L2Adapter[Any], key: ObjectKey) -> bytes:
        return Path(adapter.config.path, key.encode()).read_bytes()

    def raw_write(self, adapter: L2Adapter[Any], key: ObjectKey, data: bytes) -> None:
        Path(adapter.config.path, key.encode()).write_bytes(data)

    def raw_unfinished(self, adapter: L2Adapter[Any]) -> list[str]:
        return [str(path) for path in Path(adapter.config.path).rglob(".tmp*")]
