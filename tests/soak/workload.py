"""What one engine of the soak does: clients on the storage's event loop, and a scheduler in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any, Final

import anyio
import anyio.to_thread

from l2kit.engine import CacheEngine, Chunk, TokenRange
from l2kit.prefetch import Prefetch, WantedObject
from l2kit.storage_manager import StorageManager
from tests.soak.pages import PagesGoneError, Source, Target, fill, verify
from tests.soak.tally import Tally
from tests.soak.vocabulary import MODELS, Prompt, random_prompt

CLIENTS: Final = 5
_PAUSE_S: Final = 0.04  # between two requests of one client, on average
_MOST_PREFETCHES: Final = 6
_TICK_S: Final = 0.005
_TIMEOUTS_S: Final = (0.05, 0.3, 1.0, 1.0, 1.0)
_STORE_S: Final = 1.0  # storing waits for no tier: it has to be done as fast as a restore


class Workload:
    """Requests of every kind against one open storage manager, until it is told to stop.

    ``stop`` may be set by any thread.
    """

    def __init__(self, manager: StorageManager, tally: Tally, seed: str, stop: threading.Event) -> None:
        self._manager = manager
        self._tally = tally
        self._seed = seed
        self._stop = stop
        self._engines = {
            (model, shard): CacheEngine(
                manager,
                model.namespace,
                model.layout,
                save_unfull_chunk=model.save_unfull_chunk,
                shard=shard,
                shards=model.shards,
            )
            for model in MODELS
            for shard in range(model.shards)
        }

    async def run(self) -> None:
        """Work until ``stop`` is set and every request has ended."""
        limiter = anyio.CapacityLimiter(1)
        async with anyio.create_task_group() as group:
            for number in range(CLIENTS):
                group.start_soon(self._client, Random(f"{self._seed}/client/{number}"))
            scheduler = _Scheduler(self, Random(f"{self._seed}/scheduler"))
            await anyio.to_thread.run_sync(scheduler.run, limiter=limiter)

    # --- clients: coroutines on the loop --------------------------------------------------------------

    async def _client(self, random: Random) -> None:
        kinds: dict[Callable[[Random], Awaitable[None]], int] = {
            self._restore_and_store: 60,
            self._look_up: 8,
            self._abort: 12,
            self._hold: 14,
            self._fail: 6,
        }
        while not self._stop.is_set():
            [kind] = random.choices([*kinds], [*kinds.values()])
            await kind(random)
            await anyio.sleep(random.uniform(0, 2 * _PAUSE_S))

    async def _restore_and_store(self, random: Random) -> None:
        prompt = random_prompt(random)
        skip = random.randrange(len(prompt.tokens)) if random.random() < 0.2 else 0
        ends: list[int] = []
        for shard in range(prompt.model.shards):
            restored = await self._retrieve(prompt, shard, random, skip)
            ends.append(restored.end)
        for shard in range(prompt.model.shards):
            source = Source(prompt, shard, pause_s=random.choice((0, 0, 0, 0.002)))
            await self._store(prompt, shard, source, skip_prefix_n_tokens=ends[shard])

    async def _retrieve(self, prompt: Prompt, shard: int, random: Random, skip: int = 0) -> TokenRange:
        timeout_s = random.choice(_TIMEOUTS_S)
        target = Target(prompt, self._tally, shard, pause_s=random.choice((0, 0, 0, 0.005)))
        with self._tally.timed("retrieve", timeout_s, prompt):
            restored = await self._engines[prompt.model, shard].retrieve(
                prompt.tokens, target, skip_prefix_n_tokens=skip, timeout_s=timeout_s, **_options(prompt)
            )
        target.check_range(restored)
        return restored

    async def _store(self, prompt: Prompt, shard: int, source: Source, **options: Any) -> None:
        with self._tally.timed("store", _STORE_S, prompt):
            await self._engines[prompt.model, shard].store(prompt.tokens, source, **_options(prompt), **options)

    async def _look_up(self, random: Random) -> None:
        prompt = random_prompt(random)
        timeout_s = random.choice(_TIMEOUTS_S)
        with self._tally.timed("lookup", timeout_s, prompt):
            await self._engines[prompt.model, 0].lookup(prompt.tokens, timeout_s=timeout_s, **_options(prompt))

    async def _abort(self, random: Random) -> None:
        """The request goes away in the middle: nothing may stay behind, and it must not take long."""
        prompt = random_prompt(random)
        patience_s = random.uniform(0, 0.05)
        target = Target(prompt, self._tally, pause_s=random.choice((0, 0.005)))
        with self._tally.timed("abort", patience_s, prompt), anyio.move_on_after(patience_s):
            await self._engines[prompt.model, 0].retrieve(prompt.tokens, target, timeout_s=1.0, **_options(prompt))

    async def _fail(self, random: Random) -> None:
        """The pages vanish while they are copied out."""
        prompt = random_prompt(random)
        source = Source(prompt, fails_at=random.randrange(len(prompt.tokens)), pause_s=0.001)
        with suppress(PagesGoneError):
            await self._store(prompt, 0, source)

    async def _hold(self, random: Random) -> None:
        """Keep what was restored for a while, as an engine that is busy, and compare it again at the end."""
        prompt = random_prompt(random)
        timeout_s = random.choice(_TIMEOUTS_S)
        engine = self._engines[prompt.model, 0]
        chunks = engine.chunks(prompt.tokens, prompt.identity)
        with self._tally.timed("prefetch", timeout_s, prompt):
            prefetch = engine.start_retrieve(chunks, timeout_s=timeout_s)
            await prefetch.wait_async()
        try:
            for pause_s in (random.uniform(0, 0.3), 0):
                for chunk, obj in zip(chunks, prefetch.objects(), strict=False):
                    verify(self._tally, obj, prompt, chunk.start, chunk.end, 0, "hold")
                    if pause_s and random.random() < 0.1:
                        self._manager.l1.remove(chunk.key)  # for those who come later; ours stays
                await anyio.sleep(pause_s)
        finally:
            prefetch.release()

    # --- for the scheduler: any thread ----------------------------------------------------------------

    def chunks(self, prompt: Prompt) -> list[list[Chunk]]:
        """The chunks of each shard."""
        shards = range(prompt.model.shards)
        return [self._engines[prompt.model, shard].chunks(prompt.tokens, prompt.identity) for shard in shards]

    def start_prefetch(self, by_shard: list[list[Chunk]], timeout_s: float) -> Prefetch:
        wanted = [tuple(WantedObject(part.key, part.layout) for part in parts) for parts in zip(*by_shard, strict=True)]
        with self._tally.timed_call():
            return self._manager.start_prefetch(wanted, timeout_s=timeout_s)

    def write(self, prompt: Prompt, by_shard: list[list[Chunk]], random: Random) -> None:
        """What a scheduler's worker does after a forward pass; now and then the pass comes to nothing."""
        for shard, chunks in enumerate(by_shard):
            engine = self._engines[prompt.model, shard]
            with self._tally.timed_call():
                reserved = engine.reserve(chunks)
            try:
                for chunk, reservation in reserved:
                    fill(reservation.obj, prompt.content(chunk.start, chunk.end, shard))
                if random.random() < 0.9:
                    with self._tally.timed_call():
                        self._manager.finish_write([reservation for _, reservation in reserved])
                    engine.touch(chunks)
            finally:
                for _, reservation in reserved:
                    reservation.abort()

    @property
    def tally(self) -> Tally:
        return self._tally

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()


class _Pending:
    """One request that the scheduler polls."""

    def __init__(self, workload: Workload, prompt: Prompt, timeout_s: float, give_up_after_s: float) -> None:
        self.prompt = prompt
        self.by_shard = workload.chunks(prompt)
        self.give_up = time.monotonic() + give_up_after_s
        self.request = workload.tally.begin("prefetch", timeout_s, prompt)
        self.prefetch = workload.start_prefetch(self.by_shard, timeout_s)


class _Scheduler:
    """An LLM server's scheduler: starts prefetches, polls them, never waits."""

    def __init__(self, workload: Workload, random: Random) -> None:
        self._workload = workload
        self._tally = workload.tally
        self._random = random
        self._pending: list[_Pending] = []

    def run(self) -> None:
        """Until the workload stops; then every prefetch is let go, done or not."""
        try:
            while not self._workload.stopping:
                if len(self._pending) < _MOST_PREFETCHES and self._random.random() < 0.1:
                    self._start()
                self._pending = [pending for pending in self._pending if not self._poll(pending)]
                time.sleep(_TICK_S)
        finally:
            for pending in self._pending:
                pending.prefetch.release()
                self._tally.end(pending.request)

    def _start(self) -> None:
        gives_up = self._random.random() < 0.15
        prompt, timeout_s = random_prompt(self._random), self._random.choice(_TIMEOUTS_S)
        self._pending.append(
            _Pending(self._workload, prompt, timeout_s, self._random.uniform(0, 0.1) if gives_up else 1e9)
        )

    def _poll(self, pending: _Pending) -> bool:
        """True when the request is dealt with."""
        with self._tally.timed_call():
            done = pending.prefetch.done
        if done or time.monotonic() >= pending.give_up:
            self._finish(pending)
            return True
        return False

    def _finish(self, pending: _Pending) -> None:
        prefetch, prompt = pending.prefetch, pending.prompt
        self._tally.end(pending.request)
        with self._tally.timed_call():
            ready = prefetch.ready_chunks
        objects = iter(prefetch.objects())
        for parts in list(zip(*pending.by_shard, strict=True))[:ready]:
            for shard, part in enumerate(parts):
                verify(self._tally, next(objects), prompt, part.start, part.end, shard, "prefetch")
        with self._tally.timed_call():
            prefetch.release()
        if self._random.random() < 0.6:
            self._workload.write(prompt, pending.by_shard, self._random)


def _options(prompt: Prompt) -> dict[str, Any]:
    return {"salt": prompt.identity.salt, "lora": prompt.identity.lora}
