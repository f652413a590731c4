"""The registry over distributions on disk: five ways to fail, five errors, and a listing that hides none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from textwrap import dedent

import pytest

from l2kit.adapter import API_VERSION, Capabilities
from l2kit.errors import (
    AdapterConflictError,
    AdapterContractError,
    AdapterImportError,
    AdapterNotFoundError,
    ConfigError,
)
from l2kit.memory_adapter import MemoryAdapter
from l2kit.registry import ADAPTERS, CODECS, COMMANDS, GROUPS, POLICIES, Registry, default_registry, entry_name

ADAPTER = """
    from l2kit.adapter import Capabilities, L2Adapter
    from l2kit.config import AdapterConfig
    from l2kit.memory_adapter import MemoryAdapter

    class Good(MemoryAdapter):
        pass

    class OtherAPI(MemoryAdapter):
        api_version = (7, 3)

    class Newer(MemoryAdapter):
        api_version = (1, 99)

    class Silent(L2Adapter[AdapterConfig]):
        capabilities = Capabilities(persistent=False, shared=False)

    class Incomplete(L2Adapter[AdapterConfig]):
        api_version = (1, 0)
        capabilities = Capabilities(persistent=False, shared=False)
        async def delete_one(self, key):
            return False

    class Undeclared(MemoryAdapter):
        capabilities = None

    def function():
        pass
"""

Install = Callable[..., None]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder on the import path; what is imported from it is forgotten again."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def install(site: Path) -> Install:
    """Install a distribution: its metadata, its entry points and a module."""

    def install(name: str, version: str, group: str, points: dict[str, str], module: str = "", code: str = "") -> None:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = "".join(f"{point} = {value}\n" for point, value in points.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")
        if module:
            (site / f"{module}.py").write_text(dedent(code))

    return install


def registry(site: Path) -> Registry:
    found = [point for dist in distributions(path=[str(site)]) for point in dist.entry_points]
    return Registry({group: [point for point in found if point.group == group] for group in GROUPS})


class TestFiveFailures:
    def test_nobody_claims_the_name(self, site: Path, install: Install) -> None:
        install("good", "1.0", ADAPTERS, {"good": "good_adapter:Good"})
        with pytest.raises(AdapterNotFoundError) as caught:
            registry(site).adapter("godo://x")
        assert str(caught.value) == "adapters: no installed distribution offers 'godo'; did you mean 'good'?"

    @pytest.mark.parametrize(
        ("scheme", "extra"),
        [("file", "posix"), ("redis", "redis"), ("rediss", "redis"), ("valkey", "redis"), ("redis+unix", "redis")],
    )
    def test_nobody_claims_it_and_it_is_one_of_ours(self, site: Path, scheme: str, extra: str) -> None:
        with pytest.raises(AdapterNotFoundError) as caught:
            registry(site).adapter(f"{scheme}://x")
        assert f"pip install 'l2kit[{extra}]'" in str(caught.value)

    @pytest.mark.parametrize(
        ("code", "cause"),
        [
            ("import a_library_that_is_not_there", ModuleNotFoundError),
            ("raise RuntimeError('no such device')", RuntimeError),
            ("class Good: oops oops", SyntaxError),
            ("", AttributeError),
        ],
    )
    def test_its_import_fails(self, site: Path, install: Install, code: str, cause: type[Exception]) -> None:
        install("broken-plugin", "3.2.1", ADAPTERS, {"broken": "broken_module:Good"}, "broken_module", code)
        with pytest.raises(AdapterImportError) as caught:
            registry(site).adapter("broken://x")
        assert "'broken' of broken-plugin 3.2.1 cannot be imported" in str(caught.value)
        assert isinstance(caught.value.__cause__, cause)
        assert cause.__name__ in str(caught.value)

    def test_two_claim_it(self, site: Path, install: Install) -> None:
        install("one-plugin", "1.0", ADAPTERS, {"dup": "one_adapter:Good"}, "one_adapter", ADAPTER)
        install("other-plugin", "2.0", ADAPTERS, {"dup": "other_adapter:Good"}, "other_adapter", ADAPTER)
        with pytest.raises(AdapterConflictError) as caught:
            registry(site).adapter("dup://x")
        assert "'dup' is claimed by one-plugin 1.0 and other-plugin 2.0" in str(caught.value)
        assert "one_adapter" not in sys.modules, "neither is imported"

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("OtherAPI", f"adapter API 7.3, this l2kit has {API_VERSION[0]}.{API_VERSION[1]}"),
            ("Silent", "Silent does not say for which contract it was written; add api_version = (1, "),
            ("Incomplete", "Incomplete does not implement load_one, lookup_many, store_one"),
            ("Undeclared", "Undeclared does not declare its capabilities"),
            ("function", "is no subclass of l2kit.L2Adapter"),
        ],
    )
    def test_it_breaks_the_contract(self, site: Path, install: Install, name: str, text: str) -> None:
        install("wrong", "1.0", ADAPTERS, {"wrong": f"wrong_adapter:{name}"}, "wrong_adapter", ADAPTER)
        with pytest.raises(AdapterContractError) as caught:
            registry(site).adapter("wrong://x")
        assert "'wrong'" in str(caught.value)
        assert text in str(caught.value)

    def test_a_bad_option(self, site: Path, install: Install) -> None:
        install("good", "1.0", ADAPTERS, {"good": "good_adapter:Good"}, "good_adapter", ADAPTER)
        with pytest.raises(ConfigError, match=r"^good: unknown option 'max_byte'; did you mean 'max_bytes'\?$"):
            registry(site).adapter("good://?max_byte=7")
        with pytest.raises(ConfigError, match=r"^my tier: max_bytes: "):
            registry(site).adapter({"url": "good://", "name": "my tier", "max_bytes": 0})

    def test_the_five_are_different(self) -> None:
        kinds = [AdapterNotFoundError, AdapterConflictError, AdapterImportError, AdapterContractError]
        assert not any(issubclass(one, other) for one in kinds for other in kinds if one is not other)
        assert not any(issubclass(ConfigError, kind) for kind in kinds)


class TestAdapters:
    def test_options_come_from_the_url_a_mapping_and_keywords(self, site: Path, install: Install) -> None:
        install("good", "1.0", ADAPTERS, {"good": "good_adapter:Good"}, "good_adapter", ADAPTER)
        made = registry(site).adapter("good://?max_bytes=1KiB&timeout_s=3", timeout_s=4)
        assert (made.name, made.config.max_bytes, made.config.timeout_s) == ("good", 1024, 4.0)
        made = registry(site).adapter({"url": "good://?timeout_s=3", "name": "warm", "max_bytes": 5}, max_concurrency=2)
        assert (made.name, made.config.max_bytes, made.config.max_concurrency) == ("warm", 5, 2)

    def test_two_instances_share_nothing(self, site: Path, install: Install) -> None:
        install("good", "1.0", ADAPTERS, {"good": "good_adapter:Good"}, "good_adapter", ADAPTER)
        found = registry(site)
        one, other = found.adapter("good://", max_bytes=1), found.adapter("good://", max_bytes=2)
        assert (one.config.max_bytes, other.config.max_bytes) == (1, 2)

    def test_a_newer_minor_version_is_taken(self, site: Path, install: Install) -> None:
        install("good", "1.0", ADAPTERS, {"newer": "good_adapter:Newer"}, "good_adapter", ADAPTER)
        registry(site).adapter("newer://")

    def test_a_scheme_with_a_plus(self, site: Path, install: Install) -> None:
        assert entry_name("redis+unix") == "redis_unix"
        install("good", "1.0", ADAPTERS, {"good_plus": "good_adapter:Good"}, "good_adapter", ADAPTER)
        registry(site).adapter("good+plus://")

    @pytest.mark.parametrize("tier", [{}, {"url": 7}, {"name": "x"}])
    def test_a_tier_without_a_url(self, site: Path, tier: dict[str, object]) -> None:
        with pytest.raises(ConfigError, match="url"):
            registry(site).adapter(tier)

    def test_a_codec_that_is_not_there_is_named(self, site: Path, install: Install) -> None:
        install("good", "1.0", ADAPTERS, {"good": "good_adapter:Good"}, "good_adapter", ADAPTER)
        with pytest.raises(AdapterNotFoundError, match="codecs: no installed distribution offers 'zstd'"):
            registry(site).adapter("good://?codecs=zstd")


CODEC = """
    from l2kit.serde import RawCodec

    class Level(RawCodec):
        codec_id = "level"
        def __init__(self, level=3):
            self.level = level

    class Misnamed(RawCodec):
        codec_id = "another"
"""


class TestCodecs:
    def test_one_is_made_with_its_parameters(self, site: Path, install: Install) -> None:
        install("codec", "1.0", CODECS, {"level": "level_codec:Level"}, "level_codec", CODEC)
        made = registry(site).codec("level", {"level": 9})
        assert made.codec_id == "level"
        with pytest.raises(ConfigError, match=r"codecs: 'level'.*depth"):
            registry(site).codec("level", {"depth": 9})

    @pytest.mark.parametrize("value", ["level_codec:Misnamed", "json:loads"])
    def test_what_is_none_breaks_the_contract(self, site: Path, install: Install, value: str) -> None:
        install("codec", "1.0", CODECS, {"level": value}, "level_codec", CODEC)
        with pytest.raises(AdapterContractError, match=r"'level' must be a subclass of l2kit\.Codec"):
            registry(site).codec("level", {})


class TestListing:
    def test_it_shows_what_works_and_why_the_rest_does_not(self, site: Path, install: Install) -> None:
        points = {"good": "list_adapter:Good", "old": "list_adapter:OtherAPI"}
        install("plugin-a", "1.0", ADAPTERS, points, "list_adapter", ADAPTER)
        install("plugin-b", "2.0", ADAPTERS, {"broken": "no_such_module:X", "old": "no_such_module:Y"})
        install("plugin-c", "3.0", CODECS, {"level": "list_codec:Level"}, "list_codec", CODEC)
        install("plugin-d", "4.0", POLICIES, {"fancy": "json:loads"})
        listed = {(info.group, info.name, info.distribution): info for info in registry(site).plugins()}
        assert len(listed) == 6
        good = listed[ADAPTERS, "good", "plugin-a"]
        assert (good.version, good.api_version, good.error) == ("1.0", "1.0", None)
        assert isinstance(good.capabilities, Capabilities)
        for name, distribution, text in [
            ("broken", "plugin-b", "cannot be imported: ModuleNotFoundError"),
            ("old", "plugin-a", "claimed by plugin-a 1.0 and plugin-b 2.0"),
            ("old", "plugin-b", "claimed by plugin-a 1.0 and plugin-b 2.0"),
        ]:
            error = listed[ADAPTERS, name, distribution].error
            assert error is not None
            assert text in error
        assert listed[CODECS, "level", "plugin-c"].error is None
        assert listed[POLICIES, "fancy", "plugin-d"].version == "4.0"

    def test_what_is_installed_here(self) -> None:
        listed = {(info.group, info.name): info for info in default_registry().plugins()}
        memory = listed[ADAPTERS, "memory"]
        assert (memory.distribution, memory.error) == ("l2kit", None)
        assert memory.capabilities == MemoryAdapter.capabilities
        assert listed[CODECS, "raw"].error is None
        assert default_registry() is default_registry()


class TestCommands:
    def test_a_plugin_adds_one(self, site: Path, install: Install) -> None:
        code = """
            def main(arguments):
                return len(arguments)
            NOTHING = 7
        """
        points = {"count": "commands_of_it:main", "broken": "commands_of_it:NOTHING"}
        install("adds", "1.0", COMMANDS, points, "commands_of_it", code)
        found = registry(site)
        assert found.commands() == ["broken", "count"]
        assert found.command("count")(["a", "b"]) == 2
        with pytest.raises(AdapterContractError, match="'broken' is 7, no function"):
            found.command("broken")
        assert [plugin.error is None for plugin in found.plugins() if plugin.group == COMMANDS] == [False, True]
