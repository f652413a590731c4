"""What a command says of the objects that it went through: lines as it goes, or one JSON object at the end."""

from __future__ import annotations

import sys
from typing import TextIO

import msgspec

from l2kit.keys import ObjectKey


class Report:
    """One command's report.

    Attributes:
        objects, object_bytes: what was done.
        failures: what was not, with the reason.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False, to: TextIO | None = None) -> None:
        """Write to ``to``, by default stdout. A ``quiet`` one names only what failed."""
        self._as_json = as_json
        self._quiet = quiet
        self._to = sys.stdout if to is None else to
        self._done: list[str] = []  # only where all is said at the end
        self.objects = 0
        self.object_bytes = 0
        self.failures: list[dict[str, str | None]] = []

    def done(self, key: ObjectKey, nbytes: int) -> None:
        """One object was dealt with."""
        self.objects += 1
        self.object_bytes += nbytes
        if self._quiet:
            return
        if self._as_json:
            self._done.append(key.encode())
        else:
            print(f"{nbytes:>12}  {key}", file=self._to)

    def failed(self, key: ObjectKey | None, reason: str) -> None:
        """Something was not; ``key`` is None when it cannot be said which object that is."""
        reason = " ".join(reason.split())
        self.failures.append({"key": None if key is None else key.encode(), "reason": reason})
        if not self._as_json:
            print(reason if key is None else f"{reason}: {key}", file=self._to)

    def note(self, text: str) -> None:
        """Something for people."""
        if not self._as_json:
            print(text, file=self._to)

    def end(self, what: str, **facts: int) -> None:
        """The sum: ``what`` was done with the objects, and further facts by name."""
        if self._as_json:
            shown: dict[str, object] = {"objects": self.objects, "bytes": self.object_bytes, **facts}
            shown["failures"] = self.failures
            if not self._quiet:
                shown["keys"] = self._done
            print(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode(), file=self._to)
            return
        print(f"{self.objects} objects, {self.object_bytes} bytes {what}", file=self._to)
        for name, number in facts.items():
            if number and not isinstance(number, bool):
                print(f"  {number:>8}  {name.replace('_', ' ')}", file=self._to)
