"""Letting go of prefetches in any state, closing under them, and everything at random."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

import anyio
import anyio.to_thread
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l2kit.prefetch import Prefetch
from l2kit.storage_manager import StorageManager
from tests.unit.odd_tiers import (
    BOTH_HANGS,
    SLACK_S,
    Hang,
    Stopwatch,
    assert_closed_clean,
    content,
    hold_up,
    is_at_rest,
    key,
    odd,
    odd_storage,
    put_in_l1,
    put_in_tier,
    recover,
    storage,
    until,
    wanted,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


# --- letting go -----------------------------------------------------------------------------------


def _never(_: StorageManager) -> bool:
    return True


STATES: dict[str, Callable[[StorageManager], object]] = {
    "before it runs": _never,
    "during the lookup": lambda manager: odd(manager).waiting["lookup"],
    "during the loads": lambda manager: odd(manager).waiting["load"],
    "when part of it has come": lambda manager: manager.tiers[0].counters.snapshot()["loaded_objects"],
}


@pytest.mark.parametrize("where", ["l1", "tier"])
async def test_one_that_is_dropped_gives_its_leases_back_and_is_logged(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with storage("a") as manager:
        if where == "l1":
            put_in_l1(manager, key(0))
        else:
            await put_in_tier(manager, 0, key(0))
        prefetch = manager.start_prefetch(wanted(1))
        await prefetch.wait_async()
        assert manager.l1.usage().leases == 1
        del prefetch
        await until(lambda: manager.l1.usage().leases == 0)
        assert "dropped without release(); its 1 leases" in caplog.text


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
