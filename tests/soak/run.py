"""The soak: ``python -m tests.soak.run --minutes 5``. Ends with 0 only if everything that must be zero is.

What it does is in ``docs/how-to/soak.md``.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from random import SystemRandom

from tests.soak.conductor import Conductor, shared_server
from tests.soak.report import Progress, Result


def soak(*, minutes: float, engines: int = 4, seed: int) -> Result:
    """One soak; its folder is kept, and named, unless it passes."""
    progress = Progress()
    with shared_server() as server:
        folder = Path(tempfile.mkdtemp(prefix="l2kit-soak-"))
        result = Conductor(folder, server, minutes=minutes, engines=engines, seed=seed).run(progress)
    progress.end()
    if result.passed:
        shutil.rmtree(folder)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make soak", description="Engines under faults and kills; every byte is compared."
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="how long")
    parser.add_argument("--engines", type=int, default=4, help="how many processes at once")
    parser.add_argument("--seed", type=int, default=None, help="repeats the plan of an earlier run, not its timing")
    arguments = parser.parse_args()
    logging.getLogger("l2kit").addHandler(logging.NullHandler())  # what the last look finds is in the table
    seed = SystemRandom().randrange(1 << 31) if arguments.seed is None else arguments.seed
    sys.stdout.write(f"soak of {arguments.minutes:g} minutes, {arguments.engines} engines, --seed {seed}\n")
    sys.stdout.flush()
    result = soak(minutes=arguments.minutes, engines=arguments.engines, seed=seed)
    sys.stdout.write(f"{result.table()}\n")
    if not result.passed:
        sys.stdout.write(f"logs and findings: {result.folder}\n")
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
