"""What the README and the how-to pages show is run here as it stands there."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import l2kit
import l2kit.testing
from l2kit.config import load_storage_config
from l2kit.l1 import L1Manager
from l2kit.layout import Layout
from l2kit.memory import PAGE_BYTES, MemoryObj
from l2kit.policy import GuardedPolicy
from l2kit.registry import ADAPTERS, CODECS, POLICIES, Registry
from l2kit.testing import AdapterConformance
from l2kit.testing.groups.base import Adapter
from tests.unit.odd_tiers import key
from tests.unit.test_l1 import keys_in, put

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
ADAPTER_PAGE = ROOT / "docs" / "how-to" / "write-an-adapter.md"
CODEC_PAGE = ROOT / "docs" / "how-to" / "write-a-codec.md"
POLICY_PAGE = ROOT / "docs" / "how-to" / "write-a-policy.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def block(page: Path, language: str, containing: str) -> str:
    (found,) = [text for text in blocks(page, language) if containing in text]
    return found


#: The modules that a reader would make of the pages.
EXAMPLES: dict[str, ModuleType] = {}


def module(name: str, page: Path, containing: str) -> ModuleType:
    """Run a block of the page as the module ``name``; it may import the others."""
    made = ModuleType(name)
    with pytest.MonkeyPatch.context() as patch:
        for other, example in EXAMPLES.items():
            patch.setitem(sys.modules, other, example)
        exec(compile(block(page, "python", containing), page.name, "exec"), made.__dict__)
    return made


class ExamplePoint(EntryPoint):
    """An entry point of a page, without a distribution to install."""

    def load(self) -> Any:
        return getattr(EXAMPLES[self.module], self.attr)


def example_points(page: Path, group: str) -> list[EntryPoint]:
    """The entry points that the page tells its reader to write."""
    project = tomllib.loads(block(page, "toml", "entry-points"))["project"]
    return [ExamplePoint(name, value, group) for name, value in project["entry-points"][group].items()]


EXAMPLES["my_package"] = module("my_package", README, "class DictAdapter")
EXAMPLES["my_codecs"] = module("my_codecs", CODEC_PAGE, "class DeflateCodec")
EXAMPLES["my_policies"] = module("my_policies", POLICY_PAGE, "class SegmentedLRUPolicy")
REGISTRY = Registry(
    {
        ADAPTERS: [
            *example_points(README, ADAPTERS),
            EntryPoint("memory", "l2kit.memory_adapter:MemoryAdapter", ADAPTERS),
        ],
        CODECS: [*example_points(CODEC_PAGE, CODECS), EntryPoint("raw", "l2kit.serde:RawCodec", CODECS)],
        POLICIES: example_points(POLICY_PAGE, POLICIES),
    }
)


def objects(adapter: Any) -> dict[str, bytes]:
    """What the README's adapter holds."""
    held: dict[str, bytes] = adapter._objects
    return held


README_TESTS = module("test_my_package", README, "class TestDict(AdapterConformance)")


@pytest.mark.slow
class TestReadmeAdapter(README_TESTS.TestDict):  # type: ignore[name-defined]
    """The suite that the README promises, as the README writes it, on the adapter that the README shows."""

    def open_adapter(self, url: str, **options: Any) -> Adapter:
        return REGISTRY.adapter(url, **options)

    def raw_read(self, adapter: Adapter, key: l2kit.ObjectKey) -> bytes | None:
        return objects(adapter).get(key.encode())

    def raw_write(self, adapter: Adapter, key: l2kit.ObjectKey, data: bytes) -> None:
        objects(adapter)[key.encode()] = data


@pytest.mark.anyio
async def test_the_python_example_prints_what_it_stored(capsys: pytest.CaptureFixture[str]) -> None:
    await module("readme", README, "open_adapter").main()
    assert capsys.readouterr().out == "loaded b'hello'\n"


def test_the_five_line_config_is_a_storage_config(tmp_path: Path) -> None:
    path = tmp_path / "l2kit.toml"
    path.write_text(block(README, "toml", "chunk_size"), encoding="utf-8")
    config = load_storage_config(path)
    assert config.chunk_size == 256
    assert config.l1.max_bytes == 8 << 30
    l2kit.open_storage(config)  # every tier and option in it exists; nothing is opened


def test_every_entry_point_on_the_pages_can_be_loaded() -> None:
    offered = {(plugin.group, plugin.name): plugin.error for plugin in REGISTRY.plugins()}
    assert set(offered) >= {(ADAPTERS, "dict"), (CODECS, "deflate"), (POLICIES, "slru")}
    assert set(offered.values()) == {None}


# --- write an adapter -------------------------------------------------------------------------------------------------


def test_the_class_on_the_adapter_page_is_that_of_the_example() -> None:
    """The example is run from its wheel; what the page shows of it is what is there, to the letter."""
    example = ROOT / "examples" / "l2kit-dirstore"
    assert block(ADAPTER_PAGE, "python", "class DirStoreAdapter") in (example / "l2kit_dirstore.py").read_text(
        encoding="utf-8"
    )
    shell = block(ADAPTER_PAGE, "sh", "cp -r")
    assert f"cp -r {example.relative_to(ROOT)} " in shell
    assert "make new-plugin NAME=" in shell


def test_the_adapter_page_shows_a_whole_test_module() -> None:
    tests = module("test_mystore", ADAPTER_PAGE, "AdapterConformance")
    assert issubclass(tests.TestMyStore, AdapterConformance)
    points = tomllib.loads(block(ADAPTER_PAGE, "toml", "entry-points"))["project"]["entry-points"]
    assert points == {ADAPTERS: {"mystore": "l2kit_mystore:MyStoreAdapter"}}


# --- write a codec ----------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_objects_pass_through_the_codec_of_the_page() -> None:
    data = b"the same again " * 1000
    layout = Layout.raw(len(data))
    (tier,) = tomllib.loads(block(CODEC_PAGE, "toml", "tiers"))["tiers"]
    async with REGISTRY.adapter(f"memory://?{tier.partition('?')[2]}") as adapter:
        [stored] = await adapter.submit_store_task([key(0)], [MemoryObj.wrap(data, layout)])
        assert 0 < stored.nbytes < len(data) // 10
        target = MemoryObj.allocate(layout)
        [loaded] = await adapter.submit_load_task([key(0)], [target])
        assert loaded.loaded, loaded
        assert target.tobytes() == data


TestDeflate = module("test_my_codecs", CODEC_PAGE, "CodecConformance").TestDeflate


# --- write a policy ---------------------------------------------------------------------------------------------------


def test_the_policy_page_tests_its_policy() -> None:
    module("test_my_policies", POLICY_PAGE, "def test_").test_what_was_read_stays_longer()


def test_l1_asks_the_policy_of_the_page(caplog: pytest.LogCaptureFixture) -> None:
    name = tomllib.loads(block(POLICY_PAGE, "toml", "[l1]"))["l1"]["policy"]
    l1 = L1Manager(3 * PAGE_BYTES, GuardedPolicy(REGISTRY.policy_class(name)()))
    put(l1, key(0))
    for lease in l1.acquire_prefix([key(0)], owner="test"):
        lease.release()
    put(l1, *(key(number) for number in range(1, 6)))
    assert keys_in(l1) == [key(0), key(4), key(5)], "what was read stays"
    assert caplog.text == ""
    l1.close()
