"""The adapter contract, as the published suite checks it: on a file, striped over several, on loop devices."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from l2kit import ObjectKey
from l2kit.testing import AdapterConformance
from l2kit.testing.groups.base import Adapter
from l2kit_nvme.testing import SlabFiles


@pytest.mark.slow
class TestNvme(AdapterConformance):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Iterator[Path]:
        """Emptied at once: pytest would keep the slabs of three whole runs."""
        yield tmp_path
        for path in tmp_path.iterdir():
            path.unlink()

    @pytest.fixture
    def adapter_url(self, folder: Path) -> str:
        return f"nvme://{folder}/slab?size_bytes=128MiB"

    @pytest.fixture
    async def adapter(self, request: pytest.FixtureRequest, adapter_url: str) -> AsyncIterator[Adapter]:
        """Not entered for the histories, which open the URL themselves: a slab is open once at a time."""
        if request.node.originalname == "test_any_history_agrees_with_a_dict":
            yield self.open_adapter(adapter_url)
        else:
            async with self.open_adapter(adapter_url) as adapter:
                yield adapter

    def raw_read(self, adapter: Adapter, key: ObjectKey) -> bytes | None:
        slab = SlabFiles(adapter.config.members)
        record = slab.record(key)
        return None if record is None else slab.read(record)

    async def raw_write(self, adapter: Adapter, key: ObjectKey, data: bytes) -> None:
        """In place where the length stays; another length is another object, stored without an envelope of its own."""
        slab = SlabFiles(adapter.config.members)
        record = slab.record(key)
        if record is not None and record.size == len(data):
            slab.write(record, data)
        else:
            await adapter.delete_one(key)
            assert await adapter.store_one(key, [memoryview(data)]) == "stored"

    def raw_unfinished(self, adapter: Adapter) -> list[str]:
        """Slots that are neither free nor an object's."""
        taken = adapter._slab.catalog.used_bytes  # type: ignore[attr-defined]
        held = SlabFiles(adapter.config.members).used_bytes
        return [] if taken == held else [f"{taken - held} bytes of slots"]


@pytest.mark.slow
class TestPageCache(TestNvme):
    @pytest.fixture
    def adapter_url(self, folder: Path) -> str:
        return f"nvme://{folder}/slab?size_bytes=128MiB&direct=false"


@pytest.mark.slow
class TestFlushed(TestNvme):
    history_examples = 3

    @pytest.fixture
    def adapter_url(self, folder: Path) -> str:
        return f"nvme://{folder}/slab?size_bytes=128MiB&durability=data"


@pytest.mark.slow
class TestStriped(TestNvme):
    @pytest.fixture
    def adapter_url(self, folder: Path) -> str:
        return f"nvme://{folder}/a?size_bytes=48MiB&paths={folder}/b,{folder}/c"


@pytest.mark.slow
class TestLoopDevices(TestNvme):
    @pytest.fixture
    def adapter_url(self, devices: list[str]) -> str:
        return f"nvme://{devices[0]}?paths={devices[1]}"

    @pytest.fixture
    def devices(self, folder: Path) -> Iterator[list[str]]:
        """Two block devices of 64 MiB."""
        attached: list[str] = []
        try:
            for number in range(2):
                image = folder / f"image-{number}"
                with image.open("wb") as file:
                    file.truncate(64 << 20)
                made = subprocess.run(
                    ["losetup", "--find", "--show", "--direct-io=on", image],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if made.returncode:
                    pytest.skip(f"needs the right to make loop devices: {made.stderr.strip()}")
                attached.append(made.stdout.strip())
            yield attached
        finally:
            for device in attached:
                subprocess.run(["losetup", "--detach", device], check=True)
