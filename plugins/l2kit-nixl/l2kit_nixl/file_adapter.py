"""`NixlFileAdapter`: objects as files that one of NIXL's plugins reads and writes. Abstract: who names the plugin is in
`adapter`.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

import anyio.from_thread

from l2kit.adapter import Capabilities, KeyInfo, L2Adapter, Usage
from l2kit.config import ParsedURL, on_this_machine
from l2kit.errors import BackendError, ClosedError, ConfigError, L2Error
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.memory import first_bytes
from l2kit.outcomes import StoreStatus
from l2kit.system_errors import REFUSED, translate_os_error
from l2kit_nixl.agent import Operation, Piece, TransferAgent
from l2kit_nixl.config import NixlFileConfig
from l2kit_nixl.object_files import ObjectFiles, OpenFile, UnfinishedFile
from l2kit_nixl.spares import Spares

ConfigT = TypeVar("ConfigT", bound=NixlFileConfig)
ResultT = TypeVar("ResultT")
FileT = TypeVar("FileT", UnfinishedFile, OpenFile)

_MEND: Final = {
    errno.ENOSPC: "free space there or set a smaller max_bytes",
    errno.EDQUOT: "raise the quota or set a smaller max_bytes",
    errno.EACCES: "give this user the permission, or name another directory",
    errno.EPERM: "give this user the permission, or name another directory",
}
_WRONG_PATH: Final = REFUSED | {errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.ENOENT, errno.ENAMETOOLONG}


class NixlFileAdapter(L2Adapter[ConfigT], Generic[ConfigT]):
    """What both have; see `NixlPosixAdapter`."""

    api_version = (1, 1)
    # Payloads start on a page, which direct paths from device to memory want.
    capabilities = Capabilities(persistent=True, shared=True, evicts=True, alignment=4096, group_keys=64)
    #: What the plugin is started with.
    parameters: ClassVar[Mapping[str, str]] = {}

    _files: ObjectFiles | None = None
    _agents: Spares[TransferAgent]

    @property
    def plugin(self) -> str:
        """The name of NIXL's plugin."""
        raise NotImplementedError

    @classmethod
    def options_from_url(cls, url: ParsedURL) -> dict[str, Any]:
        """``SCHEME:///directory`` or ``SCHEME://localhost/directory``; the path is the directory.

        Raises:
            ConfigError: another host, which mostly means that a slash is missing; a port or credentials; two paths.
        """
        return super().options_from_url(on_this_machine(url, "DIRECTORY"))

    async def open(self) -> None:
        """Start one agent, make the directory, sweep what dead processes left, and learn what is there.

        Raises:
            AdapterImportError: nixl, its plugin, or a library that the plugin needs is missing.
            ConfigError: the directory cannot be made or written to; names ``path``.
        """
        files = ObjectFiles(self.config.path, self.config.max_bytes)
        self._agents = Spares(lambda: TransferAgent(self.plugin, self.parameters))

        def start() -> None:
            with self._agents.borrowed():
                files.open()

        try:
            await self.run_in_thread(start)
        except BaseException as error:
            self._agents.discard()
            if isinstance(error, OSError) and error.errno in _WRONG_PATH:
                where = f"{error.strerror} at {error.filename or self.config.path}"
                raise ConfigError(f"{self.name}: path: cannot keep objects in {self.config.path}: {where}") from error
            raise
        self._files = files

    async def close(self) -> None:
        """Deregister all memory and end the agents."""
        await self.run_in_thread(self._agents.discard)

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """Write one object in one thread job, straight from ``data``.

        - ALREADY_PRESENT only if a file of the full size is there at this moment; one of another size is replaced.
        - DROPPED if it is larger than ``max_bytes``, or if what is being written leaves no room for it.
        """
        [answer] = await self.run_in_thread(lambda: self._store([(key, lambda: data)]))
        return _result(answer)

    async def store_many(self, items: Sequence[StoreItem]) -> list[StoreStatus | Exception]:
        """Write several objects in one thread job and one transfer, checksums included."""
        return await self.run_in_thread(lambda: self._store([(item.key, item.data) for item in items]))

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """Read one object in one thread job, straight into ``into``."""
        [answer] = await self.run_in_thread(lambda: self._load([(key, into)]))
        return _result(answer)

    async def load_many(self, items: Sequence[LoadItem]) -> list[int | Exception | None]:
        """Read several objects in one thread job and one transfer, and verify them."""

        def load() -> list[int | Exception | None]:
            answers = self._load([(item.key, item.into) for item in items])
            for item, answer in zip(items, answers, strict=True):
                if isinstance(answer, int):
                    item.verify(answer)
            return answers

        return await self.run_in_thread(load)

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Ask the file system for all keys in one thread job: other processes' objects are seen at once."""
        files = self._opened_files
        return await self.run_in_thread(lambda: [files.size(key) for key in keys])

    async def delete_one(self, key: ObjectKey) -> bool:
        """Remove one object's file."""
        files = self._opened_files
        return await self.run_in_thread(lambda: files.delete(key))

    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        """Every object in the directory, whoever wrote it.

        Raises:
            BackendError: a folder cannot be read.
        """
        for info in await self._read(self._opened_files.list_objects):
            yield info

    async def usage(self) -> Usage:
        """What lies in the directory, whoever wrote it, counted file by file.

        Raises:
            BackendError: the directory cannot be read.
        """
        found = await self._read(self._opened_files.list_objects)
        return Usage(sum(info.size for info in found), self.config.max_bytes, len(found))

    @property
    def counters(self) -> Counter[str]:
        """The base's counters, and those of `ObjectFiles.events`."""
        merged = Counter(super().counters)
        if self._files is not None:
            merged.update(self._files.events)
        return merged

    def translate_error(self, error: Exception) -> L2Error:
        """Errnos to the error tree, with the path; what NIXL says is translated where it is called."""
        if not isinstance(error, OSError):
            return super().translate_error(error)
        return translate_os_error(error, name=self.name, path=self.config.path, mend=_MEND)

    @property
    def _opened_files(self) -> ObjectFiles:
        if self._files is None:
            raise ClosedError(f"{self.name}: the adapter is not open; use it inside 'async with'")
        return self._files

    async def _read(self, function: Callable[[], ResultT]) -> ResultT:
        """Run what the base neither guards against use after closing nor translates errors for."""
        self.check_open()
        try:
            return await self.run_in_thread(function)
        except OSError as error:
            raise self.translate_error(error) from error

    # --- in a thread ------------------------------------------------------------------------------

    def _store(
        self, objects: Sequence[tuple[ObjectKey, Callable[[], Sequence[memoryview]]]]
    ) -> list[StoreStatus | Exception]:
        files = self._opened_files
        answers: list[StoreStatus | Exception] = [StoreStatus.STORED] * len(objects)
        begun: dict[int, tuple[UnfinishedFile, Sequence[memoryview]]] = {}
        try:
            for index, (key, make) in enumerate(objects):
                try:
                    data = make()
                    answer = files.begin(key, sum(map(len, data)))
                except (OSError, L2Error) as error:
                    answers[index] = error
                    continue
                if isinstance(answer, StoreStatus):
                    answers[index] = answer
                else:
                    begun[index] = (answer, data)
            failed = self._move_each("WRITE", begun)
            for index in list(begun):
                file, _ = begun.pop(index)
                try:
                    if index in failed:
                        files.drop(file)
                        answers[index] = self._explained(failed[index], file.size)
                    else:
                        files.publish(file)
                except OSError as error:
                    answers[index] = error
        finally:
            for file, _ in begun.values():
                files.drop(file)
        return answers

    def _load(self, objects: Sequence[tuple[ObjectKey, Sequence[memoryview]]]) -> list[int | Exception | None]:
        files = self._opened_files
        answers: list[int | Exception | None] = [None] * len(objects)
        opened: dict[int, tuple[OpenFile, Sequence[memoryview]]] = {}
        try:
            for index, (key, into) in enumerate(objects):
                try:
                    file = files.open_object(key)
                except OSError as error:
                    answers[index] = error
                    continue
                if file is not None:
                    answers[index] = file.size
                    opened[index] = (file, first_bytes(into, file.size))
            for index, failure in self._move_each("READ", opened).items():
                answers[index] = failure
        finally:
            for file, _ in opened.values():
                file.close()
        return answers

    def _move_each(
        self, operation: Operation, files: Mapping[int, tuple[FileT, Sequence[memoryview]]]
    ) -> dict[int, L2Error]:
        """Move the bytes of all ``files`` in one transfer; when that fails, each alone. Who failed, and how."""
        try:
            self._move(operation, list(files.values()))
        except BackendError as error:
            if len(files) <= 1:
                return dict.fromkeys(files, error)
        else:
            return {}
        failed: dict[int, L2Error] = {}
        for index, one in files.items():
            try:
                self._move(operation, [one])
            except BackendError as error:
                failed[index] = error
        return failed

    def _move(self, operation: Operation, files: Sequence[tuple[FileT, Sequence[memoryview]]]) -> None:
        pieces: list[Piece] = []
        registered: list[tuple[int, int]] = []
        for file, segments in files:
            offset = 0
            for segment in segments:
                if segment:
                    pieces.append(Piece(segment, offset, file.fd))
                offset += len(segment)
            if offset:
                registered.append((file.fd, offset))
        if pieces:
            with self._agents.borrowed() as agent, agent.files(registered):
                agent.move(operation, pieces, "FILE", checkpoint=anyio.from_thread.check_cancelled)

    def _explained(self, error: L2Error, size: int) -> L2Error:
        """NIXL does not say why a write failed; a file system without room is the one reason that can be seen."""
        try:
            full = not self._opened_files.has_room_for(size)
        except OSError:
            full = False
        if full:
            full_error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.config.path)
            return self.translate_error(full_error)
        return error


def _result(answer: ResultT | Exception) -> ResultT:
    if isinstance(answer, Exception):
        raise answer
    return answer
