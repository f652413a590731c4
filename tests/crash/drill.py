"""The crash drill: a writer is killed at a random instant, again and again; after each kill everything is verified.

- No object gives bytes that were not stored under its key, or an older version than was acknowledged last.
- Every object whose store was acknowledged is there. (Where objects are evicted, it may be missing.)
- What the adapter says it uses is what the medium adds up to, and nothing unfinished stays behind.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio

import l2kit
from tests.crash.kinds import BACKENDS, Kind, folder_of, kinds
from tests.crash.writer import KEYS, SIZES, content, key, version_name

ROOT: Final = Path(__file__).parents[2]

_LATEST_KILL_S: Final = 0.5
_PATIENCE_S: Final = 60.0


class Version(NamedTuple):
    """One version of an object: the name that its bytes are made of, and how many."""

    name: str
    nbytes: int


class Drill:
    """Backends of all kinds, what each key may hold in them, and what was found so far."""

    def __init__(
        self, folder: Path, seed: int, report: Callable[[str], None], backends: Sequence[str] = BACKENDS
    ) -> None:
        """Keep the media in ``folder``; ``report`` is told of what is wrong."""
        self.found: Counter[str] = Counter()
        self.kinds: Final = [kind for backend in backends for kind in kinds(backend)]
        self._folder = folder
        self._seed = seed
        self._report = report
        self._random = random.Random(seed)
        self._held: dict[str, dict[int, set[Version | None]]] = {
            kind.name: {number: {None} for number in range(KEYS)} for kind in self.kinds
        }
        self._ever: dict[str, dict[int, set[Version]]] = {
            kind.name: {number: set() for number in range(KEYS)} for kind in self.kinds
        }

    @property
    def passed(self) -> bool:
        """Nothing that must not be was found, and the writers did get to write."""
        bad = ("wrong bytes", "lost", "stale", "failed loads", "usage differs")
        return not any(self.found[name] for name in bad) and self.found["acknowledged"] > 0

    def kill_once(self, number: int) -> None:
        """One round: write, kill, verify."""
        kind = self.kinds[number % len(self.kinds)]
        self._write(kind, number)
        self.found["kills"] += 1
        anyio.run(self._verify, kind)

    def _url(self, kind: Kind) -> str:
        folder = folder_of(kind, self._folder)
        folder.mkdir(exist_ok=True)
        return kind.url.format(folder=folder)

    def _write(self, kind: Kind, number: int) -> None:
        command = [sys.executable, "-m", "tests.crash.writer", self._url(kind), str(self._seed), str(number)]
        # Now and then while it opens the backend, or makes it; mostly while it writes.
        while_opening = self._random.random() < 0.1
        delay_s = self._random.uniform(0, _LATEST_KILL_S)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            lines: list[str] = []
            if not while_opening:
                lines.append(writer.stdout.readline())
                if lines != ["open\n"]:
                    writer.kill()
                    raise RuntimeError(f"the writer did not open its backend ({kind.name}), see above")
            time.sleep(delay_s)
            writer.kill()
            lines += writer.stdout.read().splitlines()
        self._learn(kind.name, number, [line for line in lines if line.startswith(("?", "!"))])

    def _learn(self, kind: str, number: int, lines: list[str]) -> None:
        """What each key may hold now: of what was acknowledged the last, and anything that was under way."""
        held = self._held[kind]
        under_way: dict[int, dict[str, Any]] = {}
        for line in lines:
            mark, batch_text, rest = line.split(" ", 2)
            batch = int(batch_text)
            try:
                said = json.loads(rest)
            except ValueError:  # the last line, cut by the kill
                continue
            if mark == "?":
                under_way[batch] = said
                for one, version in self._versions(said, number, batch).items():
                    held[one] = held[one] | {version}
                    if version is not None:
                        self._ever[kind][one].add(version)
            else:
                asked = self._versions(under_way.pop(batch), number, batch)
                for (one, version), status in zip(asked.items(), said, strict=True):
                    self.found["acknowledged"] += 1
                    if status in ("stored", "deleted", "miss"):
                        held[one] = {version}
                    elif status in ("already_present", "dropped"):
                        held[one] = held[one] - {version}
                    else:
                        self.found["failed stores"] += 1

    def _versions(self, said: dict[str, Any], number: int, batch: int) -> dict[int, Version | None]:
        if "delete" in said:
            return dict.fromkeys(said["delete"])
        return {
            int(one): Version(version_name(self._seed, number, batch, int(one)), size)
            for one, size in said["store"].items()
        }

    async def _verify(self, kind: Kind) -> None:
        held = self._held[kind.name]
        async with l2kit.open_adapter(self._url(kind), timeout_s=_PATIENCE_S) as adapter:
            for name in ("damaged_records", "outdated_records", "orphans_swept"):
                self.found[name] += adapter.counters[name]
            listed = {info.key async for info in adapter.iter_keys()}
            for difference in kind.differences(adapter, await adapter.usage(), len(listed)):
                self._bad("usage differs", f"{kind.name}: {difference}")
            for number in range(KEYS):
                target = l2kit.MemoryObj.allocate(l2kit.Layout.raw(max(SIZES)))
                [outcome] = await adapter.submit_load_task([key(number)], [target])
                found = target.tobytes()[: outcome.nbytes] if outcome.loaded else None
                held[number] = self._judge(kind.name, number, outcome.status, found, evicts=kind.evicts)

    def _judge(self, kind: str, number: int, status: str, found: bytes | None, *, evicts: bool) -> set[Version | None]:
        allowed = self._held[kind][number]
        if status == "miss":
            if None not in allowed and not evicts:
                self._bad("lost", f"{kind}: key {number} held {allowed}")
            return {None}
        if found is None:
            self._bad("failed loads", f"{kind}: key {number} is {status}")
            return {None}
        self.found["verified"] += 1
        for version in allowed:
            if version is not None and version.nbytes == len(found) and content(*version) == found:
                return {version}
        stale = any(len(found) == old.nbytes and content(*old) == found for old in self._ever[kind][number])
        name = "stale" if stale else "wrong bytes"
        self._bad(name, f"{kind}: key {number} has {len(found)} bytes that are none of {allowed}")
        return {None}

    def _bad(self, name: str, text: str) -> None:
        self.found[name] += 1
        self._report(f"{name}: {text}")
