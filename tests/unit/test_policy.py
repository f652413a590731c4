"""Eviction policies behind L1: what they order, and what a bad one costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from l2kit.keys import ObjectKey
from l2kit.l1 import L1Manager, Refusal
from l2kit.layout import Layout
from l2kit.memory import PAGE_BYTES
from l2kit.policy import EvictionPolicy, GuardedPolicy, LRUPolicy
from tests.unit.odd_tiers import key
from tests.unit.test_l1 import keys_in, put


class _OfferNothing(EvictionPolicy):
    """A policy that offers nothing: what it protects is never evicted, and nothing hangs."""

    def inserted(self, key: ObjectKey, nbytes: int) -> None: ...

    def touched(self, key: ObjectKey) -> None: ...

    def removed(self, key: ObjectKey) -> None: ...

    def victims(self) -> Iterator[ObjectKey]:
        return iter(())


def test_a_policy_that_offers_no_victim_means_no_memory() -> None:
    l1 = L1Manager(2 * PAGE_BYTES, _OfferNothing())
    put(l1, key(0), key(1))
    assert l1.reserve_write(key(2), Layout.raw(1), owner="x") is Refusal.NO_MEMORY
    l1.close()


class _Faulty(LRUPolicy):
    """Raises in one of its methods, and offers keys that nobody knows."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def _fail(self, method: str) -> None:
        if method == self.method:
            raise ZeroDivisionError(method)

    def inserted(self, key: ObjectKey, nbytes: int) -> None:
        self._fail("inserted")
        super().inserted(key, nbytes)

    def touched(self, key: ObjectKey) -> None:
        self._fail("touched")
        super().touched(key)

    def removed(self, key: ObjectKey) -> None:
        self._fail("removed")
        super().removed(key)

    def victims(self) -> Iterator[ObjectKey]:
        yield key(1 << 20)
        for name in super().victims():
            yield name
            yield name
            self._fail("victims")


@pytest.mark.parametrize("method", ["inserted", "touched", "removed", "victims", "none"])
def test_a_policy_that_fails_costs_its_order_and_nothing_else(method: str, caplog: pytest.LogCaptureFixture) -> None:
    l1 = L1Manager(6 * PAGE_BYTES, GuardedPolicy(_Faulty(method)))
    put(l1, *(key(n) for n in range(4)))
    for lease in l1.acquire_prefix([key(0), key(1)], owner="x"):
        lease.release()
    l1.remove(key(3))
    put(l1, *(key(n) for n in range(10, 15)))
    assert l1.contains(key(14))
    (held,) = l1.acquire_prefix([key(14)], owner="x")
    put(l1, key(20), nbytes=2 * PAGE_BYTES)
    assert l1.contains(key(14))
    held.release()
    put(l1, key(30), nbytes=6 * PAGE_BYTES)  # everything else must go
    assert keys_in(l1) == [key(30)]
    assert l1.usage().used_bytes == 6 * PAGE_BYTES
    assert caplog.text.count("LRU takes its place") == (method != "none")
    l1.close()
