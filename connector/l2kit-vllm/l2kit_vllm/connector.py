"""``L2KitConnector``: vLLM's ``KVConnectorBase_V1`` on top of the scheduler side and the worker side.

Only the translation lives here: vLLM's hooks in, plain calls out, and no exception ever into the engine: an error in a
hook is counted, logged once per kind, and becomes a miss.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from l2kit.errors import ConfigError, L2Error
from l2kit_vllm import embedded as embedded_engines
from l2kit_vllm.metadata import StepOrders
from l2kit_vllm.scheduler_side import SchedulerSide
from l2kit_vllm.settings import check_block_size, parse_extra_config
from l2kit_vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class L2KitMetadata(KVConnectorMetadata):
    """Orders of one step in vLLM's envelope."""

    def __init__(self, orders: StepOrders) -> None:
        """Carry ``orders`` to the workers."""
        self.orders: Final = orders


class L2KitConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV cache of this vLLM in l2kit. One object per role and process.

    Options come from ``kv_connector_extra_config``; see `l2kit_vllm.settings`.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Check the configuration and attach to this process's embedded engine.

        Raises:
            L2Error: a wrong option, a tier that cannot be opened, or something that l2kit does not serve; vLLM does
                not start then, and the message says what to change.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._engine_id = transfer.engine_id
        settings, storage = parse_extra_config(transfer.kv_connector_extra_config)
        block_size = _check_servable(vllm_config, kv_cache_config)
        check_block_size(storage.chunk_size, block_size)
        self._embedded = embedded_engines.attach(self._engine_id, storage)
        self._errors: set[str] = set()
        self._closed = False
        self._outer_exception: BaseException | None = None  # being handled when the step began
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        try:
            if role == KVConnectorRole.SCHEDULER:
                self._scheduler = self._make_scheduler_side(transfer, block_size)
            else:
                self._worker = WorkerSide(self._embedded, vllm_config, kv_cache_config, settings)
        except BaseException:
            embedded_engines.detach(self._engine_id)
            raise

    def _make_scheduler_side(self, transfer: Any, block_size: int) -> SchedulerSide:
        if self._embedded.engine is None:
            raise ConfigError(
                "the embedded engine needs vLLM's scheduler and its worker in one process, and this vLLM runs its "
                "worker in another: use --distributed-executor-backend uni. vLLM's CPU build honours that only with "
                "VLLM_ENABLE_V1_MULTIPROCESSING=0, that is in LLM(...) and not under its API server"
            )
        if transfer.kv_load_failure_policy != "recompute":
            _log.warning(
                "kv_load_failure_policy is %r: a load that fails would fail its request. Set it to 'recompute'",
                transfer.kv_load_failure_policy,
            )
        return SchedulerSide(
            self._embedded, block_size=block_size, loads=transfer.is_kv_consumer, saves=transfer.is_kv_producer
        )

    def _guard(self, hook: str, function: Callable[[], ResultT], otherwise: ResultT) -> ResultT:
        """Run a hook's work; an exception would end the engine, so it becomes ``otherwise``."""
        try:
            return function()
        except Exception as error:
            self._embedded.counters.add("hook_errors")
            kind = f"{hook}:{type(error).__name__}"
            if kind not in self._errors:  # vLLM calls hooks every step: say it once
                self._errors.add(kind)
                _log.exception("%s failed; its requests are recomputed (said once per kind of error)", hook)
            return otherwise

    # --- scheduler side ---------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a cache may lose what it was given."""
        return False

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the local hit, staged in host memory; None while they arrive."""
        side = self._scheduler
        assert side is not None
        miss: int | None = 0
        matched = self._guard(
            "get_num_new_matched_tokens", lambda: side.matched_tokens(request, num_computed_tokens), otherwise=miss
        )
        return matched, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Order the load of what was offered, if vLLM took it."""
        side = self._scheduler
        assert side is not None
        block_ids = blocks.get_block_ids()[0]

        def allocated() -> bool:
            side.allocated(request, block_ids, num_external_tokens)
            return True

        if not self._guard("update_state_after_alloc", allocated, otherwise=False) and num_external_tokens:
            side.nothing_to_load(request.request_id, block_ids)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """All orders of this step."""
        side = self._scheduler
        assert side is not None
        nothing: StepOrders | None = None
        orders = self._guard("build_connector_meta", lambda: side.orders(scheduler_output), otherwise=nothing)
        return L2KitMetadata(side.orders_after_error() if orders is None else orders)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Learn where blocks that turn out to be wrong can be taken out of vLLM's own prefix cache."""
        assert self._scheduler is not None
        self._scheduler.prefix_cache = gpu_block_pool

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learn which failed loads vLLM knows of."""
        side = self._scheduler
        assert side is not None
        failed = connector_output.invalid_block_ids
        if failed:
            self._guard("update_connector_output", lambda: side.loads_failed(failed), otherwise=None)

    def reset_cache(self) -> bool:
        """Give nobody what was stored until now: the weights may be others from here on."""
        side = self._scheduler
        assert side is not None

        def reset() -> bool:
            side.reset()
            return True

        return self._guard("reset_cache", reset, otherwise=False)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request. Its blocks need not be kept: saves are fenced by block id instead."""
        side = self._scheduler
        assert side is not None
        self._guard("request_finished", lambda: side.finished(request.request_id), otherwise=None)
        return False, None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The same for vLLM versions and settings with one KV cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        """True while pages are still being copied out: vLLM keeps stepping until they are."""
        return self._embedded.pending_saves > 0

    # --- worker side ------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn the pages. A layout that l2kit does not know is refused here, by name, before anything is served."""
        assert self._worker is not None
        try:
            self._worker.register(kv_caches)
        except BaseException:
            self.shutdown()  # vLLM does not start, and does not tell us
            raise

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before any page is overwritten: let saves that still read one of this step's new pages go first."""
        side = self._worker
        assert side is not None
        if isinstance(kv_connector_metadata, L2KitMetadata):
            orders = kv_connector_metadata.orders
            self._guard("handle_preemptions", lambda: side.fence(orders.overwritten_block_ids), otherwise=None)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        self._outer_exception = sys.exception()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Write staged objects into pages, before the forward pass that reads them."""
        side, orders = self._worker, self._orders()
        assert side is not None

        def load() -> bool:
            side.load(orders.loads, orders.heard_of_block_ids)
            return True

        if not self._guard("start_load_kv", load, otherwise=False):
            side.refuse(orders.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are ordered before the forward pass as a whole."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing to do per layer: chunks are saved whole, after the forward pass."""

    def wait_for_save(self) -> None:
        """Start copying completed chunks out of the pages.

        vLLM calls this on the way out of a forward pass that raised, too: then the pages hold nobody knows what.
        """
        side = self._worker
        assert side is not None
        if sys.exception() is not self._outer_exception:
            return
        self._guard("wait_for_save", lambda: side.save(self._orders().saves), otherwise=None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """No request waits for us: loads are synchronous and saves are not waited for."""
        side = self._worker
        assert side is not None
        self._guard("get_finished", side.collect, otherwise=None)
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages of this step that were promised and not filled: vLLM recomputes exactly these."""
        side = self._worker
        assert side is not None
        return self._guard("get_block_ids_with_load_errors", side.take_failed_block_ids, otherwise=set())

    def shutdown(self) -> None:
        """Release everything; the last side of the process closes the storage. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._worker is not None:
                self._worker.close()
            if self._scheduler is not None:
                self._scheduler.close()
        except L2Error:
            _log.exception("closing the connector failed")
        finally:
            embedded_engines.detach(self._engine_id)

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        return metadata.orders if isinstance(metadata, L2KitMetadata) else StepOrders()


def _check_servable(vllm_config: Any, kv_cache_config: Any) -> int:
    """Refuse what this version does not serve, by name; return the block size in tokens."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ConfigError(
            f"this model has {len(groups)} KV cache groups ({kinds}); l2kit serves one. "
            "--disable-hybrid-kv-cache-manager gives one group where vLLM supports that"
        )
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1:
        raise ConfigError(
            f"tensor_parallel_size x pipeline_parallel_size is {parallel.world_size}; the embedded engine serves 1"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales: FP8 scales that each process measures for itself give the same bytes different "
            "meanings; use scales from the checkpoint"
        )
    _check_spec(groups[0].kv_cache_spec)
    block_size: int = groups[0].kv_cache_spec.block_size
    return block_size


def _check_spec(spec: Any) -> None:
    """Refuse pages that vLLM takes back while their request runs, or that depend on later tokens."""
    for one in getattr(spec, "kv_cache_specs", {"": spec}).values():
        name = type(one).__name__
        if name not in {"FullAttentionSpec", "MLAAttentionSpec"}:
            raise ConfigError(f"this model's KV cache is of the kind {name}; l2kit serves full attention and MLA")
        if getattr(one, "non_causal", False):
            raise ConfigError(f"{name}: tokens attend to later ones, so the KV of a prefix does not depend on it alone")
