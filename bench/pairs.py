"""Paired measurements: two ways of doing the same thing, in turn, on the same machine, as a median of ratios.

Machines are shared and noisy. Only what was measured in the same round is compared, and only the ratio is quoted.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

#: Runs once and does the whole measured amount of work.
Work = Callable[[], Awaitable[None]]


class Result(msgspec.Struct):
    """One line of output. ``ratio`` is the median over rounds of ours / peer, in the better-is-greater direction."""

    case: str
    ours: float
    peer: float
    unit: str
    ratio: float
    rounds: int
    peer_name: str


async def compare(
    case: str, ours: Work, peer: Work, *, amount: float, unit: str, rounds: int, peer_name: str
) -> Result:
    """Run both ``rounds`` times in alternation, the first to go changing each round.

    Args:
        case: what is measured.
        ours: our way.
        peer: the limit or the peer.
        amount: work done by one run, so that ``amount / seconds`` has ``unit``.
        unit: for people.
        rounds: odd, at least 3.
        peer_name: what the peer is.
    """
    await ours()  # both once unmeasured: first use pays for page faults, connections, thread starts
    await peer()
    speeds: list[tuple[float, float]] = []
    for number in range(rounds):
        order: Sequence[Work] = (ours, peer) if number % 2 == 0 else (peer, ours)
        measured = {work: amount / await _seconds(work) for work in order}
        speeds.append((measured[ours], measured[peer]))
    return Result(
        case,
        round(statistics.median(own for own, _ in speeds), 4),
        round(statistics.median(other for _, other in speeds), 4),
        unit,
        round(statistics.median(own / other for own, other in speeds), 3),
        rounds,
        peer_name,
    )


async def _seconds(work: Work) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


def show(results: Sequence[Result], json_path: Path | None) -> None:
    """Print one JSON line per result, and append them to ``json_path``."""
    lines = [json.dumps(msgspec.structs.asdict(result)) for result in results]
    print("\n".join(lines), flush=True)
    if json_path is not None:
        with json_path.open("a", encoding="utf-8") as sink:
            sink.write("".join(f"{line}\n" for line in lines))
