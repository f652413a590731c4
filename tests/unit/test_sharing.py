"""Among how many workers a batch is shared: whichever was faster of late, and the other one is tried now and then."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from l2kit.sharing import Plan, Sharing

SMALL, LARGE = 64 << 10, 4 << 20


def run(sharing: Sharing, batches: int, *, nbytes: int, alone_s: float, shared_s: float) -> list[bool]:
    """Batches of eight objects on a backend that takes so long for each way; which way each was done."""
    ways: list[bool] = []
    for _ in range(batches):
        plan = sharing.plan(8, 8 * nbytes)
        sharing.took(plan, 8, 8 * nbytes, shared_s if plan.shared else alone_s)
        ways.append(plan.shared)
    return ways


def test_small_objects_begin_in_one_call_and_large_ones_side_by_side() -> None:
    assert not Sharing().plan(8, 8 * SMALL).shared
    assert Sharing().plan(8, 8 * LARGE).shared


def test_the_faster_way_is_found_and_kept_to() -> None:
    for nbytes in (SMALL, LARGE):
        for alone_s, shared_s in ((0.01, 0.02), (0.02, 0.01)):
            sharing = Sharing()
            run(sharing, 10, nbytes=nbytes, alone_s=alone_s, shared_s=shared_s)
            ways = run(sharing, 640, nbytes=nbytes, alone_s=alone_s, shared_s=shared_s)
            wrong = ways.count(alone_s < shared_s)
            assert 5 <= wrong <= 20, "the other way is tried, and seldom"


def test_a_backend_that_changes_is_followed() -> None:
    sharing = Sharing()
    run(sharing, 200, nbytes=LARGE, alone_s=0.01, shared_s=0.02)
    run(sharing, 500, nbytes=LARGE, alone_s=0.03, shared_s=0.02)
    assert run(sharing, 100, nbytes=LARGE, alone_s=0.03, shared_s=0.02).count(True) > 90


def test_sizes_are_judged_apart() -> None:
    sharing = Sharing()
    run(sharing, 20, nbytes=SMALL, alone_s=0.02, shared_s=0.01)
    run(sharing, 20, nbytes=LARGE, alone_s=0.01, shared_s=0.02)
    assert run(sharing, 64, nbytes=SMALL, alone_s=0.02, shared_s=0.01).count(False) <= 2
    assert run(sharing, 64, nbytes=LARGE, alone_s=0.01, shared_s=0.02).count(True) <= 2


def test_a_difference_that_is_none_changes_nothing() -> None:
    assert run(Sharing(), 640, nbytes=SMALL, alone_s=0.0105, shared_s=0.01).count(True) <= 20


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(0, 1 << 26), st.floats(0, 10)), max_size=50))
def test_any_batch_can_be_planned(batches: list[tuple[int, int, float]]) -> None:
    sharing = Sharing()
    for count, nbytes, seconds in batches:
        plan = sharing.plan(count, nbytes)
        assert isinstance(plan, Plan)
        sharing.took(plan, count, nbytes, seconds)
