"""The scrubber: it finds rot before a reader does, heals as readers do, keeps its pace, and gives way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import l2kit
from l2kit.adapter import Capabilities, KeyInfo, L2Adapter
from l2kit.config import build
from l2kit.envelope import HEADER_BYTES
from l2kit.errors import BackendError, ConfigError
from l2kit.inventory import counts_as_use
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.memory_adapter import MemoryAdapter
from l2kit.resilience import BreakerAdapter
from l2kit.scrubbing import SCRUB_COUNTERS, Pace, ScrubbingAdapter
from l2kit.serde import CodecChain
from l2kit.testing import AdapterConformance
from l2kit.wrapper import innermost
from tests.unit.dict_adapter import make
from tests.unit.odd_tiers import OddAdapter, OddConfig, content, key, recover, registry, until
from tests.unit.small_codecs import Codecs, ZlibCodec
from tests.unit.test_groups import GroupAdapter

NBYTES = 3000
NOW: Mapping[str, Any] = {"interval_s": 0.001, "max_bytes_per_s": 1 << 40}

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@asynccontextmanager
async def scrubbed(
    url: str = "odd://", options: Mapping[str, Any] = NOW, **others: Any
) -> AsyncIterator[tuple[ScrubbingAdapter, OddAdapter]]:
    """An odd adapter that is scrubbed, and the scrubber around it."""
    adapter = registry().adapter(url, scrub=options, **others)
    assert isinstance(adapter, ScrubbingAdapter)
    async with adapter:
        inside = innermost(adapter)
        assert isinstance(inside, OddAdapter)
        yield adapter, inside
        recover(inside)


async def put(adapter: L2Adapter[Any], *keys: ObjectKey, nbytes: int = NBYTES) -> list[str]:
    objects = [MemoryObj.wrap(content(name, nbytes), Layout.raw(nbytes)) for name in keys]
    return [outcome.status for outcome in await adapter.submit_store_task(keys, objects)]


async def get(adapter: L2Adapter[Any], *keys: ObjectKey) -> list[str]:
    targets = [MemoryObj.allocate(Layout.raw(NBYTES)) for _ in keys]
    outcomes = await adapter.submit_load_task(keys, targets)
    for name, target, outcome in zip(keys, targets, outcomes, strict=True):
        assert not outcome.loaded or target.tobytes() == content(name, NBYTES)
    return [outcome.status for outcome in outcomes]


def rot(inside: MemoryAdapter, name: ObjectKey, position: int = -1) -> None:
    """Flip a bit of a stored object, around every adapter."""
    stored = bytearray(inside._objects[name])
    stored[position] ^= 1
    inside._objects[name] = bytes(stored)


async def rounds(adapter: L2Adapter[Any], count: int = 1) -> None:
    """Until so many more rounds have begun and ended."""
    wanted = adapter.counters["scrub.rounds"] + count + 1  # one may be half over
    await until(lambda: adapter.counters["scrub.rounds"] >= wanted)


# --- what it finds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 60, HEADER_BYTES - 1, HEADER_BYTES + 100, -1])
async def test_rot_is_found_counted_and_gone_and_the_next_store_replaces_it(position: int) -> None:
    keys = [key(number) for number in range(5)]
    async with scrubbed() as (adapter, inside):
        await put(adapter, *keys)
        rot(inside, keys[2], position)
        await until(lambda: adapter.counters["scrub.corrupt"] > 0)
        await until(lambda: keys[2] not in inside.keys)
        await rounds(adapter)
        assert adapter.counters["scrub.corrupt"] == adapter.counters["load.corrupt"] == 1
        assert sum(count for name, count in adapter.counters.items() if name.startswith("corrupt.")) == 1
        assert await get(adapter, *keys) == ["loaded", "loaded", "miss", "loaded", "loaded"]
        assert await put(adapter, keys[2]) == ["stored"]
        assert await get(adapter, keys[2]) == ["loaded"]
        await rounds(adapter)
        assert adapter.counters["scrub.corrupt"] == 1
        assert inside.keys == set(keys)


async def test_what_was_cut_off_or_belongs_to_another_key_is_rot() -> None:
    keys = [key(number) for number in range(4)]
    async with scrubbed() as (adapter, inside):
        await put(adapter, *keys)
        inside._objects[keys[0]] = inside._objects[keys[1]]
        inside._objects[keys[2]] = inside._objects[keys[2]][:-1]
        await until(lambda: inside.keys == {keys[1], keys[3]})
        await until(lambda: adapter.counters["scrub.corrupt"] == 2)
        assert (adapter.counters["corrupt.key"], adapter.counters["corrupt.truncated"]) == (1, 1)


async def test_rot_beneath_a_codec_is_found() -> None:
    chain = CodecChain([ZlibCodec()])
    inside = OddAdapter(build(OddConfig, {}, where="odd"), name="odd", codecs=chain, codec_source=Codecs())
    async with ScrubbingAdapter.around(inside, NOW, where="test") as adapter:
        await put(adapter, key(0), key(1), nbytes=3 << 20)  # checked in a thread
        rot(inside, key(1))
        await until(lambda: inside.keys == {key(0)})
        await rounds(adapter)
        assert adapter.counters["scrub.corrupt"] == 1
        assert inside.keys == {key(0)}


async def test_what_is_only_not_readable_here_stays() -> None:
    async with scrubbed() as (adapter, inside):
        await put(adapter, key(0))
        stored = bytearray(inside._objects[key(0)])
        stored[8:10] = (2).to_bytes(2, "little")  # a newer format, with the checksum that it would have
        stored[HEADER_BYTES - 16 : HEADER_BYTES] = xxhash.xxh3_128_digest(bytes(stored[: HEADER_BYTES - 16]))
        inside._objects[key(0)] = bytes(stored)
        await rounds(adapter, 2)
        assert inside.keys == {key(0)}
        assert adapter.counters["scrub.corrupt"] == 0


async def test_rot_that_cannot_be_deleted_is_kept_from_readers_and_replaced_by_a_store() -> None:
    async with scrubbed() as (adapter, inside):
        await put(adapter, key(0))
        delete_one = inside.delete_one

        async def refuse(name: ObjectKey) -> bool:
            raise BackendError("read-only")

        inside.delete_one = refuse  # type: ignore[method-assign, assignment]
        rot(inside, key(0))
        await until(lambda: adapter.counters["scrub.corrupt"] > 0)
        [found] = await adapter.submit_lookup_and_lock_task([key(0)])
        assert not found.hit
        inside.delete_one = delete_one  # type: ignore[method-assign]
        assert await put(adapter, key(0)) == ["stored"]
        assert await get(adapter, key(0)) == ["loaded"]


async def test_damage_on_the_way_costs_no_object() -> None:
    """What the second look does not confirm is no rot."""
    async with scrubbed() as (adapter, inside):
        await put(adapter, key(0))
        load_one, flipped = inside.load_one, 0

        async def flip_once(name: ObjectKey, into: Sequence[memoryview]) -> int | None:
            nonlocal flipped
            size = await load_one(name, into)
            if len(into) == 1 and len(into[0]) > HEADER_BYTES and not flipped:
                into[0][-1] ^= 1
                flipped = 1
            return size

        inside.load_one = flip_once  # type: ignore[method-assign, assignment]
        await until(lambda: flipped == 1)
        await rounds(adapter)
        assert adapter.counters["scrub.corrupt"] == 0
        assert inside.keys == {key(0)}


async def test_objects_and_bytes_are_counted_and_every_counter_is_there_from_the_start() -> None:
    async with scrubbed(options={"interval_s": 3600}) as (adapter, _):
        assert {name: adapter.counters[name] for name in SCRUB_COUNTERS} == dict.fromkeys(SCRUB_COUNTERS, 0)
        assert set(SCRUB_COUNTERS) <= set(adapter.counters)
    async with scrubbed() as (adapter, inside):
        await put(adapter, key(0), key(1), key(2))
        stored_bytes = sum(map(len, inside._objects.values()))
        before = adapter.counters
        await rounds(adapter)
        after = adapter.counters
        objects = after["scrub.objects"] - before["scrub.objects"]
        assert objects >= 3
        assert (after["scrub.bytes"] - before["scrub.bytes"]) * 3 == objects * stored_bytes
        assert after["load.loaded"] == after["load.miss"] == 0, "its reads are no loads of anybody"


# --- pace and manners -------------------------------------------------------------------------------


@given(
    rate=st.integers(1, 10**6),
    reads=st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 100), st.floats(0, 100)), max_size=30),
)
def test_a_pace_is_kept_however_long_reading_and_resting_take(rate: int, reads: list[tuple[int, float, float]]) -> None:
    now = 1000.0
    pace = Pace(rate, clock=lambda: now)
    moved = 0
    for nbytes, reading_s, longer_s in reads:
        pace.owe(nbytes)
        moved += nbytes
        now += reading_s
        now += pace.wait_s + longer_s
        assert moved <= rate * (now - 1000.0) * (1 + 1e-9) + 1e-3
        assert pace.wait_s <= 1e-6


def test_rest_is_not_saved_up() -> None:
    now = 0.0
    pace = Pace(100, clock=lambda: now)
    now = 1000.0
    pace.owe(500)
    assert pace.wait_s == 5.0


async def test_after_an_object_it_rests_as_long_as_its_rate_asks() -> None:
    async with scrubbed(options={"interval_s": 0.001, "max_bytes_per_s": "1b"}) as (adapter, _):
        await put(adapter, key(0), key(1))
        await until(lambda: adapter.counters["scrub.objects"] == 1)
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        assert adapter.counters["scrub.objects"] == 1
        assert adapter.pace.wait_s > NBYTES / 2


async def test_it_gives_way_to_others_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("l2kit.scrubbing._LONGEST_YIELD_S", 0.1)
    async with scrubbed() as (adapter, inside), anyio.create_task_group() as group:
        await put(adapter, key(0), key(1))
        await rounds(adapter)
        inside.hung.add("store")
        group.start_soon(put, adapter, key(2))
        await until(lambda: inside.waiting["store"] == 1)
        before = adapter.counters["scrub.objects"]
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        assert adapter.counters["scrub.objects"] <= before + 1
        await until(lambda: adapter.counters["scrub.objects"] >= before + 2)
        assert inside.waiting["store"] == 1
        recover(inside)


async def test_what_it_reads_is_no_use_and_what_others_read_is() -> None:
    async with scrubbed() as (adapter, inside):
        await put(adapter, key(0))
        load_one = inside.load_one
        uses: list[tuple[bool, bool]] = []

        async def note(name: ObjectKey, into: Sequence[memoryview]) -> int | None:
            uses.append((counts_as_use(), await inside.run_in_thread(counts_as_use)))
            return await load_one(name, into)

        inside.load_one = note  # type: ignore[method-assign, assignment]
        await until(lambda: len(uses) >= 3)
        assert set(uses) == {(False, False)}
        assert await get(adapter, key(0)) == ["loaded"]
        assert (True, True) in uses


class Listed(GroupAdapter):
    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        for name, stored in list(self.objects.items()):
            yield KeyInfo(name, len(stored))


async def test_groups_reach_the_adapter_as_groups() -> None:
    inside = make(Listed)
    async with ScrubbingAdapter(inside) as adapter:
        names = [key(number) for number in range(8)]
        await put(adapter, *names)
        assert await get(adapter, *names) == ["loaded"] * 8
        assert [len(group) for group in inside.groups] == [8, 8]


# --- failures ---------------------------------------------------------------------------------------


async def test_objects_that_cannot_be_read_are_counted_and_cost_the_tier_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("l2kit.scrubbing._FIRST_PAUSE_S", 0.001)
    adapter = registry().tier({"url": "odd://", "scrub": NOW, "resilience": {"breaker_calls": 4}})
    async with adapter:
        inside = innermost(adapter)
        assert isinstance(inside, OddAdapter)
        assert isinstance(adapter, ScrubbingAdapter)
        assert isinstance(adapter.inner, BreakerAdapter)
        keys = [key(number) for number in range(6)]
        await put(adapter, *keys)
        inside.failing_keys = dict.fromkeys(keys, BackendError("bad sector"))
        await until(lambda: adapter.counters["scrub.failed"] >= 6)
        assert adapter.counters["circuit.read.opened"] == 0
        assert adapter.trouble is None
        inside.failing_keys = {}
        assert await get(adapter, *keys) == ["loaded"] * 6
        assert adapter.counters["scrub.corrupt"] == 0
        assert inside.keys == set(keys)


async def test_a_listing_that_fails_is_trouble_until_it_works() -> None:
    async with scrubbed() as (adapter, inside):
        await put(adapter, key(0))
        iter_keys = inside.iter_keys

        def fail() -> Any:
            raise BackendError("odd: the server is gone")

        inside.iter_keys = fail  # type: ignore[method-assign]
        await until(lambda: adapter.trouble is not None)
        assert "scrub failed" in str(adapter.trouble)
        inside.iter_keys = iter_keys  # type: ignore[method-assign]
        await rounds(adapter)
        assert await get(adapter, key(0)) == ["loaded"]


async def test_a_listing_that_hangs_is_trouble() -> None:
    async with scrubbed(open_timeout_s=0.05) as (adapter, inside):

        async def hang() -> AsyncIterator[KeyInfo]:
            await anyio.sleep_forever()
            yield KeyInfo(key(0), 0)

        inside.iter_keys = hang  # type: ignore[method-assign]
        await until(lambda: adapter.trouble is not None)
        assert "the listing did not go on within" in str(adapter.trouble)


@pytest.mark.parametrize("hang", ["rest", "read"])
async def test_closing_does_not_wait_for_it(hang: str) -> None:
    """Else this test would take longer than it may."""
    options = {**NOW, "max_bytes_per_s": 1} if hang == "rest" else NOW
    adapter = registry().adapter("odd://", scrub=options, timeout_s=3600)
    async with adapter:
        inside = innermost(adapter)
        assert isinstance(inside, OddAdapter)
        if hang == "read":
            inside.hung.add("load")
        await put(adapter, key(0))
        await until(lambda: inside.waiting["load"] if hang == "read" else adapter.counters["scrub.objects"])


# --- configuration ----------------------------------------------------------------------------------


def test_it_is_opt_in_and_configured_per_tier() -> None:
    known = registry()
    assert not isinstance(known.tier("odd://"), ScrubbingAdapter)
    assert not isinstance(known.adapter("odd://?resilience.max_retries=0"), ScrubbingAdapter)
    for tier in (
        known.tier("odd://?scrub.interval_s=60&scrub.max_bytes_per_s=2MiB"),
        known.adapter({"url": "odd://", "scrub.interval_s": 60, "scrub.max_bytes_per_s": 2 << 20}),
        known.tier({"url": "odd://", "scrub": {"interval_s": 60.0, "max_bytes_per_s": "2MiB"}}),
    ):
        assert isinstance(tier, ScrubbingAdapter)
        assert (tier.options.interval_s, tier.options.max_bytes_per_s) == (60.0, 2 << 20)
    by_default = known.tier({"url": "odd://", "scrub": {}})
    assert isinstance(by_default, ScrubbingAdapter)
    assert (by_default.options.interval_s, by_default.options.max_bytes_per_s) == (3600.0, 50 << 20)
    assert isinstance(by_default.inner, BreakerAdapter), "it stands outside of everything else"
    assert isinstance(innermost(by_default), OddAdapter)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"interval": 60}, "odd: scrub: unknown option 'interval'; did you mean 'interval_s'"),
        ({"interval_s": 0}, "odd: scrub: interval_s"),
        ({"max_bytes_per_s": "fast"}, "odd: scrub: max_bytes_per_s: 'fast' is no size"),
        ({"max_bytes_per_s": 0}, "odd: scrub: max_bytes_per_s"),
        (True, "scrub: expected a table"),
    ],
)
def test_wrong_options_are_named(options: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        registry().tier({"url": "odd://", "scrub": options})


class Mute(MemoryAdapter):
    api_version = (1, 0)
    capabilities = Capabilities(persistent=False, shared=False)
    iter_keys = L2Adapter.iter_keys


def test_a_tier_that_cannot_list_its_objects_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="mute: scrub: this adapter cannot list its keys"):
        registry(mute=Mute).tier({"url": "mute://", "scrub": {}})


class TestScrubbed(AdapterConformance):
    """A tier that is scrubbed all the time keeps the whole contract."""

    pytestmark = pytest.mark.slow

    @pytest.fixture(autouse=True)
    def no_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A thread that starts in the turn in which a test ends would stay until the test's fixtures are gone."""
        monkeypatch.setattr("l2kit.sealed.INLINE_CPU_BYTES", 1 << 40)

    @pytest.fixture
    def adapter_url(self) -> str:
        return "memory://?scrub.interval_s=0.001&scrub.max_bytes_per_s=1TiB"

    def raw_read(self, adapter: L2Adapter[Any], key: ObjectKey) -> bytes | None:
        inside = innermost(adapter)
        assert isinstance(inside, MemoryAdapter)
        return inside._objects.get(key)

    def raw_write(self, adapter: L2Adapter[Any], key: ObjectKey, data: bytes) -> None:
        inside = innermost(adapter)
        assert isinstance(inside, MemoryAdapter)
        inside._objects[key] = data


async def test_a_storage_manager_shows_what_was_scrubbed() -> None:
    tier = {"url": "memory://", "scrub": dict(NOW)}
    async with l2kit.open_storage({"tiers": [tier], "l1": {"max_bytes": "1MiB"}}) as manager:
        await until(lambda: manager.tiers[0].adapter.counters["scrub.rounds"] > 0)
        assert manager.status()["tiers"]["memory"]["adapter"]["scrub.rounds"] > 0
