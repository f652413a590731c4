"""The adapter contract, as the published suite checks it: on disk and in memory, past the page cache, flushed."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
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
        return [str(path) for path in staged if path.is_file() and path.name not in ("lock", "tally")]

    def _path(self, adapter: Adapter, key: ObjectKey) -> Path:
        return Path(object_path(f"{adapter.config.path}/objects", key))


@pytest.mark.slow
class TestFileWithLimit(TestFile):
    """And with names that are forced to the device."""

    history_examples = 3

    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/cache?max_bytes=1GiB&fsync=full"


@pytest.mark.slow
class TestFileDirect(TestFile):
    history_examples = 3

    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/cache?direct=true&fsync=data"


@pytest.mark.slow
class TestFileExclusive(TestFile):
    history_examples = 3

    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/cache?exclusive=true"

    @pytest.fixture
    async def adapter(self, request: pytest.FixtureRequest, adapter_url: str) -> AsyncIterator[Adapter]:
        """Not entered for the histories, which open the URL themselves."""
        if request.node.originalname == "test_any_history_agrees_with_a_dict":
            yield self.open_adapter(adapter_url)
        else:
            async with self.open_adapter(adapter_url) as adapter:
                yield adapter


@pytest.mark.slow
class TestFileInMemory(TestFile):
    """A tmpfs, which knows O_DIRECT since Linux 6.6."""

    history_examples = 3

    @pytest.fixture(params=["", "?direct=true"], ids=["page cache", "direct"])
    def adapter_url(self, request: pytest.FixtureRequest) -> Iterator[str]:
        shm = Path("/dev/shm")
        if not shm.is_dir():
            pytest.skip("needs a tmpfs at /dev/shm")
        with tempfile.TemporaryDirectory(prefix="l2kit-posix-", dir=shm) as folder:
            yield f"file://{folder}/cache{request.param}"
