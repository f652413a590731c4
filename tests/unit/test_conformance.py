"""The conformance suite itself: it works in a project without any configuration, and no broken adapter passes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from l2kit.testing import AdapterConformance, leaks
from l2kit.testing.groups.histories import HistoryTests
from tests.unit.broken_adapters import BrokenAdapter, every_broken_adapter, leaked, stop
from tests.unit.inner_pytest import not_caught, outcomes_of

pytest_plugins = ["pytester"]

PROJECT = """
import pytest
from l2kit.config import build
from l2kit.registry import default_registry
from l2kit.serde import CodecChain
from l2kit.testing import AdapterConformance
from tests.unit.broken_adapters import every_broken_adapter
from l2kit.memory_adapter import MemoryAdapter

KINDS = {kind.__name__: kind for kind in every_broken_adapter()}


class Suite(AdapterConformance):
    kind = MemoryAdapter
    close_bound_s = 0.9

    @pytest.fixture
    def adapter_url(self):
        return "memory://"

    def open_adapter(self, url, **options):
        config = build(self.kind.config_type, options, where="broken")
        return self.kind(config, name="broken", codecs=CodecChain(), codec_source=default_registry())

    def raw_read(self, adapter, key):
        return adapter._objects.get(key)

    def raw_write(self, adapter, key, data):
        adapter._objects[key] = data

    def raw_unfinished(self, adapter):
        return getattr(adapter, "unfinished", [])

    def raw_time_to_live_s(self, adapter, key):
        return adapter.time_to_live_s


class TestMemory(Suite):
    pass
"""


@pytest.fixture
def cleared_away() -> Iterator[None]:
    yield
    stop.set()
    while leaked:
        os.close(leaked.pop())


@pytest.mark.slow
@pytest.mark.usefixtures("cleared_away")
def test_every_broken_adapter_is_caught(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "_PATIENCE_S", 0.3)  # here there are leaks to be waited for
    assert not not_caught(pytester, PROJECT, every_broken_adapter()), "the suite lets these broken adapters pass"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in every_broken_adapter() if "histor" in kind.caught_by])
def test_some_faults_show_in_histories_only(pytester: pytest.Pytester, kind: type[BrokenAdapter]) -> None:
    pytester.makepyfile(test_project=f"{PROJECT}\n\nclass TestIt(Suite):\n    kind = KINDS[{kind.__name__!r}]\n")
    found = outcomes_of(pytester, "TestIt")
    failed = {node.split("::")[1] for node, outcomes in found.items() if "failed" in outcomes}
    assert kind.caught_by in failed
    assert failed <= {name for name in dir(HistoryTests) if name.startswith("test_")}


@pytest.mark.slow
def test_an_adapter_that_is_not_broken_passes_the_same_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_project=PROJECT)
    tests = sorted({kind.caught_by for kind in every_broken_adapter()})
    found = outcomes_of(pytester, *(f"TestMemory::{test}" for test in tests))
    assert len(found) == len(tests)
    assert not [node for node, outcomes in found.items() if "failed" in outcomes]


def test_every_test_of_the_suite_is_known_to_catch_a_fault() -> None:
    tests = {name for name in dir(AdapterConformance) if name.startswith("test_")}
    proved = {kind.caught_by for kind in every_broken_adapter()}
    assert tests - proved == {"test_no_test_is_missing"}  # that one catches a broken suite, below
    assert proved <= tests


def test_a_test_that_is_weakened_or_removed_fails_the_suite(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_project=f"""{PROJECT}

class TestWeakened(Suite):
    async def test_delete(self, adapter):
        pass

class TestRemoved(Suite):
    test_delete = None

class TestExcused(Suite):
    @pytest.mark.xfail(reason="this backend is write-once")
    async def test_delete(self, adapter):
        pytest.fail("not here")

class TestUnexplained(Suite):
    @pytest.mark.xfail
    async def test_delete(self, adapter):
        pytest.fail("not here")

class TestHelped(Suite):
    async def expect(self, adapter, objects):
        pass

class TestLeaksAllowed(Suite):
    @pytest.fixture(autouse=True)
    def no_leaks(self):
        pass

class TestHooked(Suite):
    close_bound_s = 20.0
    def raw_read(self, adapter, key):
        return None
    def mine(self):
        pass
"""
    )
    names = ["Weakened", "Removed", "Excused", "Unexplained", "Helped", "LeaksAllowed", "Hooked"]
    found = outcomes_of(pytester, *(f"Test{name}::test_no_test_is_missing" for name in names))
    caught = [name for name in names if found[f"Test{name}::test_no_test_is_missing"] == {"failed"}]
    assert caught == ["Weakened", "Removed", "Unexplained", "Helped", "LeaksAllowed"]


def test_the_test_that_finds_weakened_tests_cannot_be_removed() -> None:
    with pytest.raises(TypeError, match=r"Bad\.test_no_test_is_missing"):
        type("Bad", (AdapterConformance,), {"test_no_test_is_missing": None})


def test_an_entered_adapter_is_enough(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_project="""
import pytest
import l2kit
from l2kit.testing import AdapterConformance

class TestIt(AdapterConformance):
    @pytest.fixture
    async def adapter(self):
        async with l2kit.open_adapter("memory://") as adapter:
            yield adapter
"""
    )
    result = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider", "-k", "not cancelled")
    outcomes = result.parseoutcomes()
    assert outcomes.get("passed", 0) > 40
    assert "failed" not in outcomes
    assert "errors" not in outcomes
    result.stdout.fnmatch_lines(["*needs the fixture adapter_url*", "*needs the hooks raw_read and raw_write*"])


def test_nothing_overridden_says_what_to_do(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("from l2kit.testing import AdapterConformance\nclass TestIt(AdapterConformance): pass\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "test_delete")
    result.stdout.fnmatch_lines(["*override the fixture adapter_url (or adapter)*"])


def test_every_fault_has_a_name_and_a_docstring_of_its_own() -> None:
    kinds = every_broken_adapter()
    assert len({kind.__name__ for kind in kinds}) == len(kinds)
    assert len({vars(kind)["__doc__"] for kind in kinds}) == len(kinds)
    assert all("caught_by" in vars(kind) for kind in kinds)
