"""The leak checks notice what stays and forgive what is on its way out."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

import anyio
import pytest

from l2kit.testing import leaks
from l2kit.testing.leaks import no_leaked_tasks, no_leaked_threads_or_files


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "_PATIENCE_S", 0.2)


def test_a_thread_that_stays() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(30,), name="stayer")
    with pytest.raises(pytest.fail.Exception, match="thread stayer"), no_leaked_threads_or_files():
        thread.start()
    stop.set()
    thread.join()


def test_a_file_that_stays() -> None:
    opened: list[int] = []
    with pytest.raises(pytest.fail.Exception, match="/dev/null"), no_leaked_threads_or_files():
        opened.append(os.open(os.devnull, os.O_RDONLY))
    os.close(opened[0])


def test_a_file_number_that_is_used_again_for_another_file() -> None:
    first = os.open(os.devnull, os.O_RDONLY)

    def replace() -> None:
        os.close(first)
        assert os.open("/dev/zero", os.O_RDONLY) == first

    with pytest.raises(pytest.fail.Exception, match="/dev/zero"), no_leaked_threads_or_files():
        replace()
    os.close(first)


def test_a_thread_on_its_way_out() -> None:
    with no_leaked_threads_or_files():
        threading.Timer(0.05, lambda: None).start()


@pytest.mark.anyio
async def test_a_task_that_stays() -> None:
    tasks: list[asyncio.Task[None]] = []

    async def leak(start: Callable[[], asyncio.Task[None]]) -> None:
        async with no_leaked_tasks():
            tasks.append(start())

    loop = asyncio.get_running_loop()
    with pytest.raises(pytest.fail.Exception, match="task stayer"):
        await leak(lambda: loop.create_task(asyncio.sleep(30), name="stayer"))
    tasks[0].cancel()


@pytest.mark.anyio
async def test_a_task_on_its_way_out() -> None:
    async with no_leaked_tasks():
        task = asyncio.get_running_loop().create_task(anyio.sleep(0.02))
    assert task.done()
