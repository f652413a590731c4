"""A storage manager under many threads: while it closes, and while its tiers change their mood."""

from __future__ import annotations

import random
import threading
import time

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from l2kit.errors import ClosedError
from tests.unit.odd_tiers import (
    assert_closed_clean,
    content,
    is_at_rest,
    key,
    odd,
    odd_storage,
    storage,
    until,
    wanted,
    write,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


async def test_threads_that_call_while_it_closes() -> None:
    """Whatever a thread gets from a storage that is being closed: an answer or `ClosedError`, never a hang."""
    for seed in range(5):
        await _close_under_threads(after_s=0.005 * seed)


async def _close_under_threads(after_s: float) -> None:
    manager = odd_storage("a", drain_timeout_s=0.1)
    failures: list[BaseException] = []
    started = threading.Event()

    def engine() -> None:
        try:
            for number in range(100_000):
                started.set()
                write(manager, key(number % 50))
                prefetch = manager.start_prefetch(wanted(3, first=number % 50), timeout_s=60)
                if not prefetch.wait(10):
                    failures.append(TimeoutError("no answer"))
                prefetch.release()
        except ClosedError:
            pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=engine) for _ in range(3)]
    async with manager:
        for thread in threads:
            thread.start()
        await until(started.is_set)
        await anyio.sleep(after_s)
    for thread in threads:
        await anyio.to_thread.run_sync(thread.join, 20)
        assert not thread.is_alive()
    assert failures == []
    await until(lambda: manager.l1.usage().leases == 0)
    assert_closed_clean(manager)


async def test_engines_in_threads_over_tiers_that_change_their_mood() -> None:
    """Writers and readers compare every byte while tiers hang, fail, damage and recover around them."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201 - what a failure prints
    async with storage(
        {"url": "odd://?timeout_s=0.2", "name": "a"}, "b", l1_objects=16, lookup_timeout_s=0.2, max_pending_prefetches=8
    ) as manager:
        end = time.monotonic() + 2.0
        failures: list[BaseException] = []
        restored = [0]

        def engine(number: int) -> None:
            rng = random.Random(seed + number)
            try:
                while time.monotonic() < end:
                    first = rng.randrange(24)
                    if rng.random() < 0.5:
                        write(manager, *(key(first + n) for n in range(rng.randrange(1, 6))))
                        continue
                    prefetch = manager.start_prefetch(wanted(5, first=first))
                    if rng.random() < 0.2:
                        prefetch.release()
                    if not prefetch.wait(10):
                        raise TimeoutError("no answer long after the deadline")
                    for position, obj in enumerate(prefetch.objects()):
                        assert obj.tobytes() == content(key(first + position))
                        restored[0] += 1
                    prefetch.release()
            except BaseException as error:
                failures.append(error)

        async def change_moods() -> None:
            rng = random.Random(seed)
            while time.monotonic() < end:
                adapter = odd(manager, rng.randrange(2))
                hook = rng.choice(["lookup", "load", "store"])
                match rng.randrange(6):
                    case 0:
                        adapter.hung.add(hook)  # type: ignore[arg-type]
                    case 1:
                        adapter.stuck.add(hook)  # type: ignore[arg-type]
                    case 2:
                        adapter.failing[hook] = OSError(5, "input/output error")  # type: ignore[index]
                    case 3:
                        adapter.damaged = {key(rng.randrange(28))}
                    case _:
                        adapter.failing.clear()
                        adapter.hung.clear()
                        adapter.stuck.clear()
                        adapter.let_go()
                        adapter.gate, adapter.thread_gate = anyio.Event(), threading.Event()
                await anyio.sleep(0.01)
            for position in (0, 1):
                odd(manager, position).hung.clear()
                odd(manager, position).stuck.clear()
                odd(manager, position).let_go()

        async with anyio.create_task_group() as group:
            group.start_soon(change_moods)
            for number in range(4):
                group.start_soon(anyio.to_thread.run_sync, engine, number)
        assert failures == []
        assert restored[0] > 0
        await until(lambda: is_at_rest(manager))
