"""The connector under vLLM's real scheduler: every order of events that is hard to bring about with a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import moody
from tests.e2e.pretended_engine import PretendedEngine, expected_answer
from tests.e2e.scheduling import LONG, Open, check, step_until, store, waiting_for_lookup
from tests.e2e.tiny_models import random_prompt


def test_computed_stored_and_restored(engine: PretendedEngine) -> None:
    prompt = random_prompt(LONG)
    store(engine, prompt)

    again = engine.ask(prompt)

    assert engine.record(again) == (0, 192, 192, 192)
    check(engine, {again: prompt})


def test_asked_again_and_again_while_the_lookup_is_pending(engine: PretendedEngine, folder: Path) -> None:
    prompt = random_prompt(LONG)
    store(engine, prompt)
    lookups = moody.operations(folder, "lookup")
    moody.set_moods(folder, load="hangs")
    request_id = engine.add(prompt)

    for _ in range(20):
        engine.step()
        request = engine.harness.request(request_id)
        assert engine.connector.get_num_new_matched_tokens(request, 0) == (None, False)

    assert waiting_for_lookup(engine, request_id)
    assert moody.operations(folder, "lookup") == lookups + 1
    moody.set_moods(folder)
    step_until(engine, lambda: engine.harness.status(request_id) != "WAITING")
    assert engine.record(request_id) == (0, 192, 192, 192)
    engine.run()
    check(engine, {request_id: prompt})


def test_others_go_on_while_one_waits(engine: PretendedEngine, folder: Path) -> None:
    prompt, other = random_prompt(LONG), random_prompt(LONG, seed=1)
    store(engine, prompt)
    store(engine, other, in_l1=True)
    moody.set_moods(folder, lookup="hangs", load="hangs")
    hung = engine.add(prompt)
    engine.step()

    served = engine.add(other)
    step_until(engine, lambda: served in engine.ended)

    assert waiting_for_lookup(engine, hung)
    assert engine.record(served) == (0, 192, 0, 192)
    moody.set_moods(folder)
    engine.run()
    check(engine, {hung: prompt, served: other})


def test_offered_but_there_is_no_room_yet(open_engine: Open) -> None:
    engine = open_engine(num_blocks=20)
    prompt, other = random_prompt(LONG), random_prompt(150, seed=1)
    store(engine, prompt)
    large = engine.add(other, max_tokens=20)
    step_until(engine, lambda: engine.harness.status(large) == "RUNNING")

    request_id = engine.add(prompt)
    for _ in range(10):
        engine.step()
        assert engine.harness.status(request_id) == "WAITING"
    assert engine.side._requests[request_id].prefetch is not None
    engine.run()

    assert engine.record(request_id) == (0, 192, 192, 192)
    assert engine.answers[large] == expected_answer(other, 20)
    check(engine, {request_id: prompt})


def test_preempted_for_want_of_blocks(open_engine: Open) -> None:
    engine = open_engine(num_blocks=34)
    prompts = [random_prompt(LONG, seed=seed) for seed in range(2)]
    for prompt in prompts:
        store(engine, prompt)

    asked = {engine.add(prompt, max_tokens=120): prompt for prompt in prompts}
    preemptions: dict[str, int] = {}
    while engine.harness.scheduler.has_requests():
        for request_id in asked:
            if (request := engine.harness.request(request_id)) is not None:
                preemptions[request_id] = request.num_preemptions
        engine.step()
    engine.settle()

    assert sum(preemptions.values()) > 0
    for request_id, times in preemptions.items():
        assert sum(record.request_id == request_id for record in engine.embedded.records) == 1 + times
    check(engine, asked, tokens=120)


def test_preempted_and_offered_again_from_l1(engine: PretendedEngine) -> None:
    prompt = random_prompt(LONG)
    store(engine, prompt)
    request_id = engine.add(prompt, max_tokens=20)
    step_until(engine, lambda: len(engine.answers[request_id]) > 5)
    engine.settle()

    engine.harness.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.harness.status(request_id) == "PREEMPTED"
    engine.run()

    records = [record for record in engine.embedded.records if record.request_id == request_id]
    assert [(record.local_hit, record.external_hit, record.read, record.written) for record in records] == [
        (0, 192, 192, 192),
        (0, 192, 0, 192),
    ]
    check(engine, {request_id: prompt}, tokens=20)


def test_offered_and_not_taken(engine: PretendedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the losing side of a MultiConnector: real blocks, and no external tokens."""
    prompt = random_prompt(LONG)
    store(engine, prompt)
    offers: list[int | None] = []
    ask = engine.connector.get_num_new_matched_tokens

    def lose(request: Any, computed: int) -> tuple[int | None, bool]:
        offers.append(ask(request, computed)[0])
        return (None if offers[-1] is None else 0), False

    monkeypatch.setattr(engine.connector, "get_num_new_matched_tokens", lose)

    request_id = engine.ask(prompt)

    assert 192 in offers
    assert engine.counter("written_tokens") == 0
    check(engine, {request_id: prompt})


@pytest.mark.parametrize("state", ["new", "looking up", "offered", "just computed", "decoding", "preempted"])
def test_aborted(open_engine: Open, folder: Path, state: str) -> None:
    engine = open_engine(num_blocks=34)
    prompt, other = random_prompt(LONG), random_prompt(LONG, seed=1)
    store(engine, prompt)
    bystander = engine.add(other, max_tokens=150)
    if state == "offered":
        bystander = engine.add(random_prompt(300, seed=2), max_tokens=20)
    step_until(engine, lambda: engine.harness.status(bystander) == "RUNNING")
    if state == "looking up":
        moody.set_moods(folder, lookup="hangs")
    request_id = engine.add(prompt, max_tokens=200)
    if state == "looking up":
        step_until(engine, lambda: waiting_for_lookup(engine, request_id))
    elif state == "offered":
        step_until(engine, lambda: getattr(engine.side._requests.get(request_id), "external", 0) > 0)
        assert engine.harness.status(request_id) == "WAITING"
    elif state == "just computed":
        while engine.harness.status(request_id) == "WAITING":
            step = engine.harness.schedule()
            engine._execute(step)
            if engine.harness.status(request_id) == "WAITING":
                engine._report()
    elif state == "decoding":
        step_until(engine, lambda: len(engine.answers[request_id]) > 5)
    elif state == "preempted":
        step_until(engine, lambda: engine.harness.status(request_id) == "PREEMPTED")

    engine.abort(request_id)
    moody.set_moods(folder)

    assert request_id not in engine.side._requests
    again = engine.add(prompt)
    engine.run()
    check(engine, {again: prompt})
