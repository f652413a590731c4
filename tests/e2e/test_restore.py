"""KV that one process computed and another restored: the same tokens, the same log-probabilities, the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e import sabotage
from tests.e2e.conftest import Start
from tests.e2e.tiny_models import TinyModel
from tests.e2e.vllm_process import BLOCK_SIZE, CHUNK_SIZE, Record, VLLMProcess

NewPrompt = Callable[[int], list[int]]


class Engines(NamedTuple):
    """Three processes that share nothing but a folder."""

    first: VLLMProcess
    second: VLLMProcess
    third: VLLMProcess
    folder: Path


@pytest.fixture(scope="module")
def engines(start: Start, llama_fp32: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = tmp_path_factory.mktemp("tier")
    storage = {"tiers": [f"file://{folder}"]}
    first, second, third = [start(name, llama_fp32, storage=storage) for name in ("first", "second", "third")]
    return Engines(first, second, third, folder)


@pytest.fixture(autouse=True)
def nothing_stays(engines: Engines) -> Iterator[None]:
    yield
    for process in (engines.first, engines.second, engines.third):
        process.drain()
        assert process.leftovers() == {}


@pytest.fixture
def first(engines: Engines) -> VLLMProcess:
    return engines.first


@pytest.fixture
def second(engines: Engines) -> VLLMProcess:
    return engines.second


@pytest.fixture
def third(engines: Engines) -> VLLMProcess:
    return engines.third


# Both caches serve the same prefix of a prompt of this length, so that both processes compute the same rest of it.
EVEN = 3 * CHUNK_SIZE + 20


def test_second_process_restores_what_the_first_computed(
    first: VLLMProcess, second: VLLMProcess, new_prompt: NewPrompt
) -> None:
    prompt = new_prompt(EVEN)
    cold = first.ask(prompt)
    source = first.pages(cold.request_id, 3 * CHUNK_SIZE)
    first.drain()
    warm = first.ask(prompt)
    assert first.record(warm.request_id) == Record(EVEN, local_hit=768, external_hit=0, read=0, written=0)

    restored = second.ask(prompt)

    assert second.record(restored.request_id) == Record(EVEN, local_hit=0, external_hit=768, read=768, written=768)
    assert restored.cached == warm.cached == 768
    assert restored.tokens == warm.tokens == cold.tokens
    assert restored.logprobs == warm.logprobs  # bit by bit
    pages = second.pages(restored.request_id, 3 * CHUNK_SIZE)
    assert not source.is_blank
    assert pages.differences(source) == []


def test_the_comparison_of_pages_sees_what_an_answer_does_not(first: VLLMProcess, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(EVEN)
    reference = first.ask(prompt)
    right = first.pages(reference.request_id, 3 * CHUNK_SIZE)
    blocks = first.block_table(reference.request_id)
    warm = first.ask(prompt)

    first.call("swap_blocks", one=blocks[3], other=blocks[17])
    answer = first.ask(prompt)

    wrong = first.pages(answer.request_id, 3 * CHUNK_SIZE)
    assert first.block_table(answer.request_id)[:24] == blocks[:24]
    assert answer.tokens == warm.tokens  # attention does not care about the order of keys
    layers = range(first.model.layers)
    assert wrong.differences(right) == [
        *[f"chunk 0, block 3, layer {layer}" for layer in layers],
        *[f"chunk 2, block 17, layer {layer}" for layer in layers],
    ]
    assert wrong.differences(right.swapped(3, 17)) == []
    first.call("swap_blocks", one=blocks[3], other=blocks[17])


def test_partly_local_partly_external(first: VLLMProcess, second: VLLMProcess, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(1024)
    primed = second.ask(prompt[:290])  # while the tier is empty: 9 blocks of its own
    own = second.pages(primed.request_id, 288)
    second.drain()
    reference = first.ask(prompt[:520])
    source = first.pages(reference.request_id, 512)
    first.drain()

    answer = second.ask(prompt)

    record = second.record(answer.request_id)
    assert record == Record(1024, local_hit=288, external_hit=512, read=256, written=224)
    assert answer.cached == 512
    pages = second.pages(answer.request_id, 512)
    assert pages.differences(own, tokens=288) == []
    assert pages.differences(source, tokens=512) == []
    assert answer.tokens == first.ask(prompt).tokens


def test_a_gap_ends_the_prefix_and_is_healed(
    first: VLLMProcess, second: VLLMProcess, third: VLLMProcess, engines: Engines, new_prompt: NewPrompt
) -> None:
    prompt = new_prompt(5 * CHUNK_SIZE + 20)
    cold = first.ask(prompt)
    source = first.pages(cold.request_id, 5 * CHUNK_SIZE)
    first.drain()
    names = first.run(sabotage.object_names, prompt=prompt)
    assert len(names) == 5
    (engines.folder / names[2]).unlink()

    answer = second.ask(prompt)

    assert second.record(answer.request_id).external_hit == 2 * CHUNK_SIZE
    assert second.record(answer.request_id).written == 2 * CHUNK_SIZE
    assert answer.tokens == cold.tokens
    pages = second.pages(answer.request_id, 5 * CHUNK_SIZE)
    assert pages.differences(source, tokens=2 * CHUNK_SIZE) == []
    second.drain()
    assert (engines.folder / names[2]).exists()
    healed = third.ask(prompt)
    assert third.record(healed.request_id).written == 5 * CHUNK_SIZE
    assert healed.tokens == cold.tokens
    restored = third.pages(healed.request_id, 5 * CHUNK_SIZE)
    assert restored.differences(pages, tokens=3 * CHUNK_SIZE) == []


def flip_payload(one: Path, other: Path) -> None:
    data = bytearray(one.read_bytes())
    data[len(data) // 2] ^= 0x10
    one.write_bytes(data)


def flip_header(one: Path, other: Path) -> None:
    data = bytearray(one.read_bytes())
    data[105] ^= 0x01  # in the digest of the key
    one.write_bytes(data)


def truncate(one: Path, other: Path) -> None:
    one.write_bytes(one.read_bytes()[:-4096])


def empty(one: Path, other: Path) -> None:
    one.write_bytes(b"")


def swap(one: Path, other: Path) -> None:
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


@pytest.mark.parametrize("damage", [flip_payload, flip_header, truncate, empty, swap])
def test_damaged_objects_are_recomputed_counted_and_healed(
    damage: Callable[[Path, Path], None],
    first: VLLMProcess,
    second: VLLMProcess,
    third: VLLMProcess,
    engines: Engines,
    new_prompt: NewPrompt,
) -> None:
    prompt = new_prompt(EVEN)
    cold = first.ask(prompt)
    first.drain()
    _, one, other = [engines.folder / name for name in first.run(sabotage.object_names, prompt=prompt)]
    damage(one, other)
    corrupt_before = second.tier("file")["load_corrupt"]

    answer = second.ask(prompt)

    assert answer.tokens == cold.tokens
    assert second.record(answer.request_id).external_hit == CHUNK_SIZE
    assert second.tier("file")["load_corrupt"] > corrupt_before
    pages = second.pages(answer.request_id, 3 * CHUNK_SIZE)
    second.drain()
    healed = third.ask(prompt)
    assert healed.tokens == cold.tokens
    assert third.record(healed.request_id).written == 3 * CHUNK_SIZE
    assert third.pages(healed.request_id, 3 * CHUNK_SIZE).differences(pages, tokens=2 * CHUNK_SIZE) == []


def test_tenants_do_not_share(first: VLLMProcess, second: VLLMProcess, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(EVEN)
    reference = first.ask(prompt, cache_salt="one tenant")
    first.drain()

    other = second.ask(prompt, cache_salt="another tenant")
    nobody = second.ask(prompt)
    own = second.ask(prompt, cache_salt="one tenant")

    assert second.record(other.request_id).external_hit == 0
    assert second.record(nobody.request_id).external_hit == 0
    assert second.record(own.request_id) == Record(EVEN, local_hit=0, external_hit=768, read=768, written=768)
    assert own.tokens == other.tokens == nobody.tokens == reference.tokens


@pytest.mark.parametrize(
    ("length", "external_hit", "written"),
    [
        (1, 0, 0),
        (CHUNK_SIZE - 1, 0, 0),
        (CHUNK_SIZE, 256, 224),  # at least one token must be left to compute
        (CHUNK_SIZE + 1, 256, 256),
        (2 * CHUNK_SIZE - 1, 256, 256),
        (2 * CHUNK_SIZE, 512, 480),
        (2 * CHUNK_SIZE + 1, 512, 512),
    ],
)
def test_prompts_around_a_chunk_boundary(
    length: int,
    external_hit: int,
    written: int,
    first: VLLMProcess,
    second: VLLMProcess,
    new_prompt: NewPrompt,
) -> None:
    prompt = new_prompt(length)
    cold = first.ask(prompt)
    first.drain()
    warm = first.ask(prompt)

    restored = second.ask(prompt)

    assert second.record(restored.request_id) == Record(length, 0, external_hit, external_hit, written)
    assert restored.tokens == warm.tokens == cold.tokens
    if warm.cached == written:
        assert restored.logprobs == warm.logprobs
    if written:
        source = first.pages(cold.request_id, written)
        assert second.pages(restored.request_id, written).differences(source) == []


def test_the_same_prompt_many_times_at_once(first: VLLMProcess, second: VLLMProcess, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(EVEN)

    computed = first.ask_together(*[prompt] * 4)

    first.drain()
    names = first.run(sabotage.object_names, prompt=prompt)
    assert len(names) == 3
    source = first.pages(computed[0].request_id, 3 * CHUNK_SIZE)
    restored = second.ask_together(*[prompt] * 4)
    for answer in (*computed, *restored):
        assert answer.tokens == computed[0].tokens
    for answer in restored:
        assert second.pages(answer.request_id, 3 * CHUNK_SIZE).differences(source) == []


def test_a_prompt_that_grows(first: VLLMProcess, second: VLLMProcess, new_prompt: NewPrompt) -> None:
    """A conversation: each turn finds what the turns before have left, on either process."""
    prompt = new_prompt(1500)
    for turn, (length, process) in enumerate([(300, first), (700, second), (1100, first), (1500, second)]):
        answer = process.ask(prompt[:length])
        process.drain()
        record = process.record(answer.request_id)
        stored = (300, 700, 1100)[turn - 1] // CHUNK_SIZE * CHUNK_SIZE if turn else 0
        assert max(record.local_hit, record.external_hit) == stored
    assert process.ask(prompt).tokens == first.ask(prompt).tokens


def test_answers_do_depend_on_the_kv(first: VLLMProcess, second: VLLMProcess, new_prompt: NewPrompt) -> None:
    """Test the tests: with other KV in the same places these models answer otherwise."""
    prompt = new_prompt(EVEN)
    reference = first.ask(prompt)
    blocks = first.block_table(reference.request_id)[: 3 * CHUNK_SIZE // BLOCK_SIZE]
    first.call("fill_blocks", block_ids=blocks, value=0.0)

    answer = first.ask(prompt)

    assert answer.cached == 768
    assert answer.tokens != reference.tokens
    first.reset_prefix_cache()
