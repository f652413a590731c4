"""`FileAdapter`: the asynchronous face of one `ObjectDirectory`. Orders work, never blocks the event loop itself."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import anyio
import anyio.from_thread
from msgspec import structs

from l2kit.adapter import Capabilities, KeyInfo, L2Adapter, Probe, Usage
from l2kit.config import ParsedURL, on_this_machine
from l2kit.errors import ClosedError, L2Error
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit.serde import CodecChain, CodecSource
from l2kit_posix.config import FileConfig
from l2kit_posix.directory import ObjectDirectory
from l2kit_posix.failures import translate, translate_at_open

#: How often the adapter asks whether the directory should be looked through again, at most; and how many times as long
#: as the last look took it waits, so that this never takes more than a twentieth of a core.
_RECOUNT_INTERVAL_S: Final = 30.0
_RECOUNT_PAUSES: Final = 20
#: How often times of use are written to the files.
_SAVE_INTERVAL_S: Final = 30.0
#: Objects from this size on get their checksum piece by piece, as they go, and prove it as they come. Those of 32 MiB
#: load a fifth faster for it; those of 1 MiB would load slower, as their threads would wait for the interpreter more.
_CHECKED_ON_THE_WAY_BYTES: Final = 8 << 20

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class FileAdapter(L2Adapter[FileConfig]):
    """Keeps each stored object as one file of a directory, on a local disk or a shared file system.

    - An object is written straight from the caller's memory under a temporary name and renamed when it is complete: no
      reader in any process, on any node, ever sees a part of one. What is forced to the device, ``fsync`` says.
    - A lock is an open file: a locked object stays loadable when it is evicted or deleted, here or by another process.
      Where no file descriptor is left for one (``max_open_files``), the lookup says miss, as it cannot keep a promise.
    - ``max_bytes`` is kept at every moment, on a file system of this machine for all processes together; see
      `FileConfig`. The least recently used object goes first, also after a restart: the time of use is the file's time
      of modification.
    - A cancelled store or load stops at the next 8 MiB; then the temporary file is gone and no buffer is in use.
    - Whoever has the directory open may clear it or remove single files at any time: those objects are misses.
    """

    api_version = (1, 1)
    config_type = FileConfig
    # Payloads start on a page: direct I/O and mapping can come without a new stored form.
    capabilities = Capabilities(persistent=True, shared=True, lock="owned", evicts=True, alignment=4096, group_keys=64)

    _directory: ObjectDirectory | None = None

    def __init__(self, config: FileConfig, *, name: str, codecs: CodecChain, codec_source: CodecSource) -> None:
        """As the base's; whoever keeps the directory to itself shares nothing."""
        super().__init__(config, name=name, codecs=codecs, codec_source=codec_source)
        if config.exclusive:
            self.capabilities = structs.replace(type(self).capabilities, shared=False)

    @classmethod
    def options_from_url(cls, url: ParsedURL) -> dict[str, Any]:
        """``file:///directory`` or ``file://localhost/directory``; the path is the directory.

        Raises:
            ConfigError: another host, which mostly means that a slash is missing; a port or credentials; two paths.
        """
        return super().options_from_url(on_this_machine(url, "DIRECTORY"))

    async def open(self) -> None:
        """Make the directory, sweep what dead processes left in it, and rebuild index, usage and order of use.

        Takes some seconds for a million objects; stores are accepted afterwards.

        Raises:
            ConfigError: the directory cannot be made or written to; names ``path``.
            BackendError: it cannot be read.
        """
        self._directory = ObjectDirectory(self.config, anyio.from_thread.check_cancelled)
        try:
            await self.run_in_thread(self._directory.open)
        except OSError as error:
            raise translate_at_open(error, name=self.name, path=self.config.path) from error
        self.run_in_background("recount", self._recount)
        self.run_in_background("times of use", self._save_uses)

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
            sealing = item.begin() if item.nbytes >= _CHECKED_ON_THE_WAY_BYTES else None
            if sealing is None:
                return directory.store(item.key, item.data())
            return directory.store(item.key, sealing.data, sealing)

        return await self.run_in_thread(lambda: [_attempt(store, item) for item in items])

    async def load_many(self, items: Sequence[LoadItem]) -> list[int | Exception | None]:
        """Read and verify several objects in one thread job."""
        directory = self._opened_directory

        def load(item: LoadItem) -> int | None:
            if item.nbytes < _CHECKED_ON_THE_WAY_BYTES:
                size = directory.load(item.key, item.into)
                item.verify(size)
                return size
            receiving = item.receive()
            size = directory.load(item.key, receiving.into, receiving.advance)
            if size is not None:
                receiving.finish(size)
            return size

        return await self.run_in_thread(lambda: [_attempt(load, item) for item in items])

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Look for all keys in one thread job. Other processes' objects are seen at once.

        The file system is not asked for what is missing while the index is known to be complete.
        """
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
            for info in await self._read(partial(directory.list_folder, folder)):
                yield info

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

    @property
    def modes(self) -> dict[str, str]:
        """What is in effect, in words: ``io``, ``fsync`` and whose bytes the ``limit`` counts. Only of an open adapter.

        ``doctor`` shows it.
        """
        directory = self._opened_directory
        refused = directory.transport.direct_errno
        io = "page cache"
        if directory.transport.direct:
            io = "direct (O_DIRECT)"
        elif refused is not None:
            io = f"page cache, as O_DIRECT is refused ({errno.errorcode[refused]}, errno {refused})"
        whose = "what this process knows"
        if self.config.exclusive:
            whose = "this process, which keeps all others out"
        elif directory.limit_is_shared:
            whose = "all processes of this machine"
        return {"io": io, "fsync": self.config.fsync, "limit": whose}

    async def probe(self) -> Probe:
        """The base's, with :attr:`modes` as details."""
        result = await super().probe()
        return structs.replace(result, details={**result.details, **self.modes}) if result.ok else result

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

    async def _recount(self) -> None:
        """Now and then, learn what other processes have written, and put the tally of all of them right."""
        directory = self._opened_directory

        def recount() -> None:
            if directory.should_recount():
                directory.recount()

        while True:
            await anyio.sleep(max(_RECOUNT_INTERVAL_S, _RECOUNT_PAUSES * directory.recount_s))
            await self.run_in_thread(recount)

    async def _save_uses(self) -> None:
        """Now and then; a clean close saves the rest. After a crash the order of use is true to this many seconds."""
        directory = self._opened_directory
        while True:
            await anyio.sleep(_SAVE_INTERVAL_S)
            await self.run_in_thread(directory.save_uses)

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
