"""CacheEngine where L1 is small, and where many use it at once."""

from __future__ import annotations

import anyio
import anyio.to_thread
import pytest

from l2kit.engine import TokenRange, merge_ranges
from tests.unit.odd_tiers import CHUNK_TOKENS, storage
from tests.unit.paged_kv import PROMPT, Source, Target, make_engine

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


# --- L1 too small ---------------------------------------------------------------------------------


async def test_of_a_prompt_larger_than_l1_the_start_is_kept() -> None:
    async with storage("a", l1_objects=4) as manager:
        engine = make_engine(manager)
        assert await engine.store(PROMPT, Source(PROMPT)) == [TokenRange(0, 64)]
        await manager.drain()
        assert await engine.lookup(PROMPT) >= 48
        assert manager.readable_prefix([chunk.key for chunk in engine.chunks(PROMPT)]) == 4


async def test_a_prompt_stored_in_pieces_loses_its_end_first() -> None:
    async with storage(l1_objects=8) as manager:
        engine = make_engine(manager)
        for end in (32, 64, 96):  # chunked prefill
            await engine.store(PROMPT[:end], Source(PROMPT), skip_prefix_n_tokens=end - 32)
        other = [1] * 64
        await engine.store(other, Source(other))
        keys = [chunk.key for chunk in engine.chunks(PROMPT)]
        assert manager.readable_prefix(keys) == 4
        assert [manager.l1.contains(name) for name in keys] == [True] * 4 + [False] * 2


async def test_a_longer_prompt_does_not_evict_its_own_prefix() -> None:
    async with storage(l1_objects=4) as manager:
        engine = make_engine(manager)
        await engine.store(PROMPT[:48], Source(PROMPT))
        assert await engine.store(PROMPT, Source(PROMPT)) == [TokenRange(48, 64)]
        assert await engine.store(PROMPT, Source(PROMPT), skip_prefix_n_tokens=64) == []
        assert await engine.lookup(PROMPT) == 64


async def test_with_no_memory_at_all_nothing_is_kept_and_nothing_waits() -> None:
    async with storage(l1_objects=4) as manager:
        engine = make_engine(manager)
        await engine.store([1] * 64, Source([1] * 64))
        leases = manager.l1.acquire_prefix([c.key for c in engine.chunks([1] * 64)], owner="test")
        with anyio.fail_after(2):
            assert await engine.store(PROMPT, Source(PROMPT)) == []
            assert await engine.retrieve(PROMPT, Target(PROMPT)) == TokenRange(0, 0)
        assert manager.counters.snapshot()["writes_refused"] == 1  # the first without memory is the last tried
        for lease in leases:
            lease.release()


# --- several --------------------------------------------------------------------------------------


async def test_shards_are_objects_of_their_own() -> None:
    async with storage("a") as manager:
        engines = [make_engine(manager, shard=n, shards=2) for n in range(2)]
        await engines[0].store(PROMPT, Source(PROMPT, 0))
        assert await engines[1].lookup(PROMPT) == 0
        await engines[1].store(PROMPT, Source(PROMPT, 1))
        for number, engine in enumerate(engines):
            assert await engine.retrieve(PROMPT, Target(PROMPT, number)) == TokenRange(0, 96)


async def test_many_requests_at_once() -> None:
    async with storage("a", "b", l1_objects=20) as manager:
        engine = make_engine(manager)

        async def request(number: int) -> None:
            prompt = [number % 4, *PROMPT]
            await engine.store(prompt, Source(prompt))
            restored = await engine.retrieve(prompt, Target(prompt))
            assert restored.start == 0
            assert restored.end % CHUNK_TOKENS == 0

        async with anyio.create_task_group() as group:
            for number in range(24):
                group.start_soon(request, number)


def test_ranges_are_merged() -> None:
    assert merge_ranges([]) == []
    assert merge_ranges([TokenRange(0, 2), TokenRange(2, 5), TokenRange(7, 8)]) == [TokenRange(0, 5), TokenRange(7, 8)]
    assert len(TokenRange(3, 10)) == 7
