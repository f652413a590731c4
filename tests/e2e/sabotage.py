"""Functions that tests run inside a vLLM process with `VLLMProcess.run`: looking deeper, and breaking things."""

from __future__ import annotations

import time
from typing import Any

import anyio
import msgspec

from tests.e2e.vllm_worker import Worker


def object_names(worker: Worker, prompt: list[int], salt: str | None = None) -> list[str]:
    """Paths of the objects of a prompt's chunks in a ``file://`` tier, relative to its folder."""
    from l2kit.engine import RequestIdentity
    from l2kit_posix.names import object_path

    chunks = worker.embedded.engine.chunks(prompt, RequestIdentity(salt=salt))
    return [object_path("objects", chunk.key) for chunk in chunks]


def fail_next_scatter(worker: Worker) -> None:
    """Let the next copy into pages raise."""
    pages = worker.worker_side._pages
    right = pages.scatter_many

    def broken(*arguments: Any, **options: Any) -> None:
        pages.scatter_many = right
        raise RuntimeError("a broken scatter")

    pages.scatter_many = broken


def watch_failed_blocks(worker: Worker) -> None:
    """Note from now on which blocks are reported to vLLM as not filled; see :func:`failed_blocks`."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    right = connector.get_block_ids_with_load_errors
    connector.reported = []

    def watched() -> set[int]:
        failed: set[int] = right()
        if failed:
            connector.reported.append(sorted(failed))
        return failed

    connector.get_block_ids_with_load_errors = watched


def failed_blocks(worker: Worker) -> list[list[int]]:
    """Each report since :func:`watch_failed_blocks`."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    reported: list[list[int]] = connector.reported
    return reported


def fail_next_forward(worker: Worker) -> None:
    """Let the model's next forward pass raise when it is half through."""
    layers = worker.model_runner.model.model.layers
    middle = layers[len(layers) // 2]

    def broken(*arguments: Any, **options: Any) -> None:
        del middle.forward
        raise RuntimeError("a broken forward pass")

    middle.forward = broken


def stall_loads(worker: Worker, after: int) -> None:
    """Let the tier load so many objects and then hold up the rest until :func:`release_loads`."""
    adapter = worker.embedded.storage.tiers[0].adapter
    adapter.capabilities = msgspec.structs.replace(adapter.capabilities, group_keys=1)  # one by one, to stop in between
    right = adapter.load_one
    adapter.begun, adapter.stalled = 0, True

    async def stalling(*arguments: Any) -> Any:
        adapter.begun += 1
        if adapter.begun > after:
            while adapter.stalled:  # noqa: ASYNC110 - set from another thread
                await anyio.sleep(0.002)
        return await right(*arguments)

    adapter.load_one = stalling


def step_until_stalled(worker: Worker, timeout_s: float = 30.0) -> int:
    """Step until loads are held up; how many objects had been loaded before."""
    tier = worker.embedded.storage.tiers[0]
    give_up = time.monotonic() + timeout_s
    loaded = tier.counters.snapshot()["loaded_objects"]
    while tier.adapter.begun < 4 or tier.counters.snapshot()["loaded_objects"] - loaded < 3:
        if time.monotonic() > give_up:
            raise TimeoutError(f"{tier.adapter.begun} loads begun")
        worker.step(1)
    found: int = tier.counters.snapshot()["loaded_objects"] - loaded
    return found


def release_loads(worker: Worker) -> None:
    """Undo :func:`stall_loads`."""
    adapter = worker.embedded.storage.tiers[0].adapter
    adapter.stalled = False
    del adapter.load_one


def preemptions(worker: Worker) -> int:
    """How often the requests that are here now have been preempted."""
    return sum(request.num_preemptions for request in worker.scheduler.requests.values())
