"""At the same time: writers and readers of one key, cancellation in mid-transfer, deadlines."""

# ruff: noqa: D102 - the names of the tests say what they test

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import anyio
import pytest

from l2kit.errors import BackendTimeoutError, TaskCancelledError
from l2kit.testing.groups.base import (
    UNTOUCHED,
    Adapter,
    Conformance,
    content,
    destination,
    errors_of,
    pass_time,
    same,
    source,
)

_OBJECT_BYTES = 1 << 20
_MANY = 24
_LARGEST_LIMIT_BYTES = 64 << 20

#: When to cancel: before the adapter has begun, after some turns of the loop, when the first key is done.
_MOMENTS = ["at once", "soon", "after the first key"]


class ConcurrencyTests(Conformance):
    """Concurrency, cancellation and deadlines."""

    async def test_many_batches_at_once(self, adapter: Adapter) -> None:
        batches = [{self.key(100 * b + n): content((b, n), 3000 + b) for n in range(8)} for b in range(12)]
        stores = [adapter.submit_store_task(list(b), [source(d) for d in b.values()]) for b in batches]
        for task in stores:
            assert all(outcome.present for outcome in await task)
        async with anyio.create_task_group() as group:
            for batch in batches:
                group.start_soon(self.expect, adapter, batch)
        assert adapter.held_leases == 0

    async def test_readers_during_writes_see_one_version_whole(self, adapter: Adapter) -> None:
        key = self.key()
        versions = [content(("version", n), _OBJECT_BYTES // 2 + 4096 * n) for n in range(6)]
        room = max(map(len, versions))
        await self.store(adapter, {key: versions[0]})
        reads = 0
        writing = True

        async def write(number: int) -> None:
            for turn in range(8):
                await self.store(adapter, {key: versions[(number + turn) % len(versions)]})

        async def write_all() -> None:
            nonlocal writing
            async with anyio.create_task_group() as writers:
                for number in range(3):
                    writers.start_soon(write, number)
            writing = False

        async def read(pause: int) -> None:
            nonlocal reads
            while writing:
                outcome, received = await self.load(adapter, key, room)
                assert outcome.loaded, f"a reader must find the old or the new object: {outcome}"
                assert received[: outcome.nbytes] in versions, "a mixture of two versions"
                reads += 1
                await pass_time(pause)

        async with anyio.create_task_group() as group:
            group.start_soon(write_all)
            for pause in range(1, 6):  # out of step with each other, so that one of them looks at every moment
                group.start_soon(read, pause)
        assert reads
        outcome, received = await self.load(adapter, key, room)
        assert received[: outcome.nbytes] in versions

    async def test_writers_that_are_cancelled_leave_old_or_new(self, adapter: Adapter) -> None:
        key = self.key()
        versions = [content(("version", n), _OBJECT_BYTES + n) for n in range(8)]
        await self.store(adapter, {key: versions[0]})
        tasks = [adapter.submit_store_task([key], [source(data)]) for data in versions]
        await pass_time(3)
        for task in tasks[::2]:
            task.cancel()
        for task in tasks:
            await task
        outcome, received = await self.load(adapter, key, _OBJECT_BYTES + 8)
        assert outcome.loaded, outcome
        assert received[: outcome.nbytes] in versions

    @pytest.mark.parametrize("failure", ["cancelled", "past its deadline", "late", "too large"])
    async def test_a_writer_that_fails_leaves_old_or_new(self, adapter: Adapter, failure: str) -> None:
        """Three writers of one key at the same time; the one in the middle fails."""
        key, now = self.key(), anyio.current_time()
        limit = adapter.capabilities.max_object_bytes
        if failure == "too large" and (limit is None or limit > _LARGEST_LIMIT_BYTES):
            self.skip("the capability max_object_bytes, of at most 64 MiB")
        old, new, newest = (content(("version", n), _OBJECT_BYTES // 4 + n) for n in range(3))
        bad = content("bad", limit if failure == "too large" and limit is not None else _OBJECT_BYTES)
        await self.store(adapter, {key: old})
        deadline = {"past its deadline": now - 1, "late": now + 0.001}.get(failure)
        good = [adapter.submit_store_task([key], [source(new)])]
        failing = adapter.submit_store_task([key], [source(bad)], deadline=deadline)
        good.append(adapter.submit_store_task([key], [source(newest)]))
        if failure == "cancelled":
            await pass_time(3)
            failing.cancel()
        outcomes = [outcome for task in good for outcome in await task]
        assert [outcome.present for outcome in outcomes] == [True, True], outcomes
        [outcome] = await failing
        assert outcome.present or outcome.error, outcome
        allowed = [data for data, good in zip((new, newest), outcomes, strict=True) if good.status == "stored"]
        allowed = allowed or [old]
        if failure in ("cancelled", "late"):  # it may have been done just before
            allowed.append(bad)
        else:
            assert not outcome.present, outcome
        [held] = await self.agreed(adapter, [key], _OBJECT_BYTES)
        assert any(held == data for data in allowed), "what a failed writer left is neither old nor new"
        await adapter.submit_delete_task([key])
        await self.store(adapter, {key: new})
        await self.expect(adapter, {key: new})

    async def test_deleting_while_reading(self, adapter: Adapter) -> None:
        objects = {key: content(key, _OBJECT_BYTES) for key in self.keys(8)}
        await self.store(adapter, objects)
        targets = [destination(_OBJECT_BYTES) for _ in objects]
        loading = adapter.submit_load_task(list(objects), targets)
        await adapter.submit_delete_task(list(objects))
        for outcome, target, data in zip(await loading, targets, objects.values(), strict=True):
            assert outcome.status in ("loaded", "miss")
            if outcome.loaded:
                assert same(target.tobytes(), data)
        await self.expect(adapter, dict.fromkeys(objects))

    @pytest.mark.parametrize("moment", _MOMENTS)
    async def test_a_cancelled_load_never_writes_again(self, adapter: Adapter, moment: str) -> None:
        objects = {key: content(key, _OBJECT_BYTES) for key in self.keys(_MANY)}
        await self.store(adapter, objects)
        buffers = [bytearray([UNTOUCHED]) * _OBJECT_BYTES for _ in objects]
        task = adapter.submit_load_task(list(objects), [source(buffer) for buffer in buffers])
        await self._reach(moment, task.__aiter__)
        task.cancel()
        outcomes = await task
        assert task.ended
        for outcome, buffer, data in zip(outcomes, buffers, objects.values(), strict=True):
            assert outcome.loaded or isinstance(outcome.error, TaskCancelledError), outcome
            if outcome.loaded:
                assert same(buffer, data)
        for buffer in buffers:  # the caller reuses its memory
            buffer[:] = b"R" * _OBJECT_BYTES
        # The next answers are the right ones, and none of them belongs to what was cancelled.
        await self.expect(adapter, {**dict(list(objects.items())[::-1]), self.key(_MANY): None})
        await pass_time()
        for buffer in buffers:
            assert same(buffer, b"R" * _OBJECT_BYTES), "a buffer was written to after its task had ended"

    @pytest.mark.parametrize("moment", _MOMENTS)
    async def test_a_cancelled_store_leaves_whole_objects_or_none(self, adapter: Adapter, moment: str) -> None:
        objects = {key: content(key, _OBJECT_BYTES) for key in self.keys(_MANY)}
        buffers = [bytearray(data) for data in objects.values()]
        task = adapter.submit_store_task(list(objects), [source(buffer) for buffer in buffers])
        await self._reach(moment, task.__aiter__)
        task.cancel()
        outcomes = await task
        for buffer in buffers:  # the caller reuses its memory
            buffer[:] = b"R" * _OBJECT_BYTES
        found = await adapter.submit_lookup_and_lock_task(list(objects))
        await adapter.submit_unlock_task(list(objects))
        for key, outcome, lookup in zip(objects, outcomes, found, strict=True):
            assert outcome.present or isinstance(outcome.error, TaskCancelledError), outcome
            assert lookup.hit or not outcome.present, "an object that was stored is gone"
            await self.expect(adapter, {key: objects[key] if lookup.hit else None})
        await self.store(adapter, objects)
        await self.expect(adapter, objects)

    @pytest.mark.parametrize("moment", _MOMENTS)
    async def test_a_cancelled_store_leaves_nothing_unfinished(self, adapter: Adapter, moment: str) -> None:
        assert list(await self._unfinished(adapter)) == []
        objects = {key: content(key, _OBJECT_BYTES) for key in self.keys(_MANY)}
        task = adapter.submit_store_task(list(objects), [source(data) for data in objects.values()])
        await self._reach(moment, task.__aiter__)
        task.cancel()
        await task
        assert list(await self._unfinished(adapter)) == [], "the cancelled store left this in the backend"

    async def test_a_waiter_that_is_cancelled_waits_for_the_buffers(self, adapter: Adapter) -> None:
        objects = {key: content(key, _OBJECT_BYTES) for key in self.keys(_MANY)}
        await self.store(adapter, objects)
        task = adapter.submit_load_task(list(objects), [destination(_OBJECT_BYTES) for _ in objects])
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                try:
                    await task
                finally:
                    assert task.ended, "the waiter was let go while buffers were in flight"

            group.start_soon(wait)
            await pass_time(3)
            group.cancel_scope.cancel()
        await self.expect(adapter, objects)

    async def test_a_deadline_in_the_past_is_a_time_out_for_each_key(self, adapter: Adapter) -> None:
        objects = {key: content(key, 10_000) for key in self.keys(5)}
        await self.store(adapter, objects)
        past = anyio.current_time() - 1.0
        keys, late = list(objects), self.keys(10)[5:]
        loaded = await adapter.submit_load_task(keys, [destination(10_000) for _ in keys], deadline=past)
        assert errors_of(loaded) == [BackendTimeoutError] * 5
        found = await adapter.submit_lookup_and_lock_task(keys, deadline=past)
        assert errors_of(found) == [BackendTimeoutError] * 5
        assert adapter.held_leases == 0
        stored = await adapter.submit_store_task(late, [source(b"late")] * 5, deadline=past)
        assert errors_of(stored) == [BackendTimeoutError] * 5
        await self.expect(adapter, {**objects, **dict.fromkeys(late)})

    @pytest.mark.parametrize("after_s", [0.002, 0.02])
    async def test_a_deadline_in_mid_transfer(self, adapter: Adapter, after_s: float) -> None:
        objects = {key: content(key, _OBJECT_BYTES) for key in self.keys(_MANY)}
        await self.store(adapter, objects)
        targets = [destination(_OBJECT_BYTES) for _ in objects]
        task = adapter.submit_load_task(list(objects), targets, deadline=anyio.current_time() + after_s)
        for outcome, target, data in zip(await task, targets, objects.values(), strict=True):
            assert outcome.loaded or isinstance(outcome.error, BackendTimeoutError), outcome
            if outcome.loaded:
                assert same(target.tobytes(), data)
        await self.expect(adapter, objects)

    async def _unfinished(self, adapter: Adapter) -> Sequence[str]:
        try:
            found = self.raw_unfinished(adapter)
            return await found if inspect.isawaitable(found) else found
        except NotImplementedError:
            self.skip("the hook raw_unfinished, which goes around the adapter")

    async def _reach(self, moment: str, iterate: Callable[[], object]) -> None:
        if moment == "soon":
            await pass_time(3)
        elif moment == "after the first key":
            async for _ in iterate():  # type: ignore[attr-defined]
                break
