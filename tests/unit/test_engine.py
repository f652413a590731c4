"""CacheEngine: token ranges in, token ranges out, byte for byte, through L1 and the tiers."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l2kit.engine import CacheEngine, TokenRange, merge_ranges
from l2kit.errors import ClosedError
from l2kit.keys import MultimodalHash
from l2kit.memory import MemoryObj
from l2kit.storage_manager import StorageManager
from tests.unit.odd_tiers import CHUNK_TOKENS, NAMESPACE, layout, odd, odd_storage, storage, until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

PROMPT = [(7 * n + 3) % 1000 for n in range(6 * CHUNK_TOKENS + 5)]


def kv(prompt: Sequence[int], start: int, end: int, nbytes: int, extra: object = None) -> bytes:
    """The KV of some tokens of a prompt: it depends on all tokens before them, as in a model."""
    return hashlib.shake_128(repr((list(prompt[:end]), start, extra)).encode()).digest(nbytes)


@dataclass
class Source:
    """Stands for the paged KV of a worker that has computed ``prompt``."""

    prompt: Sequence[int]
    extra: object = None
    fails_at: int | None = None
    gathered: list[tuple[int, int]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def gather(self, start: int, end: int, obj: MemoryObj) -> None:
        if self.fails_at is not None and start >= self.fails_at:
            raise RuntimeError("the pages are gone")
        self.gathered.append((start, end))
        self.threads.add(threading.get_ident())
        obj.segments[0][:] = kv(self.prompt, start, end, obj.nbytes, self.extra)


@dataclass
class Target:
    """Stands for the paged KV of a worker that restores ``prompt``; checks every byte that it is given."""

    prompt: Sequence[int]
    extra: object = None
    written: list[tuple[int, int]] = field(default_factory=list)
    error: Exception | None = None

    def scatter(self, start: int, end: int, obj: MemoryObj, *, skip_prefix_n_tokens: int = 0) -> None:
        if self.error is not None:
            raise self.error
        assert 0 <= skip_prefix_n_tokens < end - start
        assert obj.tobytes() == kv(self.prompt, start, end, obj.nbytes, self.extra)
        self.written.append((start + skip_prefix_n_tokens, end))


def make_engine(manager: StorageManager, **options: Any) -> CacheEngine:
    return CacheEngine(manager, NAMESPACE, layout, **options)


def forget_l1(manager: StorageManager) -> None:
    for name in list(manager.l1._readable):
        manager.l1.remove(name)


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
    async with manager:
        pass
    for call in (engine.store(PROMPT, Source(PROMPT)), engine.retrieve(PROMPT, Target(PROMPT)), engine.lookup(PROMPT)):
        with pytest.raises(ClosedError):
            await call


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
