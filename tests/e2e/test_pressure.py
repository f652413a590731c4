"""Prompts computed in several steps, and more requests than there are blocks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.e2e import sabotage
from tests.e2e.conftest import Start
from tests.e2e.tiny_models import TinyModel
from tests.e2e.vllm_process import CHUNK_SIZE, Record, VLLMProcess

NewPrompt = Callable[[int], list[int]]

EVEN = 3 * CHUNK_SIZE + 20


class Engines(NamedTuple):
    """``small`` computes prompts in steps of 160 tokens and has few blocks; ``plain`` has no l2kit."""

    small: VLLMProcess
    large: VLLMProcess
    plain: VLLMProcess


@pytest.fixture(scope="module")
def engines(start: Start, llama_fp32: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    storage = {"tiers": [f"file://{tmp_path_factory.mktemp('tier')}"]}
    few = {"max_num_batched_tokens": 160, "num_gpu_blocks_override": 44, "max_model_len": 1024, "max_num_seqs": 8}
    return Engines(
        start("small", llama_fp32, storage=storage, **few),
        start("large", llama_fp32, storage=storage),
        start("plain", llama_fp32, storage=None, **few),
    )


@pytest.fixture(autouse=True)
def nothing_stays(engines: Engines) -> Iterator[None]:
    yield
    for process in (engines.small, engines.large):
        process.drain()
        assert process.leftovers() == {}


def test_prompt_computed_in_several_steps(engines: Engines, new_prompt: NewPrompt) -> None:
    small, large, plain = engines
    prompt = new_prompt(EVEN)
    cold = small.ask(prompt)
    source = small.pages(cold.request_id, 3 * CHUNK_SIZE)
    small.drain()

    restored = large.ask(prompt)

    assert small.counter("saved_tokens") == 3 * CHUNK_SIZE
    assert large.record(restored.request_id) == Record(EVEN, 0, 768, 768, 768)
    assert large.pages(restored.request_id, 3 * CHUNK_SIZE).differences(source) == []
    assert restored.tokens == cold.tokens == plain.ask(prompt).tokens


def test_restored_and_then_computed_in_several_steps(engines: Engines, new_prompt: NewPrompt) -> None:
    small, large, plain = engines
    prompt = new_prompt(950)
    source_answer = large.ask(prompt[:520])
    source = large.pages(source_answer.request_id, 2 * CHUNK_SIZE)
    large.drain()

    answer = small.ask(prompt)

    assert small.record(answer.request_id) == Record(950, 0, 512, 512, 512)
    pages = small.pages(answer.request_id, 3 * CHUNK_SIZE)
    assert pages.differences(source, tokens=2 * CHUNK_SIZE) == []
    assert answer.tokens == plain.ask(prompt).tokens
    small.drain()
    again = large.ask(prompt)  # the third chunk was completed in the third step
    assert large.pages(again.request_id, 3 * CHUNK_SIZE).differences(pages) == []


def test_preempted_requests_answer_as_ever(engines: Engines, new_prompt: NewPrompt) -> None:
    small, _, plain = engines
    prompts = [new_prompt(length) for length in (300, 530, 280, 400, 300)]
    expected = [plain.ask(prompt, max_tokens=90).tokens for prompt in prompts]

    for round_number in range(2):  # computed, then restored
        request_ids = [small.submit(prompt, max_tokens=90) for prompt in prompts]
        preempted = 0
        while not all(small.call("finished", request_id=request_id) for request_id in request_ids):
            small.step(5)
            preempted = max(preempted, small.run(sabotage.preemptions))
        answers = small.finish(*request_ids)

        assert preempted > 0
        assert [answer.tokens for answer in answers] == expected, round_number
        small.drain()
        assert small.reset_prefix_cache()
    assert small.counter("written_tokens") > 0
    assert small.counter("load_failures") == 0


def test_all_running_requests_preempted_at_once(engines: Engines, new_prompt: NewPrompt) -> None:
    small, _, plain = engines
    prompts = [new_prompt(300), new_prompt(420)]
    expected = [plain.ask(prompt, max_tokens=40).tokens for prompt in prompts]
    request_ids = [small.submit(prompt, max_tokens=40) for prompt in prompts]
    small.step_until(lambda: all(small.call("state", request_id=one) == "RUNNING" for one in request_ids))
    small.step(5)

    assert small.reset_prefix_cache(running=True)

    assert [answer.tokens for answer in small.finish(*request_ids)] == expected
    for request_id in request_ids:
        first, second = small.records(request_id)
        assert first["written"] == 0
        assert (second["local_hit"], second["read"], second["written"]) == (0, 0, 256)  # from L1
