"""What the scheduling tests share: an engine under vLLM's real scheduler, over a tier whose moods are set from outside.

`PretendedEngine` compares each page that a step reads with what must be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from l2kit.registry import default_registry
from tests.e2e import moody
from tests.e2e.pretended_engine import CHUNK_SIZE, PretendedEngine, expected_answer

Open = Callable[..., PretendedEngine]

LONG = 3 * CHUNK_SIZE + 5


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a moody tier; the plugin is installed for this test."""
    site, folder = tmp_path / "site", tmp_path / "tier"
    site.mkdir()
    folder.mkdir()
    moody.install(site)
    monkeypatch.syspath_prepend(site)
    default_registry.cache_clear()
    yield folder
    default_registry.cache_clear()


@pytest.fixture
def open_engine(tmp_path: Path, folder: Path, asynchronous: bool) -> Iterator[Open]:
    """Opens one engine over the moody tier, and checks at the end that nothing was left and no wrong KV was read."""
    opened: list[PretendedEngine] = []

    def open_it(*, storage: dict[str, Any] | None = None, **options: Any) -> PretendedEngine:
        assert not opened
        tiers = {"tiers": [f"moody://{folder}"]}
        opened.append(PretendedEngine(tmp_path, storage=tiers | (storage or {}), asynchronous=asynchronous, **options))
        return opened[0]

    yield open_it
    for engine in opened:
        with engine:
            moody.set_moods(folder)
            engine.run()
            engine.step()
            engine.settle()
            assert engine.leftovers() == {}


@pytest.fixture
def engine(open_engine: Open) -> PretendedEngine:
    return open_engine()


def store(engine: PretendedEngine, prompt: Sequence[int], *, in_l1: bool = False) -> None:
    """Let the tier have a prompt's KV, and vLLM none of it."""
    request_id = engine.ask(prompt, max_tokens=1)
    assert engine.answers[request_id] == expected_answer(prompt, 1)
    engine.embedded.drain()
    if not in_l1:
        l1 = engine.embedded.storage.l1
        for key in list(l1._readable):
            l1.remove(key)
    assert engine.harness.reset_prefix_cache()


def waiting_for_lookup(engine: PretendedEngine, request_id: str) -> bool:
    state = engine.side._requests.get(request_id)
    return engine.harness.status(request_id) == "WAITING" and state is not None and state.prefetch is not None


def step_until(engine: PretendedEngine, condition: Callable[[], bool], limit: int = 3000) -> None:
    for _ in range(limit):
        if condition():
            return
        engine.step()
    raise AssertionError(f"did not happen in {limit} steps")


def check(engine: PretendedEngine, prompts: Mapping[str, Sequence[int]], tokens: int = 4) -> None:
    """Every answer, page read and object kept is right."""
    for request_id, prompt in prompts.items():
        assert engine.answers[request_id] == expected_answer(prompt, tokens), request_id
    assert engine.runner.wrong_reads == []
    assert engine.wrong_objects(*prompts.values()) == []
