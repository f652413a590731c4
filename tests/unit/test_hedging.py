"""Hedged reads: when one tier owes an object for too long, another one that has it is asked, too."""

from __future__ import annotations

import pytest

from tests.unit.odd_tiers import (
    BOTH_HANGS,
    OBJECT_BYTES,
    Hang,
    Stopwatch,
    hold_up,
    key,
    odd,
    put_in_tier,
    read,
    recover,
    storage,
    until,
    wanted,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

HEDGE_S = 0.05


@BOTH_HANGS
async def test_a_hung_load_is_answered_by_the_other_tier_long_before_the_deadline(hang: Hang) -> None:
    async with storage("a", "b", hedge_after_s=HEDGE_S, lookup_timeout_s=20) as manager:
        for position in (0, 1):
            await put_in_tier(manager, position, *(key(n) for n in range(6)))
        hold_up(odd(manager), hang, "load")
        with Stopwatch() as watch:
            assert await read(manager, wanted(6)) == 6
        assert HEDGE_S * 0.9 <= watch.took_s < 5
        slow, quick = (manager.tiers[n].counters.snapshot() for n in (0, 1))
        assert (slow["hedged_loads"], quick["hedges_won"], quick["loaded_objects"]) == (1, 6, 6)
        assert await read(manager, wanted(6)) == 6  # from L1; what still hangs changes nothing
        recover(odd(manager))


async def test_only_what_is_owed_is_asked_for_again() -> None:
    async with storage({"url": "odd://?max_concurrency=1", "name": "a"}, "b", hedge_after_s=HEDGE_S) as manager:
        for position in (0, 1):
            await put_in_tier(manager, position, *(key(n) for n in range(6)))
        await put_in_tier(manager, 0, key(6))
        odd(manager).delay_s["load"] = 0.2
        assert await read(manager, wanted(7), timeout_s=20) == 7
        assert odd(manager, 1).loads.keys() <= {key(n) for n in range(6)}
        assert manager.tiers[1].counters.snapshot()["hedges_won"] >= 4


async def test_the_first_tier_may_still_win_and_the_late_copy_is_dropped() -> None:
    async with storage("a", "b", hedge_after_s=HEDGE_S) as manager:
        for position in (0, 1):
            await put_in_tier(manager, position, key(0))
        odd(manager, 0).delay_s["load"] = 0.3
        hold_up(odd(manager, 1), "hung", "load")
        assert await read(manager, wanted(1), timeout_s=20) == 1
        assert manager.tiers[1].counters.snapshot()["hedges_won"] == 0
        assert manager.l1.usage().writing == 1
        recover(odd(manager, 1))
        await until(lambda: manager.l1.usage().writing == 0)
        assert manager.l1.usage().used_bytes == manager.l1._readable[key(0)].slot.slot_bytes


async def test_two_searches_for_one_object_share_the_hedge() -> None:
    async with storage("a", "b", hedge_after_s=HEDGE_S) as manager:
        for position in (0, 1):
            await put_in_tier(manager, position, key(0))
        hold_up(odd(manager), "hung", "load")
        first = manager.start_prefetch(wanted(1), timeout_s=20)
        await until(lambda: odd(manager).waiting["load"])
        assert await read(manager, wanted(1), timeout_s=20) == 1
        await first.wait_async()
        assert first.ready_chunks == 1
        first.release()
        assert odd(manager, 1).loads[key(0)] == 1
        recover(odd(manager))


async def test_both_fail_and_the_answer_is_short_not_late() -> None:
    async with storage("a", "b", hedge_after_s=HEDGE_S) as manager:
        for position in (0, 1):
            await put_in_tier(manager, position, key(0))
        odd(manager, 0).delay_s["load"] = 0.2
        odd(manager, 0).damaged.add(key(0))
        odd(manager, 1).damaged.add(key(0))
        with Stopwatch() as watch:
            assert await read(manager, wanted(1), timeout_s=20) == 0
        assert watch.took_s < 5


async def test_without_memory_for_a_second_copy_nobody_is_asked() -> None:
    async with storage("a", "b", hedge_after_s=HEDGE_S, l1_objects=1) as manager:
        assert manager.l1.usage().capacity_bytes == OBJECT_BYTES
        for position in (0, 1):
            await put_in_tier(manager, position, key(0))
        odd(manager).delay_s["load"] = 0.2
        assert await read(manager, wanted(1), timeout_s=20) == 1
        assert odd(manager, 1).loads[key(0)] == 0


async def test_zero_turns_it_off() -> None:
    async with storage("a", "b", hedge_after_s=0) as manager:
        for position in (0, 1):
            await put_in_tier(manager, position, key(0))
        odd(manager).delay_s["load"] = 0.2
        assert await read(manager, wanted(1), timeout_s=20) == 1
        assert odd(manager, 1).loads[key(0)] == 0


async def test_no_more_than_a_tenth_of_all_loads_is_hedged() -> None:
    async with storage("a", "b", hedge_after_s=0.001) as manager:
        for position in (0, 1):
            await put_in_tier(manager, position, *(key(n) for n in range(60)))
        odd(manager).delay_s["load"] = 0.03
        manager.tiers[0].waited = lambda _: None  # type: ignore[method-assign, assignment]  # it never learns what is usual
        for number in range(60):
            assert await read(manager, wanted(1, first=number), timeout_s=20) == 1
        assert 4 <= manager.tiers[0].counters.snapshot()["hedged_loads"] <= 60 // 10 + 4


async def test_what_is_usual_for_a_tier_is_not_hedged() -> None:
    async with storage("a", "b", hedge_after_s=0.01) as manager:
        for position in (0, 1):
            await put_in_tier(manager, position, *(key(n) for n in range(20)))
        odd(manager).delay_s["load"] = 0.05
        for number in range(20):
            assert await read(manager, wanted(1, first=number), timeout_s=20) == 1
        assert manager.tiers[0].counters.snapshot()["hedged_loads"] <= 4
