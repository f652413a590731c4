"""``make crash-drill N=200``, or ``python -m tests.crash.run --kills 200``. Ends with 0 only if nothing is wrong."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from random import SystemRandom

from tests.crash.drill import Drill


def main() -> int:
    parser = argparse.ArgumentParser(prog="make crash-drill", description="Writers are killed; everything is verified.")
    parser.add_argument("--kills", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=None, help="repeats the plan of an earlier run, not its timing")
    arguments = parser.parse_args()
    seed = SystemRandom().randrange(1 << 31) if arguments.seed is None else arguments.seed
    sys.stdout.write(f"crash drill of {arguments.kills} kills, --seed {seed}\n")
    with tempfile.TemporaryDirectory(prefix="l2kit-crash-") as folder:
        drill = Drill(Path(folder), seed, lambda text: print(text, file=sys.stderr))  # noqa: T201
        for number in range(arguments.kills):
            drill.kill_once(number)
            if (number + 1) % 20 == 0:
                sys.stdout.write(f"{number + 1} kills: {dict(drill.found)}\n")
                sys.stdout.flush()
    for name in ("kills", "acknowledged", "verified", "wrong bytes", "lost", "stale", "failed loads", "usage differs"):
        sys.stdout.write(f"{name:16} {drill.found[name]:8}\n")
    return 0 if drill.passed else 1


if __name__ == "__main__":
    sys.exit(main())
