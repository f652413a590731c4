"""The crash drill, with few kills; ``make crash-drill N=200`` is the long one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.crash.drill import Drill
from tests.crash.kinds import BACKENDS


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_killed_writers_lose_nothing_that_was_acknowledged(tmp_path: Path, backend: str) -> None:
    wrong: list[str] = []
    drill = Drill(tmp_path, seed=1, report=wrong.append, backends=[backend])
    try:
        for number in range(len(drill.kinds)):
            drill.kill_once(number)
    finally:
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)
    assert drill.passed, wrong or drill.found
    assert drill.found["verified"] > 0
