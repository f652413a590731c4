"""Reading the objects folder: which objects lie there. Strangers' files are passed over, never touched or counted."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from l2kit_posix.index import Found
from l2kit_posix.names import FAN_OUT, NAMESPACE, Names


class Folder(NamedTuple):
    """One of the folders that objects lie in: ``objects/namespace/fan_out``."""

    path: str
    namespace: str
    fan_out: str


def object_folders(objects: str) -> Iterator[Folder]:
    """Every folder below ``objects`` that objects may lie in.

    Raises:
        OSError: a folder cannot be read; one that is gone by now is passed over.
    """
    for namespace in _subfolders(objects, NAMESPACE):
        for fan_out in _subfolders(f"{objects}/{namespace}", FAN_OUT):
            yield Folder(f"{objects}/{namespace}/{fan_out}", namespace, fan_out)


def list_folder(folder: Folder, names: Names) -> list[Found]:
    """The objects in one folder.

    Raises:
        OSError: it cannot be read; objects that are gone by now are passed over.
    """
    found: list[Found] = []
    try:
        with os.scandir(folder.path) as entries:
            for entry in entries:
                short = names.parse(folder.namespace, folder.fan_out, entry.name)
                if short is None or not entry.is_file(follow_symlinks=False):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                found.append(Found(short, status.st_size, status.st_mtime_ns))
    except FileNotFoundError:
        pass
    return found


def _subfolders(path: str, pattern: re.Pattern[str]) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [
                entry.name for entry in entries if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []
