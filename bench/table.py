"""Results as Markdown: ``python -m bench.table FILE`` prints a table for each kind of storage in a ``--json`` file.

The tables of docs/explanation/benchmarks.md are made with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from bench.pairs import Result


def tables(results: Sequence[Result]) -> Iterator[str]:
    """A heading and a table for each scheme, in the order of the results, line by line."""
    for scheme in dict.fromkeys(result.case.partition(" ")[0] for result in results):
        of_scheme = [result for result in results if result.case.partition(" ")[0] == scheme]
        peers = list(dict.fromkeys(result.peer_name for result in of_scheme))
        yield f"### `{scheme}`\n"
        heads = ["case", *(_short(peer) for peer in peers), f"CPU, ours / {_short(peers[0])}"]
        yield _row(heads)
        yield _row(["---"] * len(heads))
        for case in dict.fromkeys(result.case for result in of_scheme):
            found = {result.peer_name: result for result in of_scheme if result.case == case}
            yield _row([case.partition(" ")[2], *(_cell(found.get(peer)) for peer in peers), _cpu(found.get(peers[0]))])
        yield ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _short(peer: str) -> str:
    return peer.rpartition("LMCache ")[2].partition(" ")[2] if peer.startswith("LMCache ") else peer


def _cell(result: Result | None) -> str:
    """``0.43 of 1 (0.36 to 0.55)``: ratio, target, quartiles; a tick where the target is reached."""
    if result is None:
        return "-"
    target = "" if result.target is None else f" of {result.target:g}{' ✓' if result.met else ''}"
    spread = "" if result.quartiles is None else f" ({result.quartiles[0]:.2f} to {result.quartiles[1]:.2f})"
    return f"{result.ratio:.2f}{target}{spread}"


def _cpu(result: Result | None) -> str:
    if result is None or not result.ours_cpu or not result.peer_cpu:
        return "-"
    return f"{result.ours_cpu / result.peer_cpu:.1f}"


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    print("\n".join(tables([msgspec.json.decode(line, type=Result) for line in lines])))
