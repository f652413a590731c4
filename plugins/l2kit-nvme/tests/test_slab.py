"""What the suite does not ask: opening, owners, what goes first, use of space, damage to the table, failing devices."""

# ruff: noqa: ASYNC220 - tests look at files and start processes on a loop that nobody else uses

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import l2kit
from l2kit.errors import CapacityError, ConfigError, L2Error, TransientBackendError
from l2kit.testing.groups.base import Adapter, Conformance, content, destination, source
from l2kit_nvme import NvmeAdapter
from l2kit_nvme.catalog import Catalog, Place
from l2kit_nvme.geometry import HEADER_BYTES, PAGE_BYTES, RECORD_BYTES, UNIT_BYTES, slot_pages
from l2kit_nvme.medium import Medium
from l2kit_nvme.records import encode
from l2kit_nvme.slab import Slab as SlabOnMedium
from l2kit_nvme.testing import SlabFiles

_NBYTES = 60_000
#: Its slot: a page of envelope, and 15 of payload.
_TAKEN = 16 * PAGE_BYTES


class Slab(Conformance):
    @pytest.fixture
    def path(self, tmp_path: Path) -> Iterator[Path]:
        yield tmp_path / "slab"
        for path in tmp_path.iterdir():
            path.unlink()

    @pytest.fixture
    def adapter_url(self, path: Path) -> str:
        return f"nvme://{path}?size_bytes=8MiB"

    async def put(self, adapter: Adapter, *numbers: int, nbytes: int = _NBYTES) -> None:
        """Store objects one after the other."""
        for number in numbers:
            await self.store(adapter, {self.key(number): content(number, nbytes)})

    async def get(self, adapter: Adapter, number: int, nbytes: int = _NBYTES) -> bool:
        """Load an object and use it so; False for a miss."""
        outcome, received = await self.load(adapter, self.key(number), nbytes)
        assert outcome.status in ("loaded", "miss"), outcome
        assert not outcome.loaded or received == content(number, nbytes)
        return outcome.loaded

    async def present(self, adapter: Adapter) -> set[int]:
        """Which of the first 200 numbers are there; looks without using them."""
        listed = {info.key async for info in adapter.iter_keys()}
        return {number for number in range(200) if self.key(number) in listed}

    async def refused(self, url: str, error: type[L2Error], *parts: str, **options: object) -> None:
        with pytest.raises(error) as caught:
            async with self.open_adapter(url, **options):
                pass
        for part in parts:
            assert part in str(caught.value)


class TestOpening(Slab):
    async def test_a_slab_is_allocated_as_a_whole(self, url: str, path: Path) -> None:
        async with self.open_adapter(url):
            assert path.stat().st_size == 8 << 20
            assert path.stat().st_blocks * 512 >= 8 << 20
            assert path.stat().st_mode & 0o777 == 0o600

    async def test_without_a_size_nothing_is_made(self, path: Path) -> None:
        await self.refused(f"nvme://{path}", ConfigError, str(path), "size_bytes")
        assert not path.exists()

    async def test_an_existing_slab_needs_no_size(self, url: str, path: Path) -> None:
        async with self.open_adapter(url) as adapter:
            await self.put(adapter, 0)
        async with self.open_adapter(f"nvme://{path}") as adapter:
            assert await self.get(adapter, 0)

    async def test_another_geometry_is_refused_unless_it_is_reset(self, url: str, path: Path) -> None:
        async with self.open_adapter(url) as adapter:
            await self.put(adapter, 0)
        await self.refused(
            f"nvme://{path}?size_bytes=16MiB", ConfigError, "size_bytes", "16777216", "8388608", "reset=true"
        )
        await self.refused(url, ConfigError, "max_objects", "reset=true", max_objects=77)
        async with self.open_adapter(f"nvme://{path}?size_bytes=16MiB", reset=True) as adapter:
            assert await self.present(adapter) == set()
            assert path.stat().st_size == 16 << 20

    async def test_what_is_no_slab_is_not_overwritten(self, path: Path, url: str) -> None:
        path.write_bytes(b"somebody's file" * 100_000)
        before = path.read_bytes()
        await self.refused(url, ConfigError, str(path), "no slab")
        assert path.read_bytes() == before

    async def test_a_cut_slab_is_refused(self, path: Path, url: str) -> None:
        async with self.open_adapter(url):
            pass
        os.truncate(path, 5 << 20)
        await self.refused(url, ConfigError, "has 5242880")

    async def test_too_small_a_slab_is_refused_and_not_left_behind(self, path: Path) -> None:
        await self.refused(f"nvme://{path}?size_bytes=1MiB", ConfigError, "size_bytes", "at least")
        assert not path.exists()

    async def test_no_space_is_said_and_nothing_left_behind(self, path: Path) -> None:
        await self.refused(f"nvme://{path}?size_bytes=900TB", L2Error, str(path), "size_bytes")
        assert not path.exists()

    async def test_one_torn_superblock_is_no_harm(self, path: Path, url: str) -> None:
        async with self.open_adapter(url) as adapter:
            await self.put(adapter, 0)
        with path.open("r+b") as file:
            file.write(b"L2KSLAB\0" + b"\xff" * 504)
        async with self.open_adapter(url) as adapter:
            assert await self.get(adapter, 0)

    async def test_a_creation_that_was_interrupted_is_begun_again(self, path: Path, url: str) -> None:
        with path.open("wb") as file:
            file.write(b"L2KSLAB\0" + b"\xff" * 504)
            file.truncate(8 << 20)
        async with self.open_adapter(url) as adapter:
            await self.put(adapter, 0)

    async def test_o_direct_that_is_refused_is_said_once(
        self, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        real_open = os.open

        def refuse(path: str, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument", path)
            return real_open(path, flags, mode)

        monkeypatch.setattr(os, "open", refuse)
        with caplog.at_level(logging.WARNING):
            async with self.open_adapter(url) as adapter:
                assert isinstance(adapter, NvmeAdapter)
                assert not adapter.direct
                await self.put(adapter, 0, 1)
                assert await self.get(adapter, 0)
        assert len([record for record in caplog.records if "EINVAL" in record.message]) == 1


class TestStriping(Slab):
    def url_of(self, *paths: Path) -> str:
        return f"nvme://{paths[0]}?paths={','.join(map(str, paths[1:]))}"

    @pytest.fixture
    def paths(self, path: Path) -> list[Path]:
        return [path.with_name(name) for name in ("a", "b", "c")]

    async def test_members_are_known_in_any_order_and_only_all_together(self, paths: list[Path], url: str) -> None:
        async with self.open_adapter(self.url_of(*paths), size_bytes=8 << 20) as adapter:
            await self.put(adapter, 0, nbytes=5_000_000)
        a, b, c = paths
        async with self.open_adapter(self.url_of(c, a, b)) as adapter:
            assert await self.get(adapter, 0, nbytes=5_000_000)
        await self.refused(self.url_of(a, b), ConfigError, "striped over 3")
        async with self.open_adapter(url):
            pass
        await self.refused(self.url_of(a, b, Path(url[7:].partition("?")[0])), ConfigError, "different slabs")

    async def test_a_large_object_lies_on_all(self, paths: list[Path]) -> None:
        async with self.open_adapter(self.url_of(*paths), size_bytes=8 << 20) as adapter:
            await self.put(adapter, 0, nbytes=6 << 20)
        for path in paths:
            assert any(path.read_bytes()[HEADER_BYTES + UNIT_BYTES :])


class TestOwner(Slab):
    async def test_the_same_process_is_refused(self, url: str, path: Path) -> None:
        async with self.open_adapter(url):
            await self.refused(url, TransientBackendError, str(path), f"this process ({os.getpid()})")
        async with self.open_adapter(url):
            pass

    async def test_another_process_is_refused_until_it_is_gone(self, url: str, path: Path) -> None:
        script = (
            "import sys, anyio, l2kit\n"
            "async def main():\n"
            "    async with l2kit.open_adapter(sys.argv[1]):\n"
            "        print('open', flush=True)\n"
            "        await anyio.sleep(60)\n"
            "anyio.run(main)"
        )
        with subprocess.Popen([sys.executable, "-c", script, url], stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "open\n"
            await self.refused(url, TransientBackendError, str(path), f"process {owner.pid}")
            owner.send_signal(signal.SIGKILL)
        async with self.open_adapter(url):
            pass


class TestRoom(Slab):
    async def test_the_least_recently_used_goes_first(self, url: str) -> None:
        async with self.open_adapter(url, max_bytes=4 * _TAKEN) as adapter:
            await self.put(adapter, 0, 1, 2, 3)
            assert await self.get(adapter, 0)
            [found] = await adapter.submit_lookup_and_lock_task([self.key(1)])  # a lookup that hits is a use as well
            assert found.hit
            await adapter.submit_unlock_task([self.key(1)])
            await self.put(adapter, 4, 5)
            assert await self.present(adapter) == {0, 1, 4, 5}
            assert adapter.counters["evicted"] == 2

    async def test_the_order_of_storing_survives_a_restart(self, url: str) -> None:
        async with self.open_adapter(url) as adapter:
            await self.put(adapter, 3, 0, 2, 1)
        async with self.open_adapter(url, max_bytes=2 * _TAKEN) as adapter:
            assert await self.present(adapter) == {2, 1}

    async def test_a_full_slab_evicts_and_usage_is_what_lies_there(self, url: str, path: Path) -> None:
        async with self.open_adapter(url) as adapter:
            await self.put(adapter, *range(150))
            usage = await adapter.usage()
            present = await self.present(adapter)
            assert 60 < len(present) < 150
            assert present == set(range(150 - len(present), 150))
            assert usage.used_bytes == SlabFiles([str(path)]).used_bytes == len(present) * _TAKEN

    async def test_another_size_gets_the_room_of_the_oldest(self, url: str) -> None:
        """First small objects fill the slab, then large ones, then small ones again."""
        async with self.open_adapter(url) as adapter:
            await self.put(adapter, *range(150))
            await self.put(adapter, *range(150, 160), nbytes=1_000_000)
            assert {155, 156, 157, 158, 159} <= await self.present(adapter)
            await self.put(adapter, *range(40))
            assert set(range(24, 40)) <= await self.present(adapter)

    async def test_too_few_records_evict(self, url: str) -> None:
        async with self.open_adapter(url, max_objects=8) as adapter:
            await self.put(adapter, *range(20), nbytes=100)
            assert await self.present(adapter) == set(range(12, 20))

    async def test_an_object_that_can_never_fit_says_so(self, url: str) -> None:
        async with self.open_adapter(url) as adapter:
            await self.put(adapter, 0)
            [outcome] = await adapter.submit_store_task([self.key(1)], [source(bytes(9 << 20))])
            assert isinstance(outcome.error, CapacityError)
            assert "size_bytes" in str(outcome.error)
            assert await self.get(adapter, 0)

    async def test_what_is_locked_stays_and_its_slot_is_not_reused(self, url: str) -> None:
        async with self.open_adapter(url, max_bytes=3 * _TAKEN) as adapter:
            await self.put(adapter, 0, 1)
            await adapter.submit_lookup_and_lock_task(self.keys(2))
            await adapter.submit_delete_task([self.key(1)])
            await self.put(adapter, *range(10, 20))
            assert await self.get(adapter, 0)
            assert await self.get(adapter, 1), "its holder can load it although it is deleted"
            assert await self.present(adapter) == {0, 19}
            await adapter.submit_unlock_task(self.keys(2))
            assert not await self.get(adapter, 1)
            await self.put(adapter, 20)
            assert await self.present(adapter) == {0, 19, 20}

    async def test_all_locked_is_dropped(self, url: str) -> None:
        async with self.open_adapter(url, max_bytes=2 * _TAKEN) as adapter:
            await self.put(adapter, 0, 1)
            await adapter.submit_lookup_and_lock_task(self.keys(2))
            [outcome] = await adapter.submit_store_task([self.key(2)], [source(bytes(_NBYTES))])
            assert outcome.status == "dropped"

    async def test_stores_at_once_wait_for_one_another(self, url: str) -> None:
        """There is room for one, and four write at the same time: none is dropped for it."""
        async with self.open_adapter(url, max_bytes=_TAKEN, max_concurrency=4) as adapter:
            outcomes = await adapter.submit_store_task(self.keys(12), [source(content(n, _NBYTES)) for n in range(12)])
            assert {outcome.status for outcome in outcomes} == {"stored"}

    async def test_what_was_evicted_for_a_store_that_is_dropped_is_room_for_another(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A small store waits while a large one evicts all that may go, finds that too little, and is dropped."""
        evicting, go_on = threading.Event(), threading.Event()

        def slowly(self: SlabOnMedium, victims: Sequence[Place]) -> None:
            evicting.set()
            assert go_on.wait(10)
            revoke(self, victims)

        revoke = SlabOnMedium._revoke
        async with self.open_adapter(url, max_bytes=4 * _TAKEN, max_concurrency=2, timeout_s=30) as adapter:
            await self.put(adapter, 0, 1, 2)
            await adapter.submit_lookup_and_lock_task(self.keys(2))
            monkeypatch.setattr(SlabOnMedium, "_revoke", slowly)
            large = adapter.submit_store_task([self.key(3)], [source(bytes(3 * _NBYTES))])
            await anyio.to_thread.run_sync(lambda: evicting.wait(10))
            small = adapter.submit_store_task([self.key(4)], [source(content(4, 110_000))])
            assert isinstance(adapter, NvmeAdapter)
            while not adapter._room.statistics().tasks_waiting:  # noqa: ASYNC110 - nobody tells
                await anyio.sleep(0.001)
            go_on.set()
            with anyio.fail_after(10):
                assert [outcome.status for outcome in [*await large, *await small]] == ["dropped", "stored"]

    async def test_wear_is_what_was_written(self, url: str) -> None:
        async with self.open_adapter(url) as adapter:
            assert isinstance(adapter, NvmeAdapter)
            assert adapter.wear == 0
            await self.put(adapter, *range(20))
            stored = adapter.counters["stored_bytes"]
            assert adapter.counters["written_bytes"] >= stored
            assert 1 <= adapter.wear < 1.2
            await self.put(adapter, *range(20))  # there already: not written again
            assert adapter.counters["stored_bytes"] == stored


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 8192, 65_536 + 4096, (1 << 20) + 4096, 33_558_528, 17_993_728])
def test_a_slot_wastes_little(nbytes: int) -> None:
    payload = max(1, -(-nbytes // PAGE_BYTES) - 1)
    assert payload <= slot_pages(nbytes) - 1 <= payload + payload / 16
    if payload & (payload - 1) == 0:
        assert slot_pages(nbytes) - 1 == payload


class TestTrim(Slab):
    async def test_what_holds_nothing_is_given_back(self, url: str, path: Path) -> None:
        async with self.open_adapter(url, trim=True) as adapter:
            assert isinstance(adapter, NvmeAdapter)
            await self.put(adapter, *range(50))
            await adapter.submit_delete_task(self.keys(50))
            slab = adapter._slab
            assert slab is not None
            before = path.stat().st_blocks
            idle = await adapter.run_in_thread(lambda: slab.trim(set()))
            assert path.stat().st_blocks == before, "it was in use a moment ago"
            assert await adapter.run_in_thread(lambda: slab.trim(idle)) == set()
            assert path.stat().st_blocks < before
            assert adapter.counters["trimmed_bytes"] > 2 << 20
            await self.put(adapter, *range(50))
            assert await self.get(adapter, 49)


class TestTable(Slab):
    async def test_a_torn_record_is_skipped_and_counted(self, url: str, path: Path) -> None:
        async with self.open_adapter(url) as adapter:
            await self.put(adapter, 0, 1, 2)
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES + RECORD_BYTES + 70)
            file.write(b"\xff")
        for damaged in (1, 0):  # revoked by the first one to open it
            async with self.open_adapter(url) as adapter:
                assert await self.present(adapter) == {0, 2}
                assert adapter.counters["damaged_records"] == damaged
                assert (await adapter.usage()).used_bytes == 2 * _TAKEN

    async def test_of_two_claims_the_newer_one_counts(self, url: str, path: Path) -> None:
        """The same slot, the same key, and a region across another one."""
        async with self.open_adapter(url) as adapter:
            await self.put(adapter, 0, 1)
        slab = SlabFiles([str(path)])
        first, second = sorted(slab.records())
        claims = [
            second._replace(sequence=90, chunk_hash=self.key(5).chunk_hash),  # the slot of 1
            first._replace(sequence=0, region=first.region._replace(first_page=800)),  # an older version of 0
            first._replace(
                sequence=2,
                region=first.region._replace(first_page=first.region.first_page + 1),
                chunk_hash=self.key(6).chunk_hash,
            ),
        ]
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES + 10 * RECORD_BYTES)
            for claim in claims:
                file.write(encode(claim, slab.superblock.seed))
        async with self.open_adapter(url) as adapter:
            assert adapter.counters["outdated_records"] == 3
            assert await self.present(adapter) == {0, 5}
            assert await self.get(adapter, 0)
            outcome, _ = await self.load(adapter, self.key(5), _NBYTES)
            assert outcome.status == "corrupt", "the slot holds another object: found out, never delivered"
        assert len(SlabFiles([str(path)]).records()) == 1

    async def test_records_of_a_former_slab_are_none(self, url: str, path: Path) -> None:
        async with self.open_adapter(url) as adapter:
            await self.put(adapter, 0, 1)
        former = path.read_bytes()[HEADER_BYTES : HEADER_BYTES + 2 * RECORD_BYTES]
        async with self.open_adapter(url, reset=True) as adapter:
            await self.put(adapter, 2)
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES + 4 * RECORD_BYTES)
            file.write(former)
        async with self.open_adapter(url) as adapter:
            assert await self.present(adapter) == {2}
            assert adapter.counters["damaged_records"] == 2


class TestLateFailure:
    def test_an_old_reservation_frees_nothing_of_a_new_one(self) -> None:
        catalog = Catalog(4096, 8, None)
        key = l2kit.ObjectKey("late", bytes(16))
        old = catalog.reserve(_NBYTES)
        assert isinstance(old, Place)
        assert catalog.abandon(old)
        new = catalog.reserve(_NBYTES)
        assert isinstance(new, Place)
        assert (new.record, new.page) == (old.record, old.page)
        assert not catalog.abandon(old)
        catalog.publish(new, key, 1)
        assert not catalog.abandon(old)
        assert not catalog.abandon(new)
        assert not catalog.evict(old)
        assert catalog.lookup([key]) == [_NBYTES]
        assert catalog.used_bytes == slot_pages(_NBYTES) * PAGE_BYTES


class FailingMedium(Medium):
    """Fails as told: the next write of records, payload, or flush."""

    fails: str = ""

    def write_sector(self, member: int, offset: int, sector: bytes) -> None:
        self._fail("record")
        super().write_sector(member, offset, sector)

    def write_vector(self, member: int, offset: int, vector: Sequence[memoryview]) -> None:
        self._fail("record" if sum(map(len, vector)) <= 16 * RECORD_BYTES else "payload")
        super().write_vector(member, offset, vector)

    def flush_members(self) -> None:
        self._fail("flush")
        super().flush_members()

    def _fail(self, what: str) -> None:
        if FailingMedium.fails == what:
            FailingMedium.fails = ""
            raise OSError(5, "Input/output error", self.members[0].path)


class TestFailingDevice(Slab):
    @pytest.fixture
    def failing(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(NvmeAdapter, "medium_type", FailingMedium)
        yield
        FailingMedium.fails = ""

    @pytest.mark.parametrize("what", ["record", "payload", "flush"])
    async def test_a_store_that_fails_leaves_the_old_object(
        self, url: str, path: Path, what: str, failing: None
    ) -> None:
        async with self.open_adapter(url, durability="data") as adapter:
            await self.put(adapter, 0)
            before = (await adapter.usage()).used_bytes
            FailingMedium.fails = what
            [outcome] = await adapter.submit_store_task([self.key(0)], [source(content("new", _NBYTES + 1))])
            assert outcome.error is not None
            assert str(path) in str(outcome.error)
            assert "EIO" in str(outcome.error)
            assert await self.get(adapter, 0)
            assert (await adapter.usage()).used_bytes == before
            await self.put(adapter, 1)
        async with self.open_adapter(url) as adapter:
            assert await self.present(adapter) == {0, 1}

    async def test_a_delete_that_fails_loses_the_slot_and_says_so(self, url: str, failing: None) -> None:
        async with self.open_adapter(url) as adapter:
            await self.put(adapter, 0)
            FailingMedium.fails = "record"
            [outcome] = await adapter.submit_delete_task([self.key(0)])
            assert outcome.error is not None
            assert adapter.counters["lost_slots"] == 1
            await self.put(adapter, 1)
            target = destination(_NBYTES)
            [loaded] = await adapter.submit_load_task([self.key(1)], [target])
            assert loaded.loaded
