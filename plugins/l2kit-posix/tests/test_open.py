"""Opening a directory: what is refused and how it is said, what is rebuilt, what is swept, and what is left alone."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from l2kit import ConfigError
from l2kit.testing.groups.base import Conformance, content
from l2kit_posix.names import object_path
from l2kit_posix.staging import ORPHAN_AGE_S

_NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[None]:
    """Run as somebody whom permission bits hold back; root they do not."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(was)


@contextmanager
def mounted(path: Path, *options: str) -> Iterator[None]:
    """A small tmpfs at ``path``."""
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", path], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


class TestOpen(Conformance):
    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/cache"

    async def refused(self, path: str | Path, *expected: str) -> None:
        with pytest.raises(ConfigError) as raised:
            async with self.open_adapter(f"file://{path}"):
                pass
        for part in ("path: ", str(path), *expected):
            assert part in str(raised.value)

    async def test_a_path_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        await self.refused(tmp_path / "file", "File exists (EEXIST", "name another directory")

    async def test_a_parent_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        await self.refused(tmp_path / "file" / "cache", f"at {tmp_path}/file;", "there is a file")

    @pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
    async def test_a_file_system_that_takes_no_directories(self) -> None:
        await self.refused("/proc/l2kit", "No such file or directory (ENOENT", "name another one")

    async def test_a_read_only_file_system(self, tmp_path: Path) -> None:
        with mounted(tmp_path / "mount", "-o", "ro"):
            await self.refused(tmp_path / "mount", "Read-only file system (EROFS", "mounted read-only")
            assert list((tmp_path / "mount").iterdir()) == []

    async def test_a_directory_without_permission(self) -> None:
        with tempfile.TemporaryDirectory() as outside:  # not below tmp_path, which others cannot even search
            Path(outside).chmod(0o555)
            with unprivileged():
                await self.refused(outside, "Permission denied (EACCES", f"user {os.geteuid()}", "give this user")
                assert list(Path(outside).iterdir()) == []
            Path(outside).chmod(0o755)

    async def test_an_existing_cache_without_permission(self) -> None:
        with tempfile.TemporaryDirectory() as outside:
            async with self.open_adapter(f"file://{outside}"):
                pass
            for folder in (outside, f"{outside}/objects", f"{outside}/staging"):
                Path(folder).chmod(0o555)
            with unprivileged():
                await self.refused(outside, "Permission denied (EACCES", f"{outside}/staging")
            for folder in (outside, f"{outside}/objects", f"{outside}/staging"):
                Path(folder).chmod(0o755)

    async def test_a_dangling_link(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "link")
        await self.refused(tmp_path / "link")

    async def test_making_the_adapter_does_no_io(self, url: str, tmp_path: Path) -> None:
        self.open_adapter(url)
        assert list(tmp_path.iterdir()) == []

    async def test_a_link_to_a_directory_is_followed(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        async with self.open_adapter(f"file://{tmp_path}/link") as adapter:
            await self.store(adapter, {self.key(): b"data"})
        assert (tmp_path / "real" / "objects").is_dir()

    async def test_a_clean_close_leaves_only_objects(self, url: str, tmp_path: Path) -> None:
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, {self.key(): b"data"})
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert [str(path) for path in files] == [object_path(f"{tmp_path}/cache/objects", self.key())]
        assert list((tmp_path / "cache" / "staging").iterdir()) == []

    async def test_only_this_user_reads_by_default(self, url: str, tmp_path: Path) -> None:
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, {self.key(): b"data"})
        for path in (tmp_path / "cache").rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path

    async def test_a_mode_for_a_group_holds_whatever_the_umask(self, url: str, tmp_path: Path) -> None:
        umask = os.umask(0o077)
        try:
            async with self.open_adapter(url, file_mode="660") as adapter:
                await self.store(adapter, {self.key(): b"data"})
        finally:
            os.umask(umask)
        for path in (tmp_path / "cache").rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) == (0o770 if path.is_dir() else 0o660), path

    async def test_usage_and_listing_after_a_restart(self, url: str) -> None:
        objects = {self.key(n): content(n, 1000 + n) for n in range(50)}
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, objects)
            before = await adapter.usage()
            sizes = {info.key: info.size async for info in adapter.iter_keys()}
        async with self.open_adapter(url) as adapter:
            assert await adapter.usage() == before
            assert {info.key: info.size async for info in adapter.iter_keys()} == sizes
            assert set(sizes) == set(objects)
            assert sum(sizes.values()) == before.used_bytes
            await self.expect(adapter, objects)

    async def test_strangers_are_neither_counted_nor_touched(self, url: str, tmp_path: Path) -> None:
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, {self.key(): b"data"})
        objects = tmp_path / "cache" / "objects"
        [folder] = [path for path in objects.glob("*/*") if path.is_dir()]
        strangers = [
            objects / "README",
            objects / "..." / "00" / "file",
            objects / "UPPER" / "00" / "file",
            folder / "notes.txt",
            folder / "0011-s0of1.g0.all",
            folder / ("f" * 200),
            tmp_path / "cache" / "mine",
            tmp_path / "cache" / "staging" / "mine",
            tmp_path / "cache" / "staging" / "old" / "lock",
        ]
        for path in strangers:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * 5000)
            os.utime(path, (1, 1))
        async with self.open_adapter(url, max_bytes=10_000) as adapter:
            assert (await adapter.usage()).objects == 1
            assert [info.key async for info in adapter.iter_keys()] == [self.key()]
            await self.store(adapter, {self.key(n): content(n, 3000) for n in range(1, 9)})
        assert all(path.read_bytes() == b"x" * 5000 for path in strangers)

    async def test_what_is_no_file_is_no_object_and_hangs_nobody(self, url: str, tmp_path: Path) -> None:
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, {self.key(n): b"data" for n in range(3)})
            pipe, link, folder = (Path(object_path(f"{tmp_path}/cache/objects", self.key(n))) for n in range(3))
            for path in (pipe, link, folder):
                path.unlink()
            secret = tmp_path / "secret"
            secret.write_bytes(b"secret")
            os.mkfifo(pipe)
            link.symlink_to(secret)
            folder.mkdir()
            await self.expect(adapter, {self.key(n): None for n in range(3)})
            await self.store(adapter, {self.key(0): b"data", self.key(1): b"data"})
            await self.expect(adapter, {self.key(0): b"data", self.key(1): b"data"})
            assert secret.read_bytes() == b"secret"


class TestStaging(Conformance):
    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/cache"

    @pytest.fixture
    def staging(self, tmp_path: Path) -> Path:
        return tmp_path / "cache" / "staging"

    async def abandon(self, url: str, staging: Path) -> Path:
        """The staging folder of a process that is gone, with a file that it did not finish."""
        async with self.open_adapter(url):
            [own] = staging.glob("*/")
            name, lock = own.name, (own / "lock").read_bytes()
        orphan = staging / name
        orphan.mkdir()
        (orphan / "lock").write_bytes(lock)
        (orphan / "0").write_bytes(b"unfinished")
        return orphan

    def age(self, folder: Path) -> None:
        then = time.time() - ORPHAN_AGE_S - 60
        for path in (*folder.iterdir(), folder):
            os.utime(path, (then, then))

    async def test_a_dead_owners_files_are_swept(self, url: str, staging: Path) -> None:
        orphan = await self.abandon(url, staging)
        async with self.open_adapter(url) as adapter:
            assert not orphan.exists()
            assert adapter.counters["orphans_swept"] == 1

    async def test_a_living_owners_files_stay(self, url: str, staging: Path) -> None:
        async with self.open_adapter(url) as first:
            [own] = staging.glob("*/")
            (own / "unfinished").touch()
            self.age(own)
            async with self.open_adapter(url) as second:
                assert second.counters["orphans_swept"] == 0
                assert (own / "unfinished").exists()
                await self.store(first, {self.key(): b"data"})

    async def test_another_boots_or_hosts_files_are_swept_when_they_are_old(self, url: str, staging: Path) -> None:
        orphan = await self.abandon(url, staging)
        boot, rest = orphan.name.split("-", 1)
        elsewhere = orphan.rename(staging / f"{boot[::-1].translate(str.maketrans('0123456789', '1234567890'))}-{rest}")
        async with self.open_adapter(url):
            assert elsewhere.exists(), "its locks may not be seen here"
        self.age(elsewhere)
        async with self.open_adapter(url):
            assert not elsewhere.exists()

    async def test_a_folder_that_is_not_locked_yet_is_swept_when_it_is_old(self, url: str, staging: Path) -> None:
        orphan = await self.abandon(url, staging)
        unlocked = orphan.rename(staging / f"new-{orphan.name}")
        async with self.open_adapter(url):
            assert unlocked.exists()
        self.age(unlocked)
        async with self.open_adapter(url):
            assert not unlocked.exists()
