"""Lookup and load agree, whatever happened before: what is found can be loaded, and what is not found cannot."""

# ruff: noqa: D102 - the names of the tests say what they test

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from l2kit.keys import ObjectKey
from l2kit.task import L2Task
from l2kit.testing.groups.base import Adapter, Conformance, content, destination, pass_time, same, source

_NBYTES = 200_000
_OLD, _NEW = content("old", _NBYTES), content("new", _NBYTES - 5000)
#: A batch is cancelled after so many turns of the loop, from none.
_TURNS = 8
_OBJECT_BYTES = 64 << 10
_LIMIT_BYTES = 10 * _OBJECT_BYTES

#: What a path leads to: each key, with all that it may hold then.
Held = dict[ObjectKey, list[bytes | None]]
Path = Callable[["AgreementTests", Adapter], Awaitable[Held]]


async def _a_store(suite: AgreementTests, adapter: Adapter) -> Held:
    await suite.store(adapter, {suite.key(): _OLD})
    return {suite.key(): [_OLD]}


async def _a_second_store(suite: AgreementTests, adapter: Adapter) -> Held:
    await suite.store(adapter, {suite.key(): _OLD})
    [outcome] = await suite.store(adapter, {suite.key(): _NEW})
    return {suite.key(): [_NEW if outcome.status == "stored" else _OLD]}


async def _a_key_given_twice(suite: AgreementTests, adapter: Adapter) -> Held:
    await adapter.submit_store_task([suite.key()] * 2, [source(_OLD), source(_OLD)])
    return {suite.key(): [_OLD]}


async def _a_delete(suite: AgreementTests, adapter: Adapter) -> Held:
    await suite.store(adapter, {suite.key(): _OLD})
    await adapter.submit_delete_task([suite.key()])
    return {suite.key(): [None]}


async def _a_store_after_a_delete(suite: AgreementTests, adapter: Adapter) -> Held:
    await _a_delete(suite, adapter)
    await suite.agreed(adapter, [suite.key()], 1)
    await suite.store(adapter, {suite.key(): _NEW})
    return {suite.key(): [_NEW]}


async def _a_delete_while_leased(suite: AgreementTests, adapter: Adapter) -> Held:
    await suite.store(adapter, {suite.key(): _OLD})
    await adapter.submit_lookup_and_lock_task([suite.key()])
    await adapter.submit_delete_task([suite.key()])
    await adapter.submit_unlock_task([suite.key()])
    return {suite.key(): [None]}


async def _a_replacement_while_leased(suite: AgreementTests, adapter: Adapter) -> Held:
    await suite.store(adapter, {suite.key(): _OLD})
    await adapter.submit_lookup_and_lock_task([suite.key()])
    [outcome] = await suite.store(adapter, {suite.key(): _NEW})
    await adapter.submit_unlock_task([suite.key()])
    return {suite.key(): [_NEW if outcome.status == "stored" else _OLD]}


async def _a_store_past_its_deadline(suite: AgreementTests, adapter: Adapter) -> Held:
    past = anyio.current_time() - 1
    await adapter.submit_store_task([suite.key()], [source(_NEW)], deadline=past)
    return {suite.key(): [None]}


async def _stores_cancelled(suite: AgreementTests, adapter: Adapter) -> Held:
    for turns, key in enumerate(suite.keys(_TURNS)):
        await _cancel(adapter.submit_store_task([key], [source(_NEW)]), turns)
    return {key: [_NEW, None] for key in suite.keys(_TURNS)}


async def _second_stores_cancelled(suite: AgreementTests, adapter: Adapter) -> Held:
    await suite.store(adapter, dict.fromkeys(suite.keys(_TURNS), _OLD))
    await _stores_cancelled(suite, adapter)
    return {key: [_NEW, _OLD] for key in suite.keys(_TURNS)}


async def _deletes_cancelled(suite: AgreementTests, adapter: Adapter) -> Held:
    await suite.store(adapter, dict.fromkeys(suite.keys(_TURNS), _OLD))
    for turns, key in enumerate(suite.keys(_TURNS)):
        await _cancel(adapter.submit_delete_task([key]), turns)
    return {key: [_OLD, None] for key in suite.keys(_TURNS)}


async def _loads_cancelled(suite: AgreementTests, adapter: Adapter) -> Held:
    await suite.store(adapter, dict.fromkeys(suite.keys(_TURNS), _OLD))
    for turns, key in enumerate(suite.keys(_TURNS)):
        await _cancel(adapter.submit_load_task([key], [destination(_NBYTES)]), turns)
    return {key: [_OLD] for key in suite.keys(_TURNS)}


async def _a_load_without_room(suite: AgreementTests, adapter: Adapter) -> Held:
    await suite.store(adapter, {suite.key(): _OLD})
    await suite.load(adapter, suite.key(), 100)
    return {suite.key(): [_OLD]}


async def _cancel(task: L2Task[Any], turns: int) -> None:
    await pass_time(turns)
    task.cancel()
    await task


_PATHS: dict[str, Path] = {
    "a store": _a_store,
    "a second store": _a_second_store,
    "a key given twice": _a_key_given_twice,
    "a delete": _a_delete,
    "a store after a delete": _a_store_after_a_delete,
    "a delete while leased": _a_delete_while_leased,
    "a replacement while leased": _a_replacement_while_leased,
    "a store past its deadline": _a_store_past_its_deadline,
    "stores cancelled": _stores_cancelled,
    "second stores cancelled": _second_stores_cancelled,
    "deletes cancelled": _deletes_cancelled,
    "loads cancelled": _loads_cancelled,
    "a load without room": _a_load_without_room,
}


class AgreementTests(Conformance):
    """Lookup and load agree on every path."""

    @pytest.mark.parametrize("path", _PATHS)
    async def test_lookup_agrees_with_load_after(self, adapter: Adapter, path: str) -> None:
        led_to = await _PATHS[path](self, adapter)
        held = await self.agreed(adapter, list(led_to), _NBYTES)
        for data, allowed in zip(held, led_to.values(), strict=True):
            assert any(same(data, version) for version in allowed), "neither the old object nor the new one is there"

    async def test_lookup_agrees_with_load_after_eviction(self, url: str) -> None:
        async with await self.tiny(url, _LIMIT_BYTES) as adapter:
            objects = {key: content(key, _OBJECT_BYTES) for key in self.keys(40)}
            for key, data in objects.items():
                await adapter.submit_store_task([key], [source(data)])
            held = await self.agreed(adapter, list(objects), _OBJECT_BYTES)
            assert any(data is not None for data in held)
            assert all(data in (None, wanted) for data, wanted in zip(held, objects.values(), strict=True))

    async def test_lookup_agrees_with_load_after_damage(self, adapter: Adapter) -> None:
        objects = {key: content(key, 9000) for key in self.keys(3)}
        await self.store(adapter, objects)
        stored = await self.raw(adapter, self.key(1))
        await self.raw(adapter, self.key(1), stored[:-1] + bytes([stored[-1] ^ 1]))
        await self.load(adapter, self.key(1), 9000)
        held = await self.agreed(adapter, list(objects), 9000)
        assert [data is None for data in held] == [False, True, False]

    async def test_lookup_agrees_with_load_after_reopening(self, url: str) -> None:
        objects = {key: content(key, 9000) for key in self.keys(6)}
        async with self.open_adapter(url) as adapter:
            if not adapter.capabilities.persistent:
                self.skip("the capability persistent")
            await self.store(adapter, objects)
            await adapter.submit_delete_task([self.key(1)])
            late = adapter.submit_store_task([self.key(2), self.key(9)], [source(content("late", 8000))] * 2)
            await pass_time(2)
        del late
        async with self.open_adapter(self.reopen_url(url)) as adapter:
            held = await self.agreed(adapter, [*objects, self.key(9)], 9000)
            for data, key in zip(held, objects, strict=False):
                replaced = key == self.key(2) and data == content("late", 8000)
                assert replaced or same(data, None if key == self.key(1) else objects[key])

    async def test_lookup_agrees_with_load_after_another_writer(self, url: str) -> None:
        async with self.open_adapter(url) as one:
            if not one.capabilities.shared:
                self.skip("the capability shared")
            await self.store(one, {self.key(0): _OLD, self.key(1): _OLD})
            await self.agreed(one, self.keys(3), _NBYTES)
            async with self.open_adapter(self.reopen_url(url)) as other:
                await other.submit_delete_task([self.key(0)])
                await self.store(other, {self.key(2): _NEW})
                held = await self.agreed(one, self.keys(3), _NBYTES)
                assert [data is None for data in held] == [True, False, False]
