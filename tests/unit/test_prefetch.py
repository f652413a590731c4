"""Prefetch over real tiers: which prefix is found, where it is loaded from, and what a tier that misbehaves costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import anyio
import anyio.to_thread
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l2kit.errors import BackendError, BackendTimeoutError, L2Error
from l2kit.l1 import WriteReservation
from l2kit.outcomes import LoadOutcome
from l2kit.prefetch import Prefetch
from l2kit.storage_manager import StorageManager
from l2kit.task import L2Task
from tests.unit.odd_tiers import (
    OddAdapter,
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
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

Hang = Literal["hung", "stuck"]
BOTH_HANGS = pytest.mark.parametrize("hang", ["hung", "stuck"])

#: A short deadline, and what an answer "by the deadline" may take on a busy machine.
SHORT_S = 0.15
SLACK_S = 1.0


class Stopwatch:
    def __enter__(self) -> Stopwatch:
        self.started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.took_s = time.monotonic() - self.started


def hold_up(adapter: OddAdapter, hang: Hang, hook: Literal["lookup", "load", "store"]) -> None:
    (adapter.hung if hang == "hung" else adapter.stuck).add(hook)


def recover(adapter: OddAdapter) -> None:
    adapter.hung.clear()
    adapter.stuck.clear()
    adapter.let_go()


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


async def test_an_adapter_that_breaks_in_submit_leaves_no_reservation() -> None:
    async with storage({"url": "broken://", "name": "a"}, "b", known=registry(broken=BrokenLoads)) as manager:
        put_in_l1(manager, key(0))
        for position in (0, 1):
            await put_in_tier(manager, position, key(1))
        assert await read(manager, wanted(2)) == 1  # the request was answered, from what L1 has
        await put_in_tier(manager, 1, key(2))
        assert await read(manager, [*wanted(1), *wanted(1, first=2)]) == 2


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


# --- letting go -----------------------------------------------------------------------------------


def _never(_: StorageManager) -> bool:
    return True


STATES: dict[str, Callable[[StorageManager], object]] = {
    "before it runs": _never,
    "during the lookup": lambda manager: odd(manager).waiting["lookup"],
    "during the loads": lambda manager: odd(manager).waiting["load"],
    "when part of it has come": lambda manager: manager.tiers[0].counters.snapshot()["loaded_objects"],
}


@pytest.mark.parametrize("state", STATES)
@BOTH_HANGS
async def test_release_in_any_state_leaks_nothing(state: str, hang: Hang) -> None:
    async with storage("a") as manager:
        await put_in_tier(manager, 0, *(key(n) for n in range(6)))
        put_in_l1(manager, key(0))
        if state == "during the lookup":
            hold_up(odd(manager), hang, "lookup")
        elif state != "before it runs":
            hold_up(odd(manager), hang, "load")
        if state == "when part of it has come":
            odd(manager).hung.clear()
            odd(manager).stuck.clear()
            odd(manager).delay_s["load"] = 0.05
        prefetch = manager.start_prefetch(wanted(6), timeout_s=20)
        if state != "before it runs":
            await until(lambda: STATES[state](manager))
        await anyio.to_thread.run_sync(prefetch.release)
        prefetch.release()
        await until(lambda: prefetch.done)
        assert prefetch.ready_chunks == 0
        assert prefetch.objects() == []
        odd(manager).let_go()
        await until(lambda: is_at_rest(manager))


async def test_a_prefetch_released_before_it_runs_asks_nobody() -> None:
    async with storage("a") as manager:
        await put_in_tier(manager, 0, key(0))
        prefetch = manager.start_prefetch(wanted(1))
        prefetch.release()
        await prefetch.wait_async()
        assert odd(manager).calls["lookup"] == 0


@pytest.mark.parametrize("hook", ["lookup", "load"])
async def test_closing_the_storage_answers_every_prefetch(hook: Literal["lookup", "load"]) -> None:
    async with odd_storage("a") as manager:
        await put_in_tier(manager, 0, key(0), key(1))
        put_in_l1(manager, key(0))
        hold_up(odd(manager), "hung", hook)
        prefetches = [manager.start_prefetch(wanted(2), timeout_s=60) for _ in range(3)]
        await until(lambda: odd(manager).waiting[hook])
        prefetches.append(manager.start_prefetch(wanted(3), timeout_s=60))
        prefetches.append(manager.start_prefetch(wanted(3), timeout_s=60))  # neither gets to run
    for prefetch in prefetches:
        assert prefetch.done
        assert prefetch.ready_chunks <= 1
        for obj in prefetch.objects():  # leased memory outlives the storage
            assert obj.tobytes() == content(key(0))
        prefetch.release()
    assert_closed_clean(manager)


async def test_waiting_may_be_cancelled() -> None:
    async with storage("a") as manager:
        hold_up(odd(manager), "hung", "lookup")
        prefetch = manager.start_prefetch(wanted(1))
        with anyio.move_on_after(0.02) as scope:
            await prefetch.wait_async()
        assert scope.cancelled_caught
        prefetch.release()


async def test_a_waiter_whose_loop_is_gone_is_forgotten() -> None:
    async with storage("a") as manager:
        hold_up(odd(manager), "hung", "lookup")
        prefetch = manager.start_prefetch(wanted(1))

        async def impatient() -> None:
            with anyio.move_on_after(0.02):
                await prefetch.wait_async()

        await anyio.to_thread.run_sync(anyio.run, impatient)
        prefetch.release()
        await until(lambda: prefetch.done)


async def test_wait_blocks_a_thread_no_longer_than_asked() -> None:
    async with storage("a") as manager:
        hold_up(odd(manager), "hung", "lookup")
        prefetch = manager.start_prefetch(wanted(1))
        assert not await anyio.to_thread.run_sync(prefetch.wait, 0.02)
        odd(manager).let_go()
        assert await anyio.to_thread.run_sync(prefetch.wait, 5.0)
        prefetch.release()


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


# --- randomly -------------------------------------------------------------------------------------


ACTIONS = st.tuples(
    st.sampled_from(["hang", "stick", "fail", "damage", "recover", "start", "start", "start", "release"]),
    st.integers(0, 1),  # which tier
    st.sampled_from(["lookup", "load"]),
    st.integers(0, 9),  # which object
    st.sampled_from([0.0, 0.0, 0.002]),  # a pause after it
)


@settings(max_examples=25, deadline=None)
@given(
    where=st.lists(st.frozensets(st.integers(0, 1)), min_size=10, max_size=10),
    actions=st.lists(ACTIONS, min_size=3, max_size=14),
)
def test_random_moods_never_give_wrong_bytes_and_leak_nothing(where: list[frozenset[int]], actions: list[Any]) -> None:
    """Several prefetches over a small L1 while the tiers change their mood; every byte that comes is right."""
    anyio.run(_in_random_moods, where, actions)


async def _in_random_moods(where: list[frozenset[int]], actions: list[Any]) -> None:
    async with storage("a", "b", l1_objects=6, lookup_timeout_s=0.1) as manager:
        for number, positions in enumerate(where):
            for position in positions:
                await put_in_tier(manager, position, key(number))
        running: list[tuple[int, Prefetch]] = []
        for action, position, hook, number, pause_s in actions:
            adapter = odd(manager, position)
            match action:
                case "hang":
                    adapter.hung.add(hook)
                case "stick":
                    adapter.stuck.add(hook)
                case "fail":
                    adapter.failing[hook] = OSError(5, "input/output error")
                case "damage":
                    adapter.damaged.add(key(number))
                case "recover":
                    adapter.failing.clear()
                    recover(adapter)
                    adapter.gate, adapter.thread_gate = anyio.Event(), threading.Event()
                case "start":
                    running.append((number, manager.start_prefetch(wanted(4, first=number))))
                case _ if running:
                    running.pop(number % len(running))[1].release()
                case _:
                    pass
            await anyio.sleep(pause_s)
        with Stopwatch() as watch:
            for first, prefetch in running:
                await prefetch.wait_async()
                for number, obj in enumerate(prefetch.objects()):
                    assert obj.tobytes() == content(key(first + number))
                prefetch.release()
        assert watch.took_s < 0.1 + SLACK_S
