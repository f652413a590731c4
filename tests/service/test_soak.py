"""The soak, for half a minute: engines under faults and kills. `make soak MINUTES=n` runs as long as one likes."""

from __future__ import annotations

import sys
from random import SystemRandom

import pytest

from tests.soak.run import soak

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]


def test_half_a_minute_of_everything_that_can_go_wrong() -> None:
    seed = SystemRandom().randrange(1 << 31)
    result = soak(minutes=0.5, seed=seed)
    table = result.table()
    sys.stdout.write(table)
    assert result.must_be_zero == dict.fromkeys(result.must_be_zero, 0), table
    assert {"wrong bytes", "over deadline", "leaked leases", "leaked bytes"} <= set(result.must_be_zero)
    assert result.faults >= 1000, table
    assert result.kills >= 5, table
    assert result.done["server kills"] >= 1, table
    assert result.totals["verified_objects"] >= 2000, table
    assert result.totals["tier.loaded_objects"] >= 200, table
    assert result.totals["tier.load_corrupt"] >= 10, table
    assert result.totals["closes"] >= 2, table
    assert result.last_look is not None
    assert result.last_look.found_damaged >= result.last_look.surely_damaged >= 8, table
    assert result.passed, table
