"""Objects in whatever fsspec has a file system for: the escape hatch. fsspec itself is imported when it is needed."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from l2kit.errors import AdapterImportError, ConfigError
from l2kit.outcomes import StoreStatus
from l2kit_s3.config import FsspecConfig
from l2kit_s3.objects import PAGE_OBJECTS, CheckWanted, Found, Listed, Objects, Requests

#: Where objects lie until they are complete.
UNFINISHED: Final = ".l2kit-unfinished"


class FsspecObjects(Objects):
    """A folder of an fsspec file system, by its synchronous calls. As thread-safe as the file system is.

    - With ``publish="rename"`` an object is written below `UNFINISHED` and renamed when it is complete.
    - Time-outs are the file system's own: set them in ``storage_options``.
    """

    def __init__(self, config: FsspecConfig, requests: Requests, check_wanted: CheckWanted) -> None:
        """Make the file system.

        Raises:
            AdapterImportError: fsspec, or what it needs for this protocol, is not installed.
            ConfigError: there is no such protocol, or it does not take these options.
        """
        self._config: Final = config
        self._requests: Final = requests
        self._check_wanted: Final = check_wanted
        self._files: Any = _file_system(config)
        self._root: Final[str] = self._files._strip_protocol(config.path).rstrip("/")  # noqa: SLF001 - its only way
        self._writer: Final = os.urandom(8).hex()
        self._numbers: Final = itertools.count()

    def check(self) -> None:
        """See `Objects.check`: make the folder."""
        self._files.makedirs(self._root, exist_ok=True)

    def read(self, name: str, into: Sequence[memoryview], offset: int | None = None) -> Found | None:
        """See `Objects.read`."""
        path = self._path(name)
        try:
            self._requests.add("head")
            size = int(self._files.info(path)["size"])
            self._requests.add("get")
            begin = offset or 0
            room = min(sum(map(len, into)), size - begin)
            data = memoryview(self._files.cat_file(path, begin, begin + room) if room > 0 else b"")
        except FileNotFoundError:
            return None
        if len(data) != max(0, room):
            raise ConnectionError(f"{len(data)} bytes came of {room}")
        for segment in into:
            part = data[: len(segment)]
            segment[: len(part)] = part
            data = data[len(part) :]
        return Found(size, None)

    def write(self, name: str, data: Sequence[memoryview]) -> StoreStatus:
        """See `Objects.write`; an object that is there stays."""
        if self.size(name) is not None:
            return StoreStatus.ALREADY_PRESENT
        path = self._path(name)
        self._requests.add("put")
        if self._config.publish == "direct":
            self._files.pipe_file(path, b"".join(data))
            return StoreStatus.STORED
        unfinished = f"{self._root}/{UNFINISHED}/{self._writer}-{next(self._numbers)}"
        self._files.makedirs(self._parent(unfinished), exist_ok=True)
        try:
            self._files.pipe_file(unfinished, b"".join(data))
            self._check_wanted()
            self._files.makedirs(self._parent(path), exist_ok=True)
            self._files.mv(unfinished, path)
        except BaseException:
            if self._files.exists(unfinished):
                self._files.rm_file(unfinished)
            raise
        return StoreStatus.STORED

    def size(self, name: str) -> int | None:
        """See `Objects.size`."""
        self._requests.add("head")
        try:
            return int(self._files.info(self._path(name))["size"])
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> bool:
        """See `Objects.delete`."""
        self._requests.add("delete")
        if not self._files.exists(self._path(name)):
            return False
        try:
            self._files.rm_file(self._path(name))
        except FileNotFoundError:
            return False
        return True

    def pages(self, folder: str) -> Iterator[list[Listed]]:
        """See `Objects.pages`; fsspec lists all at once."""
        self._requests.add("list")
        self._files.invalidate_cache()
        try:
            found = self._files.find(self._path(folder) if folder else self._root, detail=True)
        except FileNotFoundError:
            return
        entries = iter(found.items())
        while page := list(itertools.islice(entries, PAGE_OBJECTS)):
            yield [Listed(self._name(path), int(info["size"])) for path, info in page]

    def close(self) -> None:
        """Nothing: fsspec keeps file systems for others who open the same."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _name(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")

    @staticmethod
    def _parent(path: str) -> str:
        return path.rpartition("/")[0]


def _file_system(config: FsspecConfig) -> Any:
    try:
        fsspec = importlib.import_module("fsspec")
    except ImportError as error:
        raise AdapterImportError("fsspec is not installed; pip install 'l2kit-s3[fsspec]'") from error
    options: dict[str, Any] = {}
    if config.storage_options is not None:
        try:
            options = msgspec.json.decode(config.storage_options.reveal(), type=dict[str, Any])
        except msgspec.DecodeError:
            raise ConfigError("storage_options: expected a JSON object") from None
    options.setdefault("use_listings_cache", False)  # what others stored must be seen
    try:
        return fsspec.filesystem(config.protocol, **options)
    except ImportError as error:
        raise AdapterImportError(f"protocol: {config.protocol!r} needs a package that is not installed") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"protocol: fsspec does not make {config.protocol!r} ({type(error).__name__})") from None
