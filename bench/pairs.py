"""Paired measurements: several ways of doing the same thing, in turn, on the same machine, as medians of ratios.

Machines are shared and noisy. Only what was measured in the same round is compared, and only the ratio is quoted.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import anyio
import msgspec

#: Runs once and does the whole measured amount of work. It may return the seconds that it took by a clock of its own.
Work = Callable[[], Awaitable[float | None]]


class Target(NamedTuple):
    """What a ratio should reach, and what it would be nice to reach."""

    at_least: float
    goal: float | None = None


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One way of doing the work.

    Attributes:
        name: what people call it.
        work: what is measured.
        first: runs once in front of all rounds, unmeasured, in place of ``work``: first use pays for page faults,
            connections and thread starts; it may also prove that the work is really done.
        before: runs unmeasured in front of each ``work``.
        after: runs unmeasured behind each ``work``, the first one included.
        in_process: False when another process works, whose CPU time is not known here.
    """

    name: str
    work: Work
    first: Work | None = None
    before: Work | None = None
    after: Work | None = None
    in_process: bool = True


class Result(msgspec.Struct, omit_defaults=True):
    """One line of output.

    Attributes:
        case: what was measured.
        ours, peer: medians over all rounds, in ``unit``.
        ratio: the median over rounds of ours / peer, in the better-is-greater direction.
        rounds: how many.
        peer_name: what the peer is.
        quartiles: of the ratios, to show how noisy the rounds were.
        target, goal: what ``ratio`` should reach, and what it would be nice to reach.
        met: whether it reaches ``target``.
        ours_cpu, peer_cpu: CPU seconds of this process, all threads, per unit of work (per GB for GB/s); medians.
        ours_server_cpu, peer_server_cpu: the same of the server.
        note: what to know before comparing, such as who verifies.
    """

    case: str
    ours: float
    peer: float
    unit: str
    ratio: float
    rounds: int
    peer_name: str
    quartiles: tuple[float, float] | None = None
    target: float | None = None
    goal: float | None = None
    met: bool | None = None
    ours_cpu: float | None = None
    peer_cpu: float | None = None
    ours_server_cpu: float | None = None
    peer_server_cpu: float | None = None
    note: str = ""


class _Run(NamedTuple):
    """One measured run of one side: work per second, and CPU seconds per unit of work."""

    speed: float
    cpu: float
    server_cpu: float


async def compare(
    case: str, ours: Work, peer: Work, *, amount: float, unit: str, rounds: int, peer_name: str
) -> Result:
    """Compare with one peer. See :func:`compare_all`."""
    (result,) = await compare_all(
        case,
        Side(name="ours", work=ours),
        [Side(name=peer_name, work=peer)],
        amount=amount,
        unit=unit,
        rounds=rounds,
    )
    return result


async def compare_all(
    case: str,
    ours: Side,
    peers: Sequence[Side],
    *,
    amount: float,
    unit: str,
    rounds: int,
    targets: Mapping[str, Target] | None = None,
    note: str = "",
    server_cpu_s: Callable[[], float] | None = None,
) -> list[Result]:
    """Run all sides ``rounds`` times, each round in another order; one result for each peer.

    Args:
        case: what is measured.
        ours: our way.
        peers: limits and peers.
        amount: work done by one run, so that ``amount / seconds`` has ``unit``.
        unit: for people.
        rounds: odd, at least 3.
        targets: by the peer's name.
        note: for :attr:`Result.note`.
        server_cpu_s: says how many CPU seconds the server has used so far.
    """
    print(f"# measuring: {case}", file=sys.stderr, flush=True)
    sides = [ours, *peers]
    for side in sides:
        await _prepare(side)
    gc.collect()
    gc.freeze()  # what the peers imported must not be searched for garbage on our account
    runs: dict[str, list[_Run]] = {side.name: [] for side in sides}
    for number in range(rounds):
        order = [*sides[number // 2 % len(sides) :], *sides[: number // 2 % len(sides)]]
        for side in order if number % 2 == 0 else reversed(order):
            runs[side.name].append(await _measure(side, amount, server_cpu_s))
    return [_result(case, runs, ours, peer, unit, (targets or {}).get(peer.name), note, server_cpu_s) for peer in peers]


async def _prepare(side: Side) -> None:
    if side.before is not None:
        await side.before()
    await (side.first or side.work)()
    if side.after is not None:
        await side.after()


async def _measure(side: Side, amount: float, server_cpu_s: Callable[[], float] | None) -> _Run:
    if side.before is not None:
        await side.before()
    server_started = server_cpu_s() if server_cpu_s is not None else 0.0
    cpu_started, started = time.process_time(), time.perf_counter()
    own_clock_s = await side.work()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    server = server_cpu_s() - server_started if server_cpu_s is not None else 0.0
    if side.after is not None:
        await side.after()
    return _Run(amount / (own_clock_s or seconds), cpu / amount, server / amount)


def _result(
    case: str,
    runs: Mapping[str, Sequence[_Run]],
    ours: Side,
    peer: Side,
    unit: str,
    target: Target | None,
    note: str,
    server_cpu_s: Callable[[], float] | None,
) -> Result:
    own, other = runs[ours.name], runs[peer.name]
    ratios = [mine.speed / its.speed for mine, its in zip(own, other, strict=True)]
    ratio = round(statistics.median(ratios), 3)
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    result = Result(
        case,
        round(statistics.median(run.speed for run in own), 4),
        round(statistics.median(run.speed for run in other), 4),
        unit,
        ratio,
        len(ratios),
        peer.name,
        quartiles=(round(low, 3), round(high, 3)),
        ours_cpu=round(statistics.median(run.cpu for run in own), 6),
        note=note,
    )
    if peer.in_process:
        result.peer_cpu = round(statistics.median(run.cpu for run in other), 6)
    if server_cpu_s is not None:
        result.ours_server_cpu = round(statistics.median(run.server_cpu for run in own), 6)
        result.peer_server_cpu = round(statistics.median(run.server_cpu for run in other), 6)
    if target is not None:
        result.target, result.goal, result.met = target.at_least, target.goal, ratio >= target.at_least
    return result


class Measure(Protocol):
    """What each benchmark module offers."""

    async def __call__(self, *, quick: bool) -> list[Result]:
        """Measure everything; ``quick``: fewer rounds."""
        ...


def show(results: Sequence[Result], json_path: Path | None) -> None:
    """Print one JSON line per result, and append them to ``json_path``."""
    lines = [msgspec.json.encode(result).decode() for result in results]
    print("\n".join(lines), flush=True)
    aimed = [result for result in results if result.met is not None]
    if aimed:
        print(f"# targets met: {sum(bool(result.met) for result in aimed)} of {len(aimed)}", flush=True)
    if json_path is not None:
        with json_path.open("a", encoding="utf-8") as sink:
            sink.write("".join(f"{line}\n" for line in lines))


def run_all(measures: Mapping[str, Measure], description: str, *, by_name: bool) -> None:
    """The command line of one benchmark, or of several that can be chosen ``by_name``."""
    parser = argparse.ArgumentParser(description=description)
    if by_name:
        parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(measures)}; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="append the JSON lines to this file, too")
    arguments = parser.parse_args()
    names: list[str] = getattr(arguments, "names", None) or list(measures)
    unknown = sorted(set(names) - set(measures))
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(measures)}")
    print(f"# {_machine()}", flush=True)
    for name in names:
        show(anyio.run(partial(measures[name], quick=arguments.quick)), arguments.json)


def _machine() -> str:
    now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{now} UTC; {platform.system()} {platform.release()}, {os.cpu_count()} CPUs, load average {load}; "
        f"Python {platform.python_version()}"
    )
