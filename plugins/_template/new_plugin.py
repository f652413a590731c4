"""Makes the first-party plugin ``plugins/l2kit-NAME`` from the template beside this file: ``make new-plugin NAME=x``.

- The template is a complete distribution in which every name is ``template``; a new plugin has NAME in its place.
- All is planned before anything is written: a refusal leaves the tree as it was.
- The root ``pyproject.toml`` learns of the plugin wherever a tool wants a list: extras, mypy, import-linter. In each
  of them the connector stands already, and the new plugin goes in front of it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Final

_TEMPLATE: Final = Path(__file__).resolve().parent
_PARTS: Final = ("LICENSE", "README.md", "pyproject.toml", "l2kit_template", "tests")

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_MAX_NAME_CHARS: Final = 24

#: Places in the root pyproject.toml before which something goes, and what.
_ENTRIES: Final = (
    (r'^vllm = \["l2kit-vllm==', '{name} = ["l2kit-{name}=={version}"]\n'),
    (r"(?<=[\[,])vllm\b(?=[^\"]*\]\")", "{name},"),
    (r":\$MYPY_CONFIG_FILE_DIR/connector/l2kit-vllm", ":$MYPY_CONFIG_FILE_DIR/plugins/l2kit-{name}"),
    (r'"l2kit_vllm"', '"{package}", '),
)

_NEXT: Final = """\
plugins/l2kit-{name} is made and pyproject.toml knows it; `make check` passes. What is left to you:
  - {package}/adapter.py, config.py and README.md of the plugin: your storage system in place of the dictionary
  - l2kit/registry.py: {name!r} in _EXTRAS, so that who lacks the plugin reads `pip install 'l2kit[{name}]'`
  - README.md and CHANGELOG.md: a line each
"""


class RefusalError(Exception):
    """Why no plugin is made."""


def new_plugin(root: Path, name: str) -> Path:
    """Make the plugin, enter it into ``root/pyproject.toml``, and return its folder.

    Raises:
        RefusalError: a bad or taken name, or a ``pyproject.toml`` with other lists than are known here.
    """
    check_name(name, root)
    folder = root / "plugins" / f"l2kit-{name}"
    pyproject = with_plugin((root / "pyproject.toml").read_text(encoding="utf-8"), name)
    files = {folder / renamed(str(path), name): renamed(text, name) for path, text in template_files().items()}
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (root / "pyproject.toml").write_text(pyproject, encoding="utf-8")
    return folder


def check_name(name: str, root: Path) -> None:
    """Check that ``name`` is fit to be a URL scheme, an extra, and part of two package names, and is free.

    Raises:
        RefusalError: it is not; says the rule, or who has the name.
    """
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME_CHARS:
        raise RefusalError(
            f"NAME: {name!r} must be lower-case letters, digits and single '-' between them, begin with a letter and "
            f"have at most {_MAX_NAME_CHARS} characters, for example: make new-plugin NAME=my-store"
        )
    folder = root / "plugins" / f"l2kit-{name}"
    if folder.exists():
        raise RefusalError(f"NAME: {folder} exists; nothing is overwritten")
    ours = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    if name in ours["project"]["optional-dependencies"]:
        raise RefusalError(f"NAME: {name!r} is an extra of l2kit already; see pyproject.toml")
    for path in (root / "pyproject.toml", *root.glob("plugins/l2kit-*/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        if name in project.get("entry-points", {}).get("l2kit.adapters", {}):
            raise RefusalError(f"NAME: {project['name']} has the scheme {name}:// already")


def with_plugin(pyproject: str, name: str) -> str:
    """Return the root ``pyproject.toml`` with the plugin in all lists; pure.

    Raises:
        RefusalError: a list is not where it used to be.
    """
    package = package_of(name)
    version = tomllib.loads(pyproject)["project"]["version"]
    for place, entry in _ENTRIES:
        text = entry.format(name=name, package=package, version=version)
        pyproject, count = re.subn(f"(?={place})", text, pyproject, flags=re.MULTILINE)
        if count == 0:
            raise RefusalError(f"pyproject.toml: nothing matches {place!r}; mend new_plugin.py to match the file")
    return pyproject


def template_files() -> dict[Path, str]:
    """Every file of the template by its path in it."""
    paths = (path for part in _PARTS for path in (_TEMPLATE / part, *(_TEMPLATE / part).rglob("*")))
    wanted = (path for path in paths if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(_TEMPLATE): path.read_text(encoding="utf-8") for path in wanted}


def renamed(text: str, name: str) -> str:
    """``text`` with the names of the plugin in place of the template's: package, classes, all others; pure."""
    classes = "".join(word.capitalize() for word in name.split("-"))
    text = text.replace("l2kit_template", package_of(name))
    return text.replace("Template", classes).replace("template", name)


def package_of(name: str) -> str:
    """The import name."""
    return f"l2kit_{name.replace('-', '_')}"


def main(arguments: list[str]) -> None:
    """``new_plugin.py NAME``, for the repository that this file is in."""
    name = " ".join(arguments)
    try:
        new_plugin(_TEMPLATE.parents[1], name)
    except RefusalError as error:
        sys.exit(str(error))
    sys.stdout.write(_NEXT.format(name=name, package=package_of(name)))


if __name__ == "__main__":
    main(sys.argv[1:])
