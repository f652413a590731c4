"""vLLM's real scheduler with a KV connector and without a model: milliseconds per step, every interleaving reachable.

The model runner is what makes an end-to-end test slow and its timing hard to control. Here the test plays the model
runner: it takes what the scheduler decided, says what the workers reported, and looks at what the scheduler and the
connector make of it. `AsyncScheduler` can be driven too, by scheduling a step before the one before has been reported;
vLLM's CPU platform never does that by itself.

    harness = make_scheduler(connector_config, work_dir=tmp_path, num_blocks=33, block_size=32)
    request_id = harness.add_request(token_ids)
    step = harness.schedule()
    harness.update(step, KVConnectorOutput(finished_recving={request_id}))

A worker-side connector can take part: :meth:`SchedulerHarness.make_worker` gives it paged tensors, and
:meth:`SchedulerHarness.run_worker` calls its hooks in vLLM's order and returns the `KVConnectorOutput`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.e2e import pretended_model


@dataclass(frozen=True)
class Step:
    """One decision of the scheduler that has not been reported yet.

    Attributes:
        output: the real ``SchedulerOutput``, connector metadata included.
        sampling: requests whose prompt is computed to its end in this step, so that the model yields a token for them.
    """

    output: Any
    sampling: frozenset[str]

    @property
    def scheduled_tokens(self) -> dict[str, int]:
        """Tokens to compute in this step, by request id."""
        return dict(self.output.num_scheduled_tokens)

    @property
    def metadata(self) -> Any:
        """What the scheduler-side connector sends to the workers in this step."""
        return self.output.kv_connector_metadata


@dataclass
class SchedulerHarness:
    """A scheduler, its connector, and the test in the place of the model runner.

    Attributes:
        scheduler: vLLM's ``Scheduler`` or ``AsyncScheduler``.
        vllm_config: the configuration that both sides of a connector are constructed with.
        kv_cache_config: groups, tensors and layout.
    """

    scheduler: Any
    vllm_config: Any
    kv_cache_config: Any
    _block_hasher: Callable[[Any], list[Any]]
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def connector(self) -> Any:
        """The scheduler-side connector."""
        return self.scheduler.connector

    def add_request(
        self,
        token_ids: Sequence[int],
        *,
        request_id: str | None = None,
        max_tokens: int = 4,
        cache_salt: str | None = None,
        lora_request: Any = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        skip_reading_prefix_cache: bool | None = None,
    ) -> str:
        """Queue a request and return its id."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        request_id = request_id if request_id is not None else f"request-{next(self._numbers)}"
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            skip_reading_prefix_cache=skip_reading_prefix_cache,
            extra_args={"kv_transfer_params": dict(kv_transfer_params)} if kv_transfer_params else None,
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(token_ids),
            sampling_params=sampling,
            pooling_params=None,
            cache_salt=cache_salt,
            lora_request=lora_request,
            block_hasher=self._block_hasher,
        )
        self.scheduler.add_request(request)
        return request_id

    def schedule(self) -> Step:
        """Let the scheduler decide one step; report it with :meth:`update`, in the order of scheduling."""
        output = self.scheduler.schedule()
        requests = self.scheduler.requests
        sampling = frozenset(
            request_id for request_id in output.num_scheduled_tokens if not requests[request_id].is_prefill_chunk
        )
        return Step(output, sampling)

    def update(self, step: Step, kv_output: Any = None, *, tokens: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Report what the workers did in ``step``.

        Args:
            step: what :meth:`schedule` returned.
            kv_output: the ``KVConnectorOutput`` of the step, from the test or from :meth:`run_worker`.
            tokens: the token that was sampled, by request id; 7 for every request that is not named.

        Returns:
            The ``EngineCoreOutput`` of each request that has one.
        """
        from vllm.v1.outputs import ModelRunnerOutput

        request_ids = list(step.output.num_scheduled_tokens)
        sampled = tokens or {}
        model_output = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=[
                [sampled.get(request_id, 7)] if request_id in step.sampling else [] for request_id in request_ids
            ],
            kv_connector_output=kv_output,
        )
        by_client = self.scheduler.update_from_output(step.output, model_output)
        return {output.request_id: output for batch in by_client.values() for output in batch.outputs}

    def step(self, kv_output: Any = None, *, tokens: Mapping[str, int] | None = None) -> Step:
        """Schedule one step and report it at once, as a synchronous engine does."""
        step = self.schedule()
        self.update(step, kv_output, tokens=tokens)
        return step

    def run_worker(self, worker: Any, step: Step, forward: Callable[[], None] | None = None) -> Any:
        """Call the hooks of a worker-side connector for one step, in vLLM's order.

        Args:
            worker: a connector that was constructed with ``KVConnectorRole.WORKER``.
            step: what :meth:`schedule` returned.
            forward: stands for the forward pass; it may write the pages of the step.

        Returns:
            The ``KVConnectorOutput`` to hand to :meth:`update`.
        """
        from vllm.v1.outputs import KVConnectorOutput

        context = SimpleNamespace(attn_metadata=None, no_compile_layers={})
        worker.handle_preemptions(step.metadata)
        worker.bind_connector_metadata(step.metadata)
        if step.output.has_sync_kv_loads:
            worker.start_load_kv(context)
        if forward is not None and step.output.total_num_scheduled_tokens:
            forward()
        if not step.output.has_sync_kv_loads:
            worker.start_load_kv(context)
        worker.wait_for_save()
        results = worker.get_transfer_results(step.output.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_cache_events=worker.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return output

    def make_worker(self, *, register: bool = True) -> tuple[Any, dict[str, Any]]:
        """Construct the worker side of the configured connector, and the pages it works on.

        Args:
            register: hand the pages to ``register_kv_caches``.
        """
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        worker = KVConnectorFactory.create_connector(self.vllm_config, KVConnectorRole.WORKER, self.kv_cache_config)
        pages = self.allocate_pages()
        if register:
            worker.register_kv_caches(pages)
        return worker, pages

    def allocate_pages(self) -> dict[str, Any]:
        """Allocate zeroed paged tensors as vLLM's model runner does: one storage, one view per layer."""
        import torch
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache

        layout = KVCacheLayout[self.kv_cache_config.kv_cache_layout]
        pages: dict[str, Any] = allocate_kv_cache(self.kv_cache_config, torch.device("cpu"), layout)
        return pages

    def abort(self, request_id: str) -> None:
        """Abort a request, as a client that disconnects does."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def request(self, request_id: str) -> Any:
        """The scheduler's ``Request``, or ``None`` once nothing of it is left."""
        return self.scheduler.requests.get(request_id)

    def status(self, request_id: str) -> str:
        """The name of the request's status, ``"GONE"`` once nothing of it is left."""
        request = self.request(request_id)
        return "GONE" if request is None else str(request.status.name)

    def block_ids(self, request_id: str, *, group: int = 0) -> list[int]:
        """The blocks that a request holds, in the order of its tokens."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[group])

    @property
    def free_blocks(self) -> int:
        """Blocks that the pool could hand out now; cached blocks that nobody holds are among them."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def reset_prefix_cache(self) -> bool:
        """Forget vLLM's own prefix cache; False while a request holds blocks."""
        return bool(self.scheduler.reset_prefix_cache())


def make_scheduler(
    connector_config: Mapping[str, Any] | None,
    *,
    work_dir: Path,
    num_blocks: int = 200,
    block_size: int = 32,
    max_num_batched_tokens: int = 4096,
    max_num_seqs: int = 16,
    enable_prefix_caching: bool = True,
    asynchronous: bool = False,
    sliding_window: int | None = None,
) -> SchedulerHarness:
    """Build a scheduler for a pretended model.

    Args:
        connector_config: arguments of ``KVTransferConfig`` (``kv_connector``, ``kv_connector_module_path``,
            ``kv_connector_extra_config``, …); ``kv_role`` is ``kv_both`` and the failure policy ``recompute`` unless
            they are given. ``None``: no connector.
        work_dir: an existing folder; the model's ``config.json`` is written below it.
        num_blocks: blocks in the pool. Block 0 is vLLM's null block, so one fewer can be used.
        block_size: tokens per block.
        max_num_batched_tokens: tokens per step; a longer prompt is computed in several steps.
        max_num_seqs: requests that may run at once.
        enable_prefix_caching: vLLM's own prefix cache.
        asynchronous: use ``AsyncScheduler``; the next step may then be scheduled before this one is reported.
        sliding_window: make it a hybrid model: a second KV group with a window of so many tokens.
    """
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    model_config = ModelConfig(
        model=str(pretended_model.write_config(work_dir)),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=pretended_model.MAX_CONTEXT_TOKENS,
        enforce_eager=True,
        seed=0,
    )
    cache_config = CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching)
    scheduler_config = SchedulerConfig(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=pretended_model.MAX_CONTEXT_TOKENS,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=asynchronous,
        # Admission otherwise waits until a whole prompt fits, which hides preemption in a small pool.
        scheduler_reserve_full_isl=False,
    )
    transfer_config = None
    if connector_config is not None:
        transfer_config = KVTransferConfig(
            **{"kv_role": "kv_both", "kv_load_failure_policy": "recompute", **connector_config}
        )
    vllm_config = VllmConfig(
        model_config=model_config,
        cache_config=cache_config,
        scheduler_config=scheduler_config,
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer_config,
    )
    # The CPU platform turns asynchronous scheduling off; here no CPU worker takes part.
    vllm_config.scheduler_config.async_scheduling = asynchronous
    cache_config.num_gpu_blocks = num_blocks
    cache_config.kv_cache_layout = "LBHNC"

    kv_cache_config = pretended_model.kv_cache_config(num_blocks, block_size, sliding_window)
    hash_function = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    scheduler_class = AsyncScheduler if asynchronous else Scheduler
    scheduler = scheduler_class(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=block_size,
        hash_block_size=block_size,
        log_stats=True,
    )
    hasher = get_request_block_hasher(block_size, hash_function)
    return SchedulerHarness(scheduler, vllm_config, kv_cache_config, hasher)
