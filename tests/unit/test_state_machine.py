"""The state machine of the conformance kit: what it plays, and how it reports."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import l2kit
from l2kit.adapter import Capabilities
from l2kit.keys import ObjectKey
from l2kit.memory_adapter import MemoryAdapter, MemoryConfig
from l2kit.outcomes import StoreStatus
from l2kit.registry import default_registry
from l2kit.serde import CodecChain
from l2kit.testing import check_histories
from tests.unit.broken_adapters.histories import RestoresWhatWasLockedTwice

pytestmark = pytest.mark.anyio


class LosesStoresOnce(MemoryAdapter):
    """Loses every store of one life, and then none for ever: like a race between two threads."""

    is_over = False

    async def open(self) -> None:
        await super().open()
        self.lost: set[ObjectKey] = set()

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        if LosesStoresOnce.is_over or key in self._objects:
            return await super().store_one(key, data)
        self.lost.add(key)
        return StoreStatus.STORED

    async def close(self) -> None:
        LosesStoresOnce.is_over |= len(self.lost) > 2
        await super().close()


class ForgetsHalf(MemoryAdapter):
    """Misses as often as not, without a limit that would say why."""

    capabilities = Capabilities(persistent=False, shared=False, lock="none", evicts=False)

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        self.stores = getattr(self, "stores", 0) + 1
        return StoreStatus.STORED if self.stores % 2 else await super().store_one(key, data)


def make(kind: type[MemoryAdapter]) -> MemoryAdapter:
    return kind(MemoryConfig(), name="tier", codecs=CodecChain(), codec_source=default_registry())


async def test_a_failure_that_happens_once_is_reported_as_what_it_is() -> None:
    LosesStoresOnce.is_over = False
    with pytest.raises(AssertionError, match=r"which is there|is not listed|other bytes|looked up") as caught:
        await check_histories(lambda: make(LosesStoresOnce))
    assert "a matter of timing" in caught.value.__notes__[-1]


async def test_what_does_not_evict_may_not_forget() -> None:
    with pytest.raises(AssertionError, match=r"which is there|is not listed"):
        await check_histories(lambda: make(ForgetsHalf))


async def test_a_failure_shows_the_history() -> None:
    with pytest.raises(AssertionError) as caught:
        await check_histories(lambda: make(RestoresWhatWasLockedTwice))
    assert "state.fill(" in "".join(caught.value.__notes__)


@pytest.mark.slow
async def test_a_failing_history_can_be_made_short() -> None:
    with pytest.raises(AssertionError) as caught:
        await check_histories(lambda: make(RestoresWhatWasLockedTwice), shrinks=True)
    assert "".join(caught.value.__notes__).count("state.") <= 8


@pytest.mark.slow
async def test_long_histories_of_the_reference_adapter() -> None:
    await check_histories(lambda: l2kit.open_adapter("memory://"), examples=50, steps=80)
    await check_histories(lambda: l2kit.open_adapter("memory://?max_bytes=12KiB"), examples=50, steps=80)
