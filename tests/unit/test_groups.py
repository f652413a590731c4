"""Small objects go to the backend in groups, where it takes them so; what becomes of one is nobody else's affair."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from l2kit.adapter import Capabilities
from l2kit.errors import AdapterContractError, BackendError, TransientBackendError
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit.resilience import BreakerAdapter, ResilienceConfig, RetryAdapter, resilient
from tests.unit.dict_adapter import DictAdapter, blank, keys, make, wrap
from tests.unit.odd_tiers import content

pytestmark = pytest.mark.anyio

NBYTES = 1000


class GroupAdapter(DictAdapter):
    """Takes up to eight objects at once, and remembers what it was given."""

    capabilities = Capabilities(persistent=False, shared=False, group_keys=8)

    async def open(self) -> None:
        await super().open()
        self.groups: list[tuple[ObjectKey, ...]] = []
        self.errors: dict[ObjectKey, Exception] = {}
        self.error: Exception | None = None
        self.forget = 0
        self.verifies = False
        self.pause_each_s = 0.0

    async def store_many(self, items: Sequence[StoreItem]) -> Sequence[StoreStatus | Exception]:
        self._take(items)
        answers = await super().store_many(items)
        return [self.errors.get(item.key, answer) for item, answer in zip(items, answers, strict=True)]

    async def load_many(self, items: Sequence[LoadItem]) -> Sequence[int | Exception | None]:
        self._take(items)
        await anyio.sleep(self.pause_each_s * len(items))
        answers = await super().load_many(items)
        for item, answer in zip(items, answers, strict=True):
            if self.verifies and isinstance(answer, int):
                item.verify(answer)
        return [self.errors.get(item.key, answer) for item, answer in zip(items, answers, strict=True)][self.forget :]

    def _take(self, items: Sequence[StoreItem | LoadItem]) -> None:
        self.groups.append(tuple(item.key for item in items))
        if self.error is not None:
            raise self.error


async def put(adapter: DictAdapter | RetryAdapter | BreakerAdapter, count: int) -> list[str]:
    objects = [wrap(content(name, NBYTES)) for name in keys(count)]
    return [outcome.status for outcome in await adapter.submit_store_task(keys(count), objects)]


async def get(adapter: DictAdapter | RetryAdapter | BreakerAdapter, names: Sequence[ObjectKey]) -> list[str]:
    targets = [blank(NBYTES) for _ in names]
    outcomes = await adapter.submit_load_task(names, targets)
    for name, target, outcome in zip(names, targets, outcomes, strict=True):
        assert not outcome.loaded or target.tobytes() == content(name, NBYTES)
    return [outcome.status for outcome in outcomes]


async def test_a_batch_is_cut_into_groups() -> None:
    async with make(GroupAdapter, max_concurrency=2) as adapter:
        assert await put(adapter, 20) == ["stored"] * 20
        assert [len(group) for group in adapter.groups] == [8, 8, 4]
        adapter.groups.clear()
        assert await get(adapter, keys(6)) == ["loaded"] * 6
        assert [len(group) for group in adapter.groups] == [6]
        assert await get(adapter, [*keys(6), *keys(6)]) == ["loaded"] * 12
        assert all(len(set(group)) == len(group) for group in adapter.groups), "keys of one call are distinct"


async def test_what_takes_its_time_for_each_object_is_shared_by_all_workers() -> None:
    async with make(GroupAdapter, max_concurrency=2) as adapter:
        await put(adapter, 6)
        adapter.pause_each_s = 0.002
        for _ in range(4):
            await get(adapter, keys(6))
        adapter.groups.clear()
        await get(adapter, keys(6))
        assert [len(group) for group in adapter.groups] == [3, 3]


async def test_a_group_is_no_larger_than_sixteen_mebibytes() -> None:
    async with make(GroupAdapter, max_concurrency=1) as adapter:
        sizes = [12_000_000, 12_000_000, 100, 100, 36_000_000, 100]
        await adapter.submit_store_task(keys(6), [wrap(bytes(size)) for size in sizes])
        assert [len(group) for group in adapter.groups] == [1, 3, 1, 1]


@pytest.mark.parametrize("verifies", [False, True])
async def test_each_key_has_its_own_outcome(verifies: bool) -> None:
    async with make(GroupAdapter, max_concurrency=1) as adapter:
        adapter.verifies = verifies
        adapter.errors[keys(5)[1]] = PermissionError(13, "Permission denied")
        assert await put(adapter, 4) == ["stored", "failed", "stored", "stored"]
        adapter.objects[keys(4)[2]] = b"damaged" * 200
        assert await get(adapter, keys(5)) == ["loaded", "failed", "corrupt", "loaded", "miss"]
        assert adapter.calls["delete"] == 1
        assert adapter.counters["store.stored"] == 3


async def test_an_error_of_the_call_is_that_of_every_key() -> None:
    async with make(GroupAdapter, max_concurrency=1) as adapter:
        adapter.error = BackendError("gone")
        assert await put(adapter, 4) == ["failed"] * 4
        assert await get(adapter, keys(4)) == ["failed"] * 4


async def test_too_few_answers_are_a_broken_contract() -> None:
    async with make(GroupAdapter, max_concurrency=1) as adapter:
        await put(adapter, 4)
        adapter.forget = 1
        outcomes = await adapter.submit_load_task(keys(4), [blank(NBYTES) for _ in range(4)])
        assert all(isinstance(outcome.error, AdapterContractError) for outcome in outcomes)
        assert "3 answers for 4 keys" in str(outcomes[0].error)


async def test_groups_pass_through_everything_that_makes_a_tier_resilient() -> None:
    inside = make(GroupAdapter, max_concurrency=1)
    async with resilient(lambda: inside, ResilienceConfig()) as adapter:
        assert isinstance(adapter, BreakerAdapter)
        assert await put(adapter, 8) == ["stored"] * 8
        assert await get(adapter, keys(9)) == ["loaded"] * 8 + ["miss"]
        assert [len(group) for group in inside.groups] == [8, 8, 1]


async def test_only_the_keys_that_failed_are_retried() -> None:
    inside = make(GroupAdapter, max_concurrency=1)
    async with RetryAdapter(inside, ResilienceConfig()) as adapter:
        inside.errors = {keys(4)[1]: TransientBackendError("lost"), keys(4)[2]: BackendError("broken")}
        assert await put(adapter, 4) == ["stored", "stored", "failed", "stored"]
        assert await get(adapter, keys(4)) == ["loaded", "loaded", "failed", "loaded"]
        assert adapter.counters["retry.load"] == 1


async def test_what_was_verified_once_is_verified_again_when_it_is_read_again() -> None:
    class Breaking(GroupAdapter):
        """Verifies what it has read, loses its connection, and reads damaged bytes at the next attempt."""

        async def load_many(self, items: Sequence[LoadItem]) -> Sequence[int | Exception | None]:
            answers = await super().load_many(items)
            if len(self.groups) > 1:
                for item in items:
                    item.into[-1][0] ^= 1
                return answers
            for item, answer in zip(items, answers, strict=True):
                assert isinstance(answer, int)
                item.verify(answer)
            raise TransientBackendError("lost")

    inside = make(Breaking, max_concurrency=1)
    async with RetryAdapter(inside, ResilienceConfig()) as adapter:
        await put(adapter, 4)
        inside.groups.clear()
        assert await get(adapter, keys(4)) == ["corrupt"] * 4


async def test_failures_of_single_keys_open_the_circuit() -> None:
    inside = make(GroupAdapter, max_concurrency=1)
    async with BreakerAdapter(inside, ResilienceConfig(breaker_calls=8, breaker_pause_s=30)) as adapter:
        await put(adapter, 8)
        inside.errors = {key: BackendError("bad sector") for key in keys(8)}
        for _ in range(2):
            await get(adapter, keys(8))
        assert "bad sector" in str(adapter.trouble)
        assert await get(adapter, keys(8)) == ["miss"] * 8
