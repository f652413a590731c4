"""The paged KV of an engine of the soak: a source that knows its bytes and a target that compares every one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from l2kit.engine import TokenRange, merge_ranges
from l2kit.memory import MemoryObj
from tests.soak.tally import Tally
from tests.soak.vocabulary import Prompt

_SHOWN_BYTES: Final = 64


class PagesGoneError(Exception):
    """What a source raises when it is told to."""


class Source:
    """KV that was just computed."""

    def __init__(self, prompt: Prompt, shard: int = 0, *, fails_at: int | None = None, pause_s: float = 0.0) -> None:
        self._prompt = prompt
        self._shard = shard
        self._fails_at = fails_at
        self._pause_s = pause_s

    def gather(self, start: int, end: int, obj: MemoryObj) -> None:
        if self._fails_at is not None and start >= self._fails_at:
            raise PagesGoneError
        time.sleep(self._pause_s)
        fill(obj, self._prompt.content(start, end, self._shard))


class Target:
    """KV that is restored. Keeps what it was given, and never raises: what is wrong is counted and written down."""

    def __init__(self, prompt: Prompt, tally: Tally, shard: int = 0, *, pause_s: float = 0.0) -> None:
        self._prompt = prompt
        self._tally = tally
        self._shard = shard
        self._pause_s = pause_s
        self._written: list[TokenRange] = []

    def scatter(self, start: int, end: int, obj: MemoryObj, *, skip_prefix_n_tokens: int = 0) -> None:
        verify(self._tally, obj, self._prompt, start, end, self._shard, "retrieve")
        if self._pause_s:  # leased memory stays as it is, whoever wants it meanwhile
            time.sleep(self._pause_s)
            verify(self._tally, obj, self._prompt, start, end, self._shard, "retrieve, later")
        self._written.append(TokenRange(start + skip_prefix_n_tokens, end))

    def check_range(self, restored: TokenRange) -> None:
        """What was written must be what the engine says, without a gap."""
        if merge_ranges(self._written) != ([restored] if len(restored) else []):
            self._tally.add("wrong_bytes", max(1, len(restored)))
            self._tally.find("wrong range", said=str(restored), written=str(self._written), prompt=str(self._prompt))
        self._tally.add("restored_tokens", len(restored))


def fill(obj: MemoryObj, content: bytes) -> None:
    """Copy ``content`` into ``obj``."""
    position = 0
    for segment in obj.segments:
        segment[:] = content[position : position + len(segment)]
        position += len(segment)


def verify(tally: Tally, obj: MemoryObj, prompt: Prompt, start: int, end: int, shard: int, where: str) -> None:
    """Compare every byte with what it must be."""
    expected, got = prompt.content(start, end, shard), obj.tobytes()
    tally.add("verified_objects")
    tally.add("verified_bytes", len(got))
    if got == expected:
        return
    wrong = differing(got, expected)
    tally.add("wrong_objects")
    tally.add("wrong_bytes", len(wrong))
    tally.find(
        "wrong bytes",
        where=where,
        prompt=str(prompt),
        tokens=[start, end],
        shard=shard,
        nbytes=len(got),
        wrong=len(wrong),
        first=wrong[0],
        last=wrong[-1],
        got=got[wrong[0] : wrong[0] + _SHOWN_BYTES].hex(),
        expected=expected[wrong[0] : wrong[0] + _SHOWN_BYTES].hex(),
    )


def differing(got: bytes, expected: bytes) -> Sequence[int]:
    """Positions at which two strings differ, those beyond the shorter one's end included."""
    length = min(len(got), len(expected))
    return [n for n in range(length) if got[n] != expected[n]] + [*range(length, max(len(got), len(expected)))]
