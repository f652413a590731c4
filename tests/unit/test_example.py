"""``examples/l2kit-dirstore``: small, complete, and independent of this tree, as the README promises."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.unit.separate_plugin import ROOT, install, passed_tests

EXAMPLE = ROOT / "examples" / "l2kit-dirstore"


def test_it_has_at_most_80_lines_of_code() -> None:
    """Everything that a third party writes, docstrings too; only blank lines and comments are free."""
    files = [path for path in EXAMPLE.rglob("*") if path.suffix in {".py", ".toml"}]
    assert sorted(path.name for path in files) == ["l2kit_dirstore.py", "pyproject.toml", "test_dirstore.py"]
    lines = [line.strip() for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    assert len([line for line in lines if line and not line.startswith("#")]) <= 80


def test_it_needs_l2kit_and_nothing_else() -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dependencies"] == ["l2kit"]
    assert project["entry-points"] == {"l2kit.adapters": {"dirstore": "l2kit_dirstore:DirStoreAdapter"}}


@pytest.mark.slow
def test_it_passes_the_conformance_suite_where_it_is_installed(tmp_path: Path) -> None:
    install(EXAMPLE, tmp_path / "site")
    assert passed_tests(EXAMPLE, tmp_path / "site") > 70
