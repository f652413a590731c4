"""The scheduler side: which tokens l2kit can give to a request, and which chunks each step must load and save.

Staged before claimed: a hit is only announced for objects that are leased in L1 already, so that loading them into
pages cannot fail any more. Until then the answer is "not yet", within the storage's lookup deadline.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from l2kit.engine import CacheEngine, Chunk
from l2kit.prefetch import Prefetch
from l2kit_vllm.embedded import EmbeddedEngine, RequestRecord
from l2kit_vllm.identity import request_identity
from l2kit_vllm.metadata import LoadOrder, SaveOrder, StepOrders

_log = logging.getLogger(__name__)

#: How long an engine that has nothing else to do lets the I/O threads have the interpreter (seconds).
_IDLE_WAIT_S: Final = 0.001


class _Request:
    """What the scheduler side knows of one request."""

    __slots__ = (
        "answered",
        "block_ids",
        "chunks",
        "external",
        "first",
        "local",
        "next_save",
        "preemptions",
        "prefetch",
        "read_chunks",
        "record",
    )

    def __init__(self, chunks: list[Chunk], record: RequestRecord) -> None:
        self.chunks = chunks  # of the whole prompt
        self.record = record
        self.prefetch: Prefetch | None = None
        self.first = 0  # index of the first chunk that `prefetch` asked for
        self.local = 0  # tokens that vLLM had itself when it last asked
        self.external = 0  # end of the prefix that we could give then
        self.read_chunks = 0  # how many chunks of it came from L2
        self.answered = False  # nothing more is offered until it is preempted
        self.preemptions = 0
        self.block_ids: list[int] = []
        self.next_save = 0  # index of the first chunk that may still have to be saved


class SchedulerSide:
    """Everything that the connector does in vLLM's scheduler. Single-threaded, never waits for I/O."""

    def __init__(self, embedded: EmbeddedEngine, *, block_size: int, loads: bool, saves: bool) -> None:
        """``loads`` and ``saves`` follow vLLM's ``kv_role``."""
        self._embedded = embedded
        self._block_size = block_size
        self._loads = loads
        self._saves = saves
        self._requests: dict[str, _Request | None] = {}  # None: not to be cached
        self._loads_to_order: list[LoadOrder] = []

    @property
    def _engine(self) -> CacheEngine:
        assert self._embedded.engine is not None
        return self._embedded.engine

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        """How many tokens beyond ``num_computed_tokens`` can be loaded now; None for "not yet".

        May be called any number of times for a request until it is scheduled.
        """
        state = self._state(request)
        if state is None or not self._loads or request.skip_reading_prefix_cache:
            return 0
        if state.preemptions != request.num_preemptions:  # it lost its pages: what L1 has may be given once more
            state.preemptions = request.num_preemptions
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
        state.local = num_computed_tokens
        state.external = state.chunks[ready - 1].end if ready > state.first else 0
        state.read_chunks = state.prefetch.loaded_objects
        offered: int = min(state.external, limit) - num_computed_tokens
        if offered <= 0:
            self._drop_prefetch(state)
            state.answered = True
            return 0
        return offered

    def allocated(self, request: Any, block_ids: list[int], num_external_tokens: int) -> None:
        """The request got its blocks and will load ``num_external_tokens``: all, less or none of what was offered."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        state.answered = True
        prefetch, state.prefetch = state.prefetch, None
        if prefetch is None:
            return
        if num_external_tokens == 0:
            prefetch.release()
            return
        # Index arithmetic, not block hashes, tells local from external: hits are hashed before they are loaded.
        end = state.local + num_external_tokens
        chunks = state.chunks[state.first : state.first + prefetch.ready_chunks]
        self._loads_to_order.append(
            LoadOrder(
                request.request_id,
                tuple(block_ids),
                tuple((chunk.start, chunk.end) for chunk in chunks),
                state.local,
                end,
            )
        )
        self._release_staged(request.request_id)
        self._embedded.staged[request.request_id] = prefetch

    def orders(self, output: Any) -> StepOrders:
        """What this step must load and save. ``output`` is vLLM's ``SchedulerOutput``."""
        orders = StepOrders(loads=self._loads_to_order)
        self._loads_to_order = []
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
        return orders

    def finished(self, request_id: str) -> None:
        """The request ended, in whatever state it was: nothing of it stays."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._drop_prefetch(state)
        self._loads_to_order = [order for order in self._loads_to_order if order.request_id != request_id]
        self._release_staged(request_id)
        self._embedded.failed_loads.discard(request_id)

    def close(self) -> None:
        """Let go of every request."""
        for request_id in list(self._requests):
            self.finished(request_id)

    # --- inner -----------------------------------------------------------------------------------------------

    def _state(self, request: Any) -> _Request | None:
        if request.request_id in self._requests:
            return self._requests[request.request_id]
        counters = self._embedded.counters
        counters.add("requests")
        identity = request_identity(request)
        state = None
        if identity is None:
            counters.add("requests_unidentified")
        else:
            prompt = request.prompt_token_ids
            record = RequestRecord(request_id=request.request_id, prompt_tokens=len(prompt))
            state = _Request(self._engine.chunks(prompt, identity), record)
            state.preemptions = request.num_preemptions
        self._requests[request.request_id] = state
        return state

    def _scheduled(
        self, orders: StepOrders, request_id: str, block_ids: list[int], computed: int, output: Any, *, anew: bool
    ) -> None:
        orders.overwritten_block_ids.update(block_ids)
        state = self._requests.get(request_id)
        if state is None:
            return
        chunk_size = self._engine.chunk_size
        if anew:
            state.block_ids = block_ids
            self._account(state, computed)
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
        if chunks:
            blocks = -(-chunks[-1].end // self._block_size)
            orders.saves.append(
                SaveOrder(
                    request_id,
                    tuple(state.block_ids[:blocks]),
                    tuple((chunk.start, chunk.end, chunk.key) for chunk in chunks),
                )
            )

    def _account(self, state: _Request, computed: int) -> None:
        """Count a request when it is scheduled with ``computed`` tokens from caches (again after each preemption)."""
        record, counters = state.record, self._embedded.counters
        record.local_hit = state.local if state.external else computed
        record.external_hit = state.external
        record.read = state.read_chunks * self._engine.chunk_size
        record.written = max(0, computed - record.local_hit)
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

    def _yield_interpreter(self) -> None:
        """Give the I/O threads the interpreter for a moment while every request waits for them.

        vLLM steps again at once when it has nothing to run, and a busy loop in this process starves the threads that
        it is waiting for (measured: 1,633 ms for a load of 90 ms).
        """
        for state in self._requests.values():
            if state is not None and state.prefetch is not None and not state.prefetch.done:
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
