"""The conformance suite itself: it works in a project without any configuration, and no broken adapter passes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from l2kit.testing import leaks
from tests.unit.broken_adapters import BrokenAdapter, every_broken_adapter, leaked, stop

pytest_plugins = ["pytester"]

PROJECT = """
import pytest
from l2kit.config import build
from l2kit.registry import default_registry
from l2kit.serde import CodecChain
from l2kit.testing import AdapterConformance
from tests.unit import broken_adapters
from l2kit.memory_adapter import MemoryAdapter


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


class TestMemory(Suite):
    pass
"""


@pytest.fixture
def cleared_away() -> Iterator[None]:
    yield
    stop.set()
    while leaked:
        os.close(leaked.pop())


def outcomes_of(pytester: pytest.Pytester, *nodes: str) -> dict[str, set[str]]:
    """Run nodes of the project's file and return what happened in each."""
    record = pytester.inline_run("-p", "no:cacheprovider", *(f"test_project.py::{node}" for node in nodes))
    found: dict[str, set[str]] = {}
    for report in record.getreports("pytest_runtest_logreport"):
        assert isinstance(report, pytest.TestReport)
        if report.when == "call" or report.outcome != "passed":
            node = report.nodeid.split("::", 1)[1].split("[")[0]
            found.setdefault(node, set()).add(report.outcome)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("cleared_away")
def test_every_broken_adapter_is_caught(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "_PATIENCE_S", 0.3)  # here there are leaks to be waited for
    kinds = every_broken_adapter()
    assert len(kinds) >= 40
    classes = [f"class Test{k.__name__}(Suite):\n    kind = broken_adapters.{k.__name__}\n" for k in kinds]
    pytester.makepyfile(test_project=PROJECT + "\n\n".join(classes))
    found = outcomes_of(pytester, *(f"Test{kind.__name__}::{kind.caught_by}" for kind in kinds))
    passed = [kind for kind in kinds if "failed" not in found[f"Test{kind.__name__}::{kind.caught_by}"]]
    assert not passed, "the suite lets these broken adapters pass"


@pytest.mark.slow
def test_an_adapter_that_is_not_broken_passes_the_same_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_project=PROJECT)
    tests = sorted({kind.caught_by for kind in every_broken_adapter()})
    found = outcomes_of(pytester, *(f"TestMemory::{test}" for test in tests))
    assert len(found) == len(tests)
    assert not [node for node, outcomes in found.items() if "failed" in outcomes]


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
"""
    )
    names = ["Weakened", "Removed", "Excused", "Unexplained"]
    found = outcomes_of(pytester, *(f"Test{name}::test_no_test_is_missing" for name in names))
    caught = [name for name in names if found[f"Test{name}::test_no_test_is_missing"] == {"failed"}]
    assert caught == ["Weakened", "Removed", "Unexplained"]


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
    result = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
    outcomes = result.parseoutcomes()
    assert outcomes.get("passed", 0) > 40
    assert "failed" not in outcomes
    assert "errors" not in outcomes
    result.stdout.fnmatch_lines(["*needs the fixture adapter_url*", "*needs the hooks raw_read and raw_write*"])


def test_nothing_overridden_says_what_to_do(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("from l2kit.testing import AdapterConformance\nclass TestIt(AdapterConformance): pass\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "test_delete")
    result.stdout.fnmatch_lines(["*override the fixture adapter_url (or adapter)*"])


def test_every_fault_is_named_once() -> None:
    assert len({kind.__name__ for kind in every_broken_adapter()}) == len(every_broken_adapter())
    assert all(issubclass(kind, BrokenAdapter) for kind in every_broken_adapter())
