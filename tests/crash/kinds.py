"""What the crash drill opens: each backend in several ways, and how their media are looked at around the adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import l2kit
from l2kit_nvme.testing import SlabFiles
from l2kit_posix.testing import DirectoryFiles

BACKENDS: Final = ("nvme", "posix")

_NVME: Final = {
    "none": "size_bytes=160MiB",
    "data": "size_bytes=160MiB&durability=data",
    "page cache": "size_bytes=160MiB&direct=false",
    "striped": "size_bytes=64MiB&paths={folder}/second,{folder}/third",
    "evicting": "size_bytes=160MiB&max_bytes=12MiB&durability=data",
}
_POSIX: Final = {
    "none": "fsync=none",
    "data": "fsync=data&direct=true",
    "full": "fsync=full",
    "exclusive": "exclusive=true&max_bytes=160MiB",
    "evicting": "max_bytes=12MiB",
}


class Kind(NamedTuple):
    """One way to open a backend.

    Attributes:
        name: for people, and for folders.
        url: with ``{folder}`` for a folder of its own.
        evicts: whether objects go although nobody deleted them; all others have room for everything.
        differences: what an adapter that was just opened says and its medium does not, in words.
    """

    name: str
    url: str
    evicts: bool
    differences: Callable[[l2kit.L2Adapter[Any], l2kit.Usage, int], list[str]]


def kinds(backend: str) -> list[Kind]:
    """All ways to open a backend; a drill takes them in turn."""
    if backend == "nvme":
        return [
            Kind(f"nvme {name}", f"nvme://{{folder}}/first?{options}", name == "evicting", _of_slab)
            for name, options in _NVME.items()
        ]
    return [
        Kind(f"posix {name}", f"file://{{folder}}/cache?{options}", name == "evicting", _of_directory)
        for name, options in _POSIX.items()
    ]


def folder_of(kind: Kind, folder: Path) -> Path:
    """A folder of this kind's own below ``folder``."""
    return folder / kind.name.replace(" ", "-")


def _of_slab(adapter: l2kit.L2Adapter[Any], usage: l2kit.Usage, listed: int) -> list[str]:
    on_medium = SlabFiles(adapter.config.members).used_bytes
    return _differing(usage, listed, {"the records": on_medium})


def _of_directory(adapter: l2kit.L2Adapter[Any], usage: l2kit.Usage, listed: int) -> list[str]:
    files = DirectoryFiles(adapter.config.path)
    directory = adapter._directory  # type: ignore[attr-defined]
    said = {"the files": sum(files.objects().values()), "the index": directory._index.used_bytes}
    if directory.limit_is_shared:
        with directory._tally as tally:
            said["the tally"] = tally.used_bytes
    unfinished = files.unfinished()
    return _differing(usage, listed, said) + ([f"unfinished files stayed: {unfinished}"] if unfinished else [])


def _differing(usage: l2kit.Usage, listed: int, said: dict[str, int]) -> list[str]:
    wrong = [f"{usage} is said, {name} have {nbytes}" for name, nbytes in said.items() if nbytes != usage.used_bytes]
    if usage.objects != listed:
        wrong.append(f"{usage} is said, {listed} are listed")
    if usage.max_bytes is not None and usage.used_bytes > usage.max_bytes:
        wrong.append(f"{usage} is beyond the limit")
    return wrong
