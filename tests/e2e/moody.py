"""A storage plugin as a third party would write it: files in a folder, and moods that a test sets from outside.

``install`` makes it a distribution of its own in a folder for PYTHONPATH, with a real entry point, so that any l2kit in
any process finds it. The moods lie in a file next to the objects and count from the next operation on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import anyio

from l2kit.adapter import Capabilities, L2Adapter
from l2kit.config import AdapterConfig
from l2kit.errors import BackendError
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus

Operation = Literal["lookup", "load", "store"]
Mood = Literal["fine", "fails", "hangs", "misses", "damages"]


class MoodyConfig(AdapterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``path``: the folder."""

    path: str


class MoodyAdapter(L2Adapter[MoodyConfig]):
    """``moody:///folder``."""

    api_version = (1, 0)
    config_type = MoodyConfig
    capabilities = Capabilities(persistent=True, shared=True)

    async def open(self) -> None:
        self._folder = Path(self.config.path)

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        await self._mood("store")
        unfinished = self._path(key).with_suffix(".part")
        unfinished.write_bytes(b"".join(data))
        unfinished.rename(self._path(key))
        return StoreStatus.STORED

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        mood = await self._mood("load")
        if mood == "misses" or not self._path(key).exists():
            return None
        stored = bytearray(self._path(key).read_bytes())
        if mood == "damages":
            stored[-1] ^= 1
        position = 0
        for segment in into:
            part = stored[position : position + len(segment)]
            segment[: len(part)] = part
            position += len(part)
        return len(stored)

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        if await self._mood("lookup") == "misses":
            return [None] * len(keys)
        return [self._path(key).stat().st_size if self._path(key).exists() else None for key in keys]

    async def delete_one(self, key: ObjectKey) -> bool:
        there = self._path(key).exists()
        self._path(key).unlink(missing_ok=True)
        return there

    def _path(self, key: ObjectKey) -> Path:
        return self._folder / str(key).replace("/", "_")

    async def _mood(self, operation: Operation) -> Mood:
        with (self._folder / "operations").open("a") as log:
            log.write(f"{operation}\n")
        while (mood := moods(self._folder).get(operation, "fine")) == "hangs":  # noqa: ASYNC110 - a file sets no event
            await anyio.sleep(0.005)
        if mood == "fails":
            raise BackendError(f"{self.name}: not in the mood for a {operation}")
        return mood


def moods(folder: Path) -> dict[Operation, Mood]:
    """The moods of a folder."""
    try:
        found: dict[Operation, Mood] = json.loads((folder / "moods").read_text())
    except FileNotFoundError:
        found = {}
    return found


def set_moods(folder: Path, **wanted: Mood) -> None:
    """Set the moods of a folder; an operation that is not named is fine again."""
    (folder / "moods.new").write_text(json.dumps(wanted))
    (folder / "moods.new").rename(folder / "moods")


def operations(folder: Path, operation: Operation) -> int:
    """How often an operation was begun in a folder."""
    try:
        return (folder / "operations").read_text().split().count(operation)
    except FileNotFoundError:
        return 0


def install(site: Path) -> None:
    """Install this module below ``site`` as ``pip`` would install a distribution called ``l2kit-moody``."""
    shutil.copy(__file__, site / "l2kit_moody.py")
    metadata = site / "l2kit_moody-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: l2kit-moody\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)


ENTRY_POINTS: Final = "[l2kit.adapters]\nmoody = l2kit_moody:MoodyAdapter\n"
