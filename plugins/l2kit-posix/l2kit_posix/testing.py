"""A directory of objects as its files show it, around the adapter. For tests: it asks nobody whether it may."""

from __future__ import annotations

from pathlib import Path

from l2kit.keys import ObjectKey
from l2kit_posix.names import Names, object_path


class DirectoryFiles:
    """What lies in a directory of objects, whoever has it open."""

    def __init__(self, root: str) -> None:
        """``root`` is the directory that ``file://`` URLs name."""
        self._root = Path(root)

    def objects(self) -> dict[ObjectKey, int]:
        """Every object, with its size in bytes."""
        names, found = Names(""), dict[ObjectKey, int]()
        for path in self._root.glob("objects/*/*/*"):
            short = names.parse(path.parent.parent.name, path.parent.name, path.name)
            if short is not None and path.is_file():
                found[names.key(short)] = path.stat().st_size
        return found

    def unfinished(self) -> list[str]:
        """Files that are no objects yet, or never will be."""
        return [str(path) for path in self._root.glob("staging/*/*") if path.name != "lock"]

    def path(self, key: ObjectKey) -> Path:
        """Where ``key`` lies, if it is there."""
        return Path(object_path(f"{self._root}/objects", key))
