"""Leak checks: what ran or was open when a block ended and was not when it began fails the test.

Each check waits a moment for what is on its way out (a thread that ends, a socket whose transport closes with the
loop's next turn), so a report means that something stays.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

_PATIENCE_S: Final = 3.0
_FILES: Final = Path("/proc/self/fd")


@contextmanager
def no_leaked_threads_or_files() -> Iterator[None]:
    """Fail when the block leaves threads or file descriptors (sockets are among them) behind."""
    threads, files = set(threading.enumerate()), _open_files()
    yield

    def left() -> list[str]:
        alive = [thread.name for thread in threading.enumerate() if thread not in threads]
        opened = [f"{number} -> {target}" for number, target in (_open_files() - files)]
        return [f"thread {name}" for name in sorted(alive)] + [f"file {name}" for name in sorted(opened)]

    _wait_until_gone(left)
    _report(left())


@contextmanager
def no_leaked_temporary_files() -> Iterator[None]:
    """Give the block a folder of its own for temporary files, and fail when it leaves one there.

    It is what `tempfile` and, by ``TMPDIR``, other libraries and child processes use meanwhile.
    """
    python, environment = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="l2kit-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)  # other users may pass, as they may through the usual one
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        try:
            yield
        finally:
            tempfile.tempdir = python
            if environment is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = environment

        def left() -> list[str]:
            return [f"temporary file {path.name}" for path in sorted(Path(folder).iterdir())]

        _wait_until_gone(left)
        _report(left())


@asynccontextmanager
async def no_leaked_tasks() -> AsyncIterator[None]:
    """Fail when the block leaves tasks behind on the running event loop."""
    before = asyncio.all_tasks()
    yield

    def left() -> list[str]:
        tasks = asyncio.all_tasks() - before - {asyncio.current_task()}
        return [f"task {task.get_name()}: {task.get_coro()!r}" for task in tasks if not _of_test_runner(task)]

    with anyio.move_on_after(_PATIENCE_S):
        while left():  # noqa: ASYNC110 - a leaked task sets no event
            await anyio.sleep(0.01)
    _report(left())


@pytest.fixture(autouse=True)
def thread_and_file_check() -> Iterator[None]:
    """For a ``conftest.py`` to import: every test leaves no thread and no file descriptor behind."""
    with no_leaked_threads_or_files():
        yield


@pytest.fixture
async def task_check(thread_and_file_check: None) -> AsyncIterator[None]:
    """Used by `leak_check`, and imported with it."""
    async with no_leaked_tasks():
        yield


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest, thread_and_file_check: None) -> None:
    """For a ``conftest.py`` to import with the other two: every async test leaves no task behind either."""
    if "anyio_backend" in request.fixturenames:  # only where there is an event loop can an async fixture be asked for
        request.getfixturevalue("task_check")


def _open_files() -> set[tuple[int, str]]:
    """Open file descriptors with what they refer to; nothing on systems without ``/proc``."""
    found: set[tuple[int, str]] = set()
    if _FILES.is_dir():
        for descriptor in _FILES.iterdir():
            with suppress(OSError):  # the descriptor that lists the folder is gone by now
                found.add((int(descriptor.name), str(descriptor.readlink())))
    return found


def _of_test_runner(task: asyncio.Task[Any]) -> bool:
    """True for the tasks in which anyio's pytest plugin runs fixtures and tests."""
    return "TestRunner." in getattr(task.get_coro(), "__qualname__", "")


def _wait_until_gone(left: Callable[[], list[str]]) -> None:
    give_up = time.monotonic() + _PATIENCE_S
    while left() and time.monotonic() < give_up:
        gc.collect()
        time.sleep(0.01)


def _report(left: list[str]) -> None:
    if left:
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)
