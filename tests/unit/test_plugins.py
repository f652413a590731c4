"""First-party plugins have one shape: who knows one of them finds his way in all, and the template has it too."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from l2kit.registry import GROUPS

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "plugins" / "_template"
PLUGINS = [*sorted(ROOT.glob("plugins/l2kit-*")), TEMPLATE]

plugins = pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
first_party = pytest.mark.parametrize("plugin", PLUGINS[:-1], ids=lambda plugin: plugin.name)


def toml(path: Path) -> Any:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def distribution(plugin: Path) -> str:
    return "l2kit-template" if plugin == TEMPLATE else plugin.name


def package(plugin: Path) -> str:
    return distribution(plugin).replace("-", "_")


@plugins
def test_files(plugin: Path) -> None:
    module = plugin / package(plugin)
    for path in (plugin / "README.md", module / "__init__.py", module / "py.typed", plugin / "tests" / "conftest.py"):
        assert path.is_file(), f"{path} is missing"
    assert (plugin / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    title, _, text = (plugin / "README.md").read_text(encoding="utf-8").partition("\n")
    assert title == f"# {distribution(plugin)}"
    assert f"pip install 'l2kit[{distribution(plugin).removeprefix('l2kit-')}]'" in text
    if "l2kit.adapters" in toml(plugin / "pyproject.toml")["project"]["entry-points"]:
        assert (module / "adapter.py").is_file()
        assert (module / "config.py").is_file()


@plugins
def test_pyproject(plugin: Path) -> None:
    ours, model, root = (
        toml(plugin / "pyproject.toml"),
        toml(TEMPLATE / "pyproject.toml"),
        toml(ROOT / "pyproject.toml"),
    )
    project, version = ours["project"], root["project"]["version"]
    assert project["name"] == distribution(plugin)
    assert project["version"] == version, "all distributions are released together"
    assert f"l2kit=={version}" in project["dependencies"], "and work with each other in that version only"
    assert set(project) - {"optional-dependencies", "scripts"} == set(model["project"])
    for key in ("readme", "requires-python", "license", "license-files"):
        assert project[key] == model["project"][key] == root["project"][key], key
    assert set(project["classifiers"]) >= set(model["project"]["classifiers"])
    assert ours["build-system"] == model["build-system"] == root["build-system"]
    targets = {"sdist": {"only-include": [package(plugin)]}, "wheel": {"packages": [package(plugin)]}}
    assert ours["tool"] == {"hatch": {"build": {"targets": targets}}}, "tools are configured in the root"
    points = project["entry-points"]
    assert points
    assert set(points) <= set(GROUPS)
    assert all(
        value.partition(":")[0].split(".")[0] == package(plugin)
        for group in points.values()
        for value in group.values()
    )


@plugins
def test_what_it_offers_is_public(plugin: Path) -> None:
    """What an entry point names stands in the package's ``__all__``, and the package holds nothing but names."""
    tree = ast.parse((plugin / package(plugin) / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    (names,) = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    public = set(ast.literal_eval(names))
    assert not [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for group in toml(plugin / "pyproject.toml")["project"]["entry-points"].values():
        for value in group.values():
            module, _, name = value.partition(":")
            assert module != package(plugin) or name in public


@plugins
def test_the_published_suite_is_run(plugin: Path) -> None:
    """Each group of entry points has the conformance suite of its own."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in plugin.glob("tests/test_*.py"))
    points = toml(plugin / "pyproject.toml")["project"]["entry-points"]
    for group, suite in (("l2kit.adapters", "AdapterConformance"), ("l2kit.codecs", "CodecConformance")):
        assert group not in points or re.search(rf"^class \w+\(.*\b{suite}\b.*\):", text, re.MULTILINE), suite


@first_party
def test_the_root_knows_it(plugin: Path) -> None:
    root = toml(ROOT / "pyproject.toml")
    project, tools = root["project"], root["tool"]
    extra = plugin.name.removeprefix("l2kit-")
    assert project["optional-dependencies"][extra] == [f"{plugin.name}=={project['version']}"]
    assert extra in re.findall(r"[a-z0-9-]+", project["optional-dependencies"]["all"][0])
    assert f"$MYPY_CONFIG_FILE_DIR/plugins/{plugin.name}" in tools["mypy"]["mypy_path"].split(":")
    lists = [tools["importlinter"]["root_packages"]]
    for contract in tools["importlinter"]["contracts"]:
        lists += [contract[key] for key in ("forbidden_modules", "modules") if key in contract]
    assert len(lists) >= 3
    assert all(package(plugin) in packages for packages in lists)
