"""Runs conformance suites inside a test, in a project of their own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest


def outcomes_of(pytester: pytest.Pytester, *nodes: str) -> dict[str, set[str]]:
    """Run nodes of ``test_project.py`` and return what happened in each, whatever its parameters."""
    record = pytester.inline_run("-p", "no:cacheprovider", "--tb=no", *(f"test_project.py::{node}" for node in nodes))
    found: dict[str, set[str]] = {}
    for report in record.getreports("pytest_runtest_logreport"):
        assert isinstance(report, pytest.TestReport)
        if report.when == "call" or report.outcome != "passed":
            node = report.nodeid.split("::", 1)[1].split("[")[0]
            found.setdefault(node, set()).add(report.outcome)
    return found


def not_caught(pytester: pytest.Pytester, project: str, kinds: Sequence[type]) -> Collection[str]:
    """Add a class to the project for each of ``kinds``; those whose ``caught_by`` does not fail."""
    classes = [f"class Test{kind.__name__}(Suite):\n    kind = KINDS[{kind.__name__!r}]\n" for kind in kinds]
    pytester.makepyfile(test_project="\n\n".join([project, *classes]))
    nodes = {kind.__name__: f"Test{kind.__name__}::{kind.caught_by}" for kind in kinds}  # type: ignore[attr-defined]
    found = outcomes_of(pytester, *nodes.values())
    return [name for name, node in nodes.items() if "failed" not in found[node]]
