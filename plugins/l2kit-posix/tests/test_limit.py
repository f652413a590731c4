"""``max_bytes`` and full file systems: what goes, in which order, and that the limit is one at every moment."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from l2kit.errors import AuthError, CapacityError
from l2kit.testing.groups.base import Adapter, Conformance, content, source
from l2kit_posix.names import object_path

#: Of the payload; a stored object has a page of envelope in front of it.
_NBYTES = 100_000
_STORED = 4096 + _NBYTES


@contextmanager
def immutable(path: Path) -> Iterator[None]:
    """Nobody, not even root, can remove the file."""
    if subprocess.run(["chattr", "+i", path], capture_output=True, check=False).returncode:
        pytest.skip("needs a file system with immutable files, and the right to make one (chattr +i)")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", path], check=True)


class Limit(Conformance):
    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/cache"

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return tmp_path / "cache"

    async def put(self, adapter: Adapter, *numbers: int) -> None:
        """Store objects one after the other."""
        for number in numbers:
            await self.store(adapter, {self.key(number): content(number, _NBYTES)})

    async def get(self, adapter: Adapter, number: int) -> bool:
        """Load an object; False for a miss."""
        outcome, received = await self.load(adapter, self.key(number), _NBYTES)
        assert outcome.status in ("loaded", "miss"), outcome
        assert not outcome.loaded or received == content(number, _NBYTES)
        return outcome.loaded

    async def present(self, adapter: Adapter) -> set[int]:
        """Which of the first 100 numbers lie in the directory; looks without using them."""
        listed = {info.key async for info in adapter.iter_keys()}
        return {number for number in range(100) if self.key(number) in listed}

    def path(self, root: Path, number: int) -> Path:
        return Path(object_path(f"{root}/objects", self.key(number)))

    def bytes_on_disk(self, root: Path) -> int:
        """Finished and unfinished files; finished ones first, so that a file that is just published counts once."""
        total = 0
        for folder in ("objects", "staging"):
            for path in (root / folder).rglob("*"):
                try:
                    total += path.stat().st_size if path.is_file() and path.name != "tally" else 0
                except FileNotFoundError:
                    continue
        return total


def files_on_disk(root: Path) -> dict[tuple[Path, int], int]:
    """Size of each file under ``root``, by its path and inode."""
    found: dict[tuple[Path, int], int] = {}
    for path in root.rglob("*"):
        with suppress(OSError):  # gone meanwhile
            status = path.stat()
            if stat.S_ISREG(status.st_mode) and path.name != "tally":
                found[path, status.st_ino] = status.st_size
    return found


class TestLimit(Limit):
    async def test_the_least_recently_used_goes_first(self, url: str) -> None:
        async with self.open_adapter(url, max_bytes=4 * _STORED) as adapter:
            await self.put(adapter, 0, 1, 2, 3)
            assert await self.get(adapter, 0)
            [found] = await adapter.submit_lookup_and_lock_task([self.key(1)])  # a lookup that hits is a use as well
            assert found.hit
            await adapter.submit_unlock_task([self.key(1)])
            await self.put(adapter, 4, 5)
            assert await self.present(adapter) == {0, 1, 4, 5}
            assert adapter.counters["evicted"] == 2
            assert adapter.counters["evicted_bytes"] == 2 * _STORED

    async def test_a_second_store_is_a_use(self, url: str) -> None:
        async with self.open_adapter(url, max_bytes=2 * _STORED) as adapter:
            await self.put(adapter, 0, 1)
            [outcome] = await self.store(adapter, {self.key(0): content(0, _NBYTES)})
            assert outcome.status == "already_present"
            await self.put(adapter, 2)
            assert await self.present(adapter) == {0, 2}

    async def test_the_limit_holds_at_every_moment(self, url: str, root: Path) -> None:
        limit = 5 * _STORED + _STORED // 2
        most = 0
        async with self.open_adapter(url, max_bytes=limit, max_concurrency=8) as adapter:
            keys = self.keys(60)
            task = adapter.submit_store_task(keys, [source(content(n, _NBYTES)) for n in range(60)])
            while not task.ended:
                # One walk sees no one moment: it can count an object and then what replaced it. What two walks both
                # see was there between them, all at the same time.
                before, after = files_on_disk(root), files_on_disk(root)
                most = max(most, sum(size for file, size in before.items() if file in after))
                await anyio.lowlevel.checkpoint()
            assert {outcome.status for outcome in await task} == {"stored"}
            usage = await adapter.usage()
            assert usage.used_bytes == self.bytes_on_disk(root) == 5 * _STORED
            assert (usage.max_bytes, usage.objects) == (limit, 5)
        assert 0 < most <= limit

    async def test_stores_at_once_wait_for_one_another(self, url: str) -> None:
        """There is room for one, and four write at the same time: none is dropped for it."""
        async with self.open_adapter(url, max_bytes=_STORED + 1, max_concurrency=4) as adapter:
            outcomes = await adapter.submit_store_task(self.keys(12), [source(content(n, _NBYTES)) for n in range(12)])
            assert {outcome.status for outcome in outcomes} == {"stored"}
            assert len(await self.present(adapter)) == 1

    async def test_an_object_over_the_limit_is_dropped_and_evicts_nothing(self, url: str) -> None:
        async with self.open_adapter(url, max_bytes=_STORED) as adapter:
            await self.put(adapter, 0)
            [outcome] = await adapter.submit_store_task([self.key(1)], [source(bytes(_NBYTES + 1))])
            assert outcome.status == "dropped"
            assert await self.present(adapter) == {0}

    async def test_a_replacement_is_counted_once(self, url: str, root: Path) -> None:
        async with self.open_adapter(url, max_bytes=10 * _STORED) as adapter:
            for nbytes in (_NBYTES, 10, 2 * _NBYTES, 5000):
                [outcome] = await self.store(adapter, {self.key(): content("x", nbytes)})
                assert outcome.status == "stored"
            await self.put(adapter, *range(1, 10))
            assert await self.present(adapter) == set(range(10))
            assert (await adapter.usage()).used_bytes == self.bytes_on_disk(root) == 9 * _STORED + 4096 + 5000

    async def test_order_and_usage_survive_a_restart(self, url: str) -> None:
        async with self.open_adapter(url, max_bytes=6 * _STORED) as adapter:
            await self.put(adapter, 0, 1, 2, 3, 4, 5)
            for number in (3, 0, 5):
                assert await self.get(adapter, number)
        async with self.open_adapter(url, max_bytes=6 * _STORED) as adapter:
            assert (await adapter.usage()).used_bytes == 6 * _STORED
            order: list[int] = []
            for number in range(10, 16):
                before = await self.present(adapter)
                await self.put(adapter, number)
                order += before - await self.present(adapter)
            assert order == [1, 2, 4, 3, 0, 5]

    async def test_a_smaller_limit_evicts_at_open(self, url: str) -> None:
        async with self.open_adapter(url) as adapter:
            await self.put(adapter, 0, 1, 2, 3)
            assert await self.get(adapter, 1)
        async with self.open_adapter(url, max_bytes=2 * _STORED + 1) as adapter:
            assert await self.present(adapter) == {1, 3}
            assert await self.get(adapter, 1)

    async def test_what_is_deleted_makes_room(self, url: str, root: Path) -> None:
        async with self.open_adapter(url, max_bytes=3 * _STORED) as adapter:
            await self.put(adapter, 0, 1, 2)
            await adapter.submit_delete_task([self.key(1)])
            await self.put(adapter, 3)
            assert await self.present(adapter) == {0, 2, 3}
            self.path(root, 2).unlink()  # behind our back: found out at the latest when it should be evicted
            assert not await self.get(adapter, 2)
            await self.put(adapter, 4)
            assert await self.present(adapter) == {0, 3, 4}
            self.path(root, 0).unlink()
            await self.put(adapter, 5)
            assert await self.present(adapter) == {3, 4, 5}

    async def test_what_another_process_used_is_not_the_next_to_go(self, url: str) -> None:
        async with self.open_adapter(url, max_bytes=3 * _STORED) as ours, self.open_adapter(url) as theirs:
            await self.put(ours, 0, 1, 2)
            theirs._directory._save_use(self.path(Path(ours.config.path), 0), ours._directory._index.now_ns())  # type: ignore[attr-defined]
            await self.put(ours, 3)
            assert await self.present(ours) == {0, 2, 3}

    async def test_what_another_process_wrote_counts_once_we_have_seen_it(self, url: str) -> None:
        async with self.open_adapter(url, max_bytes=3 * _STORED) as ours, self.open_adapter(url) as theirs:
            await self.put(theirs, 0, 1, 2, 3, 4)
            assert (await ours.usage()).objects == 5
            for number in range(5):
                assert await self.get(ours, number)
            await self.put(ours, 5)
            assert await self.present(ours) == {3, 4, 5}

    async def test_an_object_that_cannot_be_evicted_does_not_stop_all_stores(self, url: str, root: Path) -> None:
        async with self.open_adapter(url, max_bytes=2 * _STORED) as adapter:
            await self.put(adapter, 0, 1)
            folder = self.path(root, 0).parent
            with immutable(self.path(root, 0)):
                [outcome] = await adapter.submit_store_task([self.key(2)], [source(content(2, _NBYTES))])
                assert isinstance(outcome.error, AuthError)
                assert str(folder) in str(outcome.error)
                await self.put(adapter, 3)
                assert await self.present(adapter) == {0, 3}


class TestFullFileSystem(Limit):
    @pytest.fixture
    def root(self, tmp_path: Path) -> Iterator[Path]:
        """A file system of 2 MiB."""
        path = tmp_path / "mount"
        path.mkdir()
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], capture_output=True, check=False
        )
        if made.returncode:
            pytest.skip(f"needs the right to mount a tmpfs: {made.stderr.decode().strip()}")
        yield path
        subprocess.run(["umount", path], check=True)

    @pytest.fixture
    def adapter_url(self, root: Path) -> str:
        return f"file://{root}"

    def fill(self, root: Path) -> None:
        """Take all the space that is left."""
        with (root / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
            while True:
                ballast.write(bytes(4096))

    @pytest.mark.parametrize("options", [{}, {"max_bytes": "1GiB"}], ids=["no limit", "a limit beyond the real size"])
    async def test_stores_evict_and_go_on(self, url: str, options: dict[str, str]) -> None:
        async with self.open_adapter(url, **options) as adapter:
            await self.put(adapter, *range(60))
            assert await self.get(adapter, 59)
            assert adapter.counters["store.stored"] == 60
            present = await self.present(adapter)
            assert len(present) >= 15
            assert present == set(range(60 - len(present), 60)), "not the least recently used ones went"

    async def test_nothing_left_to_evict_is_a_clean_failure_and_space_heals(self, url: str, root: Path) -> None:
        async with self.open_adapter(url) as adapter:
            await self.put(adapter, 0)
            self.fill(root)
            # One goes, and that is not enough room for two.
            [outcome] = await adapter.submit_store_task([self.key(1)], [source(content(1, 2 * _NBYTES))])
            assert isinstance(outcome.error, CapacityError)
            for part in ("No space left on device", str(root), "max_bytes"):
                assert part in str(outcome.error)
            assert [path.name for path in root.glob("staging/*/*")] == ["lock"]
            assert await self.present(adapter) == set()
            (root / "ballast").unlink()
            await self.put(adapter, 2, 3)
            assert await self.get(adapter, 2)

    async def test_locked_objects_are_not_given_up(self, url: str) -> None:
        async with self.open_adapter(url) as adapter:
            await self.put(adapter, 0, 1)
            await adapter.submit_lookup_and_lock_task([self.key(0)])
            await self.put(adapter, *range(10, 50))
            assert await self.get(adapter, 0)
            assert not await self.get(adapter, 1)
            await adapter.submit_unlock_task([self.key(0)])

    async def test_a_full_file_system_can_be_opened_and_read(self, url: str, root: Path) -> None:
        async with self.open_adapter(url) as adapter:
            await self.put(adapter, 0)
        self.fill(root)
        async with self.open_adapter(url) as adapter:
            assert await self.get(adapter, 0)


class TestFileSizeLimit(Limit):
    async def test_a_limit_of_the_process_is_named(self, url: str, root: Path) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        async with self.open_adapter(url) as adapter:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
            try:
                [outcome] = await adapter.submit_store_task([self.key()], [source(bytes(_NBYTES))])
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert isinstance(outcome.error, CapacityError)
            assert "ulimit -f" in str(outcome.error)
            assert [path.name for path in root.glob("staging/*/*")] == ["lock"]
            assert list(root.glob("objects/*/*/*")) == []
            await self.put(adapter, 0)

    async def test_no_descriptor_left(self, url: str) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        async with self.open_adapter(url) as adapter:
            await self.put(adapter, 0)
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (max(int(fd.name) for fd in Path("/proc/self/fd").iterdir()), hard)
            )
            taken = []
            try:
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                pass
            try:
                [loaded] = await adapter.submit_load_task([self.key(0)], [source(bytearray(_NBYTES))])
                [found] = await adapter.submit_lookup_and_lock_task([self.key(0)])
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for fd in taken:
                    os.close(fd)
            assert "ulimit -n" in str(loaded.error)
            assert found.status == "miss", "without a descriptor nothing can be locked"
            assert adapter.counters["lease_limit"] == 1
            assert await self.get(adapter, 0)
