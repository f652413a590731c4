"""``make new-plugin``: what it makes is a plugin that passes at once, and what it refuses leaves the tree as it was."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest

from tests.unit.separate_plugin import ROOT, install, passed_tests, run

# Names that no plugin has, whatever somebody calls his own.
NAME = "plugin-under-test2"
SHORT = next(letter for letter in ascii_lowercase if not (ROOT / "plugins" / f"l2kit-{letter}").exists())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """This repository, with a ``pyproject.toml`` and a ``plugins`` folder of its own."""
    tree = tmp_path / "tree"
    (tree / "plugins").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", tree)
    shutil.copytree(ROOT / "plugins" / "_template", tree / "plugins" / "_template")
    for path in (ROOT / "Makefile", ROOT / "l2kit", ROOT / "connector", *ROOT.glob("plugins/l2kit-*")):
        (tree / path.relative_to(ROOT)).symlink_to(path)
    return tree


def make(tree: Path, name: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "new-plugin", f"NAME={name}", f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def tool_tables(tree: Path) -> Any:
    return tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))


def test_it_has_the_shape_of_the_template_and_none_of_its_names(tree: Path) -> None:
    done = make(tree, NAME)
    assert (done.returncode, done.stderr) == (0, "")
    assert "_EXTRAS" in done.stdout
    made = contents(tree / "plugins" / f"l2kit-{NAME}")
    template = contents(tree / "plugins" / "_template")
    expected = {path.replace("l2kit_template", "l2kit_plugin_under_test2") for path in template}
    assert set(made) == expected - {"conftest.py", "new_plugin.py"}
    for path, text in made.items():
        assert b"template" not in text.lower() or path == "LICENSE", path
    project = tomllib.loads(made["pyproject.toml"].decode())["project"]
    assert project["name"] == f"l2kit-{NAME}"
    assert project["entry-points"] == {"l2kit.adapters": {NAME: "l2kit_plugin_under_test2:PluginUnderTest2Adapter"}}


def test_every_list_in_pyproject_has_it_and_nothing_else_changes(tree: Path) -> None:
    before = tool_tables(tree)
    for name in (NAME, SHORT):
        assert make(tree, name).returncode == 0
    after = tool_tables(tree)
    version = before["project"]["version"]
    extras = after["project"]["optional-dependencies"]
    assert extras.pop(NAME) == [f"l2kit-{NAME}=={version}"]
    assert extras.pop(SHORT) == [f"l2kit-{SHORT}=={version}"]
    assert f",{NAME},{SHORT}," in extras["all"][0]
    extras["all"] = before["project"]["optional-dependencies"]["all"]
    after_paths = after["tool"]["mypy"]["mypy_path"].split(":")
    before_paths = before["tool"]["mypy"]["mypy_path"].split(":")
    assert [path for path in after_paths if path not in before_paths] == [
        f"$MYPY_CONFIG_FILE_DIR/plugins/l2kit-{NAME}",
        f"$MYPY_CONFIG_FILE_DIR/plugins/l2kit-{SHORT}",
    ]
    after["tool"]["mypy"]["mypy_path"] = before["tool"]["mypy"]["mypy_path"]
    imports = after["tool"]["importlinter"]
    independence = next(contract for contract in imports["contracts"] if contract["type"] == "independence")
    forbidden = next(contract for contract in imports["contracts"] if contract["type"] == "forbidden")
    for packages in (imports["root_packages"], independence["modules"], forbidden["forbidden_modules"]):
        assert packages.count("l2kit_plugin_under_test2") == packages.count(f"l2kit_{SHORT}") == 1
        packages[:] = [package for package in packages if package not in ("l2kit_plugin_under_test2", f"l2kit_{SHORT}")]
    assert after == before


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "must be lower-case letters, digits and single '-'"),
        ("My-Store", "must be lower-case letters, digits and single '-'"),
        ("my_store", "'my_store' must be lower-case letters"),
        ("my store", "'my store' must be lower-case letters"),
        ("3fs", "begin with a letter"),
        ("store-", "must be lower-case letters"),
        ("my--store", "must be lower-case letters"),
        ("../store", "must be lower-case letters"),
        ("x" * 25, "at most 24 characters"),
        ("posix", "plugins/l2kit-posix exists; nothing is overwritten"),
        ("vllm", "'vllm' is an extra of l2kit already"),
        ("all", "'all' is an extra of l2kit already"),
        ("valkey", "l2kit-redis has the scheme valkey:// already"),
        ("memory", "l2kit has the scheme memory:// already"),
    ],
)
def test_a_name_that_will_not_do_is_refused_with_the_rule(tree: Path, name: str, says: str) -> None:
    before = contents(tree)
    done = make(tree, name)
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert contents(tree) == before


def test_a_pyproject_with_other_lists_is_refused_before_anything_is_made(tree: Path) -> None:
    path = tree / "pyproject.toml"
    path.write_text(path.read_text(encoding="utf-8").replace('"l2kit_vllm"', "'l2kit_vllm'"), encoding="utf-8")
    before = contents(tree)
    done = make(tree, NAME)
    assert "mend new_plugin.py" in done.stderr
    assert contents(tree) == before


@pytest.mark.parametrize("name", [SHORT, NAME, "w" * 24])
def test_ruff_has_nothing_to_say(tree: Path, name: str) -> None:
    assert make(tree, name).returncode == 0
    folder = f"plugins/l2kit-{name}"
    run([sys.executable, "-m", "ruff", "check", "--no-cache", folder], cwd=tree)
    run([sys.executable, "-m", "ruff", "format", "--no-cache", "--check", folder], cwd=tree)


@pytest.mark.slow
def test_it_passes_mypy_and_import_linter(tree: Path) -> None:
    assert make(tree, NAME).returncode == 0
    folder = f"plugins/l2kit-{NAME}"
    mypy = [sys.executable, "-m", "mypy", "--cache-dir", str(tree / ".mypy_cache")]
    run([*mypy, f"{folder}/l2kit_plugin_under_test2"], cwd=tree)
    run([*mypy, f"{folder}/tests"], cwd=tree)
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    said = run([sys.executable, "-c", command, "--no-cache", "--no-logo"], cwd=tree, PYTHONPATH=str(tree / folder))
    assert "0 broken" in said


@pytest.mark.slow
def test_it_passes_its_conformance_tests_where_it_is_installed(tree: Path, tmp_path: Path) -> None:
    assert make(tree, NAME).returncode == 0
    install(tree / "plugins" / f"l2kit-{NAME}", tmp_path / "site")
    assert passed_tests(tree / "plugins" / f"l2kit-{NAME}", tmp_path / "site") > 70
