"""The scheduler side: which tokens l2kit can give to a request, and which chunks each step must load and save.

Staged before claimed: a hit is only announced for objects that are leased in L1 already, so that loading them into
pages cannot fail any more. Until then the answer is "not yet", within the storage's lookup deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol

from l2kit.engine import CacheEngine, Chunk
from l2kit.prefetch import Prefetch
from l2kit_vllm.embedded import EmbeddedEngine, RequestRecord
from l2kit_vllm.identity import RequestIdentities
from l2kit_vllm.metadata import LoadOrder, SaveOrder, StepOrders

_log = logging.getLogger(__name__)

#: How long an engine that has nothing else to do lets the I/O threads have the interpreter (seconds).
_IDLE_WAIT_S: Final = 0.001


class PrefixCache(Protocol):
    """What is needed of vLLM's ``BlockPool``."""

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Let no request find these blocks in the prefix cache any more."""
        ...


class _Request:
    """What the scheduler side knows of one request."""

    __slots__ = (
        "answered",
        "block_ids",
        "chunks",
        "external",
        "first",
        "loaded",
        "local",
        "next_save",
        "preemptions",
        "prefetch",
        "prompt_tokens",
        "read_chunks",
        "saves",
    )

    def __init__(self, prompt_tokens: int, preemptions: int) -> None:
        self.chunks: list[Chunk] = []  # of the whole prompt; none when it is not to be cached
        self.prompt_tokens = prompt_tokens
        self.preemptions = preemptions
        self.prefetch: Prefetch | None = None
        self.first = 0  # index of the first chunk that `prefetch` asked for
        self.local = 0  # tokens that vLLM had itself when it last asked
        self.external = 0  # end of the prefix that we could give then
        self.loaded = 0  # tokens of it that vLLM took
        self.read_chunks = 0  # how many chunks of it came from L2
        self.answered = False  # nothing more is offered until it is preempted
        self.block_ids: list[int] = []
        self.next_save = 0  # index of the first chunk that may still have to be saved
        self.saves = True  # False: its pages are not to be trusted until it gets others


class SchedulerSide:
    """Everything that the connector does in vLLM's scheduler. Single-threaded, never waits for I/O."""

    def __init__(self, embedded: EmbeddedEngine, *, block_size: int, loads: bool, saves: bool) -> None:
        """``loads`` and ``saves`` follow vLLM's ``kv_role``."""
        self._embedded = embedded
        self._block_size = block_size
        self._loads = loads
        self._saves = saves
        self._identities = RequestIdentities()
        self._requests: dict[str, _Request] = {}
        self._loads_to_order: list[LoadOrder] = []
        self._heard_of_block_ids: set[int] = set()
        self.prefix_cache: PrefixCache | None = None

    @property
    def _engine(self) -> CacheEngine:
        assert self._embedded.engine is not None
        return self._embedded.engine

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        """How many tokens beyond ``num_computed_tokens`` can be loaded now; None for "not yet".

        May be called any number of times for a request until it is scheduled.
        """
        state = self._state(request)
        state.local = num_computed_tokens
        if not state.chunks or not self._loads or request.skip_reading_prefix_cache:
            return 0
        if state.preemptions != request.num_preemptions:  # it lost its pages: what L1 has may be given once more
            state.preemptions = request.num_preemptions
            state.external = state.loaded = state.read_chunks = 0
            state.answered = request.request_id in self._embedded.failed_loads
        if state.answered:
            return 0
        limit = (request.num_tokens - 1) // self._block_size * self._block_size  # one token must be left to compute
        first = num_computed_tokens // self._engine.chunk_size
        if first >= len(state.chunks) or num_computed_tokens >= limit:
            return 0
        if state.prefetch is None or first < state.first:
            self._drop_prefetch(state)
            state.first = first
            state.prefetch = self._engine.start_retrieve(state.chunks[first:])
        if not state.prefetch.done:
            return None
        ready = state.first + state.prefetch.ready_chunks
        state.external = state.chunks[ready - 1].end if ready > state.first else 0
        state.read_chunks = state.prefetch.loaded_objects
        offered: int = min(state.external, limit) - num_computed_tokens
        if offered <= 0:
            self._drop_prefetch(state)
            state.answered = True
            return 0
        return offered

    def allocated(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """The request got its blocks and will load ``num_external_tokens``: all, less or none of what was offered.

        Raises:
            RuntimeError: it counts on tokens that we cannot give; see :meth:`nothing_to_load`.
        """
        state = self._requests.get(request.request_id)
        prefetch = None
        if state is not None:
            state.answered = True
            state.loaded = num_external_tokens
            prefetch, state.prefetch = state.prefetch, None
        if num_external_tokens == 0:
            if prefetch is not None:
                prefetch.release()
            return
        if state is None or prefetch is None:
            raise RuntimeError(f"vLLM counts on {num_external_tokens} tokens that it was not offered")
        self._release_staged(request.request_id)
        self._embedded.staged[request.request_id] = prefetch
        # Index arithmetic, not block hashes, tells local from external: hits are hashed before they are loaded.
        end = state.local + num_external_tokens
        chunks = state.chunks[state.first : state.first + prefetch.ready_chunks]
        ranges = tuple((chunk.start, chunk.end) for chunk in chunks)
        self._loads_to_order.append(LoadOrder(request.request_id, tuple(block_ids), ranges, state.local, end))

    def nothing_to_load(self, request_id: str, block_ids: Sequence[int]) -> None:
        """VLLM counts on tokens that will not come: have its worker report all pages of the request as not filled."""
        self._release_staged(request_id)
        end = len(block_ids) * self._block_size
        self._loads_to_order.append(LoadOrder(request_id, tuple(block_ids), (), 0, end))

    def orders(self, output: Any) -> StepOrders:
        """What this step must load and save. ``output`` is vLLM's ``SchedulerOutput``."""
        orders = StepOrders(heard_of_block_ids=self._heard_of_block_ids)
        for new in output.scheduled_new_reqs:
            self._scheduled(orders, new.req_id, list(new.block_ids[0]), new.num_computed_tokens, output, anew=True)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            self._scheduled(
                orders,
                request_id,
                [] if blocks is None else list(blocks[0]),
                cached.num_computed_tokens[index],
                output,
                anew=request_id in cached.resumed_req_ids,
            )
        if output.total_num_scheduled_tokens == 0:
            self._yield_interpreter()
        self._heard_of_block_ids = set()
        orders.loads, self._loads_to_order = self._loads_to_order, []
        return orders

    def orders_after_error(self) -> StepOrders:
        """The same when :meth:`orders` has failed: only what must not be left out. Nobody's block table is trusted."""
        for state in self._requests.values():
            state.saves = False
        loads, self._loads_to_order = self._loads_to_order, []
        return StepOrders(loads=loads, overwritten_block_ids=None)

    def loads_failed(self, block_ids: set[int]) -> None:
        """VLLM has learned that these pages were not filled, and sends every request that has one of them back.

        vLLM recomputes the pages in place, but until then it leaves them, and what was computed from them, in its
        prefix cache, where other requests would find them.
        """
        self._heard_of_block_ids |= block_ids
        for state in self._requests.values():
            self._disown(state, block_ids)
        self._evict(block_ids)
        self._embedded.failed_block_ids -= block_ids

    def finished(self, request_id: str) -> None:
        """The request ended, in whatever state it was: nothing of it stays."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._drop_prefetch(state)
            self._engine.touch(state.chunks[: state.next_save])  # saved in pieces, evicted as one prompt: its end first
            self._disown(state, self._embedded.failed_block_ids)  # it may have been aborted before vLLM learned of them
        self._loads_to_order = [order for order in self._loads_to_order if order.request_id != request_id]
        self._release_staged(request_id)
        self._embedded.failed_loads.discard(request_id)

    def reset(self) -> None:
        """Give no request anything that was stored so far, and store nothing more of the requests that are here."""
        for state in self._requests.values():
            self._drop_prefetch(state)
            state.chunks = []
        self._embedded.start_new_epoch()

    def close(self) -> None:
        """Let go of every request."""
        for request_id in list(self._requests):
            self.finished(request_id)

    # --- inner -----------------------------------------------------------------------------------------------

    def _state(self, request: Any) -> _Request:
        state = self._requests.get(request.request_id)
        if state is None:
            counters = self._embedded.counters
            state = self._requests[request.request_id] = _Request(request.num_prompt_tokens, request.num_preemptions)
            counters.add("requests")
            identity = self._identities.of(request)
            if identity is None:
                counters.add("requests_unidentified")
            else:
                state.chunks = self._engine.chunks(request.prompt_token_ids, identity)
        return state

    def _scheduled(
        self, orders: StepOrders, request_id: str, block_ids: list[int], computed: int, output: Any, *, anew: bool
    ) -> None:
        if orders.overwritten_block_ids is not None:
            orders.overwritten_block_ids.update(block_ids)
        state = self._requests.get(request_id)
        if state is None:
            return
        chunk_size = self._engine.chunk_size
        if anew:
            state.block_ids = block_ids
            state.saves = True
            self._account(request_id, state)
            # Whole chunks before this are in storage already: loaded from it, or saved when they were first computed.
            state.next_save = computed // chunk_size
        else:
            state.block_ids.extend(block_ids)
            # A failed load sends a request back: what it recomputes heals what was damaged.
            state.next_save = min(state.next_save, computed // chunk_size)
        if not self._saves:
            return
        end = computed + output.num_scheduled_tokens[request_id]
        first = state.next_save
        while state.next_save < len(state.chunks) and state.chunks[state.next_save].end <= end:
            state.next_save += 1
        chunks = state.chunks[first : state.next_save]
        if chunks and state.saves:
            self._engine.touch(state.chunks[:first])  # the start of the prompt must outlive what comes now
            blocks = -(-chunks[-1].end // self._block_size)
            orders.saves.append(
                SaveOrder(
                    request_id,
                    tuple(state.block_ids[:blocks]),
                    tuple((chunk.start, chunk.end, chunk.key) for chunk in chunks),
                )
            )

    def _account(self, request_id: str, state: _Request) -> None:
        """Count a request when it is scheduled with what caches gave it (again after each preemption)."""
        counters = self._embedded.counters
        record = RequestRecord(
            request_id=request_id,
            prompt_tokens=state.prompt_tokens,
            local_hit=state.local,
            external_hit=state.external,
            read=state.read_chunks * self._engine.chunk_size,
            written=state.loaded,
        )
        self._embedded.records.append(record)
        counters.add("requests_hit", record.written > 0)
        counters.add("prompt_tokens", record.prompt_tokens)
        counters.add("local_hit_tokens", record.local_hit)
        counters.add("external_hit_tokens", record.external_hit)
        counters.add("read_tokens", record.read)
        _log.info(
            "request %s: %d prompt tokens, %d hit locally, %d hit externally, %d to load (%d read from L2)",
            record.request_id,
            record.prompt_tokens,
            record.local_hit,
            record.external_hit,
            record.written,
            record.read,
        )

    def _disown(self, state: _Request, failed_block_ids: set[int]) -> None:
        """Trust no page of a request from the first failed one on."""
        if failed_block_ids.isdisjoint(state.block_ids):
            return
        state.saves = False
        first = next(index for index, block_id in enumerate(state.block_ids) if block_id in failed_block_ids)
        self._evict(set(state.block_ids[first:]))

    def _evict(self, block_ids: set[int]) -> None:
        if self.prefix_cache is not None:
            self.prefix_cache.evict_blocks(block_ids)

    def _yield_interpreter(self) -> None:
        """Give the I/O threads the interpreter for a moment while every request waits for them.

        vLLM steps again at once when it has nothing to run, and a busy loop in this process starves the threads that
        it is waiting for (measured: 1,633 ms for a load of 90 ms).
        """
        for state in self._requests.values():
            if state.prefetch is not None and not state.prefetch.done:
                state.prefetch.wait(_IDLE_WAIT_S)
                return

    def _drop_prefetch(self, state: _Request) -> None:
        prefetch, state.prefetch = state.prefetch, None
        if prefetch is not None:
            prefetch.release()

    def _release_staged(self, request_id: str) -> None:
        staged = self._embedded.staged.pop(request_id, None)
        if staged is not None:
            staged.release()
