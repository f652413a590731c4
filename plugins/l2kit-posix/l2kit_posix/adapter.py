"""`FileAdapter`: the asynchronous face of one `ObjectDirectory`. Orders work, never blocks the event loop itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.from_thread
from msgspec import structs

from l2kit.adapter import Capabilities, KeyInfo, L2Adapter, Usage
from l2kit.config import ParsedURL
from l2kit.errors import ClosedError, ConfigError, L2Error
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit_posix.config import FileConfig
from l2kit_posix.directory import ObjectDirectory
from l2kit_posix.failures import translate, translate_at_open
from l2kit_posix.scan import list_folder

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class FileAdapter(L2Adapter[FileConfig]):
    """Keeps each stored object as one file of a directory, on a local disk or a shared file system.

    - An object is written straight from the caller's memory under a temporary name and renamed when it is complete: no
      reader in any process, on any node, ever sees a part of one. Nothing is forced to the device, so a power failure
      may cost objects; damaged ones are found by their checksum.
    - A lock is an open file: a locked object stays loadable when it is evicted or deleted, here or by another process.
      Where no file descriptor is left for one (``max_open_files``), the lookup says miss, as it cannot keep a promise.
    - ``max_bytes`` is kept at every moment over the objects that this process knows; see `FileConfig`. The least
      recently used object goes first, also after a restart: the time of use is the file's time of modification.
    - A cancelled store or load stops at the next 8 MiB; then the temporary file is gone and no buffer is in use.
    - Whoever has the directory open may clear it or remove single files at any time: those objects are misses.
    """

    api_version = (1, 1)
    config_type = FileConfig
    # Payloads start on a page: direct I/O and mapping can come without a new stored form.
    capabilities = Capabilities(persistent=True, shared=True, lock="owned", evicts=True, alignment=4096, group_keys=64)

    _directory: ObjectDirectory | None = None

    @classmethod
    def options_from_url(cls, url: ParsedURL) -> dict[str, Any]:
        """``file:///directory`` or ``file://localhost/directory``; the path is the directory.

        Raises:
            ConfigError: another host, which mostly means that a slash is missing; a port or credentials; two paths.
        """
        if url.host not in (None, "localhost"):
            raise ConfigError(
                f"{url.scheme}: path: a relative path or a host ({url.host!r}) has no meaning in this URL; "
                f"write {url.scheme}:///DIRECTORY with three slashes"
            )
        if url.path and "path" in url.query:
            raise ConfigError(f"{url.scheme}: path: given twice, as the URL's path and as an option")
        return super().options_from_url(structs.replace(url, host=None))

    async def open(self) -> None:
        """Make the directory, sweep what dead processes left in it, and rebuild index, usage and order of use.

        Takes about 10 seconds for a million objects; stores are accepted afterwards.

        Raises:
            ConfigError: the directory cannot be made or written to; names ``path``.
            BackendError: it cannot be read.
        """
        self._directory = ObjectDirectory(self.config, anyio.from_thread.check_cancelled)
        try:
            await self.run_in_thread(self._directory.open)
        except OSError as error:
            raise translate_at_open(error, name=self.name, path=self.config.path) from error

    async def close(self) -> None:
        """Close every file, remove this process's temporary folder, and save the order of use."""
        await self.run_in_thread(self._opened_directory.close)

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """Write one object in one thread job, straight from ``data``.

        - ALREADY_PRESENT only if a file of the full size is there at this moment; one of another size is replaced.
        - DROPPED if it is larger than ``max_bytes``, or if everything that could make room is locked.
        - On a full file system as much is evicted as the object takes, and the write is tried once more.
        """
        directory = self._opened_directory
        return await self.run_in_thread(lambda: directory.store(key, data))

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """Read one object in one thread job, straight into ``into``; an object that cannot be read is an error."""
        directory = self._opened_directory
        return await self.run_in_thread(lambda: directory.load(key, into))

    async def store_many(self, items: Sequence[StoreItem]) -> list[StoreStatus | Exception]:
        """Write several objects in one thread job, checksums included."""
        directory = self._opened_directory

        def store(item: StoreItem) -> StoreStatus:
            return directory.store(item.key, item.data())

        return await self.run_in_thread(lambda: [_attempt(store, item) for item in items])

    async def load_many(self, items: Sequence[LoadItem]) -> list[int | Exception | None]:
        """Read and verify several objects in one thread job."""
        directory = self._opened_directory

        def load(item: LoadItem) -> int | None:
            size = directory.load(item.key, item.into)
            item.verify(size)
            return size

        return await self.run_in_thread(lambda: [_attempt(load, item) for item in items])

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Ask the file system for all keys in one thread job: other processes' objects are seen at once."""
        directory = self._opened_directory
        return await self.run_in_thread(lambda: directory.lookup(keys))

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Open the file of every object found, in one thread job. What it reports, a following load finds."""
        directory = self._opened_directory
        return await self.run_in_thread(lambda: directory.acquire(keys))

    async def release_many(self, keys: Sequence[ObjectKey]) -> None:
        """Let go of locks; their files are closed in a thread, for closing a deleted one frees its blocks."""
        directory = self._opened_directory
        released = directory.release(keys)
        if released:
            with anyio.CancelScope(shield=True):  # what was let go must be closed; closing is bounded by the device
                await self.run_in_thread(lambda: directory.give_back(released))

    async def delete_one(self, key: ObjectKey) -> bool:
        """Remove one object's file; holders of a lock can still load it."""
        directory = self._opened_directory
        return await self.run_in_thread(lambda: directory.delete(key))

    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        """Every object in the directory, whoever wrote it, folder by folder.

        Raises:
            BackendError: a folder cannot be read.
        """
        directory = self._opened_directory
        for folder in await self._read(lambda: list(directory.folders())):
            for found in await self._read(partial(list_folder, folder)):
                yield KeyInfo(found.key, found.size)

    async def usage(self) -> Usage:
        """What lies in the directory, whoever wrote it, counted file by file: some seconds for a million objects.

        Locked objects that were deleted take space until they are unlocked, and are not counted.

        Raises:
            BackendError: the directory cannot be read.
        """
        used_bytes, objects = await self._read(self._opened_directory.usage)
        return Usage(used_bytes, self.config.max_bytes, objects)

    @property
    def counters(self) -> Counter[str]:
        """The base's counters, and those of `ObjectDirectory.events`."""
        merged = Counter(super().counters)
        if self._directory is not None:
            merged.update(self._directory.events)
        return merged

    def translate_error(self, error: Exception) -> L2Error:
        """Errnos to the error tree, with the path and what to do."""
        if isinstance(error, OSError):
            return translate(error, name=self.name, path=self.config.path)
        return super().translate_error(error)

    @property
    def _opened_directory(self) -> ObjectDirectory:
        if self._directory is None:
            raise ClosedError(f"{self.name}: the adapter is not open; use it inside 'async with'")
        return self._directory

    async def _read(self, function: Callable[[], ResultT]) -> ResultT:
        """Run what the base neither guards against use after closing nor translates errors for."""
        self.check_open()
        try:
            return await self.run_in_thread(function)
        except OSError as error:
            raise self.translate_error(error) from error


def _attempt(work: Callable[[ItemT], ResultT], item: ItemT) -> ResultT | Exception:
    """One object of a group: its error is its own."""
    try:
        return work(item)
    except (OSError, L2Error) as error:
        return error
