"""Counters that outlive a killed engine: one page of a mapped file for each life of an engine, only ever increased."""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from l2kit.faults import KINDS

#: How long a request may take beyond its own deadline: what a busy machine with more processes than cores needs.
SLACK_S: Final = 1.0

FAULTS: Final = tuple(f"fault.{operation}.{kind}" for kind, operations in KINDS.items() for operation in operations)
REQUESTS: Final = ("retrieve", "store", "lookup", "prefetch", "abort")
TIER_WORK: Final = ("loaded_objects", "stored_objects", "load_corrupt", "hedged_loads", "hedges_won")
SUMS: Final = (
    *FAULTS,
    *(f"request.{name}" for name in REQUESTS),
    *(f"tier.{name}" for name in TIER_WORK),
    "adapter_calls",
    "evictions",
    "circuits_opened",
    "orphans_swept",
    "restored_tokens",
    "verified_objects",
    "verified_bytes",
    "wrong_objects",
    "wrong_bytes",
    "over_deadline",
    "errors_logged",
    "opens",
    "opens_failed",
    "closes",
    "leaked_leases",
    "leaked_bytes",
    "leaked_threads",
    "leaked_files",
)
#: Of these the largest counts.
PEAKS: Final = ("slowest_request_us", "latest_us", "slowest_call_us", "slowest_loop_us", "slowest_process_us")
_NAMES: Final = SUMS + PEAKS
_PLACES: Final = {name: place for place, name in enumerate(_NAMES)}
_PAGE_BYTES: Final = mmap.ALLOCATIONGRANULARITY


class Request:
    """One request that was begun."""

    def __init__(self, what: str, timeout_s: float, about: str) -> None:
        self.what: Final = what
        self.timeout_s: Final = timeout_s
        self.about: Final = about
        self.started: Final = time.monotonic()
        self.counted = False  # as one over its deadline


class Tally:
    """The counters of one life of an engine. Thread-safe, under one lock.

    ``findings`` is a file that takes one JSON line for everything that must not happen.
    """

    def __init__(self, file: Path, slot: int, findings: Path) -> None:
        """Use page ``slot`` of ``file``, which is there and zero."""
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), _PAGE_BYTES, offset=slot * _PAGE_BYTES)
        self._values = memoryview(self._map).cast("q")
        self._lock = threading.Lock()
        self._running: set[Request] = set()
        self._slot = slot
        self._findings = findings

    def add(self, name: str, amount: int = 1) -> None:
        place = _PLACES[name]
        with self._lock:
            self._values[place] += amount

    def peak(self, name: str, value: int) -> None:
        """Raise ``name`` to ``value`` if it is lower: for peaks, and for totals that somebody else counts."""
        place = _PLACES[name]
        with self._lock:
            self._values[place] = max(self._values[place], value)

    def get(self, name: str) -> int:
        return self._values[_PLACES[name]]

    def find(self, what: str, **facts: Any) -> None:
        """Write down something that must not happen."""
        line = json.dumps({"what": what, "engine": self._slot, "at": time.time(), **facts}) + "\n"
        with self._findings.open("a", encoding="utf-8") as file:
            file.write(line)

    @contextmanager
    def timed(self, what: str, timeout_s: float, about: object) -> Iterator[None]:
        """Measure a request that must have ended by ``timeout_s``."""
        request = self.begin(what, timeout_s, about)
        try:
            yield
        finally:
            self.end(request)

    def begin(self, what: str, timeout_s: float, about: object) -> Request:
        """A request has begun; :meth:`end` must follow."""
        self.add(f"request.{what}")
        request = Request(what, timeout_s, str(about))
        with self._lock:
            self._running.add(request)
        return request

    def end(self, request: Request) -> None:
        """A request has ended."""
        with self._lock:
            self._running.discard(request)
        took_s = time.monotonic() - request.started
        self.peak("slowest_request_us", int(took_s * 1e6))
        self.peak("latest_us", int(max(0.0, took_s - request.timeout_s) * 1e6))
        self._judge(request, "ended")

    def check_running(self) -> None:
        """Count the requests that should have ended: their engine may be killed before they do."""
        with self._lock:
            running = list(self._running)
        for request in running:
            self._judge(request, "still running")

    def _judge(self, request: Request, state: str) -> None:
        took_s = time.monotonic() - request.started
        if took_s <= request.timeout_s + SLACK_S:
            return
        with self._lock:
            counted, request.counted = request.counted, True
        if not counted:
            self.add("over_deadline")
            facts = {"request": request.what, "took_s": took_s, "timeout_s": request.timeout_s, "prompt": request.about}
            self.find("over deadline", state=state, **facts)

    @contextmanager
    def timed_call(self) -> Iterator[None]:
        """Measure a call that waits for nothing."""
        started = time.monotonic()
        yield
        self.peak("slowest_call_us", int((time.monotonic() - started) * 1e6))

    def close(self) -> None:
        self._values.release()
        self._map.close()


class Board:
    """The counters of all lives of all engines, for the conductor."""

    def __init__(self, file: Path) -> None:
        """Make ``file``."""
        self.file: Final = file
        self.slots = 0
        file.touch()

    def new_slot(self) -> int:
        """A page of zeros for one more life."""
        self.slots += 1
        os.truncate(self.file, self.slots * _PAGE_BYTES)
        return self.slots - 1

    def totals(self) -> Counter[str]:
        """The sums, and the largest of the peaks, over all lives so far."""
        totals: Counter[str] = Counter(dict.fromkeys(_NAMES, 0))
        with self.file.open("rb") as file:
            for _ in range(self.slots):
                values = struct.unpack(f"={len(_NAMES)}q", file.read(_PAGE_BYTES)[: 8 * len(_NAMES)])
                for name, value in zip(_NAMES, values, strict=True):
                    totals[name] = max(totals[name], value) if name in PEAKS else totals[name] + value
        return totals
