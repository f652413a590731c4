"""What the README and the how-to pages show is run here as it stands there."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import l2kit
from l2kit.config import load_storage_config
from l2kit.registry import ADAPTERS, CODECS, Registry
from l2kit.testing import AdapterConformance
from l2kit.testing.groups.base import Adapter

ROOT = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def block(language: str, containing: str) -> str:
    (found,) = [text for text in blocks(language) if containing in text]
    return found


def example() -> ModuleType:
    """The module that the README's adapter would be."""
    module = ModuleType("my_package")
    exec(compile(block("python", "class DictAdapter"), "README.md", "exec"), module.__dict__)
    return module


class ExamplePoint(EntryPoint):
    """The README's entry point, without a distribution to install."""

    def load(self) -> Any:
        return EXAMPLE.DictAdapter


EXAMPLE = example()
REGISTRY = Registry(
    {
        ADAPTERS: [ExamplePoint("dict", "my_package:DictAdapter", ADAPTERS)],
        CODECS: [EntryPoint("raw", "l2kit.serde:RawCodec", CODECS)],
    }
)


def objects(adapter: Any) -> dict[str, bytes]:
    """What the README's adapter holds."""
    held: dict[str, bytes] = adapter._objects
    return held


@pytest.mark.slow
class TestReadmeAdapter(AdapterConformance):
    """The suite that the README promises, on the adapter that the README shows."""

    @pytest.fixture
    def adapter_url(self) -> str:
        return "dict://"

    def open_adapter(self, url: str, **options: Any) -> Adapter:
        return REGISTRY.adapter(url, **options)

    def raw_read(self, adapter: Adapter, key: l2kit.ObjectKey) -> bytes | None:
        return objects(adapter).get(key.encode())

    def raw_write(self, adapter: Adapter, key: l2kit.ObjectKey, data: bytes) -> None:
        objects(adapter)[key.encode()] = data


@pytest.mark.anyio
async def test_the_python_example_prints_what_it_stored(capsys: pytest.CaptureFixture[str]) -> None:
    module: dict[str, Any] = {}
    exec(compile(block("python", "open_adapter"), "README.md", "exec"), module)
    await module["main"]()
    assert capsys.readouterr().out == "loaded b'hello'\n"


def test_the_five_line_config_is_a_storage_config(tmp_path: Path) -> None:
    path = tmp_path / "l2kit.toml"
    path.write_text(block("toml", "chunk_size"), encoding="utf-8")
    config = load_storage_config(path)
    assert config.chunk_size == 256
    assert config.l1.max_bytes == 8 << 30
    l2kit.open_storage(config)  # every tier and option in it exists; nothing is opened


def test_the_entry_point_example_is_toml() -> None:
    parsed = tomllib.loads(block("toml", "entry-points"))
    assert parsed["project"]["entry-points"]["l2kit.adapters"] == {"dict": "my_package:DictAdapter"}
