"""Multi-head latent attention: one row of latents per token.

vLLM's CPU backend has no prefix cache for it, save on processors with AMX, and attends to a cached prefix by another
path than to a computed one, which moves log-probabilities by up to 0.2 even in fp32. So there is no reference but the
bytes, and another load.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import tiny_models
from tests.e2e.conftest import Start
from tests.e2e.vllm_process import CHUNK_SIZE, Record, VLLMProcess

EVEN = 3 * CHUNK_SIZE + 12


@pytest.fixture(scope="module")
def engines(start: Start, models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[VLLMProcess, VLLMProcess]:
    model = tiny_models.make_mla(models)
    storage = {"tiers": [f"file://{tmp_path_factory.mktemp('tier')}"]}
    return start("first", model, storage=storage), start("second", model, storage=storage)


def test_second_process_restores_what_the_first_computed(engines: tuple[VLLMProcess, VLLMProcess]) -> None:
    first, second = engines
    prompt = tiny_models.random_prompt(EVEN)
    cold = first.ask(prompt)
    first.drain()

    restored = second.ask(prompt)
    pages = second.pages(restored.request_id, 3 * CHUNK_SIZE)
    again = second.ask(prompt)

    assert second.record(restored.request_id) == Record(EVEN, local_hit=0, external_hit=768, read=768, written=768)
    from_l1 = Record(EVEN, local_hit=0, external_hit=768, read=0, written=768)
    own_cache = Record(EVEN, local_hit=768, external_hit=0, read=0, written=0)  # of the backend for AMX
    assert second.record(again.request_id) in (from_l1, own_cache)
    source = first.pages(cold.request_id, 3 * CHUNK_SIZE)
    assert not source.is_blank
    assert pages.differences(source) == []
    assert second.pages(again.request_id, 3 * CHUNK_SIZE).differences(source) == []
    assert restored.tokens == again.tokens
    assert restored.logprobs == again.logprobs
    for process in engines:
        process.drain()
        assert process.leftovers() == {}
