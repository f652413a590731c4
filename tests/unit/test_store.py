"""StoreController over real tiers: what becomes readable reaches every tier, a bad tier costs its own stores only."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, ClassVar, Literal

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from l2kit.errors import BackendError, ConfigError
from l2kit.memory_adapter import MemoryAdapter
from l2kit.outcomes import StoreOutcome, StoreStatus
from l2kit.storage_manager import StorageManager
from l2kit.task import L2Task
from tests.unit.odd_tiers import (
    OBJECT_BYTES,
    assert_closed_clean,
    content,
    is_at_rest,
    key,
    layout,
    odd,
    odd_storage,
    put_in_l1,
    put_in_tier,
    read,
    registry,
    storage,
    until,
    wanted,
    write,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


def count(manager: StorageManager, name: str, position: int = 0) -> int:
    return manager.tiers[position].counters.snapshot()[name]


def held(manager: StorageManager) -> int:
    return manager.l1.usage().leases


async def test_every_tier_gets_every_object() -> None:
    async with storage("a", "b") as manager:
        keys = [key(n) for n in range(30)]
        write(manager, *keys)
        await manager.drain()
        assert odd(manager, 0).keys == odd(manager, 1).keys == set(keys)
        assert count(manager, "stored_objects") == 30
        assert count(manager, "stored_bytes") > 30 * OBJECT_BYTES
        for name in keys:
            manager.l1.remove(name)
        assert await read(manager, wanted(30)) == 30


async def test_the_start_of_a_prompt_is_stored_first_and_evicted_last() -> None:
    async with storage({"url": "odd://?max_concurrency=1", "name": "a"}, l1_objects=8) as manager:
        write(manager, *(key(n) for n in range(6)))
        await manager.drain()
        assert odd(manager).order == [key(n) for n in range(6)]
        put_in_l1(manager, *(key(n) for n in range(10, 15)))
        assert manager.readable_prefix([key(n) for n in range(6)]) == 3


async def test_objects_stay_until_they_are_stored() -> None:
    async with storage("a", l1_objects=8) as manager:
        odd(manager).hung.add("store")
        write(manager, key(0), key(1))
        for number in range(10, 40):
            put_in_l1(manager, key(number))
        assert manager.l1.contains(key(0))
        odd(manager).gate.set()
        await manager.drain()
        assert odd(manager).keys == {key(0), key(1)}
        assert held(manager) == 0
        for name in (key(0), key(1)):
            manager.l1.remove(name)
        assert await read(manager, wanted(2)) == 2


@pytest.mark.parametrize("hang", ["hung", "stuck"])
async def test_a_hung_tier_drops_and_counts_and_the_other_gets_everything(hang: Literal["hung", "stuck"]) -> None:
    async with storage("a", "b", max_store_queue_bytes=4 * OBJECT_BYTES) as manager:
        (odd(manager).hung if hang == "hung" else odd(manager).stuck).add("store")
        for number in range(40):
            write(manager, key(number))
            await until(lambda number=number: key(number) in odd(manager, 1).keys)  # type: ignore[misc]
        assert held(manager) == 4
        assert manager.status()["tiers"]["a"]["store_queue_bytes"] == 4 * OBJECT_BYTES
        assert count(manager, "store_drops") == 36
        assert count(manager, "store_drops", 1) == 0
        odd(manager).hung.clear()
        odd(manager).stuck.clear()
        odd(manager).let_go()
        await until(lambda: is_at_rest(manager))
        write(manager, key(50))
        await manager.drain()
        assert key(50) in odd(manager).keys


async def test_a_hung_tier_leaves_a_part_of_l1_to_others() -> None:
    """With the default queue, as large as L1, what waits for a hung tier must not lock new objects and loads out."""
    async with storage("a", "b", l1_objects=24) as manager:
        odd(manager).hung.add("store")
        for number in range(100):
            write(manager, key(number))
            assert manager.l1.contains(key(number))
            await until(lambda number=number: key(number) in odd(manager, 1).keys)  # type: ignore[misc]
        assert held(manager) <= 18
        assert manager.counters.snapshot()["writes_refused"] == 0
        assert await read(manager, wanted(4, first=30)) == 4


@pytest.mark.parametrize("hang", ["hung", "stuck"])
async def test_an_overdue_tier_loses_its_queue_and_is_probed(hang: Literal["hung", "stuck"]) -> None:
    async with storage({"url": "odd://?timeout_s=0.1", "name": "a"}) as manager:
        (odd(manager).hung if hang == "hung" else odd(manager).stuck).add("store")
        write(manager, *(key(n) for n in range(30)))
        await until(lambda: not manager.tiers[0].trusted("store"))
        assert held(manager) <= 16  # the batch that hangs; the queue is gone
        for number in range(30, 40):
            write(manager, key(number))
            await anyio.lowlevel.checkpoint()
        assert held(manager) <= 16
        odd(manager).hung.clear()
        odd(manager).stuck.clear()
        odd(manager).let_go()
        await until(lambda: held(manager) == 0)
        write(manager, key(50))
        await until(lambda: manager.tiers[0].trusted("store"))
        write(manager, *(key(n) for n in range(60, 80)))
        await manager.drain()
        assert {key(n) for n in range(60, 80)} <= odd(manager).keys


async def test_a_slow_tier_that_stores_something_keeps_its_queue() -> None:
    async with storage({"url": "odd://?timeout_s=0.2&max_concurrency=1", "name": "a"}) as manager:
        odd(manager).delay_s["store"] = 0.05
        write(manager, *(key(n) for n in range(20)))
        await manager.drain()
        assert manager.tiers[0].trusted("store")
        assert count(manager, "stored_objects") >= 4
        assert count(manager, "store_drops") == 0


async def test_what_fails_is_counted_logged_once_and_keeps_the_tier_unhealthy(caplog: pytest.LogCaptureFixture) -> None:
    async with storage({"url": "odd://?resilience.breaker=false", "name": "a"}) as manager:
        odd(manager).failing["store"] = BackendError("disk full of errors")
        with caplog.at_level(logging.WARNING):
            write(manager, *(key(n) for n in range(20)))
            await manager.drain()
        assert count(manager, "store_failures") == 20
        assert [r.getMessage() for r in caplog.records] == ["tier a: a store failed: disk full of errors"]
        assert await read(manager, wanted(1, first=30)) == 0  # a lookup that works says nothing about stores
        assert manager.status()["tiers"]["a"]["healthy"] is False
        odd(manager).failing.clear()
        write(manager, key(40))
        await manager.drain()
        assert manager.status()["tiers"]["a"]["healthy"] is True


async def test_a_tier_that_a_probe_finds_working_is_healthy_again_without_traffic() -> None:
    async with storage({"url": "odd://?resilience.breaker_pause_s=0.05", "name": "a"}) as manager:
        odd(manager).failing["store"] = BackendError("no disk")
        for n in range(8):
            write(manager, key(n))
            await manager.drain()
        assert not manager.tiers[0].healthy
        odd(manager).failing.clear()
        await until(lambda: manager.tiers[0].healthy)
        assert manager.status()["tiers"]["a"]["stored_objects"] == 0


async def test_a_tier_without_room_drops_and_stays_healthy() -> None:
    async with storage({"url": "odd://?max_bytes=100", "name": "a"}) as manager:
        write(manager, key(0))
        await manager.drain()
        assert count(manager, "store_drops") == 1
        assert manager.tiers[0].healthy


async def test_what_is_there_already_is_counted_as_present() -> None:
    async with storage("a") as manager:
        odd(manager).stored_as = StoreStatus.ALREADY_PRESENT
        write(manager, key(0))
        await manager.drain()
        assert count(manager, "store_present") == 1


class Refusing(MemoryAdapter):
    """Breaks in submit as often as ``errors`` says."""

    errors: ClassVar[list[Exception]] = []

    def submit_store_task(self, *args: Any, **options: Any) -> L2Task[StoreOutcome]:
        if self.errors:
            raise self.errors.pop()
        return super().submit_store_task(*args, **options)


@pytest.mark.parametrize("error", [RuntimeError("a bug of the plugin"), ConfigError("codec takes float32 only")])
async def test_the_worker_survives_an_error_in_submit(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    bare = {"url": "refusing://?resilience.enabled=false", "name": "a"}
    async with storage(bare, "b", known=registry(refusing=Refusing)) as manager:
        Refusing.errors[:] = [error]
        write(manager, key(0))
        await until(lambda: not Refusing.errors and held(manager) == 0)
        assert str(error) in caplog.text
        write(manager, key(1))
        await until(lambda: count(manager, "stored_objects") == 1)
        assert odd(manager, 1).keys == {key(0), key(1)}


@pytest.mark.parametrize("hook", ["store", "release", "lookup"])
async def test_closing_with_a_hung_tier_is_bounded(hook: Literal["store", "release", "lookup"]) -> None:
    async with odd_storage({"url": "odd://?timeout_s=0.5", "name": "a"}, drain_timeout_s=0.2) as manager:
        await put_in_tier(manager, 0, key(50))
        odd(manager).hung.add(hook)
        write(manager, *(key(n) for n in range(25)))
        prefetch = manager.start_prefetch(wanted(2, first=50), timeout_s=60)
        await until(lambda: odd(manager).calls["store"] > 1 and odd(manager).waiting[hook])
        started = time.monotonic()
    assert time.monotonic() - started < 2
    await until(lambda: prefetch.done)
    prefetch.release()
    assert_closed_clean(manager)
    if hook == "store":
        snapshot = manager.tiers[0].counters.snapshot()
        assert snapshot["store_drops"] + snapshot["store_failures"] == 25


async def test_closing_after_an_error_waits_for_no_store() -> None:
    started = 0.0

    async def crash() -> None:
        nonlocal started
        async with odd_storage("a", drain_timeout_s=30) as manager:
            odd(manager).hung.add("store")
            write(manager, key(0))
            await until(lambda: odd(manager).waiting["store"])
            started = time.monotonic()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await crash()
    assert time.monotonic() - started < 1.5


async def test_closing_waits_for_a_thread_that_reads_our_memory() -> None:
    """A store that nothing can cancel keeps its memory to the end; closing takes as long as it does."""
    async with odd_storage("a", drain_timeout_s=0.05) as manager:
        odd(manager).stuck.add("store")
        write(manager, key(0))
        await until(lambda: odd(manager).waiting["store"])
        seen: list[str] = []

        def let_go_later() -> None:
            time.sleep(0.4)  # longer than closing would take
            seen.extend(hold.owner for hold in manager.l1.holds())
            odd(manager).let_go()

        thread = threading.Thread(target=let_go_later)
        thread.start()
    assert not thread.is_alive() or seen
    thread.join()
    assert seen == ["store:a"]
    assert_closed_clean(manager)


async def test_what_is_written_after_closing_is_given_up() -> None:
    async with odd_storage("a") as manager:
        reservations = [manager.reserve_write(key(n), layout()) for n in range(2)]
    late = [reservation for reservation in reservations if reservation is not None]
    assert len(late) == 2
    manager.finish_write(late[:1])
    late[1].abort()
    assert_closed_clean(manager)


async def test_a_drain_covers_what_other_threads_wrote_before_it() -> None:
    async with storage("a") as manager:

        def engine() -> None:
            write(manager, *(key(n) for n in range(10)))

        await anyio.to_thread.run_sync(engine)
        await manager.drain()
        assert len(odd(manager).keys) == 10


async def test_the_bytes_that_arrive_are_those_that_were_written() -> None:
    async with storage("a", "b", l1_objects=6) as manager:
        for number in range(30):  # the store of each overlaps with evictions for the next
            write(manager, key(number))
            await manager.drain()
        for number in range(30):
            manager.l1.remove(key(number))
            prefetch = manager.start_prefetch(wanted(1, first=number))
            await prefetch.wait_async()
            assert prefetch.objects()[0].tobytes() == content(key(number))
            prefetch.release()
