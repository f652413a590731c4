"""A thread that sees what an engine that hangs can no longer tell."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from typing import Final

import anyio

from tests.soak.tally import Tally

_TICK_S: Final = 0.05
_BUSY_S: Final = 0.3  # a loop that is busy with one thing for so long: all stacks go to the log
_QUIET_S: Final = 5.0


class Watchdog:
    """Counts requests while they run over, and tells a loop that hangs from a machine that has no time for us.

    ``_beaten`` is written by the loop and read by the thread.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="soak watchdog", daemon=True)
        self._beaten: float | None = None

    def start(self) -> None:
        """Until :meth:`end`."""
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    async def beat(self) -> None:
        """Run it on the loop that is watched, until it is cancelled."""
        try:
            while True:
                started = self._beaten = time.monotonic()
                await anyio.sleep(_TICK_S)
                self._tally.peak("slowest_loop_us", int((time.monotonic() - started - _TICK_S) * 1e6))
        finally:
            self._beaten = None

    def _watch(self) -> None:
        quiet_until = 0.0
        while True:
            started = time.monotonic()
            if self._over.wait(_TICK_S):
                return
            now = time.monotonic()
            late_s = now - started - _TICK_S
            self._tally.peak("slowest_process_us", int(late_s * 1e6))
            self._tally.check_running()
            beaten = self._beaten
            if beaten is not None and now - beaten - late_s > _TICK_S + _BUSY_S and now > quiet_until:
                quiet_until = now + _QUIET_S
                sys.stderr.write(
                    f"the loop gave no sign for {now - beaten:.2f} s, this thread overslept {late_s:.2f} s\n"
                )
                sys.stderr.flush()
                faulthandler.dump_traceback()
