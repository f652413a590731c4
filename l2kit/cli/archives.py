"""``l2kit export URL FILE`` and ``l2kit import FILE URL``: the objects of a backend in one file, and back."""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, TypeVar, cast

import anyio
import anyio.to_thread

from l2kit import open_adapter
from l2kit.adapter import KeyInfo, L2Adapter
from l2kit.archive import ArchiveError, ArchiveReader, ArchiveWriter, Damage, Record, Sink
from l2kit.cli.report import Report
from l2kit.envelope import INTACT_REASONS
from l2kit.errors import ConfigError, CorruptObjectError, L2Error
from l2kit.inventory import listing
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit.sealed import check_sealed, read_checked, store_sealed

#: Objects in memory at once: so many, or as few as have so many bytes together; a larger one alone.
_AT_ONCE: Final = 64
_BATCH_BYTES: Final = 64 << 20

_BUFFER_BYTES: Final = 1 << 20

_STDIO: Final = "-"

ResultT = TypeVar("ResultT")


def add_export_arguments(command: argparse.ArgumentParser) -> None:
    """What ``export`` takes besides the URL."""
    command.add_argument("file", metavar="FILE", help="the archive; replaced when the new one is complete; - is stdout")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def add_import_arguments(command: argparse.ArgumentParser) -> None:
    """What ``import`` takes besides the URL."""
    command.add_argument("file", metavar="FILE", help="an archive that export has made; - is stdin")
    command.add_argument("--repad", action="store_true", help="give objects the padding of this backend's own")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def run_export(options: argparse.Namespace) -> int:
    """Write the archive; a line for each object that is not well, then the sum. 1 when one was left out."""
    to_stdout = options.file == _STDIO
    report = Report(as_json=options.json, quiet=True, to=sys.stderr if to_stdout else None)
    return anyio.run(partial(_export, options.url, options.file, report))


def run_import(options: argparse.Namespace) -> int:
    """Store what the archive has and the backend has not; 1 when something of the archive is not there then."""
    report = Report(as_json=options.json, quiet=True)
    return anyio.run(partial(_import, options.file, options.url, report, repad=options.repad))


# --- export -------------------------------------------------------------------------------------------


async def _export(url: str, file: str, report: Report) -> int:
    files = _FileThread()
    async with open_adapter(url) as adapter, _new_file(file, files) as sink:
        writer = await files.run(lambda: ArchiveWriter(sink))
        batch: list[KeyInfo] = []
        async with aclosing(listing(adapter)) as found:
            async for info in found:
                if batch and not _fits([one.size for one in batch], info.size):
                    await _export_batch(adapter, batch, writer, files, report)
                    batch.clear()
                batch.append(info)
        await _export_batch(adapter, batch, writer, files, report)
        await files.run(writer.finish)
    report.end("exported")
    return 1 if report.failures else 0


async def _export_batch(
    adapter: L2Adapter[Any], batch: Sequence[KeyInfo], writer: ArchiveWriter, files: _FileThread, report: Report
) -> None:
    whole: dict[ObjectKey, memoryview] = {}

    async def read(info: KeyInfo) -> None:
        try:
            stored = await read_checked(adapter, info.key, info.size)
        except L2Error as error:
            report.failed(info.key, _reason(error))
        else:
            if stored is not None:  # otherwise it went since it was listed
                whole[info.key] = stored

    def write() -> None:
        for key, stored in whole.items():
            writer.add(key, stored)

    await adapter.for_each(batch, read)
    await files.run(write)
    for key, stored in whole.items():
        report.done(key, len(stored))


@asynccontextmanager
async def _new_file(file: str, files: _FileThread) -> AsyncIterator[Sink]:
    """Where the archive goes. A file appears under its name when the block has ended well, and not otherwise."""
    try:
        if file == _STDIO:
            yield cast(Sink, sys.stdout.buffer)
            await files.run(sys.stdout.buffer.flush)
            return
        unfinished = await files.run(lambda: _Unfinished(Path(file)))
        try:
            yield cast(Sink, unfinished.sink)
            await files.run(unfinished.publish)
        finally:
            unfinished.discard()
    except BrokenPipeError:  # whoever read our stdout has enough
        raise
    except OSError as error:
        raise ArchiveError(f"{file}: cannot be written: {error.strerror}") from error


class _Unfinished:
    """A file beside ``target`` that takes its place when it is complete. All but :meth:`discard` block for long."""

    def __init__(self, target: Path) -> None:
        """Make it.

        Raises:
            ConfigError: it cannot be made, or ``target`` is no file.
        """
        self._target = target.resolve()  # a link stays one
        if self._target.exists() and not self._target.is_file():
            raise ConfigError(f"{target}: this is no file; to write elsewhere, export to - and redirect that")
        try:
            # Readable for this user alone, as all that prompts left behind.
            fd, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=self._target.parent)
        except OSError as error:
            raise ConfigError(f"{target}: cannot be made: {error.strerror}") from error
        self._path = Path(name)
        self.sink: Final = io.BufferedWriter(io.FileIO(fd, "w"), _BUFFER_BYTES)

    def publish(self) -> None:
        """Put it in the place of the target."""
        self.sink.flush()
        os.fsync(self.sink.fileno())
        self._path.replace(self._target)

    def discard(self) -> None:
        """Close it, and remove it unless it was published."""
        self.sink.raw.close()  # without another attempt to write what a full disk refused
        self._path.unlink(missing_ok=True)


# --- import -------------------------------------------------------------------------------------------


async def _import(file: str, url: str, report: Report, *, repad: bool) -> int:
    files, present = _FileThread(), 0
    with _archive(file) as source:
        try:
            items = iter(await files.run(lambda: ArchiveReader(source)))
            async with open_adapter(url) as adapter:
                while batch := await files.run(lambda: _next_batch(items)):
                    for item in batch:
                        if isinstance(item, Damage):
                            report.failed(item.key, f"{item.what}, at byte {item.offset}")
                    whole = await _whole([item for item in batch if isinstance(item, Record)], files, report)
                    present += await _import_batch(adapter, whole, report, repad=repad)
        except ArchiveError as error:
            raise ArchiveError(f"{file}: {error}") from error
        except OSError as error:
            raise ArchiveError(f"{file}: cannot be read: {error.strerror}") from error
    report.end("imported", present=present)
    return 1 if report.failures else 0


def _next_batch(items: Iterator[Record | Damage]) -> list[Record | Damage]:
    """The next items of the archive; none at its end. Blocks."""
    batch: list[Record | Damage] = []
    nbytes = 0
    for item in items:
        batch.append(item)
        nbytes += len(item.stored) if isinstance(item, Record) else 0
        if len(batch) == _AT_ONCE or nbytes >= _BATCH_BYTES:
            break
    return batch


async def _whole(records: Sequence[Record], files: _FileThread, report: Report) -> dict[ObjectKey, memoryview]:
    """Those that are the objects that they are said to be."""

    def check() -> dict[ObjectKey, memoryview | CorruptObjectError]:
        checked: dict[ObjectKey, memoryview | CorruptObjectError] = {}
        for key, stored in records:
            try:
                check_sealed(key, stored)
                checked.setdefault(key, stored)
            except CorruptObjectError as error:
                checked.setdefault(key, error)
        return checked

    whole: dict[ObjectKey, memoryview] = {}
    for key, stored in (await files.run(check)).items():
        if isinstance(stored, CorruptObjectError):
            report.failed(key, _reason(stored))
        else:
            whole[key] = stored
    return whole


async def _import_batch(
    adapter: L2Adapter[Any], whole: dict[ObjectKey, memoryview], report: Report, *, repad: bool
) -> int:
    """Store what is not there yet; returns how many are."""
    keys = list(whole)
    found = await adapter.submit_lookup_and_lock_task(keys)
    hits = [key for key, outcome in zip(keys, found, strict=True) if outcome.hit]
    await adapter.submit_unlock_task(hits)
    there = len(hits)

    async def store(key: ObjectKey) -> None:
        nonlocal there
        try:
            status = await store_sealed(adapter, key, whole[key], repad=repad)
        except L2Error as error:
            report.failed(key, _reason(error))
            return
        if status is StoreStatus.STORED:
            report.done(key, len(whole[key]))
        elif status is StoreStatus.ALREADY_PRESENT:
            there += 1
        else:
            report.failed(key, "no room")

    present = set(hits)
    await adapter.for_each([key for key in keys if key not in present], store)
    return there


@contextmanager
def _archive(file: str) -> Iterator[IO[bytes]]:
    if file == _STDIO:
        yield sys.stdin.buffer
        return
    with ExitStack() as stack:
        try:
            source = stack.enter_context(Path(file).open("rb"))
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
        yield source


# --- both -----------------------------------------------------------------------------------------------


def _fits(sizes: Sequence[int], another: int) -> bool:
    return len(sizes) < _AT_ONCE and sum(sizes) + another <= _BATCH_BYTES


def _reason(error: L2Error) -> str:
    if isinstance(error, CorruptObjectError):
        kind = "intact, not readable here" if error.reason in INTACT_REASONS else "damaged"
        return f"{kind} ({error.reason})"
    return f"failed ({type(error).__name__}: {error})"


class _FileThread:
    """Work on the archive's file, in a thread beside the loop, one piece at a time."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(1)

    async def run(self, function: Callable[[], ResultT]) -> ResultT:
        """Run ``function`` and wait for it, cancelled or not."""
        return await anyio.to_thread.run_sync(function, limiter=self._limiter)
