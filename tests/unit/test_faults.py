"""`FaultyAdapter`: each kind of fault does what it says, keeps the contract, and gets no wrong bytes through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import l2kit
from l2kit.adapter import L2Adapter
from l2kit.errors import (
    AuthError,
    BackendBusyError,
    BackendError,
    BackendTimeoutError,
    CapacityError,
    L2Error,
    TransientBackendError,
)
from l2kit.faults import FaultOptions, FaultyAdapter
from l2kit.faults.plan import Operation
from l2kit.keys import ObjectKey
from l2kit.memory_adapter import MemoryAdapter, MemoryConfig
from l2kit.serde import CodecChain
from l2kit.testing import AdapterConformance
from tests.unit.fault_bench import SIZE, Bench, bench_for, key, memory, raw
from tests.unit.odd_tiers import Stopwatch, content, until
from tests.unit.small_codecs import Codecs

pytestmark = pytest.mark.anyio

ON_CALLS = pytest.mark.parametrize("operation", ["lookup", "load", "store", "delete", "release"])
REFUSALS = [
    ("error", BackendError),
    ("transient", TransientBackendError),
    ("busy", BackendBusyError),
    ("denied", AuthError),
    ("disconnect", TransientBackendError),
]


class TestRefusals:
    @ON_CALLS
    @pytest.mark.parametrize(("kind", "expected"), REFUSALS)
    async def test_the_nth_call_fails(self, operation: Operation, kind: str, expected: type[L2Error]) -> None:
        async with bench_for(operation, f"{kind}@2-3") as bench:
            errors = []
            for _ in range(4):
                await bench.prepare(0)
                errors.append(await bench.do(operation))
            assert [type(error) for error in errors] == [type(None), expected, expected, type(None)]
            assert bench.faults() == {f"{operation}.{kind}": 2}
            assert bench.adapter.injected == 2
            assert f"(injected: {kind} at {operation} 2)" in str(errors[1])
            assert str(errors[1]).startswith("memory: ")
            assert isinstance(errors[1].__cause__ if errors[1] else None, ConnectionResetError) == (
                kind == "disconnect"
            )
            assert not bench.locks, "a lookup that fails locks nothing, and a release that fails has released"
            assert bench.adapter.held_leases == 0

    @pytest.mark.parametrize(("kind", "expected"), REFUSALS)
    async def test_opening_fails_and_closes_what_was_open(self, kind: str, expected: type[L2Error]) -> None:
        bench = Bench(open=(kind,))
        with pytest.raises(expected) as caught:
            await bench.adapter.__aenter__()
        assert type(caught.value) is expected
        assert bench.inner._state == "closed"

    @pytest.mark.parametrize("operation", ["store", "delete"])
    async def test_a_lost_connection_does_not_say_what_was_done(self, operation: Operation) -> None:
        async with bench_for(operation, "disconnect", seed=1) as bench:
            done = 0
            for number in range(60):
                if operation == "delete":
                    await bench.prepare(number)
                    outcome = await bench.delete(number)
                    done += key(number) not in bench.stored
                else:
                    outcome = await bench.store(number)
                    done += key(number) in bench.stored
                assert outcome.status == "failed"
            assert 15 < done < 45

    async def test_an_outage_of_its_own_does_not_touch_other_operations(self) -> None:
        async with Bench(load=("error",)) as bench:
            assert (await bench.store()).status == "stored"
            assert (await bench.load()).status == "failed"
            assert (await bench.lookup(0))[0].hit
            await bench.unlock(0)
            assert (await bench.delete()).status == "deleted"

    async def test_the_first_refusal_counts(self) -> None:
        async with Bench(load=("flip", "busy", "denied")) as bench:
            await bench.prepare(0)
            assert isinstance((await bench.load()).error, BackendBusyError)
            assert bench.faults() == {"load.busy": 1}


class TestDelays:
    @ON_CALLS
    @pytest.mark.parametrize("rule", ["latency:0.1@1", "stuck:0.1@1"])
    async def test_a_call_takes_longer(self, operation: Operation, rule: str) -> None:
        async with bench_for(operation, rule) as bench:
            await bench.prepare(0)
            with Stopwatch() as watch:
                assert await bench.do(operation) is None
            assert watch.took_s >= 0.1
            assert bench.adapter.injected == 1

    async def test_jitter_is_between_nothing_and_its_value(self) -> None:
        async with Bench(seed=3, lookup=("jitter:0.05",)) as bench:
            took = []
            for _ in range(12):
                with Stopwatch() as watch:
                    await bench.lookup(0)
                took.append(watch.took_s)
            assert min(took) < 0.025 < max(took)

    async def test_a_slow_backend_takes_its_time_for_each_byte(self) -> None:
        async with Bench(store=("slow:100KB",), load=("slow:100KB",)) as bench:
            with Stopwatch() as watch:
                assert (await bench.store(0, 20_000)).status == "stored"
            assert watch.took_s >= 0.2
            with Stopwatch() as watch:
                assert (await bench.load(0, 20_000)).loaded
            assert watch.took_s >= 0.2
            assert (await bench.load(1, 20_000)).status == "miss"
            assert bench.faults() == {"store.slow": 1, "load.slow": 1}

    @ON_CALLS
    async def test_a_hang_ends_by_the_deadline(self, operation: Operation) -> None:
        async with bench_for(operation, "hang@1", timeout_s=0.1) as bench:
            await bench.prepare(0)
            with Stopwatch() as watch:
                error = await bench.do(operation)
            assert isinstance(error, BackendTimeoutError)
            assert 0.1 <= watch.took_s < 2
            assert await bench.do(operation) is None
            assert not bench.locks

    async def test_a_hang_is_cancelled(self) -> None:
        async with Bench(load=("hang",)) as bench:
            with anyio.move_on_after(0.05) as scope:
                await bench.adapter.load_one(key(), [memoryview(bytearray(9))])
            assert scope.cancelled_caught

    async def test_closing_does_not_wait_for_what_hangs(self) -> None:
        with Stopwatch() as watch:
            async with Bench(load=("hang",)) as bench:
                task = bench.adapter.submit_load_task([key()], [raw(bytearray(SIZE))])
                await until(lambda: bench.adapter.injected)
        assert task.ended
        assert watch.took_s < 2

    async def test_what_is_stuck_cannot_be_cancelled(self) -> None:
        async with Bench(memory(timeout_s=0.05), load=("stuck:0.4",)) as bench:
            with Stopwatch() as watch:
                outcome = await bench.load()
            assert isinstance(outcome.error, BackendTimeoutError)
            assert watch.took_s >= 0.4

    @pytest.mark.parametrize("rule", ["latency:60", "jitter:60", "hang", "stuck:60"])
    async def test_calm_lets_go_of_what_is_held_up(self, rule: str) -> None:
        async with Bench(load=(rule, "error")) as bench:
            await bench.prepare(0)
            task = bench.adapter.submit_load_task([key()], [raw(bytearray(SIZE))])
            await until(lambda: bench.adapter.injected)
            await anyio.sleep(0.02)
            bench.adapter.calm()
            with anyio.fail_after(5):
                assert (await task)[0].loaded, "the outage is over: nothing fails any more"

    async def test_calm_ends_a_slow_store(self) -> None:
        async with Bench(store=("slow:1", "lost")) as bench:
            task = bench.adapter.submit_store_task([key()], [raw(content(key(), SIZE))])
            await until(lambda: bench.adapter.injected)
            bench.adapter.calm()
            with anyio.fail_after(5):
                assert (await task)[0].present
            assert (await bench.load()).loaded

    async def test_opening_takes_longer_and_has_its_deadline(self) -> None:
        with Stopwatch() as watch:
            async with Bench(open=("latency:0.1",)):
                pass
        assert watch.took_s >= 0.1
        bench = Bench(memory(open_timeout_s=0.05), open=("hang",))
        with pytest.raises(BackendTimeoutError, match="did not open within"):
            await bench.adapter.__aenter__()
        assert bench.inner._state == "closed"


class TestDamageToLoads:
    @pytest.mark.parametrize("kind", ["short", "flip", "truncate", "wrong"])
    @pytest.mark.parametrize("destination", [SIZE, 3 * SIZE, 300_000])
    @pytest.mark.parametrize("others", [0, 1])
    async def test_what_comes_back_is_corrupt_and_healed(self, kind: str, destination: int, others: int) -> None:
        async with Bench(seed=5, load=(f"{kind}@2-",)) as bench:
            await bench.prepare(*range(others + 1))
            for number in range(20):
                await bench.prepare(0)
                outcome = await bench.load(0, destination)
                if number == 0:
                    assert outcome.loaded
                    continue
                assert outcome.status == "corrupt", outcome
                assert key() not in bench.stored
            assert bench.faults() == {f"load.{kind}": 19}

    @pytest.mark.parametrize("kind", ["short", "flip", "truncate", "wrong", "slow:1"])
    async def test_a_miss_stays_one_and_is_not_counted(self, kind: str) -> None:
        async with Bench(load=(kind,)) as bench:
            assert (await bench.load()).status == "miss"
            assert bench.adapter.injected == 0

    async def test_a_large_object_is_damaged_in_a_thread(self) -> None:
        nbytes = 3 << 20
        async with Bench(load=("wrong@1", "short@2"), store=("flip@2",)) as bench:
            for number in range(2):
                await bench.prepare(number, nbytes=nbytes)
            bench.adapter._recent.clear()
            assert (await bench.load(0, nbytes)).status == "corrupt"
            assert (await bench.load(1, 2 * nbytes)).status == "corrupt"
            for number in range(2, 4):
                assert (await bench.store(number, nbytes)).status == "stored"
            assert (await bench.load(2, nbytes)).loaded
            assert (await bench.load(3, nbytes)).status == "corrupt"

    async def test_a_short_read_leaves_the_rest_as_it_was(self) -> None:
        async with Bench(seed=2, load=("short",)) as bench:
            await bench.prepare(0)
            stored = bench.stored[key()]
            into = [memoryview(bytearray(b"\xa5" * 600)), memoryview(bytearray(b"\xa5" * (len(stored) - 600)))]
            assert await bench.adapter.load_one(key(), into) == len(stored)
            found = b"".join(into)
            filled = next(n for n in range(len(found)) if found[n:] == b"\xa5" * (len(found) - n))
            assert 0 < filled < len(found)
            assert found[:filled] == stored[:filled]

    async def test_the_wrong_object_is_a_whole_one(self) -> None:
        async with Bench(load=("wrong",)) as bench:
            await bench.prepare(0, 1)
            into = memoryview(bytearray(len(bench.stored[key(1)])))
            await bench.adapter.load_one(key(0), [into])
            assert into == bench.stored[key(1)]
            [miss] = await bench.adapter.submit_load_task([key(7)], [raw(bytearray(SIZE))])
            assert miss.error is not None
            assert getattr(miss.error, "reason", None) == "key"

    @pytest.mark.parametrize("capacity", [0, 1, 2, 100, SIZE, 5 * SIZE])
    @pytest.mark.parametrize("kind", ["short", "flip", "truncate", "wrong", "disconnect"])
    async def test_nothing_beyond_the_destination_is_written(self, kind: str, capacity: int) -> None:
        async with Bench(seed=capacity, load=(kind,)) as bench:
            await bench.prepare(0)
            for _ in range(30):
                area = bytearray(b"\xa5" * (capacity + 20))
                view = memoryview(area)[10 : capacity + 10]
                into = [view[: capacity // 3], view[capacity // 3 :]]
                try:
                    await bench.adapter.load_one(key(), into)
                except TransientBackendError:
                    assert kind == "disconnect"
                assert area[:10] == area[-10:] == b"\xa5" * 10


class TestDamageToStores:
    @pytest.mark.parametrize("kind", ["flip", "truncate"])
    async def test_what_was_stored_is_found_out(self, kind: str) -> None:
        async with Bench(store=(kind,)) as bench:
            for number in range(20):
                assert (await bench.store(number)).status == "stored"
                assert len(bench.stored[key(number)]) < SIZE + 256 or kind == "flip"
                assert (await bench.load(number)).status == "corrupt"
            assert bench.faults() == {f"store.{kind}": 20}

    async def test_exactly_one_bit_flips(self) -> None:
        async with Bench(store=("flip@2",)) as bench:
            await bench.store()
            whole = bench.stored[key()]
            await bench.store()
            difference = int.from_bytes(whole, "big") ^ int.from_bytes(bench.stored[key()], "big")
            assert difference.bit_count() == 1

    async def test_a_lost_store_says_stored(self) -> None:
        async with Bench(store=("lost@1",)) as bench:
            assert (await bench.store()).status == "stored"
            assert (await bench.load()).status == "miss"
            assert (await bench.store()).status == "stored"
            assert (await bench.load()).loaded

    async def test_a_full_backend_keeps_what_it_has(self) -> None:
        async with Bench(store=("full@2-",)) as bench:
            await bench.store()
            for number in range(2):
                outcome = await bench.store(number)
                assert isinstance(outcome.error, CapacityError)
                assert "no room left" in str(outcome.error)
            assert list(bench.stored) == [key()]
            assert (await bench.load()).loaded


class TestLies:
    async def test_a_hit_that_is_none_and_a_miss_that_is_a_hit(self) -> None:
        async with Bench(lookup=("lie@1-2",)) as bench:
            await bench.prepare(0)
            [here], [gone] = await bench.lookup(0), await bench.lookup(1)
            assert (here.status, gone.status) == ("miss", "hit")
            assert gone.size == len(bench.stored[key()]), "as large as what was stored last"
            assert not bench.locks
            assert bench.adapter.held_leases == 1
            assert (await bench.load(1)).status == "miss"
            await bench.unlock(1)
            assert (await bench.lookup(0))[0].hit
            await bench.unlock(0)
            assert not bench.locks
            assert bench.faults() == {"lookup.lie": 2}

    async def test_some_of_a_batch_are_lied_about(self) -> None:
        async with Bench(lookup=("lie",)) as bench:
            await bench.prepare(*range(10))
            lied = []
            for _ in range(20):
                outcomes = await bench.lookup(*range(20))
                hits = [number for number in range(20) if outcomes[number].hit]
                lied.append(sum(outcome.hit != (number < 10) for number, outcome in enumerate(outcomes)))
                assert sorted(bench.locks) == [key(number) for number in hits if number < 10]
                await bench.unlock(*hits)
                assert not bench.locks
            assert min(lied) >= 1
            assert 7 < sum(lied) / 20 < 13

    async def test_true_locks_outlast_invented_ones(self) -> None:
        async with Bench(lookup=("lie@1",)) as bench:
            assert (await bench.lookup(0))[0].hit
            await bench.prepare(0)
            assert (await bench.lookup(0))[0].hit
            await bench.unlock(0)
            assert bench.locks[key()] == 1, "one of two holders is still there"
            await bench.unlock(0)
            assert not bench.locks

    async def test_closing_gives_back_what_is_true(self) -> None:
        released: list[ObjectKey] = []

        class Watching(MemoryAdapter):
            async def release_many(self, keys: Sequence[ObjectKey]) -> None:
                released.extend(keys)
                await super().release_many(keys)

        inner = Watching(MemoryConfig(), name="memory", codecs=CodecChain([]), codec_source=Codecs())
        async with Bench(inner, lookup=("lie@2",)) as bench:
            await bench.prepare(0)
            await bench.lookup(0)
            await bench.lookup(1)
            assert bench.adapter.held_leases == 2
        assert released == [key(0)]

    async def test_a_plain_lookup_is_lied_to_as_well(self) -> None:
        async with Bench(lookup=("lie@1-2",)) as bench:
            await bench.prepare(0)
            assert await bench.adapter.lookup_many([key(0)]) == [None]
            assert await bench.adapter.lookup_many([key(1)]) != [None]
            assert await bench.adapter.lookup_many([key(0), key(1)]) == [SIZE + 256, None]
            assert await bench.adapter.lookup_many([]) == await bench.adapter.acquire_many([]) == []


class TestCalm:
    async def test_nothing_happens_and_nothing_counts_until_it_resumes(self) -> None:
        async with Bench(load=("error@2-",)) as bench:
            await bench.prepare(0)
            assert (await bench.load()).loaded
            bench.adapter.calm()
            for _ in range(5):
                assert (await bench.load()).loaded
            bench.adapter.resume()
            assert (await bench.load()).status == "failed"
            assert bench.adapter.plan.calls("load") == 2
            assert bench.adapter.injected == 1

    async def test_it_is_harmless_at_any_time(self) -> None:
        bench = Bench(open=("error",), store=("stuck:0.1",))
        bench.adapter.calm()
        bench.adapter.calm()
        async with bench:
            assert (await bench.store()).present
            bench.adapter.resume()
            with Stopwatch() as watch:
                assert (await bench.store()).present
            assert watch.took_s >= 0.1


@pytest.mark.slow
class TestConformance(AdapterConformance):
    """Without a rule it is the adapter underneath."""

    @pytest.fixture
    def adapter_url(self) -> str:
        return "memory://"

    def open_adapter(self, url: str, **options: Any) -> L2Adapter[Any]:
        return FaultyAdapter(l2kit.open_adapter(url, **options), FaultOptions())

    def raw_read(self, adapter: L2Adapter[Any], key: ObjectKey) -> bytes | None:
        assert isinstance(adapter, FaultyAdapter)
        assert isinstance(adapter.inner, MemoryAdapter)
        return adapter.inner._objects.get(key)

    def raw_write(self, adapter: L2Adapter[Any], key: ObjectKey, data: bytes) -> None:
        assert isinstance(adapter, FaultyAdapter)
        assert isinstance(adapter.inner, MemoryAdapter)
        adapter.inner._objects[key] = data
