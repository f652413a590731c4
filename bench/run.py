"""All benchmarks, each a module with ``measure``: ``python -m bench.run [--quick] [--json FILE] [NAME …]``."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from types import ModuleType

import anyio

from bench import hung, posix, resp, submit
from bench.pairs import show

MODULES: dict[str, ModuleType] = {"submit": submit, "hung": hung, "posix": posix, "resp": resp}


def main() -> None:
    """Run what was named, or everything."""
    parser = argparse.ArgumentParser(prog="python -m bench.run", description="Paired benchmarks; ratios, not claims.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODULES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes")
    parser.add_argument("--json", type=Path, help="append the JSON lines to this file, too")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(MODULES))
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(MODULES)}")
    for name in arguments.names or MODULES:
        show(anyio.run(partial(MODULES[name].measure, quick=arguments.quick)), arguments.json)


if __name__ == "__main__":
    main()
