"""The adapter contract, as the published suite checks it, on every way to an object store that runs here."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from l2kit import ObjectKey
from l2kit.testing import AdapterConformance
from l2kit.testing.groups.base import Adapter
from l2kit.testing.object_stores import ObjectStore
from l2kit_s3.fsspec_objects import UNFINISHED


def name_of(key: ObjectKey) -> str:
    """Below the prefix, written down a second time."""
    return ".".join(key.encode().rsplit("/", 1))


class OnStore(AdapterConformance):
    """The hooks that go around the adapter, with a plain client."""

    __test__ = False
    store_of_tests: ClassVar[ObjectStore]

    def name(self, adapter: Adapter, key: ObjectKey) -> str:
        return f"{adapter.config.prefix}/{name_of(key)}"

    def raw_read(self, adapter: Adapter, key: ObjectKey) -> bytes | None:
        return self.store_of_tests.read(self.name(adapter, key))

    def raw_write(self, adapter: Adapter, key: ObjectKey, data: bytes) -> None:
        self.store_of_tests.write(self.name(adapter, key), data)

    def raw_unfinished(self, adapter: Adapter) -> list[str]:
        return self.store_of_tests.uploads(adapter.config.prefix)


@pytest.mark.service
class TestS3(OnStore):
    __test__ = True

    @pytest.fixture
    def adapter_url(self, object_store: ObjectStore, prefix: str) -> str:
        type(self).store_of_tests = object_store
        return object_store.url(prefix, unsigned_payload="true")


@pytest.mark.service
class TestS3InSmallPieces(OnStore):
    """Many pieces, replaced objects, and no listing."""

    __test__ = True

    @pytest.fixture
    def adapter_url(self, object_store: ObjectStore, prefix: str) -> str:
        type(self).store_of_tests = object_store
        options = {"piece_bytes": "64KiB", "if_absent": "false", "list_pages": "0", "unsigned_payload": "true"}
        return object_store.url(prefix, **options)


@pytest.mark.service
class TestS3ThroughObstore(OnStore):
    """What Google and Azure use as well; payloads are signed."""

    __test__ = True

    @pytest.fixture
    def adapter_url(self, object_store: ObjectStore, prefix: str) -> str:
        type(self).store_of_tests = object_store
        return object_store.url(prefix, direct="false")


class TestFsspecFiles(AdapterConformance):
    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"fsspec+file://{tmp_path}/objects"

    def raw_read(self, adapter: Adapter, key: ObjectKey) -> bytes | None:
        path = Path(adapter.config.path) / name_of(key)
        return path.read_bytes() if path.exists() else None

    def raw_write(self, adapter: Adapter, key: ObjectKey, data: bytes) -> None:
        path = Path(adapter.config.path) / name_of(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_unfinished(self, adapter: Adapter) -> list[str]:
        return [path.name for path in (Path(adapter.config.path) / UNFINISHED).glob("*")]
