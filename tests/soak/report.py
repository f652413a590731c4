"""What a soak says: a line now and then, a table in the end, and whether it passed."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.soak.tally import FAULTS, REQUESTS, SLACK_S

if TYPE_CHECKING:
    from tests.soak.medium import LastLook

#: A soak that did less than this has shown nothing.
LEAST_PER_MINUTE: Final = {"faults": 2000, "kills": 10, "verified objects": 2000}
_SHOWN_FINDINGS: Final = 20


@dataclass
class Result:
    """Everything that was counted."""

    minutes: float
    engines: int
    seed: int
    folder: Path
    elapsed_s: float = 0.0
    totals: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    damage: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    last_look: LastLook | None = None

    @property
    def faults(self) -> int:
        """Injected by the adapters and done to the medium."""
        return sum(self.totals[name] for name in FAULTS) + self.damage.total()

    @property
    def kills(self) -> int:
        return self.done["engine kills"] + self.done["server kills"]

    @property
    def must_be_zero(self) -> dict[str, int]:
        zeros = {
            "wrong bytes": self.totals["wrong_bytes"],
            "over deadline": self.totals["over_deadline"],
            "leaked leases": self.totals["leaked_leases"],
            "leaked bytes": self.totals["leaked_bytes"],
            "leaked threads": self.totals["leaked_threads"],
            "leaked files": self.totals["leaked_files"],
            "engines that crashed or hung": len(self.failures),
        }
        if self.last_look is not None:
            zeros["wrong bytes"] += self.last_look.wrong_bytes
            zeros["leaked files"] += len(self.last_look.strays)
            zeros["connections left"] = self.last_look.connections
            zeros["failures of the last look"] = len(self.last_look.failures)
        return zeros

    @property
    def enough(self) -> dict[str, tuple[int, int]]:
        """What was done, and the least that must have been."""
        done = {"faults": self.faults, "kills": self.kills, "verified objects": self.totals["verified_objects"]}
        return {name: (done[name], int(least * self.minutes)) for name, least in LEAST_PER_MINUTE.items()}

    @property
    def shortcomings(self) -> list[str]:
        """Why it has not passed."""
        broken = [f"{name}: {number}, must be 0" for name, number in self.must_be_zero.items() if number]
        broken += [
            f"{name}: {number}, at least {least}" for name, (number, least) in self.enough.items() if number < least
        ]
        if self.last_look is None:
            broken.append("it did not come to its end")
        return broken

    @property
    def passed(self) -> bool:
        return not self.shortcomings

    def line(self) -> str:
        """One line while it runs."""
        totals = self.totals
        requests = sum(totals[f"request.{name}"] for name in REQUESTS)
        return (
            f"{int(self.elapsed_s) // 60:02}:{int(self.elapsed_s) % 60:02}  requests {requests:,}  "
            f"verified {totals['verified_objects']:,}  faults {self.faults:,}  "
            f"kills {self.done['engine kills']}+{self.done['server kills']}  stops {self.done['server stops']}  "
            f"wrong bytes {totals['wrong_bytes']}  over deadline {totals['over_deadline']}  "
            f"leaked {sum(n for name, n in totals.items() if name.startswith('leaked'))}  "
            f"slowest {totals['slowest_request_us'] / 1e6:.2f} s"
        )

    def table(self) -> str:
        """Everything, when it is over."""
        rows = [*self._work(), *self._hardship(), *self._verdict()]
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {value}" if name else "" for name, value in rows]
        if self.findings:
            lines += ["", "  findings:", *(f"    {finding[:600]}" for finding in self.findings[:_SHOWN_FINDINGS])]
        lines += [f"  {failure}" for failure in self.failures[:_SHOWN_FINDINGS]]
        if self.last_look is not None:
            lines += [f"  {text}" for text in (*self.last_look.failures, *self.last_look.strays)[:_SHOWN_FINDINGS]]
        lines += ["", *(f"  {text}" for text in self.shortcomings), "PASSED" if self.passed else "FAILED"]
        return "\n".join(lines)

    def _work(self) -> list[tuple[str, str]]:
        totals = self.totals
        requests = {name: totals[f"request.{name}"] for name in REQUESTS}
        return [
            ("minutes", f"{self.minutes:g} (took {self.elapsed_s:.0f} s with its end), seed {self.seed}"),
            ("engines", f"{self.engines}, in {self.done['engine lives']} lives, {totals['closes']} ended in order"),
            ("requests", f"{sum(requests.values()):,} ({_listed(requests)})"),
            ("adapter operations", f"{totals['adapter_calls']:,} keys"),
            ("tokens restored", f"{totals['restored_tokens']:,}"),
            ("objects verified", f"{totals['verified_objects']:,} ({totals['verified_bytes'] >> 20:,} MiB)"),
            ("objects stored, loaded", f"{totals['tier.stored_objects']:,}, {totals['tier.loaded_objects']:,}"),
            ("evictions in L1", f"{totals['evictions']:,}"),
            ("hedged loads, won", f"{totals['tier.hedged_loads']:,}, {totals['tier.hedges_won']:,}"),
            ("", ""),
        ]

    def _hardship(self) -> list[tuple[str, str]]:
        totals = self.totals
        by_kind: Counter[str] = Counter()
        for name in FAULTS:
            by_kind[name.rpartition(".")[2]] += totals[name]
        rows = [
            ("faults injected", f"{self.faults:,}"),
            ("  by adapters", _listed(by_kind)),
            ("  on the medium", _listed(self.damage)),
            (
                "kills (SIGKILL)",
                f"{self.kills} ({self.done['engine kills']} engines, {self.done['server kills']} server)",
            ),
            ("stops (SIGSTOP)", f"{self.done['server stops']} server"),
            ("damage found by loads", f"{totals['tier.load_corrupt']:,}"),
            ("circuits opened", f"{totals['circuits_opened']:,}"),
            ("opens that failed", f"{totals['opens_failed']} of {totals['opens']}"),
            ("errors logged", f"{totals['errors_logged']}"),
            ("staging of the killed swept", f"{totals['orphans_swept']} by engines"),
        ]
        if self.last_look is not None:
            look = self.last_look
            rows += [
                ("left in the tiers", f"{look.intact:,} intact, {look.found_damaged:,} damaged and found to be"),
                ("  files", f"{look.file_bytes_before:,} bytes, {look.file_bytes:,} after the last open"),
                ("  probe objects", f"{look.probes_left}"),
            ]
        return [*rows, ("", "")]

    def _verdict(self) -> list[tuple[str, str]]:
        totals = self.totals
        return [
            *((name, str(number)) for name, number in self.must_be_zero.items()),
            ("slowest request", f"{totals['slowest_request_us'] / 1e6:.3f} s"),
            ("latest after its deadline", f"{totals['latest_us'] / 1e6:.3f} s ({SLACK_S:g} s are allowed)"),
            ("slowest any-thread call", f"{totals['slowest_call_us'] / 1e3:.1f} ms"),
            ("longest pause of a loop", f"{totals['slowest_loop_us'] / 1e3:.1f} ms"),
            ("  of a whole process", f"{totals['slowest_process_us'] / 1e3:.1f} ms (the machine's own)"),
        ]


class Progress:
    """Shows the line: over and over in place on a terminal, now and then elsewhere."""

    def __init__(self) -> None:
        self._in_place = sys.stdout.isatty()
        self._every_s = 1.0 if self._in_place else 10.0
        self._next = time.monotonic() + self._every_s

    def show(self, result: Callable[[], Result]) -> None:
        """Show what ``result`` returns, if it is time."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            self._write(result().line(), "\r\033[K" if self._in_place else "", "" if self._in_place else "\n")

    def end(self) -> None:
        """Leave the line as it is."""
        if self._in_place:
            self._write("", "", "\n")

    def _write(self, text: str, before: str, after: str) -> None:
        sys.stdout.write(f"{before}{text}{after}")
        sys.stdout.flush()


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in counts.items() if number)
