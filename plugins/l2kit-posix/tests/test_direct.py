"""O_DIRECT: what is planned, what is moved, what happens where it is refused. And what ``fsync`` forces to disk."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import l2kit
from l2kit import Layout, MemoryObj
from l2kit.testing.groups.base import Adapter, Conformance, content, same, source
from l2kit_posix.direct import PAGE_BYTES, DirectFiles, address_of, calls
from l2kit_posix.names import object_path
from l2kit_posix.vectors import CALL_BYTES

#: Where a segment begins in its page, and how long it is.
segments = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 1, 16, 4095]), st.sampled_from([0, 1, 100, 4095, 4096, 4097, 8192, 20_000])),
    max_size=8,
)


def memory(shape: list[tuple[int, int]]) -> list[memoryview]:
    """Segments of that shape in memory of their own, each with other bytes."""
    views = []
    for number, (ahead, nbytes) in enumerate(shape):
        whole = memoryview(mmap.mmap(-1, ahead + nbytes + 1))
        whole[ahead : ahead + nbytes] = content(number, nbytes)
        views.append(whole[ahead : ahead + nbytes])
    return views


@given(segments)
def test_a_plan_has_all_bytes_in_order_and_only_whole_pages(shape: list[tuple[int, int]]) -> None:
    views = memory(shape)
    planned = [part for parts in calls(views, address_of) for part in parts]
    pieces = [piece for part in planned for piece in ([part.view] if part.view is not None else part.copied)]
    assert same(b"".join(pieces), b"".join(views))
    for part in planned:
        if part.view is not None:
            address = address_of(part.view)
            assert address is not None
            assert address % PAGE_BYTES == 0
            assert part.nbytes == len(part.view) > 0
        else:
            assert part.nbytes == sum(map(len, part.copied)) > 0
    assert all(part.nbytes % PAGE_BYTES == 0 for part in planned[:-1])


def test_a_page_of_head_and_aligned_payload_copy_the_head_only() -> None:
    head, payload = memoryview(bytearray(PAGE_BYTES + 16))[16:], memoryview(mmap.mmap(-1, 3 * CALL_BYTES))
    planned = list(calls([head[:PAGE_BYTES], payload], address_of))
    copied = [part.nbytes for parts in planned for part in parts if part.view is None]
    assert copied in ([PAGE_BYTES], []), "the head may lie on a page by chance"
    assert all(sum(part.nbytes for part in parts) <= CALL_BYTES for parts in planned)


def test_read_only_memory_goes_through_a_copy() -> None:
    [parts] = calls([memoryview(bytes(2 * PAGE_BYTES))], address_of)
    assert [part.view for part in parts] == [None]


def needs_direct(path: Path) -> None:
    try:
        os.close(os.open(path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pytest.skip(f"needs a file system with O_DIRECT, which {path} is not on")


@settings(max_examples=60, deadline=None)
@given(written=segments, read=segments)
def test_files_come_back_whatever_the_shapes(
    tmp_path_factory: pytest.TempPathFactory, written: list[tuple[int, int]], read: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "direct"
    folder.mkdir(exist_ok=True)
    needs_direct(folder)
    files, path = DirectFiles(lambda: None), folder / "file"
    data, into = memory(written), memory(read)
    whole, before = b"".join(data), b"".join(into)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    try:
        files.write(fd, data)
        assert same(path.read_bytes(), whole)
        moved = files.read(fd, into, len(whole))
    finally:
        os.close(fd)
    assert moved == min(len(whole), len(before))
    assert same(b"".join(into), whole[:moved] + before[moved:]), "other bytes, or what was not read was touched"


class TestDirect(Conformance):
    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/cache?direct=true"

    async def test_large_objects_from_any_memory(self, url: str) -> None:
        nbytes = CALL_BYTES + 3 * PAGE_BYTES + 17
        data = content("large", nbytes)
        aligned = MemoryObj.allocate(Layout.raw(nbytes))
        aligned.segments[0][:] = data
        objects = [
            MemoryObj.wrap(data, Layout.raw(nbytes)),
            MemoryObj.wrap(bytearray(data), Layout.raw(nbytes)),
            aligned,
        ]
        async with self.open_adapter(url) as adapter:
            keys = self.keys(3)
            assert all(one.status == "stored" for one in await adapter.submit_store_task(keys, objects))
            await self.expect(adapter, dict.fromkeys(keys, data))

    async def test_the_mode_in_effect_is_said(self, url: str, tmp_path: Path) -> None:
        tmp_path.joinpath("cache").mkdir()
        needs_direct(tmp_path / "cache")
        async with self.open_adapter(url) as adapter:
            probe = await adapter.probe()
            assert probe.ok
            assert probe.details["io"] == "direct (O_DIRECT)"
        async with self.open_adapter(url, direct=False, fsync="full") as adapter:
            details = (await adapter.probe()).details
            assert (details["io"], details["fsync"]) == ("page cache", "full")

    async def test_where_it_is_refused_one_warning_says_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with refusing(tmp_path), caplog.at_level(logging.WARNING, "l2kit_posix"):
            async with self.open_adapter(f"file://{tmp_path}/cache?direct=true") as adapter:
                await self.store(adapter, {self.key(n): content(n, 50_000) for n in range(5)})
                await self.expect(adapter, {self.key(n): content(n, 50_000) for n in range(5)})
                details = (await adapter.probe()).details
        assert details["io"] == "page cache, as O_DIRECT is refused (EINVAL, errno 22)"
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "errno 22" in caplog.text


class refusing:  # noqa: N801 - reads as a statement
    """A place whose file system refuses O_DIRECT: tmpfs did before Linux 6.6, so the flag is refused here by hand."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        really = os.open

        def refuse(path: str, flags: int, *rest: int) -> int:
            if flags & os.O_DIRECT and str(path).startswith(self._path):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
            return really(path, flags, *rest)

        self._patch.setattr(os, "open", refuse)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


class TestFsync(Conformance):
    """What is forced to the device, and before what. That it is there after a loss of power, the kernel promises."""

    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/cache"

    @pytest.fixture
    def journal(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
        """The system calls that matter, in order, each with the name of what it is about."""
        made: list[tuple[str, str]] = []

        def record(name: str, subject: Callable[..., str]) -> None:
            really = getattr(os, name)

            def call(*arguments: object, **named: object) -> object:
                made.append((name, subject(*arguments)))
                return really(*arguments, **named)

            monkeypatch.setattr(os, name, call)

        record("fsync", lambda fd: Path(f"/proc/self/fd/{fd}").readlink().name)
        record("replace", lambda old, new: Path(new).name)
        record("unlink", lambda path: Path(path).name)
        return made

    async def journal_of(self, adapter: Adapter, number: int, journal: list[tuple[str, str]]) -> list[str]:
        """What storing an object did, in words."""
        path = Path(object_path(f"{adapter.config.path}/objects", self.key(number)))
        journal.clear()
        await self.store(adapter, {self.key(number): b"data"})
        words = {path.name: "object", path.parent.name: "folder", path.parent.parent.name: "namespace"}
        return [
            f"{call} {'unfinished' if name.isdigit() and name not in words else words.get(name, name)}"
            for call, name in journal
        ]

    async def test_none_forces_nothing(self, url: str, journal: list[tuple[str, str]]) -> None:
        async with self.open_adapter(url) as adapter:
            assert (await self.journal_of(adapter, 0, journal))[0] == "replace object"
            assert not any(call == "fsync" for call, _ in journal)

    async def test_data_forces_the_bytes_before_the_name(self, url: str, journal: list[tuple[str, str]]) -> None:
        async with self.open_adapter(url, fsync="data") as adapter:
            await self.store(adapter, {self.key(0): b"the folders are there"})
            await adapter.submit_delete_task([self.key(0)])
            assert await self.journal_of(adapter, 0, journal) == ["fsync unfinished", "replace object"]

    async def test_full_forces_the_name_before_the_answer(self, url: str, journal: list[tuple[str, str]]) -> None:
        async with self.open_adapter(url, fsync="full") as adapter:
            made = await self.journal_of(adapter, 0, journal)
            assert made[0] == "fsync unfinished"
            assert made[-4:] == ["fsync folder", "fsync namespace", "fsync objects", "fsync cache"]
            journal.clear()
            await adapter.submit_delete_task([self.key(0)])
            assert [call for call, _ in journal] == ["unlink", "fsync"]
            assert await self.journal_of(adapter, 0, journal) == ["fsync unfinished", "replace object", "fsync folder"]

    async def test_a_flush_that_fails_is_no_store(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        async with self.open_adapter(url, fsync="data") as adapter:

            def fail(fd: int) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            with monkeypatch.context() as patched:
                patched.setattr(os, "fsync", fail)
                [outcome] = await adapter.submit_store_task([self.key()], [source(b"data")])
            assert outcome.status == "failed"
            assert "EIO" in str(outcome.error)
            await self.expect(adapter, {self.key(): None})
            assert (await adapter.usage()).used_bytes == 0


@pytest.mark.slow
def test_a_direct_store_leaves_the_page_cache_alone(tmp_path: Path) -> None:
    """The kernel says which pages of a file it holds."""
    needs_direct(tmp_path)
    if subprocess.run(["fincore", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("needs fincore, of util-linux")
    key, nbytes = l2kit.ObjectKey("cached", bytes(16)), 1 << 20

    async def store(options: str) -> None:
        async with l2kit.open_adapter(f"file://{tmp_path}/{options}?direct={options}") as adapter:
            obj = MemoryObj.allocate(Layout.raw(nbytes))
            await adapter.submit_store_task([key], [obj])
            assert (await adapter.submit_load_task([key], [obj]))[0].loaded

    def cached(options: str) -> int:
        path = object_path(f"{tmp_path}/{options}/objects", key)
        command = ["fincore", "--noheadings", "--bytes", "--output", "RES", path]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    for options in ("true", "false"):
        anyio.run(store, options)
    assert cached("false") >= nbytes
    assert cached("true") <= PAGE_BYTES
