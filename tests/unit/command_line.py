"""For the tests of the commands: run them in this process, over real backends and over one that hurts on request."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from l2kit import open_adapter
from l2kit.adapter import KeyInfo, L2Adapter
from l2kit.cli import main
from l2kit.inventory import DatedKeyInfo, listing
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.sealed import read_sealed
from tests.unit.odd_tiers import OddAdapter, OddConfig, content, registry

Opens = Any  # a function from a URL, and options, to an adapter


class DatedConfig(OddConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``dates`` is when the n-th object was last used, in seconds since the epoch; ``stubborn`` refuses to delete."""

    dates: tuple[str, ...] = ()
    stubborn: bool = False


class DatedAdapter(OddAdapter):
    config_type = DatedConfig

    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        assert isinstance(self.config, DatedConfig)
        dates = map(float, self.config.dates)
        for name, stored in list(self._objects.items()):
            yield DatedKeyInfo(name, len(stored), next(dates))

    async def delete_one(self, key: ObjectKey) -> bool:
        assert isinstance(self.config, DatedConfig)
        if self.config.stubborn:
            raise OSError(30, "Read-only file system")
        return await super().delete_one(key)


def opens(url: str, **options: Any) -> L2Adapter[Any]:
    """``odd://`` and ``dated://``, whose objects outlive them on a shelf, besides all that is installed."""
    if url.startswith(("odd:", "dated:")):
        return registry(dated=DatedAdapter).adapter(url, **options)
    return open_adapter(url, **options)


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def report(self) -> Any:
        return json.loads(self.out)

    @property
    def keys(self) -> set[str]:
        """The keys that stand at the ends of lines."""
        return {line.rsplit(maxsplit=1)[-1] for line in self.out.splitlines() if line.endswith(".all")}


class CommandLine:
    """``l2kit`` in this process."""

    def __init__(self, folder: Path, captured: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._captured = captured

    def __call__(self, *arguments: object) -> Done:
        self._captured.readouterr()
        code = main([str(argument) for argument in arguments])
        return Done(code, *self._captured.readouterr())

    def url(self, kind: str, name: str = "one") -> str:
        """An empty place for objects; ``odd`` is memory."""
        return {
            "odd": f"odd://?shelf={self.folder}/{name}",
            "file": f"file://{self.folder}/{name}",
            "nvme": f"nvme://{self.folder}/{name}.slab?size_bytes=40MiB&direct=false",
        }[kind]


@pytest.fixture
def command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    for module in ("objects", "eviction", "archives"):
        monkeypatch.setattr(f"l2kit.cli.{module}.open_adapter", opens)
    handlers = list(logging.getLogger().handlers)
    yield CommandLine(tmp_path, capsys)
    logging.getLogger().handlers[:] = handlers


def key(number: int, namespace: str = "cli") -> ObjectKey:
    return ObjectKey(namespace, number.to_bytes(8, "big"))


def put(url: str, sizes: Mapping[ObjectKey, int]) -> None:
    """Store objects whose content belongs to their keys, one after the other."""

    async def store() -> None:
        async with opens(url) as adapter:
            for name, nbytes in sizes.items():
                obj = MemoryObj.wrap(content(name, nbytes), Layout.raw(nbytes))
                [outcome] = await adapter.submit_store_task([name], [obj])
                assert outcome.present, outcome

    anyio.run(store)


def load(url: str, keys: Sequence[ObjectKey]) -> None:
    """Use objects, one after the other."""

    async def use() -> None:
        async with opens(url) as adapter:
            for name in keys:
                [outcome] = await adapter.submit_load_task([name], [MemoryObj.allocate(Layout.raw(8 << 20))])
                assert outcome.loaded, outcome

    anyio.run(use)


def held(url: str) -> dict[ObjectKey, bytes]:
    """Every object as it lies there."""

    async def collect() -> dict[ObjectKey, bytes]:
        async with opens(url) as adapter, aclosing(listing(adapter)) as found:
            return {info.key: bytes(await read_sealed(adapter, info.key, info.size) or b"") async for info in found}

    return anyio.run(collect)
