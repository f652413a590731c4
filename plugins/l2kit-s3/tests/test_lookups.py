"""Which objects are there: right answers, in few requests."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import l2kit
from l2kit import Layout, MemoryObj, ObjectKey, StoreStatus
from l2kit_s3.adapter import name_of, parse_name
from l2kit_s3.config import ObjectStoreConfig
from l2kit_s3.lookups import HitCache, Lookups, probes
from l2kit_s3.objects import PAGE_OBJECTS, Found, Listed, Objects, cut

pytestmark = pytest.mark.anyio

MOST_REQUESTS = 60


class Dictionary(Objects):
    """An object store that counts."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.heads = 0
        self.lists = 0

    def check(self) -> None:
        raise NotImplementedError

    def read(self, name: str, into: Sequence[memoryview], offset: int | None = None) -> Found | None:
        raise NotImplementedError

    def write(self, name: str, data: Sequence[memoryview]) -> StoreStatus:
        raise NotImplementedError

    def size(self, name: str) -> int | None:
        self.heads += 1
        return self.sizes.get(name)

    def delete(self, name: str) -> bool:
        raise NotImplementedError

    def pages(self, folder: str) -> Iterator[list[Listed]]:
        names = sorted(name for name in self.sizes if name.startswith(f"{folder}/"))
        for begin in range(0, len(names) + 1, PAGE_OBJECTS):
            self.lists += 1
            yield [Listed(name, self.sizes[name]) for name in names[begin : begin + PAGE_OBJECTS]]

    def close(self) -> None:
        raise NotImplementedError


async def in_turn(items: Sequence[list[str]], work: Callable[[list[str]], Awaitable[None]]) -> None:
    for item in items:
        await work(item)


async def here(work: Callable[[], None]) -> None:
    work()


def lookups_in(store: Dictionary, *, now: Callable[[], float] = lambda: 0.0, **options: Any) -> Lookups:
    return Lookups(store, ObjectStoreConfig(**options), run_in_thread=here, for_each=in_turn, now=now)


def names_of(count: int, namespace: str = "ns") -> list[str]:
    return [f"p/{namespace}/{os.urandom(16).hex()}.s0of1.g0.all" for _ in range(count)]


async def test_one_listing_answers_for_a_small_namespace() -> None:
    names = names_of(512)
    store = Dictionary({name: index for index, name in enumerate(names) if index % 3})
    found = await lookups_in(store).sizes(names)
    assert found == [index if index % 3 else None for index in range(512)]
    assert (store.lists, store.heads) == (1, 0)


async def test_few_keys_are_asked_one_by_one() -> None:
    names = names_of(7)
    store = Dictionary(dict.fromkeys(names[:3], 5))
    assert await lookups_in(store).sizes(names) == [5, 5, 5, None, None, None, None]
    assert (store.lists, store.heads) == (0, 7)


async def test_a_large_namespace_is_listed_in_part_and_then_left_alone() -> None:
    names = names_of(100)
    store = Dictionary(dict.fromkeys(names_of(9 * PAGE_OBJECTS), 1) | dict.fromkeys(names[::2], 7))
    now = 0.0
    lookups = lookups_in(store, now=lambda: now)
    expected = [7, None] * 50
    assert await lookups.sizes(names) == expected
    assert store.lists == 8
    assert store.heads < 100  # what the pages showed was not asked again
    assert await lookups.sizes(names) == expected
    assert store.lists == 8
    now = 61.0
    assert await lookups.sizes(names) == expected
    assert store.lists == 16


async def test_each_namespace_has_a_listing_of_its_own() -> None:
    names = [*names_of(20, "one"), *names_of(20, "other")]
    store = Dictionary(dict.fromkeys(names[5:], 1))
    assert await lookups_in(store).sizes(names) == [None] * 5 + [1] * 35
    assert (store.lists, store.heads) == (2, 0)


@given(there=st.integers(0, 512))
async def test_the_end_of_a_prefix_is_found_in_few_requests(there: int) -> None:
    names = [f"p/ns/{number:032x}.s0of1.g0.all" for number in range(512)]
    store = Dictionary(dict.fromkeys(names[:there], 9))
    found = await lookups_in(store, lookup="prefix", list_pages=0).sizes(names)
    assert found == [9] * there + [None] * (512 - there)
    assert store.heads <= MOST_REQUESTS


@given(low=st.integers(0, 600), width=st.integers(1, 600), more=st.integers(0, 600))
def test_probes_lie_where_the_end_may_be(low: int, width: int, more: int) -> None:
    asked = probes(low, low + width, low + width + more)
    assert asked == sorted(set(asked))
    assert all(low <= index < low + width for index in asked)
    assert asked


def test_names_are_keys() -> None:
    key = ObjectKey("ns", bytes(16), 1, 4, 2, 7)
    assert name_of(key) == "ns/00000000000000000000000000000000.s1of4.g2.l7"
    assert parse_name(name_of(key)) == key
    for other in ("", "ns/00", key.encode(), "ns/zz.s1of4.g2.l7", f"more/{name_of(key)}", "l2kit-is-anybody-there"):
        assert parse_name(other) is None


def test_the_cache_is_bounded_and_ends() -> None:
    cache = HitCache(1000.0, 2)
    for size, name in enumerate("abc"):
        cache.add(name, size)
    assert [cache.get(name) for name in "abc"] == [None, 1, 2]
    cache.discard("b")
    assert cache.get("b") is None
    none = HitCache(0.0, 2)
    none.add("a", 1)
    assert none.get("a") is None


@given(sizes=st.lists(st.integers(0, 50), max_size=8), piece_bytes=st.integers(1, 60))
def test_pieces_are_the_whole_in_order(sizes: list[int], piece_bytes: int) -> None:
    whole = memoryview(bytearray(range(250)) * 2)
    into: list[memoryview] = []
    for size in sizes:
        into.append(whole[:size])
        whole = whole[size:]
    pieces = cut(into, piece_bytes)
    assert b"".join(part for piece in pieces for part in piece.into) == b"".join(into)
    lengths = [sum(map(len, piece.into)) for piece in pieces]
    assert all(length == piece_bytes for length in lengths[:-1])
    assert [piece.offset for piece in pieces] == [sum(lengths[:number]) for number in range(len(pieces))]


@pytest.mark.service
@pytest.mark.parametrize("direct", ["true", "false"])
async def test_512_keys_on_a_real_store(place: Any, direct: str) -> None:
    keys = [ObjectKey("lookups", os.urandom(16)) for _ in range(512)]
    layout = Layout.raw(100)
    async with l2kit.open_adapter(place.url(direct=direct, list_pages="1")) as adapter:
        await adapter.submit_store_task(keys[::2], [MemoryObj.wrap(bytes(100), layout) for _ in keys[::2]])
        before = len(place.proxy.asked)
        found = await adapter.submit_lookup_and_lock_task(keys)
        assert [outcome.hit for outcome in found] == [True, False] * 256
        assert len(place.proxy.asked) - before == 1
        assert adapter.counters["lookup_requests"] == 1
        assert "1 LIST" in (await adapter.probe()).details["cost"]
        await adapter.submit_unlock_task(keys)


@pytest.mark.service
async def test_a_hit_that_is_kept_ends_with_a_load_that_misses(place: Any) -> None:
    key, layout = ObjectKey("lookups", os.urandom(16)), Layout.raw(100)

    async def is_there(adapter: Any) -> bool:
        [outcome] = await adapter.submit_lookup_and_lock_task([key])
        await adapter.submit_unlock_task([key])
        return bool(outcome.hit)

    async with l2kit.open_adapter(place.url(hit_cache_s="600")) as adapter:
        await adapter.submit_store_task([key], [MemoryObj.wrap(bytes(100), layout)])
        before = len(place.proxy.asked)
        assert await is_there(adapter)
        assert len(place.proxy.asked) == before
        place.store.delete(place.name(key))
        assert await is_there(adapter)
        [missed] = await adapter.submit_load_task([key], [MemoryObj.allocate(layout)])
        assert missed.status == "miss"
        assert not await is_there(adapter)
