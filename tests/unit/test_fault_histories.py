"""Whatever a plan does to whatever history: no load ever delivers bytes that were not stored under its key."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l2kit.errors import BackendError
from l2kit.faults import KINDS, FaultOptions
from l2kit.faults.plan import Kind, Operation
from l2kit.framing import seal
from l2kit.keys import ObjectKey
from l2kit.memory_adapter import MemoryAdapter, MemoryConfig
from l2kit.serde import CodecChain
from l2kit.storage_manager import open_storage
from tests.unit.fault_bench import Bench, key, raw, registry
from tests.unit.odd_tiers import OBJECT_BYTES, content, is_at_rest, read, until, wanted, write
from tests.unit.small_codecs import Codecs, QuickZlibCodec, XorCodec

Step = tuple[str, list[int], int]

SHORT: dict[Kind, str] = {"latency": ":0.001", "jitter": ":0.002", "stuck": ":0.003", "slow": ":10MiB"}
PROVEN = (
    *("load.loaded", "load.corrupt", "lookup.hit"),
    *(f"fault.load.{kind}" for kind in ("short", "truncate", "flip", "wrong")),
    *("fault.store.truncate", "fault.store.flip", "fault.store.lost", "fault.lookup.lie"),
)
DAMAGE: tuple[Kind, ...] = ("lost", "short", "truncate", "flip", "wrong", "lie")


def rules(operation: Operation) -> st.SearchStrategy[tuple[str, ...]]:
    """Any rules under which something still gets through, in little time; damage is what most of them do."""
    kinds = [kind for kind, operations in KINDS.items() if operation in operations and kind != "hang"]
    damage = [kind for kind in kinds if kind in DAMAGE]
    others = [f"{kind}{SHORT.get(kind, '')}" for kind in kinds if kind not in DAMAGE]
    refusing = st.tuples(st.sampled_from(others), st.sampled_from(["~0.1", "@1-2", "@5"])).map("".join)
    if not damage:
        return st.lists(refusing, max_size=2).map(tuple)
    hurting = st.tuples(st.sampled_from(damage), st.sampled_from(["~0.5", "~0.2", "@3-5", "@2-~0.3"])).map("".join)
    lists = st.tuples(st.lists(refusing, max_size=1), st.lists(hurting, min_size=1, max_size=2))
    return lists.map(lambda found: (*found[0], *found[1]))


plans = st.builds(
    FaultOptions,
    seed=st.integers(0, 1000),
    lookup=rules("lookup"),
    load=rules("load"),
    store=rules("store"),
    delete=rules("delete"),
    release=rules("release"),
)
WORDS = st.sampled_from(["store", "store", "load", "load", "load", "lookup", "foreign", "delete"])
NUMBERS = st.integers(0, 5)
steps = st.lists(
    st.tuples(WORDS, st.lists(NUMBERS, min_size=1, max_size=4), st.integers(0, 2)), min_size=25, max_size=40
)


def version(number: int, variant: int) -> bytes:
    """Of two objects the versions are equally long, so that no length gives them away."""
    return content(f"{number}/{variant}", 150 + 400 * (number // 2) + 90 * variant)


async def run_history(plan: FaultOptions, history: list[Step], chain: CodecChain) -> Counter[str]:
    """Play a history over a model: a set of versions for each key, any of which may come back, and nothing else."""
    model: dict[int, set[bytes]] = {number: set() for number in range(6)}
    inner = MemoryAdapter(MemoryConfig(), name="memory", codecs=chain, codec_source=Codecs())
    async with Bench(inner, **{field: getattr(plan, field) for field in plan.__struct_fields__}) as bench:
        for step, numbers, variant in history:
            keys = [key(number) for number in numbers]
            if step == "store":
                sources = [version(number, variant) for number in numbers]
                for number, data in zip(numbers, sources, strict=True):
                    model[number].add(data)
                await bench.adapter.submit_store_task(keys, [raw(data) for data in sources])
            elif step == "foreign":  # somebody else's, stored with another chain
                data = version(numbers[0], variant)
                model[numbers[0]].add(data)
                await inner.store_one(keys[0], seal(keys[0], raw(data), CodecChain([XorCodec(9)]), 64))
            elif step == "load":
                targets = [raw(bytearray(b"\xa5" * (3000 if variant else len(version(n, 0))))) for n in numbers]
                outcomes = await bench.adapter.submit_load_task(keys, targets)
                after = [target.tobytes() for target in targets]
                for number, outcome, found in zip(numbers, outcomes, after, strict=True):
                    assert not outcome.loaded or found[: outcome.nbytes] in model[number], (number, outcome)
                await anyio.lowlevel.checkpoint()
                assert after == [target.tobytes() for target in targets], "a buffer was touched after the end"
            elif step == "delete":
                await bench.adapter.submit_delete_task(keys)
            else:
                await lookup_and_unlock(bench, keys)
        assert bench.adapter.held_leases == 0
        assert not bench.locks
        bench.adapter.calm()
        assert await lookup_and_unlock(bench, [key(number) for number in range(6)])
        assert bench.adapter.injected == sum(bench.faults().values())
        return bench.adapter.counters


async def lookup_and_unlock(bench: Bench, keys: list[ObjectKey]) -> bool:
    try:
        found = await bench.adapter.submit_lookup_and_lock_task(keys)
    except BackendError:
        return False
    hits = [key for key, outcome in zip(keys, found, strict=True) if outcome.hit]
    try:
        await bench.adapter.submit_unlock_task(hits)
    except BackendError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("codec", [None, QuickZlibCodec, XorCodec])
def test_no_plan_gets_wrong_bytes_through(codec: Any) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=60)
    @given(plans, steps)
    def play(plan: FaultOptions, history: list[Step]) -> None:
        seen.update(anyio.run(run_history, plan, history, CodecChain([codec()] if codec else [])))

    play()
    unseen = [name for name in PROVEN if seen[name] < 3]
    assert not unseen, f"these histories prove nothing about {unseen}"


@pytest.mark.anyio
async def test_a_storage_manager_lives_through_an_outage() -> None:
    """A tier that fails, damages and lies: prefetches come back with less, never with anything wrong."""
    tier = {
        "url": "fault+memory://",
        "timeout_s": 0.5,
        "fault": {
            "seed": 3,
            "lookup": ["lie~0.3", "error~0.1"],
            "load": ["flip~0.2", "wrong~0.2", "short~0.2", "disconnect~0.1"],
            "store": ["lost~0.2", "truncate~0.2", "full~0.1"],
        },
    }
    config = {"tiers": [tier], "l1": {"max_bytes": 4 * OBJECT_BYTES}, "chunk_size": 16}
    async with open_storage(config, registry=registry()) as manager:
        for number in range(40):
            chunks = wanted(3, first=number % 8)
            await read(manager, chunks)
            write(manager, *(item.key for chunk in chunks for item in chunk))
            await until(lambda: is_at_rest(manager))
        counters = manager.tiers[0].adapter.counters
        assert sum(count for name, count in counters.items() if name.startswith("fault.")) > 10
