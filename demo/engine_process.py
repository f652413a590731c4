"""One vLLM process of the demo: starts an engine, answers the prompt, and reports over a pipe.

Run by ``demo/run.py`` as ``python -m demo.engine_process SPEC_JSON FD``. Every report is one JSON line on file
descriptor ``FD``: ``{"event": "ready"}``, ``{"event": "progress", "done": …, "total": …}``, ``{"event": "answer", …}``,
``{"event": "status", …}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

BATCH_TOKENS = 512
"""Prompt tokens per engine step. Divides the shared prefix, so that cold and warm runs split the prompt alike, and bf16
results are equal to the bit."""


def main() -> int:
    """Do what the specification says and end."""
    spec, descriptor = json.loads(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(descriptor, "w", encoding="utf-8", buffering=1) as pipe:

        def report(event: str, **facts: Any) -> None:
            pipe.write(json.dumps({"event": event, **facts}) + "\n")

        engine = _start(spec)
        # The first forward pass of a process maps the weights into memory: no part of what is measured here.
        _ask(engine, spec["token_ids"][:8], 1, "warm-up", lambda *_, **__: None)
        report("ready")
        for number in range(spec["questions"]):
            report("answer", **_ask(engine, spec["token_ids"], spec["max_tokens"], f"question-{number}", report))
        if spec["storage"] is not None:
            report("status", **_storage_status())
        engine.engine_core.shutdown()
    return 0


def _start(spec: dict[str, Any]) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {}
    if spec["storage"] is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "L2KitConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": spec["storage"],
        }
    llm = LLM(
        model=spec["checkpoint"],
        dtype="bfloat16",
        block_size=spec["block_size"],
        max_model_len=4096,
        max_num_batched_tokens=BATCH_TOKENS,
        enforce_eager=True,
        seed=0,
        **options,
    )
    return llm.llm_engine


def _ask(engine: Any, token_ids: list[int], max_tokens: int, request_id: str, report: Any) -> dict[str, Any]:
    """Answer greedily; measure the time from handing the prompt over to the first token."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, min_tokens=max_tokens, logprobs=1)
    started = time.perf_counter()
    engine.add_request(request_id, {"prompt_token_ids": token_ids}, parameters)
    ttft_s, last, computed = 0.0, None, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = output
            if not ttft_s and output.outputs[0].token_ids:
                ttft_s = time.perf_counter() - started
        if not ttft_s:
            before, computed = computed, _computed_tokens(engine)
            if computed != before:
                report("progress", done=computed, total=len(token_ids))
    assert last is not None
    answer = last.outputs[0]
    return {
        "ttft_s": ttft_s,
        "token_ids": list(answer.token_ids),
        "text": answer.text,
        # repr of a float is exact: bit-equal log-probabilities, and only those, are equal texts
        "logprobs": [repr(step[token].logprob) for step, token in zip(answer.logprobs, answer.token_ids, strict=True)],
        "cached_tokens": last.num_cached_tokens or 0,
    }


def _computed_tokens(engine: Any) -> int:
    """Prompt tokens computed so far, straight from the scheduler in this process."""
    requests = engine.engine_core.engine_core.scheduler.requests
    return sum(request.num_computed_tokens for request in requests.values())


def _storage_status() -> dict[str, Any]:
    import msgspec

    from l2kit_vllm.embedded import engines

    (embedded,) = engines().values()
    embedded.drain()
    return {**embedded.status(), "requests": [msgspec.structs.asdict(record) for record in embedded.records]}


if __name__ == "__main__":
    raise SystemExit(main())
