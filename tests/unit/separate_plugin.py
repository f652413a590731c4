"""A plugin that this environment does not have: installed into a folder of its own, and tested from another."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def install(project: Path, site: Path) -> None:
    """Build the wheel of ``project`` without network, and install it into ``site``."""
    options = "--quiet --no-deps --no-index --no-build-isolation --disable-pip-version-check"
    run(
        [sys.executable, "-m", "pip", "install", *options.split(), "--target", str(site), str(project)], cwd=site.parent
    )


def passed_tests(project: Path, site: Path, *arguments: str) -> int:
    """Run the tests of ``project`` from a copy, with what is installed in ``site``; how many passed. All must."""
    tests = shutil.copytree(project / "tests", site.parent / f"tests-of-{project.name}")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "--strict-markers"]
    said = run([*command, "--import-mode=importlib", *arguments, tests.name], cwd=tests.parent, PYTHONPATH=str(site))
    match = re.search(r"^(\d+) passed", said, re.MULTILINE)
    assert match is not None, said
    return int(match[1])


def run(command: list[str], *, cwd: Path, **environment: str) -> str:
    """Run it and return what it said; it must succeed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout
