"""The crash drill, with few kills; ``make crash-drill N=200`` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.drill import KINDS, Drill


@pytest.mark.slow
def test_killed_writers_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    wrong: list[str] = []
    drill = Drill(tmp_path, seed=1, report=wrong.append)
    try:
        for number in range(2 * len(KINDS)):
            drill.kill_once(number)
    finally:
        for path in tmp_path.glob("*/*"):
            path.unlink()
    assert drill.passed, wrong or drill.found
    assert drill.found["verified"] > 0
