"""Starts the engines and the server, kills, stops and restarts them, damages what is stored, and ends it all."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import IO, Final

from l2kit.testing.servers import Flavor, RespServer, find_binary, run_server
from tests.soak.hostility import SERVER_BYTES
from tests.soak.medium import Medium, look_once_more
from tests.soak.report import Progress, Result
from tests.soak.tally import Board

ROOT: Final = Path(__file__).resolve().parents[2]
_TICK_S: Final = 0.05
_ORDERLY_END_S: Final = 45.0

#: What happens how often, in seconds between two of a kind; each time half as much more or less.
_EVERY_S: Final = {
    "kill an engine": 3.0,
    "end an engine": 11.0,
    "kill the server": 17.0,
    "stop the server": 23.0,
    "hurt a file": 0.3,
    "hurt a value": 0.3,
    "look at the files": 2.0,
}
#: These wait until the server is back from what was done to it before.
_TO_THE_SERVER: Final = ("kill the server", "stop the server", "hurt a value")


class Life:
    """One process of one engine, from its start to its end."""

    def __init__(self, process: subprocess.Popen[bytes], slot: int, log: IO[bytes]) -> None:
        self.process: Final = process
        self.slot: Final = slot
        self.asked_to_end: float | None = None
        self.killed = False
        self._log = log

    def end(self) -> None:
        """SIGTERM."""
        self.asked_to_end = time.monotonic()
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.killed = True
        self.process.kill()
        self.process.wait()

    def verdict(self) -> str | None:
        """Why it should not have ended as it did; None when it did as it was told."""
        self._log.close()
        code = self.process.returncode
        if self.killed or (self.asked_to_end is not None and code in (0, -signal.SIGTERM)):
            return None
        return f"engine life {self.slot} ended with {code}; see its log"


class Conductor:
    """One soak. ``folder`` is empty, and keeps what is needed to understand a failure."""

    def __init__(self, folder: Path, server: RespServer, *, minutes: float, engines: int, seed: int) -> None:
        self.result: Final = Result(minutes=minutes, engines=engines, seed=seed, folder=folder)
        self._folder = folder
        self._server = server
        self._random = Random(seed)
        self._seed = seed
        self._board = Board(folder / "counters")
        self._findings = folder / "findings.jsonl"
        (folder / "logs").mkdir()
        self._medium = Medium(folder / "shared" / "tier", server, self._random)
        self._lives: list[Life | None] = [None] * engines
        self._born_at = [0.0] * engines
        self._server_back_at: float | None = None
        self._server_is_stopped = False
        self._done: Counter[str] = Counter()

    def run(self, progress: Progress) -> Result:
        """The whole soak; the server is up before and after."""
        started = time.monotonic()
        actions = self._actions()
        due = {name: started + self._next_s(name) for name in actions}
        try:
            while (now := time.monotonic()) < started + 60 * self.result.minutes:
                self._revive(now)
                for name, action in actions.items():
                    if now >= due[name] and (name not in _TO_THE_SERVER or self._server_back_at is None):
                        due[name] = now + self._next_s(name)
                        action()
                progress.show(lambda: self._snapshot(now - started))
                time.sleep(_TICK_S)
            self._bring_server_back()
            self._end_all(progress)
        finally:
            for life in self._lives:
                if life is not None and life.process.poll() is None:
                    life.kill()
            self._bring_server_back()
        try:
            self.result.last_look = look_once_more(self._medium)
        except Exception:  # whatever it is, what was counted until now is worth being shown
            self.result.failures.append(f"the last look failed: {traceback.format_exc()}")
        return self._snapshot(time.monotonic() - started)

    def _actions(self) -> dict[str, Callable[[], None]]:
        return {
            "kill an engine": self._kill_engine,
            "end an engine": self._end_engine,
            "kill the server": self._kill_server,
            "stop the server": self._stop_server,
            "hurt a file": self._medium.hurt_file,
            "hurt a value": self._medium.hurt_server,
            "look at the files": self._medium.look,
        }

    def _next_s(self, name: str) -> float:
        return _EVERY_S[name] * self._random.uniform(0.5, 1.5)

    # --- engines ----------------------------------------------------------------------------------------

    def _revive(self, now: float) -> None:
        """Start engines anew, and the server."""
        self._bury_the_dead(now)
        for place, life in enumerate(self._lives):
            if life is None and now >= self._born_at[place]:
                self._lives[place] = self._start(place)
        if self._server_back_at is not None and now >= self._server_back_at:
            self._bring_server_back()

    def _start(self, place: int) -> Life:
        slot = self._board.new_slot()
        spec = {
            "seed": f"{self._seed}/{slot}",
            "slot": slot,
            "counters": str(self._board.file),
            "findings": str(self._findings),
            "directory": str(self._medium.directory),
            "redis_url": self._server.url(),
        }
        log = (self._folder / "logs" / f"{slot:05}.log").open("wb")
        command = [sys.executable, "-m", "tests.soak.engine_process", json.dumps(spec)]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._done["engine lives"] += 1
        return Life(process, slot, log)

    def _bury_the_dead(self, now: float) -> None:
        """See who has ended, and whether he should have; end those who should have and have not."""
        for place, life in enumerate(self._lives):
            if life is None:
                continue
            if life.process.poll() is not None:
                why = life.verdict()
                if why is not None:
                    self.result.failures.append(why)
                self._lives[place] = None
                self._born_at[place] = now + self._random.uniform(0, 0.5)
            elif life.asked_to_end is not None and now > life.asked_to_end + _ORDERLY_END_S:
                self._give_up_on(life)

    def _give_up_on(self, life: Life) -> None:
        self.result.failures.append(f"engine life {life.slot} did not end within {_ORDERLY_END_S:.0f} s; see its log")
        life.process.send_signal(signal.SIGUSR1)  # all stacks
        time.sleep(0.5)
        life.kill()

    def _kill_engine(self) -> None:
        lives = [life for life in self._lives if life is not None and life.process.poll() is None]
        if lives:
            self._random.choice(lives).kill()
            self._done["engine kills"] += 1

    def _end_engine(self) -> None:
        lives = [life for life in self._lives if life is not None and life.asked_to_end is None]
        if lives:
            self._random.choice(lives).end()
            self._done["engine ends"] += 1

    def _end_all(self, progress: Progress) -> None:
        for life in self._lives:
            if life is not None and life.asked_to_end is None and life.process.poll() is None:
                life.end()
        while any(self._lives):
            self._bury_the_dead(time.monotonic())
            progress.show(lambda: self._snapshot(60 * self.result.minutes))
            time.sleep(_TICK_S)

    # --- the server -------------------------------------------------------------------------------------

    def _kill_server(self) -> None:
        self._server.kill()
        self._server_back_at = time.monotonic() + self._random.uniform(0.1, 3.0)
        self._done["server kills"] += 1

    def _stop_server(self) -> None:
        self._server.pause()
        self._server_is_stopped = True
        self._server_back_at = time.monotonic() + self._random.uniform(0.1, 4.0)
        self._done["server stops"] += 1

    def _bring_server_back(self) -> None:
        if self._server_back_at is None:
            return
        self._server_back_at = None
        if self._server_is_stopped:
            self._server_is_stopped = False
            self._server.resume()
        else:
            self._server.start()

    # --- what came of it --------------------------------------------------------------------------------

    def _snapshot(self, elapsed_s: float) -> Result:
        self.result.elapsed_s = elapsed_s
        self.result.totals = self._board.totals()
        self.result.done = self._done
        self.result.damage = self._medium.damage
        if self._findings.exists():
            self.result.findings = self._findings.read_text(encoding="utf-8").splitlines()
        return self.result


@contextmanager
def shared_server() -> Iterator[RespServer]:
    """A server that keeps its data when it is killed, and evicts when it is full."""
    flavor: Flavor = "redis" if find_binary("redis") is not None else "valkey"
    options = {"maxmemory": str(SERVER_BYTES), "maxmemory-policy": "allkeys-lru", "appendonly": "yes"}
    with run_server(flavor, **options) as server:
        yield server
