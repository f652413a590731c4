"""StoreController over real tiers: what becomes readable reaches every tier, and a bad tier costs its own stores only."""

from __future__ import annotations

import logging
from typing import Any, ClassVar, Literal

import anyio
import pytest

from l2kit.errors import BackendError, ConfigError
from l2kit.memory_adapter import MemoryAdapter
from l2kit.outcomes import StoreOutcome, StoreStatus
from l2kit.storage_manager import StorageManager
from l2kit.task import L2Task
from tests.unit.odd_tiers import (
    OBJECT_BYTES,
    OddAdapter,
    content,
    is_at_rest,
    key,
    layout,
    odd,
    put_in_l1,
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
        keys = [key(n) for n in range(20)]
        write(manager, *keys)
        await manager.drain()
        assert odd(manager, 0).keys == odd(manager, 1).keys == set(keys)
        assert count(manager, "stored_objects") == 20
        assert count(manager, "stored_bytes") > 20 * OBJECT_BYTES
        for name in keys:
            manager.l1.remove(name)
        assert await read(manager, wanted(20)) == 20


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


async def test_hung_tiers_leave_half_of_l1_to_others() -> None:
    """With the default queue, as large as L1, what waits for hung tiers must not lock new objects and loads out."""
    async with storage("a", "b", "c", l1_objects=24) as manager:
        for position in (0, 1):
            odd(manager, position).hung.add("store")
        for number in range(100):
            write(manager, key(number))
            await anyio.sleep(0)
            assert manager.l1.contains(key(number))
        await until(lambda: len(odd(manager, 2).keys) == 100)
        assert held(manager) <= 12
        assert manager.counters.snapshot()["writes_refused"] == 0
        assert await read(manager, wanted(4, first=30)) == 4


async def test_what_fails_is_counted_logged_once_and_keeps_the_tier_unhealthy(caplog: pytest.LogCaptureFixture) -> None:
    async with storage("a") as manager:
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


async def test_a_tier_without_room_drops_and_stays_healthy() -> None:
    async with storage({"url": "odd://?max_bytes=100", "name": "a"}) as manager:
        write(manager, key(0))
        await manager.drain()
        assert count(manager, "store_drops") == 1
        assert manager.tiers[0].healthy


async def test_what_is_there_already_is_counted_as_present() -> None:
    class Keeping(OddAdapter):
        async def store_one(self, *_: object) -> StoreStatus:
            return StoreStatus.ALREADY_PRESENT

    known = registry()
    load = known.load
    known.load = lambda group, name: Keeping if name == "odd" else load(group, name)  # type: ignore[method-assign]
    async with storage("a", known=known) as manager:
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
    async with storage({"url": "refusing://", "name": "a"}, "b", known=registry(refusing=Refusing)) as manager:
        Refusing.errors[:] = [error]
        write(manager, key(0))
        await until(lambda: not Refusing.errors and held(manager) == 0)
        assert str(error) in caplog.text
        write(manager, key(1))
        await until(lambda: count(manager, "stored_objects") == 1)
        assert odd(manager, 1).keys == {key(0), key(1)}


@pytest.mark.parametrize("hook", ["store", "release", "lookup"])
async def test_closing_with_a_hung_tier_is_bounded(hook: Literal["store", "release", "lookup"]) -> None:
    context = storage("a", drain_timeout_s=0.2)
    manager = await context.__aenter__()
    odd(manager).hung.add(hook)
    write(manager, *(key(n) for n in range(25)))
    prefetch = manager.start_prefetch(wanted(2, first=50), timeout_s=60)
    await until(lambda: odd(manager).calls["store"] or odd(manager).calls["lookup"])
    with anyio.fail_after(2):
        await manager.__aexit__(None, None, None)
    assert prefetch.done
    prefetch.release()
    usage = manager.l1.usage()
    assert (usage.leases, usage.writing, usage.used_bytes) == (0, 0, 0)
    if hook == "store":
        snapshot = manager.tiers[0].counters.snapshot()
        assert snapshot["store_drops"] + snapshot["store_failures"] == 25
    await context.aclose() if hasattr(context, "aclose") else None


async def test_closing_waits_for_a_thread_that_reads_our_memory() -> None:
    """A store that nothing can cancel keeps its memory to the end; closing takes as long as it does."""
    context = storage("a", drain_timeout_s=0.1)
    manager = await context.__aenter__()
    odd(manager).stuck.add("store")
    write(manager, key(0))
    await until(lambda: odd(manager).waiting["store"])
    (lease,) = (hold for hold in manager.l1.holds() if hold.owner == "store:a")
    closed = anyio.Event()

    async def close() -> None:
        await manager.__aexit__(None, None, None)
        closed.set()

    async with anyio.create_task_group() as group:
        group.start_soon(close)
        await anyio.sleep(0.3)
        assert not closed.is_set()
        assert manager.l1.holds()[0].generation == lease.generation
        odd(manager).let_go()
        with anyio.fail_after(5):
            await closed.wait()
    assert manager.l1.usage().used_bytes == 0


async def test_writes_after_closing_hold_nothing() -> None:
    async with storage("a") as manager:
        reservation = manager.reserve_write(key(0), layout())
        assert reservation is not None
    assert manager.l1.usage().writing == 1


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
