"""A third party's tier that fails, lies and hangs, and failures inside the connector, under real vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e import moody, sabotage
from tests.e2e.conftest import Start
from tests.e2e.tiny_models import TinyModel
from tests.e2e.vllm_process import BLOCK_SIZE, CHUNK_SIZE, Record, VLLMError, VLLMProcess

NewPrompt = Callable[[int], list[int]]

EVEN = 3 * CHUNK_SIZE + 20
LOOKUP_TIMEOUT_S = 3.0


class Engines(NamedTuple):
    """Two processes over one folder of a plugin that l2kit has never heard of."""

    first: VLLMProcess
    second: VLLMProcess
    folder: Path


@pytest.fixture(scope="module")
def engines(start: Start, llama_fp32: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("moody")
    moody.install(site)
    storage = {"tiers": [f"moody://{folder}"], "lookup_timeout_s": LOOKUP_TIMEOUT_S, "drain_timeout_s": 1.0}
    first, second = [
        start(name, llama_fp32, storage=storage, environment={"PYTHONPATH": str(site)}) for name in ("first", "second")
    ]
    return Engines(first, second, folder)


@pytest.fixture(autouse=True)
def nothing_stays(engines: Engines) -> Iterator[None]:
    yield
    moody.set_moods(engines.folder)
    for process in (engines.first, engines.second):
        if process.is_alive:
            process.drain()
            assert process.leftovers() == {}


@pytest.fixture
def first(engines: Engines) -> VLLMProcess:
    return engines.first


@pytest.fixture
def second(engines: Engines) -> VLLMProcess:
    return engines.second


@pytest.fixture
def folder(engines: Engines) -> Path:
    return engines.folder


@pytest.mark.parametrize("mood", ["fails", "misses", "damages"])
def test_tier_that_promises_and_does_not_keep_it(
    mood: moody.Mood, first: VLLMProcess, second: VLLMProcess, folder: Path, new_prompt: NewPrompt
) -> None:
    """It dies between lookup and load, or has evicted what it had just promised, or gives something else."""
    prompt = new_prompt(EVEN)
    cold = first.ask(prompt)
    first.drain()
    counter = {"fails": "load_failures", "misses": "load_misses", "damages": "load_corrupt"}[mood]
    before = second.tier("moody")[counter]
    moody.set_moods(folder, load=mood)

    answer = second.ask(prompt)

    assert answer.tokens == cold.tokens
    assert second.record(answer.request_id) == Record(EVEN, 0, 0, 0, 0)
    assert second.tier("moody")[counter] > before
    moody.set_moods(folder)
    second.drain()
    second.forget()
    assert second.record(second.ask(prompt).request_id).written == 768  # healed


def test_tier_that_hangs(first: VLLMProcess, second: VLLMProcess, folder: Path, new_prompt: NewPrompt) -> None:
    known, prompt, other, third = [new_prompt(EVEN) for _ in range(4)]
    reference = first.ask(prompt)
    first.drain()
    second.ask(known)
    second.drain()
    assert second.reset_prefix_cache()
    moody.set_moods(folder, lookup="hangs")

    started = time.monotonic()
    hung = second.submit(prompt)
    second.step(3)
    assert second.record(second.ask(known).request_id) == Record(EVEN, 0, 768, 0, 768)
    assert second.call("state", request_id=hung) == "WAITING"
    (answer,) = second.finish(hung)

    assert LOOKUP_TIMEOUT_S - 0.5 < time.monotonic() - started < LOOKUP_TIMEOUT_S + 10
    assert answer.tokens == reference.tokens
    started = time.monotonic()
    second.ask(other)
    assert time.monotonic() - started < LOOKUP_TIMEOUT_S
    moody.set_moods(folder)
    first.ask(third)
    first.drain()
    _until(lambda: second.record(second.ask(third, max_tokens=1).request_id).external_hit == 768)  # trusted again


def _until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


@pytest.mark.parametrize("operation", ["lookup", "load"])
def test_aborted_while_the_tier_hangs(
    operation: moody.Operation, first: VLLMProcess, second: VLLMProcess, folder: Path, new_prompt: NewPrompt
) -> None:
    prompt = new_prompt(EVEN)
    first.ask(prompt)
    first.drain()
    begun = moody.operations(folder, operation)
    moody.set_moods(folder, lookup="hangs" if operation == "lookup" else "fine", load="hangs")
    request_id = second.submit(prompt)
    second.step_until(lambda: moody.operations(folder, operation) > begun)
    assert second.call("state", request_id=request_id) == "WAITING"

    second.abort(request_id)

    assert second.call("state", request_id=request_id) == "GONE"
    moody.set_moods(folder)
    second.drain()
    _until(lambda: second.leftovers() == {})
    assert second.ask(prompt).tokens == first.ask(prompt).tokens


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_aborted_while_it_runs(
    steps: int, first: VLLMProcess, second: VLLMProcess, folder: Path, new_prompt: NewPrompt
) -> None:
    prompt = new_prompt(EVEN)
    first.ask(prompt)
    first.drain()
    request_id = second.submit(prompt, max_tokens=100)
    second.step_until(lambda: second.call("state", request_id=request_id) == "RUNNING")
    second.step(steps)

    second.abort(request_id)

    second.step(2)
    assert second.leftovers() == {}
    assert second.reset_prefix_cache()
    assert second.record(second.ask(prompt).request_id).written == 768


def test_a_load_that_fails_is_recomputed(first: VLLMProcess, second: VLLMProcess, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(EVEN)
    cold = first.ask(prompt)
    first.drain()
    second.ask(prompt[:100])  # 3 blocks of its own
    failures = second.counter("load_failures")
    second.run(sabotage.watch_failed_blocks)
    second.run(sabotage.fail_next_scatter)

    answer = second.ask(prompt)

    assert answer.tokens == cold.tokens
    first_block, last_block = 96 // BLOCK_SIZE, 768 // BLOCK_SIZE
    expected = sorted(second.block_table(answer.request_id)[first_block:last_block])
    assert second.run(sabotage.failed_blocks) == [expected]
    assert second.counter("load_failures") == failures + 1
    assert len(second.records(answer.request_id)) == 1  # not offered again
    assert second.counter("hook_errors") == 0
    assert second.reset_prefix_cache()
    assert second.record(second.ask(prompt).request_id).written == 768


def test_a_load_that_fails_and_is_aborted_leaves_no_trap(
    first: VLLMProcess, second: VLLMProcess, new_prompt: NewPrompt
) -> None:
    """The unfilled pages must not stay in vLLM's own prefix cache."""
    prompt = new_prompt(EVEN)
    cold = first.ask(prompt)
    first.drain()
    failures = second.counter("load_failures")
    second.run(sabotage.fail_next_scatter)
    request_id = second.submit(prompt)
    second.step_until(lambda: second.counter("load_failures") > failures)
    second.abort(request_id)

    answer = second.ask(prompt)

    assert answer.tokens == cold.tokens
    assert second.record(answer.request_id).local_hit == 0


def test_forward_pass_that_raises_stores_nothing(second: VLLMProcess, folder: Path, new_prompt: NewPrompt) -> None:
    """The engine dies of it, but what its pages hold then must not reach a tier. The last test of this process."""
    second.drain()
    stores = moody.operations(folder, "store")
    saved = second.counter("saved_tokens")
    second.run(sabotage.fail_next_forward)

    with pytest.raises(VLLMError, match="broken forward"):
        second.ask(new_prompt(EVEN))

    second.drain()
    assert second.counter("saved_tokens") == saved
    assert moody.operations(folder, "store") == stores
    second.kill()


def test_exit_while_the_tier_hangs(first: VLLMProcess, folder: Path, new_prompt: NewPrompt) -> None:
    moody.set_moods(folder, store="hangs", lookup="hangs")
    first.ask(new_prompt(EVEN))

    assert first.exit() < 15
