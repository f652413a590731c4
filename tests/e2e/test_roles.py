"""Producers that only store, consumers that only load, and the two ways to name the connector."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e import sabotage
from tests.e2e.conftest import Start
from tests.e2e.tiny_models import TinyModel
from tests.e2e.vllm_process import CHUNK_SIZE, Record, VLLMProcess

NewPrompt = Callable[[int], list[int]]

EVEN = 3 * CHUNK_SIZE + 20


class Engines(NamedTuple):
    """The producer finds the connector by its module, the consumer by vLLM's plugin entry point."""

    producer: VLLMProcess
    consumer: VLLMProcess
    folder: Path


@pytest.fixture(scope="module")
def engines(start: Start, llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = tmp_path_factory.mktemp("tier")
    configuration = tmp_path_factory.mktemp("config") / "l2kit.toml"
    configuration.write_text(f'chunk_size = {CHUNK_SIZE}\ntiers = ["file://{folder}"]\n[l1]\nmax_bytes = "64MiB"\n')
    by_module = {"kv_role": "kv_producer", "kv_connector_module_path": "l2kit_vllm.connector"}
    by_file = {"config": str(configuration), "chunk_size": None, "l1": None}
    return Engines(
        start("producer", llama, storage={"tiers": [f"file://{folder}"]}, connector=by_module),
        start("consumer", llama, storage=by_file, connector={"kv_role": "kv_consumer"}),
        folder,
    )


def test_producer_stores_and_consumer_loads(engines: Engines, new_prompt: NewPrompt) -> None:
    producer, consumer, _ = engines
    prompt = new_prompt(EVEN)
    cold = producer.ask(prompt)
    producer.drain()
    warm = producer.ask(prompt)

    restored = consumer.ask(prompt)

    assert consumer.record(restored.request_id) == Record(EVEN, 0, 768, 768, 768)
    source = producer.pages(cold.request_id, 3 * CHUNK_SIZE)
    assert consumer.pages(restored.request_id, 3 * CHUNK_SIZE).differences(source) == []
    assert restored.tokens == warm.tokens
    assert restored.logprobs == warm.logprobs  # bf16, bit by bit


def test_producer_does_not_load(engines: Engines, new_prompt: NewPrompt) -> None:
    producer = engines.producer
    prompt = new_prompt(EVEN)
    cold = producer.ask(prompt)
    producer.forget()

    again = producer.ask(prompt)

    assert producer.record(again.request_id) == Record(EVEN, 0, 0, 0, 0)
    assert again.tokens == cold.tokens
    assert producer.status()["storage"]["prefetches"] == 0
    assert producer.leftovers() == {}


def test_consumer_does_not_store(engines: Engines, new_prompt: NewPrompt) -> None:
    consumer, folder = engines.consumer, engines.folder
    prompt = new_prompt(EVEN)

    consumer.ask(prompt)

    consumer.drain()
    names = consumer.run(sabotage.object_names, prompt=prompt)
    assert [name for name in names if (folder / name).exists()] == []
    assert consumer.counter("saved_tokens") == 0
    assert consumer.leftovers() == {}
