"""Background work that never dies silently: a task that raises is logged, reported and started again."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
from anyio.abc import TaskGroup

from l2kit.errors import BackendError, L2Error, first_error

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 30.0
_PROVEN_S: Final = 10.0  # work that has run for so long since it was started again counts as well

_log = logging.getLogger(__name__)

Work = Callable[[], Awaitable[None]]


class Supervisor:
    """The background tasks of one adapter or tier. Loop-bound, except for :attr:`trouble`."""

    def __init__(self, owner: str) -> None:
        """``owner`` is whose work it is, for messages."""
        self._owner = owner
        self._task_group: TaskGroup | None = None
        self._waiting: list[tuple[str, Work]] = []
        self._failures: dict[str, L2Error] = {}
        self._restarted: dict[str, float] = {}  # when work that had failed was started again; absent while it is down

    @property
    def trouble(self) -> L2Error | None:
        """The last failure of work that is down, or that has not run for long since; None otherwise. Any thread."""
        now = time.monotonic()
        for name, error in list(self._failures.items()):
            restarted = self._restarted.get(name)
            if restarted is None or now - restarted < _PROVEN_S:
                return error
        return None

    def start(self, name: str, work: Work) -> None:
        """Run ``work`` until it returns; at once, or as soon as :meth:`run_in` says where."""
        if self._task_group is None:
            self._waiting.append((name, work))
        else:
            self._task_group.start_soon(self._supervise, name, work, name=f"l2kit {self._owner} {name}")

    def run_in(self, task_group: TaskGroup) -> None:
        """Run everything in ``task_group`` and end with it."""
        self._task_group = task_group
        waiting, self._waiting = self._waiting, []
        for name, work in waiting:
            self.start(name, work)

    async def _supervise(self, name: str, work: Work) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            started = time.monotonic()
            try:
                await work()
            except Exception as caught:
                self._note(name, first_error(caught), pause_s)
            else:
                self._failures.pop(name, None)
                return
            if time.monotonic() - started > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self._restarted[name] = time.monotonic()

    def _note(self, name: str, error: Exception, pause_s: float) -> None:
        # Of a foreign error its place but not its text, which may hold a URL with its password.
        what = str(error) if isinstance(error, L2Error) else type(error).__name__
        where = "" if isinstance(error, L2Error) else "\n" + "".join(traceback.format_tb(error.__traceback__))
        self._failures[name] = BackendError(f"{self._owner}: {name} failed: {what}")
        self._restarted.pop(name, None)
        _log.error("%s: %s failed and starts again in %.1f s: %s%s", self._owner, name, pause_s, what, where)
