"""The full-disk drill: limits above what the disk really has. Stores fail cleanly or evict, loads go on, space heals.

Each test fills a small file system of its own, mounted for it and unmounted after it, never the machine's disk.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

import l2kit
from l2kit.adapter import L2Adapter
from l2kit.errors import CapacityError
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.outcomes import StoreOutcome
from l2kit.resilience import BreakerAdapter
from l2kit.storage_manager import StorageManager
from l2kit.wrapper import innermost

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(120)]

DISK_BYTES = 8 << 20
OBJECT_BYTES = 200_000
#: More than there is room for.
MANY = 3 * DISK_BYTES // OBJECT_BYTES


class Disk:
    """A small file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    @property
    def free_bytes(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def fill(self, leave_bytes: int = 0) -> None:
        """Somebody else's file takes what is left."""
        assert self.path.is_mount(), "never the machine's disk"
        with self._filler.open("ab", buffering=0) as file, suppress(OSError):
            while self.free_bytes > leave_bytes:
                file.write(bytes(min(64 << 10, self.free_bytes - leave_bytes)))

    def give_back(self) -> None:
        """It goes again."""
        self._filler.unlink()

    def files(self) -> set[Path]:
        """All but the filler."""
        return {path for path in self.path.rglob("*") if path.is_file()} - {self._filler}


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    if request.param == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},nr_inodes=400", "l2kit-drill", str(mount_point)]
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(DISK_BYTES + (4 << 20))
        _or_skip(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0", str(image)])
        mount = ["mount", "-o", "loop", str(image), str(mount_point)]
    _or_skip(mount)
    try:
        yield Disk(mount_point)
    finally:
        done = subprocess.run(["umount", str(mount_point)], capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:  # a file is still open: take it out of the tree all the same
            subprocess.run(["umount", "--lazy", str(mount_point)], capture_output=True, timeout=30, check=False)
            pytest.fail(f"something holds the file system: {done.stderr}")


def _or_skip(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip(f"needs {command[0]}")
    if done.returncode:
        pytest.skip(f"needs the right to mount a file system: {' '.join(done.stderr.split())[:200]}")


def key(number: int) -> ObjectKey:
    return ObjectKey("disk", number.to_bytes(16, "big", signed=True))


def content(number: int, nbytes: int = OBJECT_BYTES) -> bytes:
    return hashlib.shake_128(str(number).encode()).digest(nbytes)


async def put(adapter: L2Adapter[Any], numbers: Iterable[int]) -> list[StoreOutcome]:
    """One after the other, as an engine's chunks come."""
    outcomes = []
    for number in numbers:
        obj = MemoryObj.wrap(content(number), Layout.raw(OBJECT_BYTES))
        outcomes += await adapter.submit_store_task([key(number)], [obj])
    return outcomes


def stored_or_no_room(outcome: StoreOutcome) -> bool:
    """Whether an object was stored; that there was no room for it is the one other thing that may happen.

    A file system takes space for itself, too: what one object has left may not be enough for another one.
    """
    assert outcome.status in ("stored", "dropped") or isinstance(outcome.error, CapacityError), outcome
    return outcome.present


async def have(adapter: L2Adapter[Any], numbers: Iterable[int]) -> set[int]:
    """Which are there: what a lookup finds, a load brings, and every byte is compared."""
    there = set()
    for number in numbers:
        [found] = await adapter.submit_lookup_and_lock_task([key(number)])
        target = MemoryObj.wrap(bytearray(OBJECT_BYTES), Layout.raw(OBJECT_BYTES))
        [outcome] = await adapter.submit_load_task([key(number)], [target])
        if found.hit:
            await adapter.submit_unlock_task([key(number)])
        assert outcome.status == ("loaded" if found.hit else "miss"), outcome
        if outcome.loaded:
            assert bool(target.tobytes() == content(number))
            there.add(number)
    return there


async def books(adapter: L2Adapter[Any], disk: Disk) -> set[Path]:
    """The files that the adapter keeps beside objects: those that stay when its first object has come and gone."""
    await put(adapter, [-1])
    await adapter.submit_delete_task([key(-1)])
    return disk.files()


async def until(predicate: Callable[[], object], timeout_s: float = 20.0) -> None:
    with anyio.fail_after(timeout_s):
        while not predicate():  # noqa: ASYNC110 - what is watched sets no event
            await anyio.sleep(0.01)


# --- file:// ----------------------------------------------------------------------------------------


def file_url(disk: Disk) -> str:
    return f"file://{disk.path}/objects?max_bytes=1GiB"


async def test_file_evicts_its_own_when_the_disk_is_full_of_it(disk: Disk) -> None:
    async with l2kit.open_adapter(file_url(disk)) as adapter:
        kept = await books(adapter, disk)
        outcomes = await put(adapter, range(MANY))
        stored = {number for number, outcome in enumerate(outcomes) if stored_or_no_room(outcome)}
        assert len(stored) > MANY * 3 // 4, "what it evicts makes room for others"
        assert adapter.counters["evicted"] > 0
        there = await have(adapter, range(MANY))
        assert there == {number for number in stored if number >= min(there)}, "the oldest ones went"
        assert len(there) * OBJECT_BYTES > DISK_BYTES // 2
        assert len(disk.files() - kept) == len(there), "an attempt that failed has left something"
    async with l2kit.open_adapter(file_url(disk)) as adapter:
        assert await have(adapter, range(MANY)) == there
    assert len(disk.files() - kept) == len(there)


async def test_file_on_a_disk_full_of_others_fails_cleanly_and_recovers(disk: Disk) -> None:
    async with l2kit.open_adapter(file_url(disk)) as adapter:
        kept = await books(adapter, disk)
        disk.fill(leave_bytes=OBJECT_BYTES // 2)
        assert not any(map(stored_or_no_room, await put(adapter, range(5))))
        assert await have(adapter, range(5)) == set()
        assert disk.files() == kept, "part of an object"
        disk.give_back()
        assert [outcome.status for outcome in await put(adapter, range(5))] == ["stored"] * 5
        assert await have(adapter, range(5)) == set(range(5))
        assert (await adapter.probe()).ok


async def test_file_keeps_what_is_locked_and_loads_it_from_a_full_disk(disk: Disk) -> None:
    async with l2kit.open_adapter(file_url(disk)) as adapter:
        kept = await books(adapter, disk)
        await put(adapter, range(5))
        found = await adapter.submit_lookup_and_lock_task([key(number) for number in range(5)])
        assert all(outcome.hit for outcome in found)
        disk.fill()
        assert not any(map(stored_or_no_room, await put(adapter, range(5, 10)))), "nothing may be evicted for it"
        assert await have(adapter, range(10)) == set(range(5))
        await adapter.submit_unlock_task([key(number) for number in range(5)])
        stored = [number for number in range(5, 10) if stored_or_no_room((await put(adapter, [number]))[0])]
        assert stored, "now it evicts"
        there = await have(adapter, range(10))
        assert stored[-1] in there
        assert len(disk.files() - kept) == len(there)


async def test_file_on_a_disk_without_inodes_fails_cleanly_and_recovers(disk: Disk) -> None:
    async with l2kit.open_adapter(file_url(disk)) as adapter:
        await put(adapter, [0])
        [found] = await adapter.submit_lookup_and_lock_task([key(0)])
        assert found.hit
        fillers = disk.path / "fillers"
        fillers.mkdir()
        with suppress(OSError):
            for number in range(100_000):
                (fillers / str(number)).touch()
        if os.statvfs(disk.path).f_favail > 0:
            pytest.skip("needs a file system whose inodes run out")
        assert not any(map(stored_or_no_room, await put(adapter, range(1, 4))))
        assert await have(adapter, range(4)) == {0}
        for filler in fillers.iterdir():
            filler.unlink()
        fillers.rmdir()
        await adapter.submit_unlock_task([key(0)])
        assert [outcome.status for outcome in await put(adapter, range(1, 4))] == ["stored"] * 3
        assert await have(adapter, range(4)) == {0, 1, 2, 3}


# --- nvme:// ----------------------------------------------------------------------------------------


def nvme_url(disk: Disk, size_bytes: int) -> str:
    return f"nvme://{disk.path}/slab?size_bytes={size_bytes}&direct=false"


async def test_nvme_makes_no_slab_that_the_disk_has_no_room_for_and_one_when_it_has(disk: Disk) -> None:
    for size_bytes in (1 << 30, 2 * DISK_BYTES):
        with pytest.raises(CapacityError):
            await l2kit.open_adapter(nvme_url(disk, size_bytes)).__aenter__()
        assert disk.files() == set(), "part of a slab"
        assert disk.free_bytes > DISK_BYTES * 3 // 4
    async with l2kit.open_adapter(nvme_url(disk, 5 << 20)) as adapter:
        assert [outcome.status for outcome in await put(adapter, range(5))] == ["stored"] * 5
        assert await have(adapter, range(5)) == set(range(5))


async def test_nvme_needs_no_space_once_its_slab_is_there(disk: Disk) -> None:
    async with l2kit.open_adapter(f"{nvme_url(disk, 5 << 20)}&max_bytes=1GiB") as adapter:
        disk.fill()
        outcomes = await put(adapter, range(MANY))
        assert [outcome.status for outcome in outcomes] == ["stored"] * MANY
        there = await have(adapter, range(MANY))
        assert there == set(range(min(there), MANY))
        assert len(there) * OBJECT_BYTES > 5 << 19
    async with l2kit.open_adapter(nvme_url(disk, 5 << 20)) as adapter:  # on the full disk
        assert await have(adapter, range(MANY)) == there


# --- a whole tier -----------------------------------------------------------------------------------


async def test_a_tier_on_a_full_disk_goes_on_reading_and_stores_again_when_there_is_space(disk: Disk) -> None:
    tier = {"url": file_url(disk), "name": "disk", "resilience": {"breaker_calls": 4, "breaker_pause_s": 0.05}}
    config = {"tiers": [tier], "l1": {"max_bytes": "16MiB"}}
    async with l2kit.open_storage(config) as manager:
        adapter = manager.tiers[0].adapter
        assert isinstance(adapter, BreakerAdapter)
        await offer(manager, range(3))
        held = await adapter.submit_lookup_and_lock_task([key(number) for number in range(3)])
        assert all(outcome.hit for outcome in held)
        disk.fill()
        await offer(manager, range(3, 20))
        counted = manager.status()["tiers"]["disk"]
        assert counted["stored_objects"] == 3
        assert counted["store_failures"] + counted["store_drops"] == 17
        assert all(circuit.closed for circuit in adapter.circuits.values()), "a full disk is no broken one"
        assert await have(adapter, range(20)) == {0, 1, 2}
        disk.give_back()
        await adapter.submit_unlock_task([key(number) for number in range(3)])
        for number in range(3, 20):
            manager.l1.remove(key(number))
        await offer(manager, range(3, 20))
        assert await have(adapter, range(20)) == set(range(20))
        await until(lambda: manager.tiers[0].healthy)
        assert innermost(adapter).trouble is None


async def offer(manager: StorageManager, numbers: Iterable[int]) -> None:
    for number in numbers:
        reservation = manager.reserve_write(key(number), Layout.raw(OBJECT_BYTES))
        assert reservation is not None
        reservation.obj.segments[0][:] = content(number)
        manager.finish_write([reservation])
    await manager.drain()
