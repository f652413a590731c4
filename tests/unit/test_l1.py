"""What L1Manager promises about memory, leases, owners and eviction."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from l2kit.errors import ClosedError, ConfigError
from l2kit.keys import ObjectKey
from l2kit.l1 import L1Manager, Refusal, WriteReservation
from l2kit.layout import Layout
from l2kit.memory import PAGE_BYTES
from l2kit.policy import LRUPolicy
from tests.unit.odd_tiers import content, key


def _fill(reservation: WriteReservation, data: bytes) -> None:
    reservation.obj.segments[0][:] = data


def write(l1: L1Manager, name: ObjectKey, nbytes: int = PAGE_BYTES) -> WriteReservation:
    """Reserve and fill; it must succeed."""
    reservation = l1.reserve_write(name, Layout.raw(nbytes), owner="test")
    assert isinstance(reservation, WriteReservation)
    _fill(reservation, content(name, nbytes))
    return reservation


def put(l1: L1Manager, *names: ObjectKey, nbytes: int = PAGE_BYTES) -> None:
    for name in names:
        write(l1, name, nbytes).finish()


def keys_in(l1: L1Manager) -> list[ObjectKey]:
    return [key(number) for number in range(64) if l1.contains(key(number))]


@pytest.fixture
def l1() -> Iterator[L1Manager]:
    """Eight pages."""
    manager = L1Manager(8 * PAGE_BYTES, LRUPolicy())
    yield manager
    usage = manager.usage()
    entries = sum(entry.slot.slot_bytes for entry in manager._readable.values())
    assert (usage.leases, usage.writing, usage.used_bytes) == (0, 0, entries)
    manager.close()


def test_refusals_tell_why(l1: L1Manager) -> None:
    put(l1, key(0))
    reservation = write(l1, key(1))
    assert l1.reserve_write(key(0), Layout.raw(1), owner="x") is Refusal.PRESENT
    assert l1.reserve_write(key(1), Layout.raw(1), owner="x") is Refusal.WRITING
    assert l1.reserve_write(key(2), Layout.raw(9 * PAGE_BYTES), owner="x") is Refusal.NO_MEMORY
    reservation.abort()
    assert keys_in(l1) == [key(0)]


def test_an_object_that_is_being_written_is_not_readable(l1: L1Manager) -> None:
    reservation = write(l1, key(0))
    assert l1.acquire(key(0), owner="x") is None
    assert l1.readable_prefix([key(0)]) == 0
    assert not l1.remove(key(0))
    reservation.finish()
    assert l1.contains(key(0))


def test_leases_taken_in_finish_survive_any_pressure(l1: L1Manager) -> None:
    (lease,) = write(l1, key(0)).finish(["store"])
    for number in range(1, 40):
        put(l1, key(number))
    assert lease.obj.tobytes() == content(key(0), PAGE_BYTES)
    assert l1.contains(key(0))
    lease.release()
    for number in range(40, 60):
        put(l1, key(number))
    assert not l1.contains(key(0))


def test_no_memory_answers_at_once_when_all_is_leased(l1: L1Manager) -> None:
    leases = [lease for number in range(8) for lease in write(l1, key(number)).finish(["x"])]
    started = time.monotonic()
    for size in (1, PAGE_BYTES, 3 * PAGE_BYTES, 8 * PAGE_BYTES):
        assert l1.reserve_write(key(20), Layout.raw(size), owner="y") is Refusal.NO_MEMORY
    assert time.monotonic() - started < 0.5
    assert l1.evictions == 0
    for lease in leases:
        lease.release()
    put(l1, key(20), nbytes=8 * PAGE_BYTES)


def test_one_held_object_does_not_lock_other_sizes_out(l1: L1Manager) -> None:
    (lease,) = write(l1, key(0)).finish(["x"])
    put(l1, key(1), nbytes=2 * PAGE_BYTES)
    put(l1, key(2), nbytes=3 * PAGE_BYTES)
    assert l1.contains(key(1))
    lease.release()


def test_nothing_is_evicted_in_vain() -> None:
    l1 = L1Manager(64 * PAGE_BYTES, LRUPolicy())
    leases = []
    for number in range(64):  # every other page stays leased: no run of free pages is longer than one
        taken = write(l1, key(number)).finish(["x"])
        leases += taken
    for lease in leases[::2]:
        lease.release()
    assert l1.reserve_write(key(99), Layout.raw(40 * PAGE_BYTES), owner="x") is Refusal.NO_MEMORY
    assert l1.usage().entries == 64
    assert l1.evictions == 0
    for lease in leases:
        lease.release()
    put(l1, key(99), nbytes=40 * PAGE_BYTES)
    l1.close()


def test_a_prefix_loses_its_end_first(l1: L1Manager) -> None:
    prefix = [key(number) for number in range(6)]
    put(l1, *prefix)
    for lease in l1.acquire_prefix(prefix, owner="x"):
        lease.release()
    put(l1, key(10), key(11), key(12), key(13), key(14))
    assert keys_in(l1)[: l1.readable_prefix(prefix)] == prefix[:3]
    assert l1.readable_prefix(prefix) == 3


def test_touching_a_prefix_orders_it_and_skips_gaps(l1: L1Manager) -> None:
    prefix = [key(number) for number in range(6)]
    put(l1, *(name for name in prefix if name != key(2)))
    l1.touch(prefix)
    put(l1, key(10), key(11), key(12), key(13))
    assert [name for name in prefix if l1.contains(name)] == [key(0), key(1), key(3), key(4)]
    assert l1.usage().leases == 0


def test_holds_report_owner_generation_and_age(l1: L1Manager) -> None:
    first = write(l1, key(0))
    (lease,) = write(l1, key(1)).finish(["store:redis"])
    l1.remove(key(1))  # the holder keeps the memory, and the report shows it
    holds = {hold.key: hold for hold in l1.holds()}
    assert (holds[key(0)].owner, holds[key(0)].kind) == ("test", "reservation")
    assert (holds[key(1)].owner, holds[key(1)].kind) == ("store:redis", "lease")
    assert holds[key(0)].generation < holds[key(1)].generation
    assert l1.holds(older_than_s=60) == []
    assert lease.obj.tobytes() == content(key(1), PAGE_BYTES)
    lease.release()
    first.abort()
    assert l1.holds() == []


def test_a_detached_reservation_keeps_its_memory_and_frees_its_name(l1: L1Manager) -> None:
    hung = write(l1, key(0))
    hung.detach()
    put(l1, key(0))
    assert l1.usage().writing == 1
    assert hung.finish(["x"])[0].obj.tobytes() == content(key(0), PAGE_BYTES)
    assert l1.usage().used_bytes == 2 * PAGE_BYTES  # the late copy lives as long as its lease
    assert l1.holds()[0].owner == "x"
    l1._unindexed.copy().pop().leases.copy().pop().release()
    assert l1.usage().used_bytes == PAGE_BYTES


def test_a_detached_reservation_that_finishes_first_is_readable(l1: L1Manager) -> None:
    hung = write(l1, key(0))
    hung.detach()
    second = write(l1, key(0))
    hung.finish()
    assert l1.contains(key(0))
    assert second.finish() == []
    assert l1.usage().used_bytes == PAGE_BYTES


def test_closing_leaves_held_memory_to_its_holders() -> None:
    l1 = L1Manager(8 * PAGE_BYTES, LRUPolicy())
    (lease,) = write(l1, key(0)).finish(["x"])
    reservation = write(l1, key(1))
    put(l1, key(2))
    l1.close()
    l1.close()
    assert lease.obj.tobytes() == content(key(0), PAGE_BYTES)
    _fill(reservation, content("late", PAGE_BYTES))
    assert reservation.obj.tobytes() == content("late", PAGE_BYTES)
    with pytest.raises(ClosedError):
        l1.reserve_write(key(3), Layout.raw(1), owner="x")
    assert l1.acquire(key(0), owner="y") is None
    (late,) = reservation.finish(["y"])
    assert late.obj.tobytes() == content("late", PAGE_BYTES)
    assert l1.acquire(key(1), owner="y") is None
    late.release()
    lease.release()
    usage = l1.usage()
    assert (usage.used_bytes, usage.entries, usage.leases, usage.writing) == (0, 0, 0, 0)


def _mapped_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * PAGE_BYTES


@pytest.mark.parametrize("held", [False, True])
def test_closing_unmaps_the_arena_once_nobody_reads_it(held: bool) -> None:
    size = 1 << 30  # address space only; nothing is touched
    l1 = L1Manager(size, LRUPolicy())
    put(l1, key(0), key(1))
    lease = l1.acquire(key(0), owner="x")
    assert lease is not None
    if not held:
        lease.release()
        del lease
    before = _mapped_bytes()
    l1.close()
    if held:
        lease.release()
        assert lease.obj.tobytes() == content(key(0), PAGE_BYTES)
        del lease
    assert before - _mapped_bytes() > size // 2


def test_an_owner_list_that_raises_changes_nothing(l1: L1Manager) -> None:
    def owners() -> Iterator[str]:
        yield "x"
        raise RuntimeError("half way")

    reservation = write(l1, key(0))
    with pytest.raises(RuntimeError, match="half way"):
        reservation.finish(owners())
    assert l1.usage().leases == 0
    reservation.finish()
    assert l1.contains(key(0))


def test_more_memory_than_the_machine_has_is_a_configuration_error() -> None:
    for size in (1 << 62, 1 << 80, PAGE_BYTES - 1):
        with pytest.raises(ConfigError, match="capacity_bytes"):
            L1Manager(size, LRUPolicy())


@pytest.mark.timeout(60)
def test_many_threads() -> None:
    """Readers compare every byte under their lease while writers, removers and evictions go on around them."""
    l1 = L1Manager(24 * PAGE_BYTES, LRUPolicy())
    end = time.monotonic() + 1.5
    failures: list[BaseException] = []
    seen = {"writes": 0, "reads": 0, "refusals": 0}

    def work(seed: int) -> None:
        import random

        rng = random.Random(seed)
        try:
            while time.monotonic() < end:
                name = key(rng.randrange(12))
                nbytes = rng.choice((PAGE_BYTES, 2 * PAGE_BYTES + 1))
                answer = l1.reserve_write(name, Layout.raw(nbytes), owner=f"thread {seed}")
                if isinstance(answer, WriteReservation):
                    pattern = rng.randbytes(1)
                    _fill(answer, pattern * nbytes)
                    if rng.random() < 0.2:
                        answer.abort()
                        continue
                    for lease in answer.finish(["store"] * rng.randrange(2)):
                        assert lease.obj.tobytes() == pattern * nbytes
                        lease.release()
                    seen["writes"] += 1
                elif answer is Refusal.NO_MEMORY:
                    seen["refusals"] += 1
                leases = l1.acquire_prefix([key(n) for n in range(rng.randrange(3), 12)], owner=f"thread {seed}")
                for lease in leases:
                    data = lease.obj.tobytes()
                    assert data == data[:1] * len(data), "torn bytes under a lease"
                    seen["reads"] += 1
                if rng.random() < 0.1:
                    l1.remove(name)
                for lease in leases:
                    data = lease.obj.tobytes()
                    assert data == data[:1] * len(data), "bytes changed under a lease"
                    lease.release()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert seen["writes"] > 50
    assert seen["reads"] > 50
    usage = l1.usage()
    entries = sum(entry.slot.slot_bytes for entry in l1._readable.values())
    assert (usage.leases, usage.writing, usage.used_bytes) == (0, 0, entries)
    l1.close()
