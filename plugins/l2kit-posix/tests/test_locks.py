"""Locks: an open file outlives its name."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from l2kit.errors import TransientBackendError
from l2kit.testing.groups.base import Adapter, Conformance, content, source
from l2kit_posix.leases import default_max_open
from l2kit_posix.names import object_path

_NBYTES = 50_000
_STORED = 4096 + _NBYTES


class Locks(Conformance):
    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/cache"

    def path(self, adapter: Adapter, number: int) -> Path:
        return Path(object_path(f"{adapter.config.path}/objects", self.key(number)))

    def open_objects(self, adapter: Adapter) -> list[str]:
        """The objects that this process holds open."""
        links = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
        return [link for link in links if link.startswith(f"{adapter.config.path}/objects/")]

    async def lock(self, adapter: Adapter, *numbers: int) -> list[bool]:
        found = await adapter.submit_lookup_and_lock_task([self.key(number) for number in numbers])
        return [outcome.hit for outcome in found]

    async def unlock(self, adapter: Adapter, *numbers: int) -> list[str]:
        return [str(o.status) for o in await adapter.submit_unlock_task([self.key(number) for number in numbers])]

    async def loads(self, adapter: Adapter, number: int, nbytes: int = _NBYTES, name: object = None) -> bool:
        outcome, received = await self.load(adapter, self.key(number), nbytes)
        assert not outcome.loaded or received == content(number if name is None else name, nbytes)
        return outcome.loaded

    async def test_our_own_eviction_passes_locked_objects_over(self, url: str) -> None:
        async with self.open_adapter(url, max_bytes=3 * _STORED) as adapter:
            await self.store(adapter, {self.key(0): content(0, _NBYTES)})
            await self.store(adapter, {self.key(1): content(1, _NBYTES)})
            assert await self.lock(adapter, 0) == [True]
            await self.store(adapter, {self.key(n): content(n, _NBYTES) for n in range(2, 8)})
            assert self.path(adapter, 0).exists()
            assert await self.loads(adapter, 0)
            await self.unlock(adapter, 0)

    async def test_a_store_is_dropped_when_everything_is_locked(self, url: str) -> None:
        async with self.open_adapter(url, max_bytes=2 * _STORED) as adapter:
            await self.store(adapter, {self.key(n): content(n, _NBYTES) for n in range(2)})
            await self.lock(adapter, 0, 1)
            data = content(2, _NBYTES)
            [outcome] = await adapter.submit_store_task([self.key(2)], [source(data)])
            assert outcome.status == "dropped"
            await self.unlock(adapter, 0)
            await self.store(adapter, {self.key(2): data})
            assert [await self.loads(adapter, n) for n in range(3)] == [False, True, True]
            await self.unlock(adapter, 1)


class TestLocks(Locks):
    async def test_a_locked_object_survives_eviction_by_another_process(self, url: str) -> None:
        async with self.open_adapter(url) as ours, self.open_adapter(url, max_bytes=2 * _STORED) as theirs:
            await self.store(theirs, {self.key(0): content(0, _NBYTES)})
            assert await self.lock(ours, 0) == [True]
            await self.store(theirs, {self.key(n): content(n, _NBYTES) for n in range(1, 6)})
            assert not self.path(ours, 0).exists()
            assert not await self.loads(theirs, 0)
            assert await self.loads(ours, 0)
            assert await self.lock(ours, 0) == [False], "a new lookup is told the truth"
            await self.unlock(ours, 0)
            assert not await self.loads(ours, 0)

    async def test_a_locked_object_survives_deletion_and_clearing(self, url: str) -> None:
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, {self.key(n): content(n, _NBYTES) for n in range(3)})
            assert await self.lock(adapter, 0, 1) == [True, True]
            await adapter.submit_delete_task([self.key(0)])
            for number in (1, 2):
                self.path(adapter, number).unlink()
            assert [await self.loads(adapter, n) for n in range(3)] == [True, True, False]
            await self.unlock(adapter, 0, 1)
            assert [await self.loads(adapter, n) for n in range(3)] == [False, False, False]

    async def test_a_locked_object_that_is_replaced_is_read_anew(self, url: str) -> None:
        """After a damaged object was healed, nobody must go on reading the damaged one through an old lock."""
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, {self.key(0): content(0, _NBYTES)})
            await self.lock(adapter, 0)
            damaged = bytearray(self.path(adapter, 0).read_bytes())
            damaged[-1] ^= 1
            self.path(adapter, 0).write_bytes(damaged)
            outcome, _ = await self.load(adapter, self.key(0), _NBYTES)
            assert outcome.status == "corrupt"
            assert not self.path(adapter, 0).exists()
            await self.store(adapter, {self.key(0): content(0, _NBYTES)})
            assert await self.loads(adapter, 0)
            assert self.path(adapter, 0).exists()
            assert await self.lock(adapter, 0) == [True]
            assert len(self.open_objects(adapter)) == 1, "one file for each locked object, whatever became of it"
            self.path(adapter, 0).unlink()
            assert await self.loads(adapter, 0), "the newer lock's file is the newer object"
            assert await self.unlock(adapter, 0, 0) == ["deleted", "deleted"]
            assert self.open_objects(adapter) == []

    async def test_one_file_for_many_locks_of_one_object(self, url: str) -> None:
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, {self.key(0): content(0, _NBYTES)})
            for _ in range(5):
                assert await self.lock(adapter, 0) == [True]
            assert len(self.open_objects(adapter)) == 1
            assert await self.unlock(adapter, *[0] * 4) == ["deleted"] * 4
            assert len(self.open_objects(adapter)) == 1
            await self.unlock(adapter, 0)
            assert self.open_objects(adapter) == []

    async def test_closing_gives_every_file_back(self, url: str) -> None:
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, {self.key(n): content(n, _NBYTES) for n in range(20)})
            await self.lock(adapter, *range(20))
            assert len(self.open_objects(adapter)) == 20
        assert self.open_objects(adapter) == []

    async def test_beyond_the_bound_a_lookup_says_miss_and_counts(self, url: str) -> None:
        async with self.open_adapter(url, max_open_files=3) as adapter:
            await self.store(adapter, {self.key(n): content(n, _NBYTES) for n in range(6)})
            assert await self.lock(adapter, *range(5)) == [True, True, True, False, False]
            assert adapter.counters["lease_limit"] == 2
            assert await self.lock(adapter, 1) == [True], "an object that is locked already needs no more"
            assert await self.loads(adapter, 5), "loads need no lock"
            await self.unlock(adapter, 0, 1)
            assert await self.lock(adapter, 3) == [True]
            await self.unlock(adapter, 1, 2, 3)
            assert self.open_objects(adapter) == []

    async def test_the_bound_comes_from_the_process(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
            assert default_max_open() == 300
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class TestExclusive(Locks):
    """One process has the directory for itself: what it locks is held in memory, and is as safe."""

    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/cache?exclusive=true"

    async def test_others_are_refused(self, url: str, tmp_path: Path) -> None:
        async with self.open_adapter(url):
            for other in (url, f"file://{tmp_path}/cache"):
                with pytest.raises(TransientBackendError, match="another process has it open"):
                    async with self.open_adapter(other):
                        pass
        async with self.open_adapter(f"file://{tmp_path}/cache"):
            with pytest.raises(TransientBackendError, match="this one wants it for itself"):
                async with self.open_adapter(url):
                    pass
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, {self.key(0): content(0, _NBYTES)})
        assert list((tmp_path / "cache" / "staging").iterdir()) == []

    async def test_lookups_and_locks_open_nothing(self, url: str) -> None:
        async with self.open_adapter(url, max_open_files=1) as adapter:
            await self.store(adapter, {self.key(n): content(n, _NBYTES) for n in range(5)})
            assert await self.lock(adapter, *range(6)) == [True] * 5 + [False]
            assert self.open_objects(adapter) == []
            await adapter.submit_delete_task([self.key(0)])
            assert len(self.open_objects(adapter)) == 1, "a locked object that loses its name"
            assert await self.loads(adapter, 0)
            assert await self.lock(adapter, 0) == [False]
            await self.unlock(adapter, *range(5))
            assert self.open_objects(adapter) == []
            assert [await self.loads(adapter, n) for n in range(2)] == [False, True]

    async def test_what_is_going_cannot_be_locked_any_more(self, url: str) -> None:
        """Who unlocks while another deletes must not let a third one lock what loses its name a moment later."""
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, {self.key(n): content(n, _NBYTES) for n in range(2)})
            assert await self.lock(adapter, 0) == [True]
            directory = adapter._directory  # type: ignore[attr-defined]
            short = directory._names.short(self.key(0))
            assert not directory._leases.condemn(short), "it is locked"
            assert await self.lock(adapter, 0, 1) == [False, True]
            await self.unlock(adapter, 0)
            assert await self.lock(adapter, 0) == [False]
            directory._leases.absolve(short)
            assert await self.lock(adapter, 0) == [True]
            await self.unlock(adapter, 0, 1)
