"""The worker side by itself, on real pages in host memory and a storage manager over ``memory://``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch

from l2kit.config import load_storage_config
from l2kit.errors import ConfigError
from l2kit_vllm import worker_side
from l2kit_vllm.embedded import EmbeddedEngine
from l2kit_vllm.metadata import LoadOrder, SaveOrder
from l2kit_vllm.page_geometry import Arrangement
from l2kit_vllm.paged_layout import PagedLayout
from l2kit_vllm.settings import ConnectorSettings
from l2kit_vllm.worker_side import WorkerSide

CHUNK_SIZE: Final = 64
BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = 64
PROMPT: Final = list(range(100, 100 + 3 * CHUNK_SIZE))
SOURCE: Final = (3, 1, 4, 15, 9, 2, 6, 5, 35, 8, 7, 10)
TARGET: Final = tuple(range(40, 52))
LAYOUT: Final = PagedLayout(Arrangement.HND_PACKED, ("0", "1"), NUM_BLOCKS, BLOCK_SIZE, 2, 8, "bfloat16")


@pytest.fixture
def embedded() -> Iterator[EmbeddedEngine]:
    config = load_storage_config({"chunk_size": CHUNK_SIZE, "l1": {"max_bytes": "1MiB"}, "tiers": ["memory://"]})
    embedded = EmbeddedEngine(config)
    yield embedded
    embedded.drain()
    usage = embedded.storage.l1.usage()
    embedded.close()
    assert (usage.leases, usage.writing) == (0, 0)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    storage = torch.frombuffer(bytearray(os.urandom(2 * NUM_BLOCKS * LAYOUT.block_bytes)), dtype=torch.bfloat16)
    layers = storage.view(2, NUM_BLOCKS, 2, BLOCK_SIZE, 16)
    return {"0": layers[0], "1": layers[1]}


@pytest.fixture
def side(
    embedded: EmbeddedEngine, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> Iterator[WorkerSide]:
    side = new_side(embedded, monkeypatch)
    side.register(tensors)
    yield side
    side.close()
    assert embedded.pending_saves == 0


def new_side(embedded: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> WorkerSide:
    monkeypatch.setattr(worker_side, "_declared_layout", lambda *_: LAYOUT)
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="somebody/model",
            hf_config=SimpleNamespace(to_dict=dict),
            dtype="bfloat16",
            quantization=None,
            max_model_len=4096,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        lora_config=None,
        speculative_config=None,
    )
    return WorkerSide(embedded, config, None, ConnectorSettings(model_revision="1"))


def pages(tensors: dict[str, torch.Tensor], blocks: Sequence[int]) -> bytes:
    """The bytes of these blocks in all layers."""
    return b"".join(
        np.ascontiguousarray(tensor.view(torch.uint8).numpy()[list(blocks)]).tobytes() for tensor in tensors.values()
    )


def save_order(embedded: EmbeddedEngine, blocks: Sequence[int] = SOURCE, request_id: str = "s") -> SaveOrder:
    assert embedded.engine is not None
    chunks = embedded.engine.chunks(PROMPT)
    return SaveOrder(request_id, tuple(blocks), tuple((chunk.start, chunk.end, chunk.key) for chunk in chunks))


def stage(embedded: EmbeddedEngine, request_id: str = "r", *, first: int = 0) -> tuple[tuple[int, int], ...]:
    """Lease the prompt's chunks as the scheduler side does."""
    assert embedded.engine is not None
    chunks = embedded.engine.chunks(PROMPT)[first:]
    prefetch = embedded.engine.start_retrieve(chunks)
    assert prefetch.wait(5)
    embedded.staged[request_id] = prefetch
    return tuple((chunk.start, chunk.end) for chunk in chunks[: prefetch.ready_chunks])


def test_saved_and_loaded_into_other_pages(
    embedded: EmbeddedEngine, side: WorkerSide, tensors: dict[str, torch.Tensor]
) -> None:
    everything = pages(tensors, range(NUM_BLOCKS))
    side.save([save_order(embedded)])
    embedded.drain()
    assert embedded.counters.snapshot()["saved_tokens"] == 192
    assert pages(tensors, range(NUM_BLOCKS)) == everything
    untouched = [block for block in range(NUM_BLOCKS) if block not in TARGET]
    rest = pages(tensors, untouched)

    side.load([LoadOrder("r", TARGET, stage(embedded), 0, 192)], set())

    assert pages(tensors, TARGET) == pages(tensors, SOURCE)
    assert pages(tensors, untouched) == rest
    assert side.take_failed_block_ids() == set()
    assert embedded.staged == {}
    assert embedded.storage.l1.usage().leases == 0


def test_what_lies_before_the_load_keeps_its_bytes(
    embedded: EmbeddedEngine, side: WorkerSide, tensors: dict[str, torch.Tensor]
) -> None:
    side.save([save_order(embedded)])
    before = pages(tensors, TARGET[:5])
    chunks = stage(embedded, first=1)

    side.load([LoadOrder("r", TARGET, chunks, 80, 176)], set())

    assert pages(tensors, TARGET[:5]) == before
    # The last chunk is written to its end: the request computes its last tokens there after that.
    assert pages(tensors, TARGET[5:]) == pages(tensors, SOURCE[5:])
    assert embedded.counters.snapshot()["written_tokens"] == 96


def test_twice_the_same_chunk_is_kept_once(embedded: EmbeddedEngine, side: WorkerSide) -> None:
    side.save([save_order(embedded), save_order(embedded, TARGET, "t")])
    side.collect()
    assert embedded.storage.l1.usage().entries == 3
    assert embedded.status()["storage"]["writes_present"] == 3


def test_failed_loads_are_reported_once_and_exactly(embedded: EmbeddedEngine, side: WorkerSide) -> None:
    side.save([save_order(embedded)])
    orders = [
        LoadOrder("missing", TARGET, ((0, 64),), 16, 64),  # nothing is staged
        LoadOrder("short", (20, 21, 22, 23, 24, 25), stage(embedded, "short")[:1], 0, 96),  # fewer chunks than leases
        LoadOrder("good", SOURCE, stage(embedded, "good"), 0, 192),
    ]

    side.load(orders, set())

    assert side.take_failed_block_ids() == {*TARGET[1:4], 20, 21, 22, 23, 24, 25}
    assert side.take_failed_block_ids() == set()
    assert embedded.failed_loads == {"missing", "short"}
    assert embedded.failed_block_ids == {*TARGET[1:4], 20, 21, 22, 23, 24, 25}
    counters = embedded.counters.snapshot()
    assert (counters["load_failures"], counters["written_tokens"]) == (2, 192)
    assert embedded.staged == {}


def test_nothing_is_saved_until_a_failed_load_has_been_heard_of(embedded: EmbeddedEngine, side: WorkerSide) -> None:
    side.load([LoadOrder("missing", TARGET, ((0, 64),), 0, 64)], set())
    side.save([save_order(embedded)])
    side.load([], set())  # a step that was scheduled before vLLM knew
    side.save([save_order(embedded)])
    assert embedded.storage.l1.usage().entries == 0
    side.load([LoadOrder("again", TARGET, ((0, 64),), 0, 64)], set(TARGET[:4]))  # the same pages fail once more
    side.save([save_order(embedded)])
    assert embedded.storage.l1.usage().entries == 0
    side.load([], set(TARGET[:4]))
    side.save([save_order(embedded)])
    assert embedded.storage.l1.usage().entries == 3


def test_a_gather_that_fails_keeps_no_other_from_being_saved(embedded: EmbeddedEngine, side: WorkerSide) -> None:
    broken = save_order(embedded, (NUM_BLOCKS + 5,) * 12)
    with pytest.raises(ConfigError, match="block_ids"):
        side.save([broken, save_order(embedded)])
    assert embedded.counters.snapshot()["save_failures"] == 1
    assert embedded.storage.l1.usage().entries == 3


class SlowTransfer:
    """A copy on a device that has not ended yet."""

    def __init__(self) -> None:
        self.ended = False
        self.waited_on = 0

    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.ended = True

    def wait_on(self) -> None:
        self.waited_on += 1


@pytest.fixture
def transfers(side: WorkerSide, monkeypatch: pytest.MonkeyPatch) -> list[SlowTransfer]:
    """Copies end when the test says so."""
    started: list[SlowTransfer] = []

    def start(*_: Any) -> SlowTransfer:
        started.append(SlowTransfer())
        return started[-1]

    monkeypatch.setattr(side._pages, "gather_many", start)
    monkeypatch.setattr(side._pages, "scatter_many", start)
    return started


def test_a_save_is_readable_when_its_copy_has_ended(
    embedded: EmbeddedEngine, side: WorkerSide, transfers: list[SlowTransfer]
) -> None:
    side.save([save_order(embedded)])
    assert (embedded.pending_saves, embedded.storage.l1.usage().entries) == (1, 0)
    transfers[0].ended = True
    side.collect()
    assert (embedded.pending_saves, embedded.storage.l1.usage().entries) == (0, 3)


def test_a_save_is_fenced_by_its_pages(
    embedded: EmbeddedEngine, side: WorkerSide, transfers: list[SlowTransfer]
) -> None:
    side.save([save_order(embedded)])
    side.fence(set(TARGET))
    assert transfers[0].waited_on == 0
    side.fence({TARGET[0], SOURCE[-1]})
    assert transfers[0].waited_on == 1
    side.fence(None)
    assert transfers[0].waited_on == 2


def test_staged_objects_stay_leased_until_they_are_copied(
    embedded: EmbeddedEngine, side: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    side.save([save_order(embedded)])
    embedded.drain()
    transfer = SlowTransfer()
    monkeypatch.setattr(side._pages, "scatter_many", lambda _: transfer)

    side.load([LoadOrder("r", TARGET, stage(embedded), 0, 192)], set())

    assert transfer.waited_on == 1  # by the forward pass
    assert embedded.storage.l1.usage().leases == 3
    transfer.ended = True
    side.collect()
    assert embedded.storage.l1.usage().leases == 0


def test_close_waits_for_copies(embedded: EmbeddedEngine, side: WorkerSide, transfers: list[SlowTransfer]) -> None:
    side.save([save_order(embedded)])
    side.close()
    assert transfers[0].ended
    assert embedded.storage.l1.usage().entries == 3


def test_too_little_l1_is_refused(tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    embedded = EmbeddedEngine(load_storage_config({"chunk_size": CHUNK_SIZE, "l1": {"max_bytes": 4096}}))
    try:
        with pytest.raises(ConfigError, match=r"l1.max_bytes: 4096 is less than one chunk of this model, 8192 bytes"):
            new_side(embedded, monkeypatch).register(tensors)
        assert embedded.engine is None
    finally:
        embedded.close()
