"""The canonical representation: processes share KV though their blocks have different sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.conftest import Start
from tests.e2e.tiny_models import TinyModel
from tests.e2e.vllm_process import CHUNK_SIZE, Record, VLLMProcess

EVEN = 3 * CHUNK_SIZE + 20


@pytest.fixture(scope="module")
def engines(
    start: Start, llama_fp32: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[VLLMProcess, VLLMProcess]:
    storage = {"tiers": [f"file://{tmp_path_factory.mktemp('tier')}"], "representation": "canonical"}
    return (
        start("blocks-of-32", llama_fp32, storage=storage),
        start("blocks-of-64", llama_fp32, storage=storage, block_size=64),
    )


def test_blocks_of_another_size(
    engines: tuple[VLLMProcess, VLLMProcess], new_prompt: Callable[[int], list[int]]
) -> None:
    small, large = engines
    prompt = new_prompt(EVEN)
    cold = small.ask(prompt)
    source = small.pages(cold.request_id, 3 * CHUNK_SIZE)
    small.drain()

    restored = large.ask(prompt)

    assert large.record(restored.request_id) == Record(EVEN, local_hit=0, external_hit=768, read=768, written=768)
    assert restored.tokens == cold.tokens
    other = [*prompt[:512], *new_prompt(276)]
    computed = large.ask(other)
    large.drain()
    small.forget()
    back = small.ask(prompt)  # through canonical bytes and back, the same pages
    assert small.pages(back.request_id, 3 * CHUNK_SIZE).differences(source) == []
    assert small.ask(other).tokens == computed.tokens
    for process in engines:
        process.drain()
        assert process.leftovers() == {}
