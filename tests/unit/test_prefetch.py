"""Prefetch over real tiers: which prefix is found, where it is loaded from, and what a tier that misbehaves costs."""

from __future__ import annotations

import anyio
import anyio.to_thread
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l2kit.l1 import WriteReservation
from tests.unit.odd_tiers import (
    SHORT_S,
    SLACK_S,
    Stopwatch,
    content,
    hold_up,
    is_at_rest,
    key,
    layout,
    odd,
    put_in_l1,
    put_in_tier,
    read,
    storage,
    until,
    wanted,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


# --- which prefix ---------------------------------------------------------------------------------


PLACES = st.frozensets(st.sampled_from(["l1", "a", "b", "damaged in a"]))


@settings(max_examples=50, deadline=None)
@given(chunks_of_places=st.integers(1, 2).flatmap(lambda groups: st.lists(st.tuples(*[PLACES] * groups), max_size=6)))
def test_any_split_over_l1_and_tiers(chunks_of_places: list[tuple[frozenset[str], ...]]) -> None:
    """Each object is in any set of places; the answer is the longest run of whole chunks, with the right bytes."""
    chunks = wanted(len(chunks_of_places), groups=max(map(len, chunks_of_places), default=1))
    places = {
        item.key: {"a"} | set(where) if "damaged in a" in where else set(where)
        for chunk, of_chunk in zip(chunks, chunks_of_places, strict=True)
        for item, where in zip(chunk, of_chunk, strict=True)
    }
    damaged = {name for name, where in places.items() if "damaged in a" in where}
    expected = 0
    for chunk in chunks:
        if not all(places[item.key] & {"l1", "b"} or places[item.key] == {"a"} for item in chunk):
            break
        expected += 1

    async def check() -> None:
        async with storage("a", "b") as manager:
            put_in_l1(manager, *(name for name, where in places.items() if "l1" in where))
            for position, tier in enumerate("ab"):
                await put_in_tier(manager, position, *(name for name, where in places.items() if tier in where))
            odd(manager).damaged |= damaged
            assert await read(manager, chunks) == expected
            await until(lambda: is_at_rest(manager))
            assert await read(manager, chunks) == expected
            loads = odd(manager, 0).loads + odd(manager, 1).loads
            assert all(count <= 2 for count in loads.values())

    anyio.run(check)


async def test_a_gap_ends_the_answer_and_frees_what_lies_behind() -> None:
    async with storage("a") as manager:
        put_in_l1(manager, key(3), key(4))
        await put_in_tier(manager, 0, key(0), key(1))
        prefetch = manager.start_prefetch(wanted(5))
        await prefetch.wait_async()
        assert prefetch.ready_chunks == 2
        assert (prefetch.l1_chunks, prefetch.loaded_objects) == (0, 2)
        assert manager.l1.usage().leases == 2
        prefetch.release()


async def test_what_l1_has_in_full_is_answered_before_start_prefetch_returns() -> None:
    async with storage("a") as manager:
        put_in_l1(manager, key(0), key(1))
        hold_up(odd(manager), "hung", "lookup")
        prefetch = manager.start_prefetch(wanted(2))
        assert prefetch.done
        assert (prefetch.ready_chunks, prefetch.l1_chunks) == (2, 2)
        assert odd(manager).calls["lookup"] == 0
        prefetch.release()


async def test_without_tiers_the_answer_is_what_l1_has() -> None:
    async with storage() as manager:
        put_in_l1(manager, key(0))
        prefetch = manager.start_prefetch(wanted(3))
        assert prefetch.done
        assert prefetch.ready_chunks == 1
        prefetch.release()


async def test_only_the_rest_is_asked_of_the_tiers() -> None:
    async with storage("a") as manager:
        put_in_l1(manager, key(0), key(1))
        await put_in_tier(manager, 0, *(key(n) for n in range(4)))
        assert await read(manager, wanted(4)) == 4
        assert sorted(odd(manager).loads) == [key(2), key(3)]


async def test_a_restored_prefix_loses_its_end_first() -> None:
    async with storage("a", l1_objects=8) as manager:
        await put_in_tier(manager, 0, *(key(n) for n in range(6)))
        assert await read(manager, wanted(6)) == 6
        put_in_l1(manager, *(key(n) for n in range(20, 25)))
        assert manager.readable_prefix([key(n) for n in range(6)]) == 3


# --- several at once ------------------------------------------------------------------------------


async def test_two_prefetches_of_the_same_keys_load_each_object_once() -> None:
    async with storage("a") as manager:
        await put_in_tier(manager, 0, *(key(n) for n in range(6)))
        odd(manager).hung.add("load")
        first = manager.start_prefetch(wanted(4))
        await until(lambda: odd(manager).waiting["load"])
        second = manager.start_prefetch(wanted(6))
        third = manager.start_prefetch(wanted(2))
        await until(lambda: odd(manager).calls["lookup"] == 3)
        first.release()  # its loads go on: others wait for them
        odd(manager).gate.set()
        await second.wait_async()
        await third.wait_async()
        assert (second.ready_chunks, third.ready_chunks) == (6, 2)
        assert second.objects()[0].tobytes() == content(key(0))
        assert set(odd(manager).loads.values()) == {1}
        second.release()
        third.release()


async def test_when_the_load_of_another_prefetch_fails_one_loads_it_oneself() -> None:
    async with storage("a", "b") as manager:
        for position in (0, 1):
            await put_in_tier(manager, position, key(0))
        odd(manager).hung.add("load")
        odd(manager).failing_keys[key(0)] = OSError(5, "input/output error")
        first = manager.start_prefetch(wanted(1))
        await until(lambda: odd(manager).waiting["load"])
        second = manager.start_prefetch(wanted(1))
        await until(lambda: odd(manager, 1).calls["lookup"] == 2)
        odd(manager).gate.set()
        for prefetch in (first, second):
            await prefetch.wait_async()
            assert prefetch.ready_chunks == 1
            prefetch.release()


async def test_who_waits_for_a_load_that_hangs_gets_it_from_another_tier() -> None:
    async with storage("a", "b") as manager:
        for position in (0, 1):
            await put_in_tier(manager, position, key(0), key(1))
        odd(manager).stuck.add("load")
        first = manager.start_prefetch(wanted(2), timeout_s=SHORT_S)
        await until(lambda: odd(manager).waiting["load"])
        with Stopwatch() as watch:
            assert await read(manager, wanted(2), timeout_s=30) == 2
        assert watch.took_s < SHORT_S + SLACK_S
        first.release()


async def test_more_lookups_than_allowed_are_answered_from_l1() -> None:
    async with storage("a", max_pending_prefetches=3) as manager:
        hold_up(odd(manager), "hung", "lookup")
        put_in_l1(manager, key(0))
        prefetches = [manager.start_prefetch(wanted(2)) for _ in range(10)]  # the loop has had no turn yet
        assert [prefetch.done for prefetch in prefetches].count(True) == 7
        assert all(prefetch.ready_chunks == 1 for prefetch in prefetches if prefetch.done)
        assert manager.counters.snapshot()["prefetches_refused"] == 7
        for prefetch in prefetches:
            prefetch.release()


async def test_what_the_engine_is_writing_is_not_waited_for() -> None:
    async with storage("a") as manager:
        await put_in_tier(manager, 0, key(0), key(1))
        reservation = manager.l1.reserve_write(key(1), layout(), owner="engine")
        assert isinstance(reservation, WriteReservation)
        assert await read(manager, wanted(2)) == 1
        reservation.abort()
        assert await read(manager, wanted(2)) == 2


async def test_many_threads_start_poll_and_release() -> None:
    async with storage("a", "b", l1_objects=12) as manager:
        for number in range(24):
            await put_in_tier(manager, number % 2, key(number))
        odd(manager).delay_s["load"] = 0.001
        failures: list[BaseException] = []

        def engine(seed: int) -> None:
            try:
                for turn in range(25):
                    first = (seed + 3 * turn) % 20
                    prefetch = manager.start_prefetch(wanted(4, first=first), timeout_s=5)
                    if turn % 5 == 4:
                        prefetch.release()  # in whatever state it is
                        continue
                    assert prefetch.wait(20)
                    for number, obj in enumerate(prefetch.objects()):
                        assert obj.tobytes() == content(key(first + number))
                    prefetch.release()
                    prefetch.release()
            except BaseException as error:
                failures.append(error)

        async with anyio.create_task_group() as group:
            for seed in range(4):
                group.start_soon(anyio.to_thread.run_sync, engine, seed)
        assert failures == []


# --- L1 too small ---------------------------------------------------------------------------------


async def test_of_a_prompt_larger_than_l1_the_prefix_that_fits_comes() -> None:
    async with storage("a", l1_objects=5) as manager:
        await put_in_tier(manager, 0, *(key(n) for n in range(12)))
        with Stopwatch() as watch:
            assert await read(manager, wanted(12), timeout_s=30) == 5
        assert watch.took_s < SLACK_S
        assert await read(manager, wanted(12), timeout_s=30) == 5


async def test_a_tail_in_l1_gives_way_to_the_prefix() -> None:
    async with storage("a", l1_objects=5) as manager:
        await put_in_tier(manager, 0, *(key(n) for n in range(8)))
        put_in_l1(manager, *(key(n) for n in range(3, 8)))
        with Stopwatch() as watch:
            assert await read(manager, wanted(8), timeout_s=30) == 5
        assert watch.took_s < SLACK_S


async def test_what_fits_is_a_prefix_even_when_tiers_alternate() -> None:
    async with storage("a", "b", l1_objects=3) as manager:
        await put_in_tier(manager, 0, *(key(n) for n in range(0, 12, 2)))
        await put_in_tier(manager, 1, *(key(n) for n in range(1, 12, 2)))
        for adapter in (odd(manager, 0), odd(manager, 1)):
            adapter.delay_s["load"] = 0.01
        assert await read(manager, wanted(12)) == 3


async def test_two_prompts_larger_than_l1_at_once_both_end() -> None:
    async with storage("a", l1_objects=6) as manager:
        await put_in_tier(manager, 0, *(key(n) for n in range(40)))
        odd(manager).delay_s["load"] = 0.005
        with Stopwatch() as watch:
            prefetches = [manager.start_prefetch(wanted(10, first=first), timeout_s=30) for first in (0, 10, 20, 0)]
            for prefetch in prefetches:
                await prefetch.wait_async()
        assert watch.took_s < 3
        assert 1 <= sum(prefetch.ready_chunks for prefetch in prefetches[:3]) <= 6
        for prefetch in prefetches:
            prefetch.release()


async def test_with_all_of_l1_leased_the_answer_is_nothing_at_once() -> None:
    async with storage("a", l1_objects=4) as manager:
        await put_in_tier(manager, 0, *(key(n) for n in range(4)))
        put_in_l1(manager, *(key(n) for n in range(10, 14)))
        leases = manager.l1.acquire_prefix([key(n) for n in range(10, 14)], owner="test")
        with Stopwatch() as watch:
            assert await read(manager, wanted(4), timeout_s=30) == 0
        assert watch.took_s < SLACK_S
        assert odd(manager).calls["load"] == 0
        for lease in leases:
            lease.release()


async def test_an_object_larger_than_l1_is_no_hit() -> None:
    async with storage("a", l1_objects=1) as manager:
        odd(manager).claimed.add(key(0))
        big = [tuple(type(item)(item.key, layout(64)) for item in chunk) for chunk in wanted(1)]
        assert await read(manager, big) == 0
