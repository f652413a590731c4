"""CacheEngine: token ranges in, token ranges out, byte for byte, through L1 and the tiers."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import anyio.to_thread
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l2kit.engine import TokenRange, merge_ranges
from l2kit.errors import ClosedError
from l2kit.keys import MultimodalHash
from l2kit.memory import MemoryObj
from tests.unit.odd_tiers import CHUNK_TOKENS, odd, odd_storage, storage, until
from tests.unit.paged_kv import PROMPT, Source, Target, forget_l1, kv, make_engine

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


# --- store, lookup, retrieve ----------------------------------------------------------------------


async def test_a_prompt_goes_out_and_comes_back() -> None:
    async with storage("a") as manager:
        engine = make_engine(manager)
        source = Source(PROMPT)
        assert await engine.store(PROMPT, source) == [TokenRange(0, 96)]
        assert source.gathered == [(n, n + 16) for n in range(0, 96, 16)]
        assert source.threads.isdisjoint({threading.get_ident()})
        await manager.drain()
        forget_l1(manager)
        assert await engine.lookup(PROMPT) == 96
        target = Target(PROMPT)
        assert await engine.retrieve(PROMPT, target) == TokenRange(0, 96)
        assert target.written == source.gathered
        assert await engine.lookup(PROMPT[:40]) == 32
        assert await engine.retrieve(PROMPT[:40], Target(PROMPT)) == TokenRange(0, 32)


async def test_a_prompt_shorter_than_a_chunk_is_nothing() -> None:
    async with storage("a") as manager:
        engine = make_engine(manager)
        assert await engine.store(PROMPT[:15], Source(PROMPT)) == []
        assert await engine.lookup([]) == 0
        assert await engine.retrieve(PROMPT[:15], Target(PROMPT)) == TokenRange(0, 0)
        assert odd(manager).calls["lookup"] == 0


async def test_the_rest_of_a_prompt_is_kept_where_it_is_asked_for() -> None:
    async with storage("a") as manager:
        engine = make_engine(manager, save_unfull_chunk=True)
        assert await engine.store(PROMPT, Source(PROMPT)) == [TokenRange(0, 101)]
        await manager.drain()
        forget_l1(manager)
        target = Target(PROMPT)
        assert await engine.retrieve(PROMPT, target) == TokenRange(0, 101)
        assert target.written[-1] == (96, 101)
        assert await engine.lookup([*PROMPT, 1, 2, 3]) == 96  # another rest is another chunk


@settings(max_examples=40, deadline=None)
@given(
    skip=st.integers(0, len(PROMPT) + 3),
    stored=st.frozensets(st.integers(0, 5)),
    in_l1=st.frozensets(st.integers(0, 5)),
    length=st.integers(0, len(PROMPT)),
)
def test_retrieve_skips_what_is_there_already(
    skip: int, stored: frozenset[int], in_l1: frozenset[int], length: int
) -> None:
    """Whatever is stored where and skipped, what is written is exactly the run that continues the skipped tokens."""

    async def check() -> None:
        async with storage("a") as manager:
            engine = make_engine(manager)
            chunks = engine.chunks(PROMPT)
            reserved = engine.reserve([chunks[n] for n in sorted(stored | in_l1)])
            for chunk, reservation in reserved:
                reservation.obj.segments[0][:] = kv(PROMPT, chunk.start, chunk.end, reservation.obj.nbytes)
            manager.finish_write([reservation for _, reservation in reserved])
            await manager.drain()
            for number in stored - in_l1:
                manager.l1.remove(chunks[number].key)
            for number in in_l1 - stored:
                odd(manager).forget(chunks[number].key)
            prompt = PROMPT[:length]
            number = skip // CHUNK_TOKENS
            while number in stored | in_l1 and (number + 1) * CHUNK_TOKENS <= length:
                number += 1
            end = max(skip, number * CHUNK_TOKENS)
            target = Target(PROMPT)
            assert await engine.retrieve(prompt, target, skip_prefix_n_tokens=skip) == TokenRange(skip, end)
            assert merge_ranges([TokenRange(*pair) for pair in target.written]) == (
                [TokenRange(skip, end)] if end > skip else []
            )

    anyio.run(check)


async def test_chunks_inside_the_skipped_tokens_are_not_loaded() -> None:
    async with storage("a") as manager:
        engine = make_engine(manager)
        await engine.store(PROMPT, Source(PROMPT))
        await manager.drain()
        forget_l1(manager)
        target = Target(PROMPT)
        assert await engine.retrieve(PROMPT, target, skip_prefix_n_tokens=37) == TokenRange(37, 96)
        assert target.written[0] == (37, 48)
        assert sum(odd(manager).loads.values()) == 4


async def test_a_gap_in_the_middle_two_chunks_are_used() -> None:
    async with storage("a") as manager:
        engine = make_engine(manager)
        await engine.store(PROMPT, Source(PROMPT))
        await manager.drain()
        forget_l1(manager)
        odd(manager).forget(engine.chunks(PROMPT)[2].key, engine.chunks(PROMPT)[5].key)  # 0, 1, 3 and 4 are left
        assert await engine.lookup(PROMPT) == 32
        assert await engine.retrieve(PROMPT, Target(PROMPT)) == TokenRange(0, 32)
        assert manager.l1.usage().leases == 0


async def test_store_gathers_only_what_is_not_there() -> None:
    async with storage("a") as manager:
        engine = make_engine(manager)
        await engine.store(PROMPT[:32], Source(PROMPT))
        manager.l1.remove(engine.chunks(PROMPT)[0].key)
        source = Source(PROMPT)
        assert await engine.store(PROMPT, source) == [TokenRange(0, 16), TokenRange(32, 96)]
        assert (16, 32) not in source.gathered


async def test_store_leaves_out_what_starts_before_the_skipped_tokens() -> None:
    async with storage("a") as manager:
        engine = make_engine(manager)
        source = Source(PROMPT)
        assert await engine.store(PROMPT, source, skip_prefix_n_tokens=17) == [TokenRange(32, 96)]
        assert await engine.lookup(PROMPT) == 0


async def test_salt_lora_and_images_keep_prompts_apart() -> None:
    images = [MultimodalHash("a" * 64, 20, 8)]
    variants: list[dict[str, Any]] = [
        {},
        {"salt": "x"},
        {"lora": "x"},
        {"mm_hashes": images},
        {"mm_hashes": ["b" * 64]},
    ]
    async with storage("a") as manager:
        engine = make_engine(manager)
        for number, identity in enumerate(variants):
            assert await engine.lookup(PROMPT, **identity) == (16 if identity.get("mm_hashes") is images else 0)
            await engine.store(PROMPT, Source(PROMPT, "shared" if number in (0, 3) else number), **identity)
        await manager.drain()
        for number, identity in enumerate(variants):
            if number in (0, 3):
                continue  # their first chunk, before the image, is one object
            target = Target(PROMPT, number)
            assert await engine.retrieve(PROMPT, target, **identity) == TokenRange(0, 96)
        assert await engine.lookup(PROMPT, salt="y") == 0
        assert await engine.lookup(PROMPT, mm_hashes=[MultimodalHash("a" * 63 + "b", 20, 8)]) == 16


# --- failures -------------------------------------------------------------------------------------


async def test_a_source_that_raises_leaves_nothing_half_written() -> None:
    async with storage("a") as manager:
        engine = make_engine(manager)
        with pytest.raises(RuntimeError, match="the pages are gone"):
            await engine.store(PROMPT, Source(PROMPT, fails_at=32))
        assert (manager.l1.usage().entries, manager.l1.usage().writing, manager.l1.usage().used_bytes) == (0, 0, 0)
        assert odd(manager).keys == set()
        assert await engine.store(PROMPT, Source(PROMPT)) == [TokenRange(0, 96)]


async def test_a_store_that_is_cancelled_leaves_nothing_half_written() -> None:
    async with storage("a") as manager:
        engine = make_engine(manager)
        entered, go_on = threading.Event(), threading.Event()

        class SlowSource(Source):
            def gather(self, start: int, end: int, obj: MemoryObj) -> None:
                entered.set()
                assert go_on.wait(10)
                super().gather(start, end, obj)

        source = SlowSource(PROMPT)
        async with anyio.create_task_group() as group:
            group.start_soon(engine.store, PROMPT, source)
            await until(entered.is_set)
            group.cancel_scope.cancel()
            assert manager.l1.usage().writing == 6  # the thread still writes: its memory is not given away
            threading.Timer(0.05, go_on.set).start()
        assert manager.l1.usage().writing == 0
        assert len(source.gathered) == 6


async def test_a_target_that_raises_releases_everything() -> None:
    async with storage("a") as manager:
        engine = make_engine(manager)
        await engine.store(PROMPT, Source(PROMPT))
        with pytest.raises(ValueError, match="no such block"):
            await engine.retrieve(PROMPT, Target(PROMPT, error=ValueError("no such block")))
        assert manager.l1.usage().leases == manager.l1.usage().writing + sum(
            hold.owner.startswith("store:") for hold in manager.l1.holds()
        )


async def test_a_failing_tier_never_raises() -> None:
    async with storage("a") as manager:
        engine = make_engine(manager)
        await engine.store(PROMPT, Source(PROMPT))
        await manager.drain()
        forget_l1(manager)
        odd(manager).failing["load"] = ConnectionError("gone")
        assert await engine.retrieve(PROMPT, Target(PROMPT)) == TokenRange(0, 0)
        odd(manager).failing["lookup"] = ConnectionError("gone")
        assert await engine.retrieve(PROMPT, Target(PROMPT)) == TokenRange(0, 0)
        assert await engine.lookup(PROMPT) == 0


async def test_outside_async_with() -> None:
    manager = odd_storage("a")
    engine = make_engine(manager)
    for _ in range(2):  # before and after
        for call in (
            engine.store(PROMPT, Source(PROMPT)),
            engine.retrieve(PROMPT, Target(PROMPT)),
            engine.lookup(PROMPT),
        ):
            with pytest.raises(ClosedError):
                await call
        if _ == 0:
            async with manager:
                pass
