"""The same over Redis and Valkey, and what becomes of requests when the server dies or hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from l2kit.testing.servers import Flavor, RespServer, run_server
from tests.e2e import sabotage
from tests.e2e.conftest import Start
from tests.e2e.tiny_models import TinyModel
from tests.e2e.vllm_process import CHUNK_SIZE, Record, VLLMProcess

NewPrompt = Callable[[int], list[int]]

EVEN = 3 * CHUNK_SIZE + 20
LOOKUP_TIMEOUT_S = 3.0
RECOVERY_S = 60.0


class Engines(NamedTuple):
    """Two processes with one server between them."""

    server: RespServer
    first: VLLMProcess
    second: VLLMProcess


@pytest.fixture(scope="module", params=["redis", "valkey"])
def engines(request: pytest.FixtureRequest, start: Start, llama_fp32: TinyModel) -> Iterator[Engines]:
    flavor: Flavor = request.param
    with run_server(flavor) as server:
        tier = {"url": server.url(), "name": "server", "timeout_s": 4.0}
        storage = {"tiers": [tier], "lookup_timeout_s": LOOKUP_TIMEOUT_S, "drain_timeout_s": 1.0}
        first, second = [start(f"{flavor}-{name}", llama_fp32, storage=storage) for name in ("first", "second")]
        yield Engines(server, first, second)
        first.end()
        second.end()


@pytest.fixture(autouse=True)
def nothing_stays(engines: Engines) -> Iterator[None]:
    yield
    for process in (engines.first, engines.second):
        if process.is_alive:
            process.drain()
            assert process.leftovers() == {}


def test_second_process_restores_what_the_first_computed(engines: Engines, new_prompt: NewPrompt) -> None:
    _, first, second = engines
    prompt = new_prompt(EVEN)
    cold = first.ask(prompt)
    first.drain()
    warm = first.ask(prompt)

    restored = second.ask(prompt)

    assert second.record(restored.request_id) == Record(EVEN, local_hit=0, external_hit=768, read=768, written=768)
    assert restored.tokens == warm.tokens == cold.tokens
    assert restored.logprobs == warm.logprobs
    source = first.pages(cold.request_id, 3 * CHUNK_SIZE)
    assert not source.is_blank
    assert second.pages(restored.request_id, 3 * CHUNK_SIZE).differences(source) == []


def test_server_killed_between_the_two(engines: Engines, new_prompt: NewPrompt) -> None:
    server, first, second = engines
    prompt = new_prompt(EVEN)
    cold = first.ask(prompt)
    first.drain()
    server.kill()
    try:
        started = time.monotonic()
        answer = second.ask(prompt)
        took_s = time.monotonic() - started

        assert answer.tokens == cold.tokens
        assert second.record(answer.request_id).external_hit == 0
        assert took_s < LOOKUP_TIMEOUT_S + 10
        assert not second.tier("server")["healthy"]
        from_l1 = _again(second, prompt)
        assert second.record(from_l1).written == 768
    finally:
        server.start()
    other = new_prompt(EVEN)
    first.ask(other)
    first.drain()
    assert second.record(second.ask(other).request_id).written == 768  # it has come back by itself


def _recover(process: VLLMProcess) -> None:
    """Wait until the breakers, opened by a server that was killed before, have closed again: nothing asks for that."""
    give_up = time.monotonic() + RECOVERY_S
    while not (status := process.tier("server"))["healthy"]:
        assert time.monotonic() < give_up, status
        time.sleep(0.05)


def _again(process: VLLMProcess, prompt: list[int]) -> str:
    assert process.reset_prefix_cache()
    return process.ask(prompt).request_id


def test_server_killed_while_the_second_loads(engines: Engines, new_prompt: NewPrompt) -> None:
    server, first, second = engines
    prompt = new_prompt(12 * CHUNK_SIZE + 20)
    cold = first.ask(prompt)
    first.drain()
    source = first.pages(cold.request_id, 12 * CHUNK_SIZE)
    second.run(sabotage.stall_loads, after=3)

    request_id = second.submit(prompt)
    assert second.run(sabotage.step_until_stalled) == 3
    server.kill()
    try:
        second.run(sabotage.release_loads)
        (answer,) = second.finish(request_id)

        assert answer.tokens == cold.tokens
        loaded = second.record(request_id).external_hit
        assert 0 < loaded < 12 * CHUNK_SIZE
        assert second.pages(request_id, loaded).differences(source, tokens=loaded) == []
        assert second.tier("server")["load_failures"] > 0
    finally:
        server.start()


def test_server_that_hangs(engines: Engines, new_prompt: NewPrompt) -> None:
    """Answers come by the deadline, what is in L1 is served, and the process ends in time."""
    server, first, second = engines
    _recover(second)
    known, prompt, other = new_prompt(EVEN), new_prompt(EVEN), new_prompt(EVEN)
    reference = first.ask(prompt)
    first.drain()
    in_l1 = second.ask(known)
    second.drain()
    assert second.reset_prefix_cache()
    server.pause()
    try:
        started = time.monotonic()
        hung = second.submit(prompt)
        second.step(3)
        from_l1 = second.ask(known)
        assert second.record(from_l1.request_id).written == 768
        assert from_l1.tokens == in_l1.tokens
        assert second.call("state", request_id=hung) == "WAITING"
        (answer,) = second.finish(hung)
        took_s = time.monotonic() - started

        assert took_s < LOOKUP_TIMEOUT_S + 10  # the client gives a silent socket up even before that
        assert answer.tokens == reference.tokens
        assert second.record(hung).external_hit == 0
        started = time.monotonic()
        second.ask(other)  # nobody waits for a server that has just hung
        assert time.monotonic() - started < LOOKUP_TIMEOUT_S
        assert second.exit() < 15
    finally:
        server.resume()
