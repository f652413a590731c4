"""What lies in the directory of ``nixl+posix://``, and what one bad object does to its neighbours."""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from pathlib import Path

import pytest

import l2kit
from l2kit import Layout, MemoryObj, ObjectKey
from l2kit.errors import AdapterImportError, BackendError, ConfigError
from l2kit.l1 import L1Manager, WriteReservation
from l2kit.outcomes import LoadStatus, StoreStatus
from l2kit.policy import LRUPolicy
from l2kit_nixl import NixlGdsAdapter, NixlPosixAdapter
from l2kit_nixl.agent import TransferAgent
from l2kit_nixl.object_files import ObjectFiles, OpenFile

pytestmark = pytest.mark.anyio

_NBYTES = 100_000


def _key(number: int) -> ObjectKey:
    return ObjectKey("files", number.to_bytes(16, "big"))


def _source(number: int) -> MemoryObj:
    return MemoryObj.wrap(bytes([number]) * _NBYTES, Layout.raw(_NBYTES))


async def test_the_least_recently_used_object_goes_first(tmp_path: Path) -> None:
    async with l2kit.open_adapter(f"nixl+posix://{tmp_path}/cache", max_bytes=4 * _NBYTES) as adapter:
        for number in range(3):
            [stored] = await adapter.submit_store_task([_key(number)], [_source(number)])
            assert stored.status is StoreStatus.STORED
        await adapter.submit_lookup_and_lock_task([_key(0)])
        await adapter.submit_unlock_task([_key(0)])
        [stored] = await adapter.submit_store_task([_key(3)], [_source(3)])
        assert stored.status is StoreStatus.STORED
        found = await adapter.submit_lookup_and_lock_task([_key(number) for number in range(4)])
        assert [outcome.hit for outcome in found] == [True, False, True, True]
        assert adapter.counters["evicted"] == 1
        usage = await adapter.usage()
        assert usage.objects == 3
        assert usage.used_bytes <= 4 * _NBYTES


async def test_a_smaller_limit_is_kept_from_the_opening_on(tmp_path: Path) -> None:
    url = f"nixl+posix://{tmp_path}/cache"
    async with l2kit.open_adapter(url) as adapter:
        for number in range(4):
            await adapter.submit_store_task([_key(number)], [_source(number)])
    async with l2kit.open_adapter(url, max_bytes=5 * _NBYTES // 2) as adapter:
        usage = await adapter.usage()
        assert usage.objects == 2


async def test_unfinished_files_of_the_dead_are_swept_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    async with l2kit.open_adapter(f"nixl+posix://{root}"):
        pass
    orphan, young, alive, stranger = (
        root / "unfinished" / name for name in ("0" * 16 + ".1", "0" * 16 + ".2", "0" * 16 + ".3", "notes.txt")
    )
    for path in (orphan, young, alive, stranger):
        path.write_bytes(b"half")
        if path is not young:
            os.utime(path, (time.time() - 120,) * 2)
    with alive.open("r+b") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        async with l2kit.open_adapter(f"nixl+posix://{root}") as adapter:
            assert adapter.counters["orphans_swept"] == 1
        assert sorted(path.name for path in (root / "unfinished").iterdir()) == sorted(
            path.name for path in (young, alive, stranger)
        )


class _LyingFiles(ObjectFiles):
    """Says that one object is longer than its file, as when somebody cuts it while it is read."""

    def open_object(self, key: ObjectKey) -> OpenFile | None:
        """Open it."""
        found = super().open_object(key)
        if found is not None and key == _key(1):
            return OpenFile(key, found.size + 4096, found.fd)
        return found


async def test_one_object_that_cannot_be_read_does_not_fail_its_group(tmp_path: Path) -> None:
    keys = [_key(number) for number in range(4)]
    async with l2kit.open_adapter(f"nixl+posix://{tmp_path}/cache") as adapter:
        assert isinstance(adapter, NixlPosixAdapter)
        await adapter.submit_store_task(keys, [_source(number) for number in range(4)])
        lying = _LyingFiles(adapter.config.path, None)
        lying.open()
        adapter._files = lying
        targets = [MemoryObj.allocate(Layout.raw(_NBYTES + 8192)) for _ in keys]
        outcomes = await adapter.submit_load_task(keys, targets)
        assert [outcome.status for outcome in outcomes] == [
            LoadStatus.LOADED,
            LoadStatus.FAILED,
            LoadStatus.LOADED,
            LoadStatus.LOADED,
        ]
        assert isinstance(outcomes[1].error, BackendError)
        for number in (0, 2, 3):
            assert targets[number].tobytes()[:_NBYTES] == bytes([number]) * _NBYTES


async def test_a_cleared_directory_is_used_again(tmp_path: Path) -> None:
    async with l2kit.open_adapter(f"nixl+posix://{tmp_path}/cache") as adapter:
        for folder in (tmp_path / "cache").iterdir():
            folder.rmdir()
        assert (await adapter.probe()).ok


async def test_no_memory_stays_registered_and_no_agent_alive(tmp_path: Path) -> None:
    adapter = l2kit.open_adapter(f"nixl+posix://{tmp_path}/cache")
    assert isinstance(adapter, NixlPosixAdapter)
    async with adapter:
        assert (await adapter.probe()).ok
        with adapter._agents.borrowed() as agent:
            assert len(agent.regions) == 2, "the memory that the probe loaded into, and the agent's own"
            inner = weakref.ref(agent._agent)
    assert inner() is None
    assert not agent.usable


async def test_l1s_arena_is_registered_once_and_as_a_whole(tmp_path: Path) -> None:
    l1 = L1Manager(64 * _NBYTES, LRUPolicy())
    keys = [_key(number) for number in range(16)]

    def reserve(key: ObjectKey, owner: str) -> MemoryObj:
        made = l1.reserve_beside(key, Layout.raw(_NBYTES), owner=owner)
        assert isinstance(made, WriteReservation)
        return made.obj

    sources, targets = ([reserve(key, owner) for key in keys] for owner in ("source", "target"))
    for number, source in enumerate(sources):
        source.segments[0][:] = bytes([number]) * _NBYTES
    async with l2kit.open_adapter(f"nixl+posix://{tmp_path}/cache") as adapter:
        assert isinstance(adapter, NixlPosixAdapter)
        for some in (slice(0, 5), slice(5, 16)):
            await adapter.submit_store_task(keys[some], sources[some])
            outcomes = await adapter.submit_load_task(keys[some], targets[some])
            assert all(outcome.loaded for outcome in outcomes)
        assert [target.tobytes() for target in targets] == [source.tobytes() for source in sources]
        with adapter._agents.borrowed() as one, adapter._agents.borrowed() as other:
            assert {len(agent.regions) for agent in (one, other)} <= {0, 2}, "the arena, and the agent's own map"
    l1.close()  # nothing of ours keeps the arena mapped


async def test_a_missing_cuda_library_is_one_clear_error_at_start(tmp_path: Path) -> None:
    adapter = l2kit.open_adapter(f"nixl+gds://{tmp_path}/cache", multithreaded=True)
    assert isinstance(adapter, NixlGdsAdapter)
    assert adapter.plugin == "GDS_MT"
    try:
        TransferAgent("GDS_MT", {}).close()
    except AdapterImportError:
        pass
    else:
        pytest.skip("this machine has what GDS_MT needs")
    with pytest.raises(AdapterImportError, match=r"GDS_MT needs .*libcu.* does not have"):
        async with adapter:
            pass
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "url", ["nixl+posix://relative/path", "nixl+posix://", "nixl+gds:///x?multithreded=true", "nixl+posix:///a%00b"]
)
async def test_impossible_options_are_refused_at_configuration(url: str) -> None:
    with pytest.raises(ConfigError):
        l2kit.open_adapter(url)


async def test_a_directory_that_cannot_be_made_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="path: cannot keep objects in"):
        async with l2kit.open_adapter(f"nixl+posix://{tmp_path}/file/cache"):
            pass
