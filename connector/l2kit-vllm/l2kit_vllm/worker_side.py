"""The worker side: copies between vLLM's pages and L1, in the order that the scheduler side gives.

Loads are ordered before the forward pass that reads the pages, saves after the one that wrote them. On the CPU a copy
has ended when its call returns; on CUDA it runs on a side stream, and pages that are still being copied out are
fenced by their block ids.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from l2kit.errors import ConfigError
from l2kit.l1 import WriteReservation
from l2kit.prefetch import Prefetch
from l2kit_vllm.embedded import EmbeddedEngine
from l2kit_vllm.gpu_connector import Chunk, GPUConnector
from l2kit_vllm.identity import model_namespace
from l2kit_vllm.metadata import LoadOrder, SaveOrder
from l2kit_vllm.paged_layout import PagedLayout
from l2kit_vllm.settings import ConnectorSettings
from l2kit_vllm.transfer import Transfer
from l2kit_vllm.vllm_specs import from_vllm

_log = logging.getLogger(__name__)


class _PendingSave(NamedTuple):
    """Pages on their way into L1."""

    transfer: Transfer
    block_ids: frozenset[int]
    reservations: list[WriteReservation]
    tokens: int


class WorkerSide:
    """Everything that the connector does in vLLM's worker. Single-threaded; never waits for storage."""

    def __init__(
        self, embedded: EmbeddedEngine, vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings
    ) -> None:
        """Nothing is served before :meth:`register`."""
        self._embedded = embedded
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._pages: GPUConnector | None = None
        self._pending: deque[_PendingSave] = deque()
        self._loading: deque[tuple[Transfer, Prefetch]] = deque()
        self._failed_block_ids: set[int] = set()  # to be reported
        self._unheard_block_ids: set[int] = set()  # failed, and vLLM may still be building on them

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Learn the pages and name what they hold.

        Raises:
            ConfigError: a layout, backend or checkpoint that l2kit does not know; the message names it.
        """
        layout = _declared_layout(self._vllm_config, self._kv_cache_config, kv_caches)
        pages = GPUConnector(layout, kv_caches, self._settings.representation)
        if self._settings.representation == "native":
            representation = f"native:{layout.fingerprint}"
        else:
            representation = f"canonical:{'mla' if layout.is_mla else 'kv_2ltd'}:1"
        chunk_size = self._embedded.config.chunk_size
        namespace = model_namespace(
            self._vllm_config,
            layout=representation,
            kv_dtype=layout.dtype,
            layers=len(layout.layers),
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            chunk_size=chunk_size,
            model_revision=self._settings.model_revision,
        )
        object_bytes = pages.object_layout(chunk_size).nbytes
        l1_bytes = self._embedded.config.l1.max_bytes
        if object_bytes > l1_bytes:
            raise ConfigError(f"l1.max_bytes: {l1_bytes} is less than one chunk of this model, {object_bytes} bytes")
        self._pages = pages
        self._embedded.serve(namespace, pages.object_layout)
        _log.info(
            "l2kit serves %s (%s): %d layers, %s, chunks of %d tokens and %d bytes, L1 for %d of them, tiers %s",
            self._vllm_config.model_config.model,
            representation,
            namespace.layers,
            layout.dtype,
            chunk_size,
            object_bytes,
            l1_bytes // object_bytes,
            [tier.name for tier in self._embedded.storage.tiers],
        )

    def load(self, orders: Iterable[LoadOrder], heard_of_block_ids: set[int]) -> None:
        """Write the staged objects of each order into its pages, ahead of the forward pass.

        What cannot be loaded is reported by :meth:`take_failed_block_ids`; no order is left out silently.
        """
        self._unheard_block_ids -= heard_of_block_ids  # before this step's own failures: block ids come again
        for order in orders:
            try:
                self._load(order)
            except Exception:
                _log.exception(
                    "loading %s failed: vLLM recomputes its tokens from %d on", order.request_id, order.write_from
                )
                self.refuse([order])
        self.collect()

    def refuse(self, orders: Iterable[LoadOrder]) -> None:
        """Report that the pages of these orders were not filled."""
        block_size = self._require_pages().layout.block_size
        for order in orders:
            first, last = order.write_from // block_size, -(-order.write_to // block_size)
            failed = set(order.block_ids[first:last])
            self._failed_block_ids |= failed
            self._unheard_block_ids |= failed
            self._embedded.failed_block_ids |= failed
            self._embedded.failed_loads.add(order.request_id)
            self._embedded.counters.add("load_failures")

    def save(self, orders: Iterable[SaveOrder]) -> None:
        """Start copying each order's chunks out of the pages that the forward pass has written.

        After a failed load nothing is saved until vLLM has learned of it: any request may share the pages, and with
        asynchronous scheduling the next step is already on its way.
        """
        failure: Exception | None = None
        for order in orders if not self._unheard_block_ids else ():
            reserved: list[WriteReservation] = []
            try:
                self._gather(order, reserved)
            except Exception as error:
                self._embedded.counters.add("save_failures")
                for reservation in reserved:
                    reservation.abort()
                failure = error
        self.collect()
        if failure is not None:
            raise failure

    def fence(self, overwritten_block_ids: set[int] | None) -> None:
        """Let later work of this step wait for saves that still read one of these pages; the host does not wait."""
        for pending in self._pending:
            if overwritten_block_ids is None or not pending.block_ids.isdisjoint(overwritten_block_ids):
                pending.transfer.wait_on()

    def collect(self) -> None:
        """Publish saves and release loads whose copies have ended."""
        while self._loading and self._loading[0][0].done():
            self._loading.popleft()[1].release()
        while self._pending and self._pending[0].transfer.done():
            pending = self._pending.popleft()
            self._embedded.storage.finish_write(pending.reservations)
            self._embedded.counters.add("saved_tokens", pending.tokens)
        self._embedded.pending_saves = len(self._pending)

    def take_failed_block_ids(self) -> set[int]:
        """Pages that were promised in this step and not filled; each is reported once."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def close(self) -> None:
        """Wait for the copies in flight (bounded by the device) and let go of everything."""
        for transfer, staged in self._loading:
            transfer.wait()
            staged.release()
        self._loading.clear()
        for pending in self._pending:
            pending.transfer.wait()
        self.collect()

    def _load(self, order: LoadOrder) -> None:
        staged = self._embedded.staged.pop(order.request_id, None)
        if staged is None:
            raise RuntimeError("nothing is staged for this request")
        try:
            transfer = self._scatter(order, staged)
        except BaseException:
            staged.release()
            raise
        self._loading.append((transfer, staged))
        transfer.wait_on()
        self._embedded.counters.add("written_tokens", order.write_to - order.write_from)

    def _scatter(self, order: LoadOrder, staged: Prefetch) -> Transfer:
        pages = self._require_pages()
        chunks = [
            Chunk(order.block_ids, start, end, obj, max(0, order.write_from - start))
            for (start, end), obj in zip(order.chunks, staged.objects(), strict=True)
            if start < order.write_to and end > order.write_from
        ]
        if not chunks or chunks[-1].end_token < order.write_to:
            raise RuntimeError(f"{len(chunks)} chunks are staged, they do not reach token {order.write_to}")
        return pages.scatter_many(chunks)

    def _gather(self, order: SaveOrder, reserved: list[WriteReservation]) -> None:
        pages, storage = self._require_pages(), self._embedded.storage
        chunks: list[Chunk] = []
        for start, end, key in order.chunks:
            reservation = storage.reserve_write(key, pages.object_layout(end - start), owner=f"save:{order.request_id}")
            if reservation is not None:
                reserved.append(reservation)
                chunks.append(Chunk(order.block_ids, start, end, reservation.obj))
        if not chunks:
            return
        transfer = pages.gather_many(chunks)
        block_size = pages.layout.block_size
        blocks = frozenset(
            block_id
            for chunk in chunks
            for block_id in order.block_ids[chunk.start_token // block_size : chunk.end_token // block_size]
        )
        tokens = sum(chunk.end_token - chunk.start_token for chunk in chunks)
        self._pending.append(_PendingSave(transfer, blocks, list(reserved), tokens))

    def _require_pages(self) -> GPUConnector:
        if self._pages is None:
            raise RuntimeError("vLLM has not registered its KV caches")
        return self._pages


def _declared_layout(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]) -> PagedLayout:
    """What vLLM declares about the pages of its one KV cache group."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    group = kv_cache_config.kv_cache_groups[0]
    modules = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    names = [
        name
        for name in group.layer_names
        if getattr(modules[name], "kv_sharing_target_layer_name", None) is None  # it has no pages of its own
    ]
    declared = {
        (
            modules[name].get_attn_backend().__name__,
            getattr(modules[name], "isa", None),
            getattr(modules[name], "kv_cache_dtype", "auto"),
        )
        for name in names
    }
    if len(declared) != 1:
        raise ConfigError(
            f"the layers of this model differ in backend, instruction set or KV dtype: {sorted(map(str, declared))}"
        )
    backend, isa, kv_cache_dtype = declared.pop()
    return from_vllm(
        group.kv_cache_spec,
        kv_caches,
        layers=names,
        num_blocks=kv_cache_config.num_blocks,
        backend=backend,
        kv_cache_layout=kv_cache_config.kv_cache_layout,
        cache_dtype=kv_cache_dtype,
        cpu_isa=isa,
    )
