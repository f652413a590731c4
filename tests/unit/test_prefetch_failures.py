"""Prefetch and lookup over tiers that fail, lie, damage and hang: what each costs, and whom."""

from __future__ import annotations

import anyio
import anyio.to_thread
import pytest

from l2kit.errors import BackendError, BackendTimeoutError, L2Error
from l2kit.outcomes import LoadOutcome
from l2kit.task import L2Task
from tests.unit.odd_tiers import (
    BOTH_HANGS,
    SHORT_S,
    SLACK_S,
    Hang,
    OddAdapter,
    Stopwatch,
    hold_up,
    is_at_rest,
    key,
    layout,
    odd,
    put_in_l1,
    put_in_tier,
    read,
    recover,
    registry,
    storage,
    until,
    wanted,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


# --- tiers that fail ------------------------------------------------------------------------------


async def test_a_key_that_fails_in_the_first_tier_is_loaded_from_the_second() -> None:
    async with storage("a", "b") as manager:
        for position in (0, 1):
            await put_in_tier(manager, position, *(key(n) for n in range(3)))
        odd(manager).failing_keys[key(1)] = OSError(5, "input/output error")
        assert await read(manager, wanted(3)) == 3
        assert manager.tiers[0].counters.snapshot()["load_failures"] == 1
        assert manager.tiers[1].counters.snapshot()["loaded_objects"] == 1


async def test_a_tier_that_lies_in_lookups_is_passed_over() -> None:
    async with storage("a", "b") as manager:
        odd(manager).claimed |= {key(0), key(1)}
        await put_in_tier(manager, 1, key(0), key(1))
        assert await read(manager, wanted(2)) == 2
        assert manager.tiers[0].counters.snapshot()["load_misses"] == 2


async def test_a_damaged_object_comes_from_the_next_tier_and_is_healed() -> None:
    async with storage("a", "b") as manager:
        for position in (0, 1):
            await put_in_tier(manager, position, key(0))
        odd(manager).damaged.add(key(0))
        assert await read(manager, wanted(1)) == 1
        assert manager.tiers[0].counters.snapshot()["load_corrupt"] == 1
        assert odd(manager).keys == set()


async def test_a_tier_that_dies_after_the_lookup_shortens_the_answer() -> None:
    async with storage("a") as manager:
        await put_in_tier(manager, 0, key(0), key(1))
        odd(manager).failing["load"] = ConnectionResetError(104, "reset")
        put_in_l1(manager, key(0))
        assert await read(manager, wanted(2)) == 1
        assert not manager.tiers[0].healthy
        odd(manager).failing.clear()
        assert await read(manager, wanted(2)) == 2
        assert manager.tiers[0].healthy


async def test_a_failing_lookup_leaves_the_other_tier() -> None:
    async with storage("a", "b") as manager:
        await put_in_tier(manager, 1, key(0))
        odd(manager).failing["lookup"] = BackendError("no")
        assert await read(manager, wanted(1)) == 1
        assert manager.tiers[0].counters.snapshot()["lookup_failures"] == 1
        assert "no" in str(manager.status()["tiers"]["a"]["last_error"])


class BrokenLoads(OddAdapter):
    """Breaks before it has a task to show for it."""

    def submit_load_task(self, *_: object, **__: object) -> L2Task[LoadOutcome]:
        raise RuntimeError("a bug of the plugin")


async def test_an_adapter_that_breaks_in_submit_costs_its_own_share_only(caplog: pytest.LogCaptureFixture) -> None:
    bare = {"url": "broken://?resilience.enabled=false", "name": "a"}
    async with storage(bare, "b", known=registry(broken=BrokenLoads)) as manager:
        for position in (0, 1):
            await put_in_tier(manager, position, key(0), key(1))
        assert await read(manager, wanted(2)) == 2
        assert manager.tiers[0].counters.snapshot()["load_failures"] == 2
        assert not manager.tiers[0].healthy
        assert "a bug of the plugin" in caplog.text


class Clumsy(OddAdapter):
    """Its one seam for errors raises itself."""

    def translate_error(self, error: Exception) -> L2Error:
        raise AttributeError("translate_error has a bug")


async def test_an_error_in_translate_error_fails_one_call_and_not_the_adapter() -> None:
    async with storage({"url": "clumsy://", "name": "a"}, known=registry(clumsy=Clumsy)) as manager:
        await put_in_tier(manager, 0, key(0))
        odd(manager).failing["lookup"] = ValueError("odd")
        assert await read(manager, wanted(1)) == 0
        odd(manager).failing.clear()
        assert await read(manager, wanted(1)) == 1


# --- tiers that hang ------------------------------------------------------------------------------


@BOTH_HANGS
async def test_a_hung_lookup_costs_one_deadline_once(hang: Hang) -> None:
    async with storage("a", "b", lookup_timeout_s=SHORT_S) as manager:
        await put_in_tier(manager, 0, *(key(n) for n in range(6)))
        await put_in_tier(manager, 1, key(0), key(1))
        hold_up(odd(manager), hang, "lookup")
        with Stopwatch() as first:
            assert await read(manager, wanted(4)) == 2  # the healthy tier's data
        assert SHORT_S * 0.9 <= first.took_s < SHORT_S + SLACK_S
        for number in (10, 11, 12):  # from now on nobody waits for it
            with Stopwatch() as later:
                assert await read(manager, wanted(2, first=number), timeout_s=30) == 0
            assert later.took_s < SLACK_S
        if hang == "stuck":
            assert odd(manager).calls["lookup"] <= 1  # the one that is out is the probe
        recover(odd(manager))
        await until(lambda: odd(manager).waiting["lookup"] == 0)
        await read(manager, wanted(1, first=13))  # asked again, and not waited for
        await until(lambda: manager.tiers[0].trusted("lookup"))
        assert await read(manager, wanted(6), timeout_s=10) == 6


@BOTH_HANGS
async def test_a_hung_load_costs_one_deadline_and_then_the_other_tier_serves(hang: Hang) -> None:
    async with storage("a", "b", lookup_timeout_s=SHORT_S) as manager:
        for position in (0, 1):
            await put_in_tier(manager, position, *(key(n) for n in range(8)))
        hold_up(odd(manager), hang, "load")
        with Stopwatch() as first:
            await read(manager, wanted(4))
        assert first.took_s < SHORT_S + SLACK_S
        with Stopwatch() as second:  # the same keys: what hangs in tier a must not keep them from tier b
            assert await read(manager, wanted(4), timeout_s=30) == 4
        assert second.took_s < SLACK_S
        assert await read(manager, wanted(8), timeout_s=30) == 8
        assert sum(odd(manager, 1).loads.values()) == 8
        recover(odd(manager))
        await until(lambda: is_at_rest(manager))


@BOTH_HANGS
async def test_a_hung_load_of_the_only_tier_is_probed_and_trusted_again(hang: Hang) -> None:
    async with storage("a", lookup_timeout_s=SHORT_S) as manager:
        await put_in_tier(manager, 0, *(key(n) for n in range(8)))
        hold_up(odd(manager), hang, "load")
        assert await read(manager, wanted(4)) == 0
        for _ in range(3):
            with Stopwatch() as later:
                assert await read(manager, wanted(4), timeout_s=30) == 0
            assert later.took_s < SLACK_S
        assert sum(odd(manager).loads.values()) <= 8  # what is out is the probe; more would only pile up
        recover(odd(manager))
        await until(lambda: odd(manager).waiting["load"] == 0)
        await read(manager, wanted(4))
        await until(lambda: manager.tiers[0].trusted("load"))
        assert await read(manager, wanted(8), timeout_s=10) == 8


async def test_a_slow_tier_that_delivers_something_keeps_its_trust() -> None:
    async with storage({"url": "odd://?max_concurrency=1", "name": "a"}, lookup_timeout_s=0.3) as manager:
        await put_in_tier(manager, 0, *(key(n) for n in range(8)))
        odd(manager).delay_s["load"] = 0.1
        assert 1 <= await read(manager, wanted(8)) <= 3
        assert manager.tiers[0].trusted("load")
        assert await read(manager, wanted(8)) >= 2


async def test_a_client_time_out_in_a_lookup_is_not_waited_for_again() -> None:
    async with storage("a") as manager:
        odd(manager).failing["lookup"] = BackendTimeoutError("the client's own time-out")
        assert await read(manager, wanted(1)) == 0
        assert not manager.tiers[0].trusted("lookup")
        odd(manager).failing.clear()
        await put_in_tier(manager, 0, key(0))
        await read(manager, wanted(1))
        await until(lambda: manager.tiers[0].trusted("lookup"))
        assert await read(manager, wanted(1)) == 1


async def test_stores_that_time_out_do_not_cost_a_tier_its_lookups() -> None:
    async with storage({"url": "odd://?timeout_s=0.05", "name": "a"}) as manager:
        await put_in_tier(manager, 0, key(0))
        odd(manager).hung.add("store")
        reservation = manager.reserve_write(key(5), layout())
        assert reservation is not None
        manager.finish_write([reservation])
        await until(lambda: manager.tiers[0].counters.snapshot()["store_failures"])
        assert not manager.tiers[0].healthy
        assert await read(manager, wanted(1)) == 1
        assert not manager.tiers[0].healthy  # a lookup that works says nothing about stores


async def test_hits_in_l1_wait_for_nobody() -> None:
    async with storage("a", lookup_timeout_s=30) as manager:
        put_in_l1(manager, *(key(n) for n in range(4)))
        hold_up(odd(manager), "stuck", "lookup")
        waiting = [manager.start_prefetch(wanted(2, first=10 + n)) for n in range(20)]
        await until(lambda: odd(manager).waiting["lookup"])
        with Stopwatch() as watch:
            for _ in range(100):
                prefetch = manager.start_prefetch(wanted(4))
                assert prefetch.done
                assert prefetch.ready_chunks == 4
                prefetch.release()
        assert watch.took_s < SLACK_S
        for prefetch in waiting:
            prefetch.release()
        odd(manager).let_go()


async def test_a_late_answer_is_unlocked() -> None:
    async with storage("a", lookup_timeout_s=SHORT_S) as manager:
        await put_in_tier(manager, 0, key(0))
        hold_up(odd(manager), "stuck", "lookup")
        assert await read(manager, wanted(1)) == 0
        recover(odd(manager))
        await until(lambda: odd(manager).calls["release"])
        await until(lambda: manager.tiers[0].adapter.held_leases == 0)


# --- lookup ---------------------------------------------------------------------------------------


async def test_lookup_counts_chunks_and_loads_nothing() -> None:
    async with storage("a", "b") as manager:
        put_in_l1(manager, key(0))
        await put_in_tier(manager, 0, key(1), key(3))
        await put_in_tier(manager, 1, key(2))
        assert await manager.lookup(wanted(6)) == 4
        assert manager.l1.usage().entries == 1
        assert not odd(manager).loads


@BOTH_HANGS
async def test_lookup_answers_by_its_deadline_and_leaves_no_lease(hang: Hang) -> None:
    async with storage("a", "b") as manager:
        for position in (0, 1):
            await put_in_tier(manager, position, key(0))
        await put_in_tier(manager, 0, key(1))
        hold_up(odd(manager), hang, "lookup")
        with Stopwatch() as watch:
            assert await manager.lookup(wanted(2), timeout_s=SHORT_S) == 1
        assert watch.took_s < SHORT_S + SLACK_S
        with Stopwatch() as watch:
            assert await manager.lookup(wanted(2), timeout_s=30) == 1
        assert watch.took_s < SLACK_S
        recover(odd(manager))


@BOTH_HANGS
async def test_a_cancelled_lookup_leaves_no_lease(hang: Hang) -> None:
    async with storage("a", "b") as manager:
        for position in (0, 1):
            await put_in_tier(manager, position, key(0))
        hold_up(odd(manager), hang, "lookup")
        with anyio.move_on_after(0.05) as scope:
            await manager.lookup(wanted(2), timeout_s=30)
        assert scope.cancelled_caught
        recover(odd(manager))
        await until(lambda: odd(manager).waiting["lookup"] == 0)
        await until(lambda: is_at_rest(manager))
