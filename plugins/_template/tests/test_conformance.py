"""The adapter contract, as the published suite checks it."""

from __future__ import annotations

import pytest

from l2kit import ObjectKey
from l2kit.testing import AdapterConformance
from l2kit.testing.groups.base import Adapter


class TestTemplate(AdapterConformance):
    @pytest.fixture
    def adapter_url(self) -> str:
        return "template://"

    def raw_read(self, adapter: Adapter, key: ObjectKey) -> bytes | None:
        return self._objects(adapter).get(key.encode())

    def raw_write(self, adapter: Adapter, key: ObjectKey, data: bytes) -> None:
        self._objects(adapter)[key.encode()] = data

    def raw_unfinished(self, adapter: Adapter) -> list[str]:
        """Names of what unfinished stores left behind; a dictionary has none. Yours: temporary names, open uploads."""
        return []

    def _objects(self, adapter: Adapter) -> dict[str, bytes]:
        """What is stored, seen around the adapter: yours asks the storage system with another client."""
        objects: dict[str, bytes] = adapter._objects  # type: ignore[attr-defined]
        return objects
