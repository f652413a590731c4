"""``make crash-drill N=200``, or ``python -m tests.crash.run --kills 200``. Ends with 0 only if nothing is wrong."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from random import SystemRandom

from tests.crash.drill import Drill
from tests.crash.kinds import BACKENDS


def main() -> int:
    parser = argparse.ArgumentParser(prog="make crash-drill", description="Writers are killed; everything is verified.")
    parser.add_argument("--kills", type=int, default=200, help="how many of each backend's writers")
    parser.add_argument("--backend", choices=BACKENDS, help="only this one")
    parser.add_argument("--seed", type=int, default=None, help="repeats the plan of an earlier run, not its timing")
    arguments = parser.parse_args()
    seed = SystemRandom().randrange(1 << 31) if arguments.seed is None else arguments.seed
    backends = BACKENDS if arguments.backend is None else (arguments.backend,)
    passed = [drill(backend, arguments.kills, seed) for backend in backends]
    return 0 if all(passed) else 1


def drill(backend: str, kills: int, seed: int) -> bool:
    sys.stdout.write(f"crash drill of {kills} kills, --backend {backend} --seed {seed}\n")
    with tempfile.TemporaryDirectory(prefix="l2kit-crash-") as folder:
        running = Drill(Path(folder), seed, lambda text: print(text, file=sys.stderr), [backend])  # noqa: T201
        for number in range(kills):
            running.kill_once(number)
            if (number + 1) % 20 == 0:
                sys.stdout.write(f"{number + 1} kills: {dict(running.found)}\n")
                sys.stdout.flush()
    for name in ("kills", "acknowledged", "verified", "wrong bytes", "lost", "stale", "failed loads", "usage differs"):
        sys.stdout.write(f"{name:16} {running.found[name]:8}\n")
    return running.passed


if __name__ == "__main__":
    sys.exit(main())
