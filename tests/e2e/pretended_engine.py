"""An engine without a model: vLLM's real scheduler, both sides of `L2KitConnector`, and KV whose every byte is known.

In place of the model runner and the model stands a `PretendedRunner`. It keeps the state that vLLM's runner keeps, and
writes for each token a KV that is a function of all tokens up to it. Whatever a step reads is compared with what must
be there; a step that reads anything else computes rubbish from then on, as a real model would, and its tokens show it.
So *no* wrong page stays unnoticed, two swapped blocks included, and a step takes a few milliseconds.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from l2kit_vllm import embedded as embedded_engines
from l2kit_vllm.connector import L2KitConnector
from tests.e2e import pretended_model
from tests.e2e.scheduler_harness import SchedulerHarness, Step, make_scheduler

Bytes = npt.NDArray[np.uint8]

CHUNK_SIZE: Final = 64
BLOCK_SIZE: Final = 16
RUBBISH: Final = -13
"""The token that a model samples after it has read KV that is not that of its prompt."""


class WorkerFirst(L2KitConnector):
    """The scheduler side, and before it the worker side: the order in which vLLM makes them in one process."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        _declare_layers(vllm_config, kv_cache_config)
        self.worker = L2KitConnector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
        self.pages = SchedulerHarness.allocate_pages(SimpleNamespace(kv_cache_config=kv_cache_config))  # type: ignore[arg-type]
        self.worker.register_kv_caches(self.pages)
        super().__init__(vllm_config, role, kv_cache_config)


def _declare_layers(vllm_config: Any, kv_cache_config: Any) -> None:
    """Give vLLM's configuration the layers that a model would have registered."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    class Layer(AttentionLayerBase):
        isa = "vec"
        kv_cache_dtype = "auto"

        def get_attn_backend(self) -> Any:
            return CPUAttentionBackend

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            raise NotImplementedError

    for group in kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            vllm_config.compilation_config.static_forward_context[name] = Layer()


@lru_cache(maxsize=1 << 17)
def _next_state(state: bytes, token: int) -> bytes:
    return hashlib.blake2b(state + token.to_bytes(8, "little", signed=True), digest_size=16).digest()


@lru_cache(maxsize=1 << 14)
def _slot(state: bytes) -> Bytes:
    """What a token's slot holds: ``[layer, head, bytes]``."""
    shape = (pretended_model.LAYERS, pretended_model.KV_HEADS, 4 * pretended_model.HEAD_SIZE)
    content = np.frombuffer(hashlib.shake_128(state).digest(int(np.prod(shape))), np.uint8)
    return content.reshape(shape)


def expected_token(token_ids: Sequence[int]) -> int:
    """What the model samples after these tokens."""
    state = b""
    for token in token_ids:
        state = _next_state(state, token)
    return 8 + int.from_bytes(state[:4], "little") % 1000


def expected_answer(prompt: Sequence[int], tokens: int) -> list[int]:
    """What the model answers."""
    answer: list[int] = []
    for _ in range(tokens):
        answer.append(expected_token([*prompt, *answer]))
    return answer


@dataclass
class _Running:
    """What a model runner remembers of a request."""

    tokens: list[int]
    prompt_tokens: int
    blocks: list[int]
    states: list[bytes] = field(default_factory=list)  # of the tokens that were computed, right or rubbish


class PretendedRunner:
    """Stands for vLLM's model runner (V1) and the model in it."""

    def __init__(self, pages: Mapping[str, Any]) -> None:
        import torch

        self._pages: list[Bytes] = [tensor.view(torch.uint8).numpy() for tensor in pages.values()]
        self._requests: dict[str, _Running] = {}
        self.wrong_reads: list[str] = []

    def forward(self, output: Any) -> dict[str, int]:
        """Compute one step; the token that each request samples if its step is a sampling one."""
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            prompt = list(new.prompt_token_ids)
            self._requests[new.req_id] = _Running(prompt, len(prompt), list(new.block_ids[0]))
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            request, blocks = self._requests[request_id], cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                request.blocks = list(blocks[0])
            elif blocks is not None:
                request.blocks += blocks[0]
            outputs = cached.num_output_tokens[index]
            if request_id in cached.all_token_ids and outputs:
                # Known to the scheduler; placeholders are of tokens that we have sampled ourselves.
                known = cached.all_token_ids[request_id]
                request.tokens = [*known, *request.tokens[len(known) :]]
            del request.tokens[request.prompt_tokens + outputs :]
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        # Layer by layer in a real model: what one request writes in a step, another one may read in the same step.
        order = sorted(output.num_scheduled_tokens, key=lambda request_id: computed[request_id])
        read = {request_id: self._read(request_id, computed[request_id], output, computed) for request_id in order}
        sampled: dict[str, int] = {}
        for request_id in order:
            sampled[request_id] = self._compute(
                request_id, computed[request_id], output.num_scheduled_tokens[request_id], right=read[request_id]
            )
        return sampled

    def state_of(self, tokens: Sequence[int]) -> bytes:
        """The state after these tokens."""
        state = b""
        for token in tokens:
            state = _next_state(state, token)
        return state

    def _read(self, request_id: str, computed: int, output: Any, all_computed: Mapping[str, int]) -> bool:
        """Whether everything that a request builds on is what it must be, or will be written in this very step."""
        request = self._requests[request_id]
        written = {
            block
            for other, count in output.num_scheduled_tokens.items()
            for block in self._requests[other].blocks[
                all_computed[other] // BLOCK_SIZE : -(-(all_computed[other] + count) // BLOCK_SIZE)
            ]
        }
        state, wrong = b"", []
        for position, token in enumerate(request.tokens[:computed]):
            state = _next_state(state, token)
            block = request.blocks[position // BLOCK_SIZE]
            if block in written and position // BLOCK_SIZE < computed // BLOCK_SIZE:
                continue
            slot = position % BLOCK_SIZE
            content = np.stack([pages[block, :, slot, :] for pages in self._pages])
            if not np.array_equal(content, _slot(state)):
                wrong.append(position)
        if wrong:
            self.wrong_reads.append(f"{request_id}: {len(wrong)} of {computed} tokens, first {wrong[0]}")
        return not wrong

    def _compute(self, request_id: str, computed: int, count: int, *, right: bool) -> int:
        request = self._requests[request_id]
        state = self.state_of(request.tokens[:computed]) if right else b"rubbish"
        for position in range(computed, computed + count):
            token = request.tokens[position] if position < len(request.tokens) else RUBBISH
            state = _next_state(state, token)
            content = _slot(state)
            block, slot = request.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            for layer, pages in enumerate(self._pages):
                pages[block, :, slot, :] = content[layer]
        if computed + count < len(request.tokens):
            return RUBBISH  # a part of a prompt: nothing is sampled
        token = 8 + int.from_bytes(state[:4], "little") % 1000 if right else RUBBISH
        request.tokens.append(token)
        return token


class PretendedEngine:
    """Scheduler, connector and runner, driven step by step. A context manager that closes the storage.

    Attributes:
        harness: vLLM's scheduler.
        connector: the scheduler side; ``connector.worker`` is the worker side.
        runner: the model.
        answers: the tokens of each request so far.
        ended: why each finished request ended.
    """

    def __init__(
        self,
        work_dir: Path,
        *,
        storage: Mapping[str, Any] | None = None,
        connector: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
        **scheduler: Any,
    ) -> None:
        """``storage`` is merged over small defaults; ``scheduler`` is for `make_scheduler`."""
        config = {
            "kv_connector": "WorkerFirst",
            "kv_connector_module_path": __name__,
            **(connector or {}),
            "kv_connector_extra_config": {
                "chunk_size": CHUNK_SIZE,
                "model_revision": "pretended",
                "l1": {"max_bytes": "8MiB"},
                **(storage or {}),
            },
        }
        self.harness: Final = make_scheduler(
            config, work_dir=work_dir, block_size=BLOCK_SIZE, asynchronous=asynchronous, **scheduler
        )
        self.connector: Final = self.harness.connector
        self.runner: Final = PretendedRunner(self.connector.pages)
        self.answers: Final[dict[str, list[int]]] = {}
        self.ended: Final[dict[str, str]] = {}
        self._asynchronous = asynchronous
        self._unreported: deque[tuple[Step, Any, dict[str, int]]] = deque()
        self.before_forward: Callable[[Step], None] = lambda _: None
        self.after_forward: Callable[[Step], None] = lambda _: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connector.worker.shutdown()
        self.connector.shutdown()
        assert self.embedded_id not in embedded_engines.engines()

    @property
    def embedded_id(self) -> str:
        """VLLM's id of this engine."""
        return str(self.harness.vllm_config.kv_transfer_config.engine_id)

    @property
    def embedded(self) -> embedded_engines.EmbeddedEngine:
        """The storage behind the connector."""
        return embedded_engines.engines()[self.embedded_id]

    @property
    def side(self) -> Any:
        """l2kit's scheduler side."""
        return self.connector._scheduler

    @property
    def worker_side(self) -> Any:
        """l2kit's worker side."""
        return self.connector.worker._worker

    def counter(self, name: str) -> int:
        """One of the embedded engine's counters."""
        return int(self.embedded.counters.snapshot()[name])

    def add(self, prompt: Sequence[int], **options: Any) -> str:
        """Queue a request; its id."""
        request_id = self.harness.add_request(prompt, **options)
        self.answers[request_id] = []
        return request_id

    def abort(self, request_id: str) -> None:
        """Abort a request."""
        self.harness.abort(request_id)
        self.ended.setdefault(request_id, "aborted")

    def step(self) -> Step | None:
        """One step, as `EngineCore.step` does it, or, asynchronously, as `step_with_batch_queue` does."""
        step = None
        if self.harness.scheduler.has_requests():
            step = self.harness.schedule()
            self._execute(step)
            executed = step.output.total_num_scheduled_tokens > 0
            room = len(self._unreported) < (2 if self._asynchronous else 1)
            if room and (executed or self.harness.scheduler.has_requests()):
                return step
        if self._unreported:
            self._report()
        return step

    def settle(self) -> None:
        """Report what has been executed."""
        while self._unreported:
            self._report()

    def run(self, *, limit: int = 3000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.harness.scheduler.has_requests() and not self._unreported:
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps: {dict(self.harness.scheduler.requests)}")

    def ask(self, prompt: Sequence[int], **options: Any) -> str:
        """Queue a request and run until nothing is left to do; its id."""
        request_id = self.add(prompt, **options)
        self.run()
        return request_id

    def record(self, request_id: str) -> tuple[int, int, int, int]:
        """Local hit, external hit, read, written, when a request was last scheduled."""
        found = [record for record in self.embedded.records if record.request_id == request_id]
        assert found, f"no record of {request_id}"
        return found[-1].local_hit, found[-1].external_hit, found[-1].read, found[-1].written

    def leftovers(self) -> dict[str, int]:
        """What should be zero when there is no request: only what is not zero is told."""
        self.embedded.drain()
        usage = self.embedded.storage.l1.usage()
        found = {
            "staged": len(self.embedded.staged),
            "failed loads": len(self.embedded.failed_loads),
            "pending saves": self.embedded.pending_saves,
            "requests of the scheduler side": len(self.side._requests),
            "loads not ordered": len(self.side._loads_to_order),
            "L1 leases": usage.leases,
            "L1 writes": usage.writing,
            "adapter leases": sum(tier.adapter.held_leases for tier in self.embedded.storage.tiers),
            "vLLM requests": len(self.harness.scheduler.requests),
            "vLLM blocks": self.harness.kv_cache_config.num_blocks - 1 - self.harness.free_blocks,
            "hook errors": self.counter("hook_errors"),
        }
        return {name: count for name, count in found.items() if count}

    def wrong_objects(self, *prompts: Sequence[int]) -> list[str]:
        """Which objects in L1 do not hold the KV of these prompts."""
        assert self.embedded.engine is not None
        wrong: list[str] = []
        for number, prompt in enumerate(prompts):
            for chunk in self.embedded.engine.chunks(prompt):
                lease = self.embedded.storage.l1.acquire(chunk.key, owner="test")
                if lease is None:
                    continue
                if lease.obj.tobytes() != self._expected_object(prompt, chunk.start, chunk.end):
                    wrong.append(f"prompt {number}, tokens {chunk.start} to {chunk.end}")
                lease.release()
        return wrong

    def _expected_object(self, prompt: Sequence[int], start: int, end: int) -> bytes:
        state = self.runner.state_of(prompt[:start])
        slots = []
        for token in prompt[start:end]:
            state = _next_state(state, token)
            slots.append(_slot(state))
        tokens = np.stack(slots)  # [token, layer, head, bytes]
        blocks = tokens.reshape(-1, BLOCK_SIZE, *tokens.shape[1:])
        return np.ascontiguousarray(blocks.transpose(2, 0, 3, 1, 4)).tobytes()  # [layer, block, head, token, bytes]

    def _execute(self, step: Step) -> None:
        sampled: dict[str, int] = {}

        def forward() -> None:
            self.before_forward(step)
            sampled.update(self.runner.forward(step.output))
            self.after_forward(step)

        kv_output = self.harness.run_worker(self.connector.worker, step, forward)
        if not step.output.total_num_scheduled_tokens:
            self.runner.forward(step.output)
        self._unreported.append((step, kv_output, sampled))

    def _report(self) -> None:
        step, kv_output, sampled = self._unreported.popleft()
        outputs = self.harness.update(step, None if kv_output.is_empty() else kv_output, tokens=sampled)
        for request_id, output in outputs.items():
            self.answers[request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ended[request_id] = str(output.finish_reason)
