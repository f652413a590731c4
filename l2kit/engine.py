"""`CacheEngine`: token ranges in, token ranges out, over a `StorageManager`.

The engine turns prompts into chunk keys, and moves whole chunks between a `KVSource` or `KVTarget` (the paged KV of an
LLM worker, in practice) and L1; the storage manager takes care of everything behind L1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import anyio
import anyio.to_thread
import msgspec

from l2kit.keys import MultimodalHash, Namespace, ObjectKey, TokenDatabase
from l2kit.l1 import WriteReservation
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.prefetch import Prefetch, WantedChunk, WantedObject
from l2kit.storage_manager import StorageManager


class TokenRange(msgspec.Struct, frozen=True):
    """Tokens ``start <= i < end`` of a prompt; both ends are multiples of the chunk size (or the prompt's end)."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


class KVSource(Protocol):
    """Where KV is read from. Called in a worker thread; errors pass through to the caller of the engine."""

    def gather(self, start: int, end: int, obj: MemoryObj) -> None:
        """Fill ``obj`` with the KV of tokens ``start <= i < end``; done when this returns."""
        ...


class KVTarget(Protocol):
    """Where KV is written to. Called in a worker thread; errors pass through to the caller of the engine."""

    def scatter(self, start: int, end: int, obj: MemoryObj, *, skip_prefix_n_tokens: int = 0) -> None:
        """Write the KV of tokens ``start + skip_prefix_n_tokens <= i < end`` from ``obj``; touch no other token."""
        ...


class RequestIdentity(msgspec.Struct, frozen=True):
    """What makes equal tokens different prompts: cache salt (tenant), LoRA id, multimodal content."""

    salt: str | None = None
    lora: str | None = None
    mm_hashes: tuple[MultimodalHash | str, ...] = ()


_PLAIN: Final = RequestIdentity()

#: Prompts that one engine copies at once; more would only share the same memory bandwidth.
_MAX_COPIES: Final = 4


class Chunk(msgspec.Struct, frozen=True):
    """One chunk of one prompt: its tokens and its object."""

    start: int
    end: int
    key: ObjectKey
    layout: Layout


class CacheEngine:
    """Stores, finds and restores the KV of prompts.

    All ranges are aligned to ``chunk_size`` tokens. :meth:`chunks` and :meth:`start_retrieve` may be called from any
    thread; the coroutines belong to the storage manager's event loop.
    """

    def __init__(
        self,
        storage: StorageManager,
        namespace: Namespace,
        layout: Callable[[int], Layout],
        *,
        save_unfull_chunk: bool = False,
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        """Serve one model's KV from ``storage``.

        Args:
            storage: an open storage manager; it may serve several engines.
            namespace: identity of the model and its KV; its ``chunk_size`` is the engine's.
            layout: the layout of one object of that many tokens.
            save_unfull_chunk: also keep the rest of a prompt that fills no chunk.
            shard: which shard of the KV heads this engine holds.
            shards: how many there are.
        """
        self.storage: Final = storage
        self.namespace: Final = namespace
        self.tokens: Final = TokenDatabase(namespace, namespace.chunk_size, save_unfull_chunk=save_unfull_chunk)
        self._layout = layout
        self._shard = (shard, shards)
        self._copies: anyio.CapacityLimiter | None = None

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk."""
        return self.tokens.chunk_size

    def chunks(self, token_ids: Sequence[int], identity: RequestIdentity = _PLAIN) -> list[Chunk]:
        """The chunks of a prompt from its first token on, whether they are stored or not. CPU-bound, no I/O."""
        return [
            Chunk(start, end, ObjectKey(self.tokens.namespace, digest, *self._shard), self._layout(end - start))
            for start, end, digest in self.tokens.chunks(
                token_ids, salt=identity.salt, lora=identity.lora, mm_hashes=identity.mm_hashes
            )
        ]

    def start_retrieve(self, chunks: Sequence[Chunk], *, timeout_s: float | None = None) -> Prefetch:
        """Start bringing the longest possible prefix of ``chunks`` into L1. Any thread; see `Prefetch`."""
        return self.storage.start_prefetch(_wanted(chunks), timeout_s=timeout_s)

    def reserve(
        self, chunks: Sequence[Chunk], *, skip_prefix_n_tokens: int = 0
    ) -> list[tuple[Chunk, WriteReservation]]:
        """Reserve L1 memory for those of ``chunks`` that are not there yet; stops at the first without memory.

        - Any thread. The caller fills each and hands all of them to ``storage.finish_write``, or aborts them, and then
          calls :meth:`touch` with the whole prompt.
        - Chunks that start before ``skip_prefix_n_tokens`` are left out; but what L1 has of the prefix is not evicted
          to make room for the rest.
        """
        l1 = self.storage.l1
        reserved: list[tuple[Chunk, WriteReservation]] = []
        here = l1.acquire_prefix([chunk.key for chunk in chunks], owner="reserve")
        try:
            for chunk in chunks:
                if chunk.start < skip_prefix_n_tokens:
                    continue
                reservation = self.storage.reserve_write(chunk.key, chunk.layout)
                if reservation is not None:
                    reserved.append((chunk, reservation))
                elif not l1.is_known(chunk.key):
                    break
        except BaseException:
            for _, reservation in reserved:
                reservation.abort()
            raise
        finally:
            for lease in here:
                lease.release()
        return reserved

    def touch(self, chunks: Sequence[Chunk]) -> None:
        """Keep a prompt that was stored piece by piece together: L1 gives up the end before the start. Any thread."""
        self.storage.l1.touch([chunk.key for chunk in chunks])

    async def store(
        self,
        token_ids: Sequence[int],
        source: KVSource,
        *,
        skip_prefix_n_tokens: int = 0,
        salt: str | None = None,
        lora: str | None = None,
        mm_hashes: Sequence[MultimodalHash | str] = (),
    ) -> list[TokenRange]:
        """Keep the KV of a prompt: gather what is not in L1 yet, then let it spread to the tiers in the background.

        - Chunks that start before ``skip_prefix_n_tokens`` are left out.
        - Each chunk becomes readable as a whole or not at all; a source that raises leaves none half-written.

        Returns:
            The ranges that were gathered, merged and in order; chunks already present, or refused for want of memory,
            are not in them.
        """
        identity = RequestIdentity(salt, lora, tuple(mm_hashes))
        chunks = self.chunks(token_ids, identity)
        reserved = self.reserve(chunks, skip_prefix_n_tokens=skip_prefix_n_tokens)

        def gather() -> None:
            for chunk, reservation in reserved:
                source.gather(chunk.start, chunk.end, reservation.obj)

        try:
            await self._copy(gather)
            self.storage.finish_write([reservation for _, reservation in reserved])
            self.touch(chunks)
        finally:
            for _, reservation in reserved:
                reservation.abort()
        return merge_ranges([TokenRange(chunk.start, chunk.end) for chunk, _ in reserved])

    async def lookup(
        self,
        token_ids: Sequence[int],
        *,
        timeout_s: float | None = None,
        salt: str | None = None,
        lora: str | None = None,
        mm_hashes: Sequence[MultimodalHash | str] = (),
    ) -> int:
        """How many tokens from the start of the prompt could be restored, as far as L1 and the tiers say.

        - Nothing is loaded, so nothing is verified: a tier may promise what it turns out not to have.
        - A failing tier shortens the answer, it never raises; the answer comes within ``timeout_s``.
        """
        chunks = self.chunks(token_ids, RequestIdentity(salt, lora, tuple(mm_hashes)))
        count = await self.storage.lookup(_wanted(chunks), timeout_s=timeout_s)
        return chunks[count - 1].end if count else 0

    async def retrieve(
        self,
        token_ids: Sequence[int],
        target: KVTarget,
        *,
        skip_prefix_n_tokens: int = 0,
        timeout_s: float | None = None,
        salt: str | None = None,
        lora: str | None = None,
        mm_hashes: Sequence[MultimodalHash | str] = (),
    ) -> TokenRange:
        """Restore the longest possible prefix of a prompt.

        - The first ``skip_prefix_n_tokens`` tokens are in the target already: they are not written. They may end
          anywhere; chunks wholly inside them are not even loaded.
        - A failing tier shortens the answer, it never raises; the answer comes within ``timeout_s``.

        Returns:
            The tokens that were written. Empty (start equals end) when nothing beyond the skipped tokens was found.
        """
        identity = RequestIdentity(salt, lora, tuple(mm_hashes))
        chunks = [chunk for chunk in self.chunks(token_ids, identity) if chunk.end > skip_prefix_n_tokens]
        prefetch = self.start_retrieve(chunks, timeout_s=timeout_s)
        try:
            await prefetch.wait_async()
            ready = chunks[: prefetch.ready_chunks]
            objects = prefetch.objects()

            def scatter() -> None:
                for chunk, obj in zip(ready, objects, strict=True):
                    skip = max(0, skip_prefix_n_tokens - chunk.start)
                    target.scatter(chunk.start, chunk.end, obj, skip_prefix_n_tokens=skip)

            await self._copy(scatter)
        finally:
            prefetch.release()
        return TokenRange(skip_prefix_n_tokens, ready[-1].end if ready else skip_prefix_n_tokens)

    async def _copy(self, work: Callable[[], None]) -> None:
        """Run ``work``, which touches memory of others, in a thread of this engine; waited for, cancelled or not."""
        if self._copies is None:  # made here because it belongs to the running loop
            self._copies = anyio.CapacityLimiter(_MAX_COPIES)
        await anyio.to_thread.run_sync(work, abandon_on_cancel=False, limiter=self._copies)


def _wanted(chunks: Sequence[Chunk]) -> list[WantedChunk]:
    return [(WantedObject(chunk.key, chunk.layout),) for chunk in chunks]


def merge_ranges(ranges: Sequence[TokenRange]) -> list[TokenRange]:
    """Join ranges that touch; ``ranges`` are in order and do not overlap."""
    merged: list[TokenRange] = []
    for item in ranges:
        if merged and merged[-1].end == item.start:
            merged[-1] = TokenRange(merged[-1].start, item.end)
        else:
            merged.append(item)
    return merged
