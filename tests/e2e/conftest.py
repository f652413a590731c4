"""Models, folders and vLLM processes for the end-to-end tests."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from l2kit.testing.servers import redis_server, valkey_server
from tests.e2e import tiny_models
from tests.e2e.scheduling import asynchronous, engine, folder, open_engine
from tests.e2e.tiny_models import TinyModel
from tests.e2e.vllm_process import VLLMProcess

__all__ = ["asynchronous", "engine", "folder", "open_engine", "redis_server", "valkey_server"]

#: Starts a vLLM process, from a name and what `VLLMProcess` takes.
Start = Callable[..., VLLMProcess]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("e2e")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "models"


# Another split of a prompt moves a bf16 log-probability by up to 0.1, and that can change the token. So tests compare
# bf16 answers only where both were computed in the same split, bit by bit; elsewhere they use fp32.
@pytest.fixture(scope="session")
def llama(models: Path) -> TinyModel:
    return tiny_models.make_llama(models)


@pytest.fixture(scope="session")
def llama_fp32(models: Path) -> TinyModel:
    return tiny_models.make_llama(models, dtype="float32")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts processes that live as long as the test module. Use it in fixtures, so that they start side by side."""
    with _starting(tmp_path_factory.mktemp(f"logs-{request.module.__name__.rpartition('.')[2]}")) as begin:
        yield begin


@pytest.fixture
def start_here(tmp_path: Path) -> Iterator[Start]:
    """Starts processes that end with the test."""
    with _starting(tmp_path) as begin:
        yield begin


@contextmanager
def _starting(logs: Path) -> Iterator[Start]:
    started: list[VLLMProcess] = []

    def begin(name: str, model: TinyModel, **options: Any) -> VLLMProcess:
        process = VLLMProcess(model, log_path=logs / f"{name}.log", **options)
        started.append(process)
        return process

    try:
        yield begin
    finally:
        for process in started:
            process.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A test that failed shows what its processes wrote."""
    report = yield
    if report.when == "call" and report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, VLLMProcess):
                report.sections.append((f"log of {value.name}", value.tail()))
    return report


@pytest.fixture
def new_prompt(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    """Prompts that no other test asks, and the same ones in every run: ``new_prompt(tokens)``."""
    seeds = itertools.count(zlib.crc32(request.node.nodeid.encode()) << 8)
    return lambda tokens: tiny_models.random_prompt(tokens, seed=next(seeds))
