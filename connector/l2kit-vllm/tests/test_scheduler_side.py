"""The scheduler side by itself: what it offers, orders and counts. Under vLLM's scheduler it is in ``tests/e2e``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import pytest

from l2kit.config import load_storage_config
from l2kit.keys import Namespace
from l2kit.layout import Layout
from l2kit_vllm.embedded import EmbeddedEngine
from l2kit_vllm.metadata import StepOrders
from l2kit_vllm.scheduler_side import SchedulerSide

CHUNK_SIZE: Final = 64
BLOCK_SIZE: Final = 16
PROMPT: Final = list(range(100, 100 + 5 * CHUNK_SIZE + 3))
BLOCKS: Final = list(range(1, 22))  # of the whole prompt

NAMESPACE: Final = Namespace(
    model="m", revision="1", kv_dtype="bfloat16", layout="native:1", layers=2, kv_heads=2, head_dim=8, chunk_size=64
)


def object_layout(tokens: int) -> Layout:
    return Layout.pages(layers=2, blocks=tokens // BLOCK_SIZE, page_bytes=64 * BLOCK_SIZE, tokens=tokens)


@pytest.fixture
def embedded() -> Iterator[EmbeddedEngine]:
    config = load_storage_config({"chunk_size": CHUNK_SIZE, "l1": {"max_bytes": "1MiB"}, "tiers": ["memory://"]})
    embedded = EmbeddedEngine(config)
    embedded.serve(NAMESPACE, object_layout)
    yield embedded
    embedded.drain()
    usage = embedded.storage.l1.usage()
    embedded.close()
    assert (usage.leases, usage.writing) == (0, 0)
    assert embedded.staged == {}


@pytest.fixture
def side(embedded: EmbeddedEngine) -> Iterator[SchedulerSide]:
    side = SchedulerSide(embedded, block_size=BLOCK_SIZE, loads=True, saves=True)
    yield side
    side.close()
    assert side._requests == {}
    assert side._loads_to_order == []


def put(embedded: EmbeddedEngine, *numbers: int, in_l1: bool = True) -> None:
    """Have chunks of the prompt in the tier, and in L1 if told so."""
    assert embedded.engine is not None
    chunks = [chunk for number, chunk in enumerate(embedded.engine.chunks(PROMPT)) if number in numbers]
    embedded.storage.finish_write([reservation for _, reservation in embedded.engine.reserve(chunks)])
    embedded.drain()
    for chunk in chunks:
        assert in_l1 or embedded.storage.l1.remove(chunk.key)


def request(request_id: str = "r", **changes: Any) -> Any:
    """Stands for vLLM's ``Request``."""
    return SimpleNamespace(
        **{
            "request_id": request_id,
            "prompt_token_ids": PROMPT,
            "num_prompt_tokens": len(PROMPT),
            "num_tokens": len(PROMPT),
            "num_preemptions": 0,
            "prompt_embeds": None,
            "cache_salt": None,
            "lora_request": None,
            "mm_features": [],
            "skip_reading_prefix_cache": False,
            **changes,
        }
    )


def scheduled(
    new: Mapping[str, tuple[Sequence[int], int, int]] | None = None,
    cached: Mapping[str, tuple[Sequence[int] | None, int, int]] | None = None,
    resumed: Sequence[str] = (),
) -> Any:
    """Stands for vLLM's ``SchedulerOutput``: for each request its (new) blocks, computed and scheduled tokens."""
    new, cached = new or {}, cached or {}
    counts = {request_id: count for request_id, (_, _, count) in {**new, **cached}.items()}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=request_id, block_ids=(list(blocks),), num_computed_tokens=computed)
            for request_id, (blocks, computed, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=[None if blocks is None else (list(blocks),) for blocks, _, _ in cached.values()],
            num_computed_tokens=[computed for _, computed, _ in cached.values()],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
    )


def ask(side: SchedulerSide, asked: Any, computed: int = 0) -> int:
    """Ask until there is an answer."""
    while (answer := side.matched_tokens(asked, computed)) is None:
        side.orders(scheduled())
    return answer


def saved(orders: StepOrders) -> list[tuple[str, list[int]]]:
    """Which chunks of which requests are to be saved, by the chunks' first tokens."""
    return [(order.request_id, [start for start, _, _ in order.chunks]) for order in orders.saves]


# --- offers -----------------------------------------------------------------------------------------


def test_offers_the_longest_prefix_beyond_the_local_one(embedded: EmbeddedEngine, side: SchedulerSide) -> None:
    put(embedded, 0, 1, 3, in_l1=False)
    assert ask(side, request("a")) == 128
    assert ask(side, request("b"), 48) == 80
    assert ask(side, request("c"), 128) == 0
    assert ask(side, request("d"), 192) == 64
    assert ask(side, request("e"), 200) == 56


def test_leaves_a_token_to_compute(embedded: EmbeddedEngine, side: SchedulerSide) -> None:
    put(embedded, 0, 1)
    short = request(prompt_token_ids=PROMPT[:128], num_prompt_tokens=128, num_tokens=128)
    assert ask(side, short) == 112
    decoding = request("resumed", prompt_token_ids=PROMPT[:128], num_prompt_tokens=128, num_tokens=140)
    assert ask(side, decoding) == 128
    assert ask(side, request("all but one", num_tokens=17), 16) == 0


def test_nothing_is_offered(embedded: EmbeddedEngine, side: SchedulerSide) -> None:
    put(embedded, 0)
    assert ask(side, request("prompt logprobs", skip_reading_prefix_cache=True)) == 0
    assert ask(side, request("embeddings", prompt_embeds=object())) == 0
    assert ask(side, request("short", prompt_token_ids=PROMPT[:63], num_prompt_tokens=63, num_tokens=63)) == 0
    assert ask(side, request("tenant", cache_salt="x")) == 0
    producer = SchedulerSide(embedded, block_size=BLOCK_SIZE, loads=False, saves=True)
    assert ask(producer, request("producer")) == 0


def test_asking_again_changes_nothing(embedded: EmbeddedEngine, side: SchedulerSide) -> None:
    put(embedded, 0, 1)
    prefetches = embedded.status()["storage"]["prefetches"]
    asked = request()
    assert [ask(side, asked) for _ in range(5)] == [128] * 5
    assert ask(side, asked, 32) == 96  # somebody else has computed a part meanwhile
    assert ask(side, asked) == 128  # and lost it again
    assert embedded.status()["storage"]["prefetches"] == prefetches + 1
    assert embedded.storage.l1.usage().leases == 2


def test_a_local_prefix_that_shrinks_below_what_was_looked_up(embedded: EmbeddedEngine, side: SchedulerSide) -> None:
    put(embedded, 0, 1, 2)
    asked = request()
    assert ask(side, asked, 128) == 64
    assert ask(side, asked, 16) == 176
    side.allocated(asked, BLOCKS, 176)
    (load,) = side.orders(scheduled(new={"r": (BLOCKS, 192, 131)})).loads
    assert (load.chunks, load.write_from, load.write_to) == (((0, 64), (64, 128), (128, 192)), 16, 192)
    side.finished("r")


def test_tokens_that_no_key_can_name_are_not_cached(embedded: EmbeddedEngine, side: SchedulerSide) -> None:
    asked = request(prompt_token_ids=[-1, *PROMPT])
    with pytest.raises(Exception, match="token_ids"):
        side.matched_tokens(asked, 0)
    assert ask(side, asked) == 0
    assert side.orders(scheduled(new={"r": (BLOCKS, 0, len(PROMPT))})).saves == []


# --- loads ------------------------------------------------------------------------------------------


def test_the_three_counts_of_a_mixed_hit(embedded: EmbeddedEngine, side: SchedulerSide) -> None:
    """80 tokens local, 192 external: 112 to load, of two chunks that were read."""
    put(embedded, 0, 1, 2, in_l1=False)
    asked = request()
    assert ask(side, asked, 80) == 112
    side.allocated(asked, BLOCKS, 112)

    orders = side.orders(scheduled(new={"r": (BLOCKS, 192, 131)}))

    (load,) = orders.loads
    assert load.block_ids == tuple(BLOCKS)
    assert (load.chunks, load.write_from, load.write_to) == (((64, 128), (128, 192)), 80, 192)
    (record,) = embedded.records
    assert (record.local_hit, record.external_hit, record.read, record.written) == (80, 192, 128, 112)
    assert len(embedded.staged["r"].objects()) == 2
    assert side.orders(scheduled()).loads == []
    side.finished("r")


def test_an_offer_that_is_not_taken_is_let_go(embedded: EmbeddedEngine, side: SchedulerSide) -> None:
    put(embedded, 0, 1)
    asked = request()
    assert ask(side, asked) == 128
    side.allocated(asked, BLOCKS, 0)
    assert embedded.storage.l1.usage().leases == 0
    assert side.orders(scheduled(new={"r": (BLOCKS, 0, len(PROMPT))})).loads == []
    assert embedded.records[-1].written == 0
    assert ask(side, asked) == 0


def test_tokens_that_were_not_offered_are_never_silently_missing(embedded: EmbeddedEngine, side: SchedulerSide) -> None:
    with pytest.raises(RuntimeError, match="64 tokens that it was not offered"):
        side.allocated(request("unknown"), BLOCKS, 64)
    side.nothing_to_load("unknown", BLOCKS)
    (load,) = side.orders(scheduled()).loads
    assert (load.block_ids, load.chunks, load.write_from) == (tuple(BLOCKS), (), 0)


def test_after_a_failed_load_only_a_miss(embedded: EmbeddedEngine, side: SchedulerSide) -> None:
    put(embedded, 0, 1)
    asked = request()
    assert ask(side, asked) == 128
    side.allocated(asked, BLOCKS, 128)
    side.orders(scheduled(new={"r": (BLOCKS, 128, 195)}))
    embedded.staged.pop("r").release()
    embedded.failed_loads.add("r")
    assert ask(side, asked) == 0
    asked.num_preemptions = 1
    assert ask(side, asked) == 0
    side.finished("r")
    assert embedded.failed_loads == set()


def test_after_a_preemption_once_more(embedded: EmbeddedEngine, side: SchedulerSide) -> None:
    put(embedded, 0, 1, in_l1=False)
    asked = request()
    for preemptions, read in enumerate([128, 0]):
        asked.num_preemptions = preemptions
        assert ask(side, asked) == 128
        side.allocated(asked, BLOCKS, 128)
        side.orders(scheduled(cached={"r": (BLOCKS, 128, 10)}, resumed=["r"]))
        embedded.staged.pop("r").release()
        assert (embedded.records[-1].read, embedded.records[-1].written) == (read, 128)
    assert len(embedded.records) == 2


@pytest.mark.parametrize("state", ["asked", "allocated", "ordered", "unknown"])
def test_finished_in_any_state(embedded: EmbeddedEngine, side: SchedulerSide, state: str) -> None:
    put(embedded, 0, 1)
    asked = request()
    if state != "unknown":
        ask(side, asked)
    if state in {"allocated", "ordered"}:
        side.allocated(asked, BLOCKS, 128)
    if state == "ordered":
        side.orders(scheduled(new={"r": (BLOCKS, 128, 195)}))
    side.finished("r")
    assert embedded.storage.l1.usage().leases == 0
    assert side.orders(scheduled()).loads == []


# --- saves ------------------------------------------------------------------------------------------


def test_chunks_are_saved_when_their_last_token_is_computed(side: SchedulerSide) -> None:
    ask(side, request())
    steps = [
        (scheduled(new={"r": (BLOCKS[:4], 0, 60)}), []),
        (scheduled(cached={"r": (BLOCKS[4:5], 60, 10)}), [("r", [0])]),
        (scheduled(cached={"r": (BLOCKS[5:16], 70, 186)}), [("r", [64, 128, 192])]),
        (scheduled(cached={"r": (BLOCKS[16:], 256, 67)}), [("r", [256])]),
        (scheduled(cached={"r": (None, 323, 1)}), []),
    ]
    for output, expected in steps:
        orders = side.orders(output)
        assert saved(orders) == expected
        for order in orders.saves:
            assert order.block_ids == tuple(BLOCKS[: order.chunks[-1][1] // BLOCK_SIZE])


def test_what_was_loaded_or_was_here_is_not_saved_again(embedded: EmbeddedEngine, side: SchedulerSide) -> None:
    put(embedded, 0, 1)
    asked = request()
    assert ask(side, asked, 16) == 112
    side.allocated(asked, BLOCKS, 112)
    assert saved(side.orders(scheduled(new={"r": (BLOCKS, 128, 195)}))) == [("r", [128, 192, 256])]
    side.finished("r")
    ask(side, request("local"), 80)
    assert saved(side.orders(scheduled(new={"local": (BLOCKS, 80, 243)}))) == [("local", [64, 128, 192, 256])]


def test_a_resumed_request_has_other_blocks(side: SchedulerSide) -> None:
    ask(side, request())
    side.orders(scheduled(new={"r": (BLOCKS[:5], 0, 70)}))
    others = [block + 100 for block in BLOCKS]
    orders = side.orders(scheduled(cached={"r": (others[:8], 0, 128)}, resumed=["r"]))
    assert [order.block_ids for order in orders.saves] == [tuple(others[:8])]
    assert orders.overwritten_block_ids == set(others[:8])


def test_a_request_that_is_sent_back_saves_what_it_recomputes(side: SchedulerSide) -> None:
    ask(side, request())
    assert saved(side.orders(scheduled(new={"r": (BLOCKS, 0, 323)}))) == [("r", [0, 64, 128, 192, 256])]
    assert saved(side.orders(scheduled(cached={"r": (None, 80, 243)}))) == [("r", [64, 128, 192, 256])]


def test_a_consumer_saves_nothing(embedded: EmbeddedEngine) -> None:
    consumer = SchedulerSide(embedded, block_size=BLOCK_SIZE, loads=True, saves=False)
    ask(consumer, request())
    assert consumer.orders(scheduled(new={"r": (BLOCKS, 0, 323)})).saves == []
    consumer.close()


# --- failed loads -----------------------------------------------------------------------------------


class Pool:
    """Stands for vLLM's block pool."""

    def __init__(self) -> None:
        self.evicted: set[int] = set()

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted |= block_ids


def test_pages_after_a_failed_one_are_disowned(embedded: EmbeddedEngine, side: SchedulerSide) -> None:
    side.prefix_cache = pool = Pool()
    for request_id in ("loser", "sharer", "bystander"):
        ask(side, request(request_id))
    shared = [*BLOCKS[:10], *range(200, 211)]
    others = list(range(300, 321))
    side.orders(scheduled(new={"loser": (BLOCKS, 0, 100), "sharer": (shared, 160, 100), "bystander": (others, 0, 100)}))
    embedded.failed_block_ids |= {5, 6}

    side.loads_failed({5, 6})

    assert pool.evicted == {*BLOCKS[4:], *shared[4:]}
    assert embedded.failed_block_ids == set()
    orders = side.orders(
        scheduled(cached={"loser": (None, 64, 259), "sharer": (None, 160, 163), "bystander": (None, 100, 223)})
    )
    assert orders.heard_of_block_ids == {5, 6}
    assert saved(orders) == [("bystander", [64, 128, 192, 256])]
    assert side.orders(scheduled()).heard_of_block_ids == set()
    resumed = side.orders(scheduled(cached={"loser": (others, 0, 323)}, resumed=["loser"]))
    assert saved(resumed) == [("loser", [0, 64, 128, 192, 256])]  # with other pages


def test_pages_of_a_request_that_ends_before_vllm_learns_of_them(embedded: EmbeddedEngine, side: SchedulerSide) -> None:
    side.prefix_cache = pool = Pool()
    ask(side, request())
    side.orders(scheduled(new={"r": (BLOCKS, 128, 195)}))
    embedded.failed_block_ids |= set(BLOCKS[2:8])
    side.finished("r")
    assert pool.evicted == set(BLOCKS[2:])


def test_after_an_error_loads_are_kept_and_no_block_table_is_trusted(
    embedded: EmbeddedEngine, side: SchedulerSide
) -> None:
    put(embedded, 0)
    ask(side, request("other"))
    side.orders(scheduled(new={"other": (BLOCKS, 0, 10)}))
    asked = request()
    ask(side, asked)
    side.allocated(asked, BLOCKS, 64)

    orders = side.orders_after_error()

    assert [load.request_id for load in orders.loads] == ["r"]
    assert orders.overwritten_block_ids is None
    assert side.orders(scheduled(cached={"other": (None, 10, 300)})).saves == []
    side.finished("r")


def test_a_reset_makes_everybody_start_anew(embedded: EmbeddedEngine, side: SchedulerSide) -> None:
    put(embedded, 0, 1)
    waiting = request("waiting")
    assert ask(side, waiting) == 128
    side.reset()
    assert embedded.storage.l1.usage().leases == 0
    assert ask(side, waiting) == 0
    assert side.orders(scheduled(new={"waiting": (BLOCKS, 0, 323)})).saves == []
    assert ask(side, request("new")) == 0
    assert saved(side.orders(scheduled(new={"new": (BLOCKS, 0, 323)}))) == [("new", [0, 64, 128, 192, 256])]
