"""The inside of a `VLLMProcess`: a vLLM engine that does what it is told, one command at a time.

Commands come as JSON lines on stdin. A reply is a length (4 bytes, little-endian), that much JSON, and then the
attachments whose sizes the JSON names. At the end of stdin the process exits as any program does.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec


class Worker:
    """One engine and its requests. Public methods are commands."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.attachments: list[bytes] = []
        self._internal_ids: dict[str, str] = {}  # vLLM adds random characters to each request id
        self._outputs: dict[str, Any] = {}
        self._block_tables: dict[str, list[int]] = {}  # by vLLM's id

    # --- commands ---------------------------------------------------------------------------------

    def open(self, options: dict[str, Any]) -> None:
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        ensure_kv_transfer_shutdown()  # vLLM keeps the worker side of an engine that did not start
        self.engine = LLMEngine.from_engine_args(EngineArgs(**options))
        self._watch_block_tables()

    def submit(self, request_id: str, prompt: list[int], cache_salt: str | None, sampling: dict[str, Any]) -> None:
        from vllm import SamplingParams

        question: dict[str, Any] = {"prompt_token_ids": prompt}
        if cache_salt is not None:
            question["cache_salt"] = cache_salt
        parameters = SamplingParams(
            **{"temperature": 0.0, "logprobs": 3, "detokenize": False, "ignore_eos": True, **sampling}
        )
        self._internal_ids[request_id] = self.engine.add_request(request_id, question, parameters)

    def step(self, count: int) -> None:
        for _ in range(count):
            for output in self.engine.step():
                self._outputs[output.request_id] = output

    def finish(self, request_ids: list[str], timeout_s: float) -> list[dict[str, Any]]:
        give_up = time.monotonic() + timeout_s
        while not all(self._is_finished(request_id) for request_id in request_ids):
            if time.monotonic() > give_up:
                waiting = [request_id for request_id in request_ids if not self._is_finished(request_id)]
                raise TimeoutError(f"{waiting} not finished within {timeout_s} s")
            self.step(1)
        return [self._answer(self._outputs[request_id]) for request_id in request_ids]

    def finished(self, request_id: str) -> bool:
        return self._is_finished(request_id)

    def state(self, request_id: str) -> str:
        """VLLM's state of a request: WAITING, RUNNING, PREEMPTED…; GONE when the scheduler has forgotten it."""
        request = self.scheduler.requests.get(self._internal_ids[request_id])
        return "GONE" if request is None else str(request.status.name)

    def abort(self, request_ids: list[str]) -> None:
        self.engine.abort_request(request_ids)

    def records(self, request_id: str) -> list[dict[str, Any]]:
        internal = self._internal_ids[request_id]
        found = [msgspec.structs.asdict(r) for r in self.embedded.records if r.request_id == internal]
        names = ("prompt_tokens", "local_hit", "external_hit", "read", "written")
        return [{name: record[name] for name in names} for record in found]

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.embedded.status()
        return status

    def drain(self, timeout_s: float) -> None:
        self.embedded.drain(timeout_s)

    def block_table(self, request_id: str) -> list[int]:
        return self._block_tables[self._internal_ids[request_id]]

    def pages(self, block_ids: list[int]) -> None:
        import torch

        for tensor in self.kv_tensors:
            pages = tensor[torch.tensor(block_ids)].contiguous()
            self.attachments.append(pages.view(torch.uint8).numpy().tobytes())

    def swap_blocks(self, one: int, other: int) -> None:
        """Exchange the contents of two blocks in every layer."""
        for tensor in self.kv_tensors:
            tensor[[one, other]] = tensor[[other, one]].clone()

    def fill_blocks(self, block_ids: list[int], value: float) -> None:
        """Overwrite blocks in every layer."""
        for tensor in self.kv_tensors:
            tensor[block_ids] = value

    def reset_prefix_cache(self, running: bool = False, connector: bool = False) -> bool:
        done: bool = self.engine.reset_prefix_cache(running, connector)
        return done

    def clear_l1(self) -> None:
        l1 = self.embedded.storage.l1
        for key in list(l1._readable):
            l1.remove(key)

    def leftovers(self) -> dict[str, int]:
        """What should be zero when no request is there: only what is not zero is told."""
        embedded, side = self.embedded, self.scheduler_side
        usage = embedded.storage.l1.usage()
        pool = self.scheduler.kv_cache_manager.block_pool
        found = {
            "staged": len(embedded.staged),
            "failed_loads": len(embedded.failed_loads),
            "pending_saves": embedded.pending_saves,
            "requests of the scheduler side": len(side._requests),
            "loads not ordered": len(side._loads_to_order),
            "L1 leases": usage.leases,
            "L1 writes": usage.writing,
            "open prefetches": len(embedded.storage._open_prefetches),
            "adapter leases": sum(tier.adapter.held_leases for tier in embedded.storage.tiers),
            "vLLM requests": len(self.scheduler.requests),
            "vLLM blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "hook errors": embedded.counters.snapshot()["hook_errors"],
        }
        return {name: count for name, count in found.items() if count}

    def open_engines(self) -> int:
        """How many embedded engines are open."""
        from l2kit_vllm.embedded import engines

        return len(engines())

    def run(self, module: str, name: str, arguments: dict[str, Any]) -> Any:
        return getattr(importlib.import_module(module), name)(self, **arguments)

    # --- for commands and for functions that tests run in here -------------------------------------

    @property
    def core(self) -> Any:
        """VLLM's `EngineCore`."""
        return self.engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """VLLM's scheduler."""
        return self.core.scheduler

    @property
    def model_runner(self) -> Any:
        """VLLM's model runner."""
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def kv_tensors(self) -> list[Any]:
        """The paged KV of each layer as vLLM registered it, found without l2kit's help."""
        tensors: list[Any] = list(self.model_runner.kv_caches)
        return tensors

    @property
    def embedded(self) -> Any:
        """The one embedded engine of this process."""
        from l2kit_vllm.embedded import engines

        (embedded,) = engines().values()
        return embedded

    @property
    def scheduler_side(self) -> Any:
        """l2kit's scheduler side."""
        return self.scheduler.connector._scheduler

    @property
    def worker_side(self) -> Any:
        """l2kit's worker side."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    def internal_id(self, request_id: str) -> str:
        """VLLM's id of a request."""
        return self._internal_ids[request_id]

    # --- inner ------------------------------------------------------------------------------------

    def _watch_block_tables(self) -> None:
        """Note the blocks of each request after each scheduling: when a request ends, vLLM forgets them."""
        scheduler, schedule = self.scheduler, self.scheduler.schedule

        def watched(*arguments: Any, **options: Any) -> Any:
            output = schedule(*arguments, **options)
            for request in scheduler.running:
                (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
                self._block_tables[request.request_id] = list(blocks)
            return output

        scheduler.schedule = watched

    def _is_finished(self, request_id: str) -> bool:
        output = self._outputs.get(request_id)
        return output is not None and output.finished

    @staticmethod
    def _answer(output: Any) -> dict[str, Any]:
        completion = output.outputs[0]
        return {
            "request_id": output.request_id,
            "tokens": list(completion.token_ids),
            "logprobs": [
                {str(token): value.logprob for token, value in position.items()}
                for position in completion.logprobs or ()
            ],
            "cached": output.num_cached_tokens or 0,
            "finish_reason": str(completion.finish_reason),
        }


def main(arguments: Sequence[str]) -> None:
    """Serve commands until stdin ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    worker = Worker()
    with os.fdopen(int(arguments[0]), "wb") as replies:
        for line in sys.stdin:
            message = json.loads(line)
            worker.attachments = []
            reply = _run(getattr(worker, message["command"]), message["arguments"])
            attachments = worker.attachments if reply["error"] is None else []
            head = json.dumps({**reply, "attachments": [len(part) for part in attachments]}).encode()
            replies.write(len(head).to_bytes(4, "little") + head + b"".join(attachments))
            replies.flush()


def _run(command: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": command(**arguments), "error": None}
    except Exception as error:  # the test decides what it means
        traceback.print_exc()
        return {"result": None, "error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(sys.argv[1:])
