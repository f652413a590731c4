"""Deadlines, retries, the byte budget and the circuit breaker: each alone, then all around one adapter."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from l2kit.adapter import L2Adapter
from l2kit.config import build
from l2kit.errors import (
    AuthError,
    BackendBusyError,
    BackendError,
    BackendTimeoutError,
    CapacityError,
    ConfigError,
    L2Error,
    TransientBackendError,
)
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.outcomes import StoreStatus
from l2kit.resilience import (
    BreakerAdapter,
    ByteBudgetAdapter,
    DeadlineAdapter,
    ReopeningAdapter,
    ResilienceConfig,
    RetryAdapter,
    resilient,
)
from l2kit.resilience.byte_budget import ByteGate
from l2kit.resilience.circuit import Circuit, CircuitState
from l2kit.resilience.share_budget import ShareBudget
from l2kit.testing import AdapterConformance
from l2kit.wrapper import WrappingAdapter, innermost
from tests.unit.odd_tiers import OddAdapter, Stopwatch, content, key, recover, registry, until

NBYTES = 1000

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@asynccontextmanager
async def odd_inside(
    wrapper: type[WrappingAdapter[ResilienceConfig]], options: Mapping[str, float], url: str = "odd://"
) -> AsyncIterator[tuple[L2Adapter[Any], OddAdapter]]:
    """``wrapper`` around an odd adapter, both open; the odd one recovers at the end."""
    inside = registry().adapter(url)
    assert isinstance(inside, OddAdapter)
    async with wrapper(inside, build(ResilienceConfig, options, where="test")) as adapter:
        yield adapter, inside
        recover(inside)


async def put(adapter: L2Adapter[Any], *keys: ObjectKey) -> list[str]:
    objects = [MemoryObj.wrap(content(name, NBYTES), Layout.raw(NBYTES)) for name in keys]
    return [outcome.status for outcome in await adapter.submit_store_task(keys, objects)]


async def get(adapter: L2Adapter[Any], *keys: ObjectKey, deadline: float | None = None) -> list[str | L2Error]:
    targets = [MemoryObj.allocate(Layout.raw(NBYTES)) for _ in keys]
    outcomes = await adapter.submit_load_task(keys, targets, deadline=deadline)
    for name, target, outcome in zip(keys, targets, outcomes, strict=True):
        assert not outcome.loaded or target.tobytes() == content(name, NBYTES)
    return [outcome.error or outcome.status for outcome in outcomes]


class FailsSometimes(OddAdapter):
    """Raises ``errors`` one after the other, then works."""

    errors: Sequence[Exception] = ()

    async def _behave(self, hook: Any, name: ObjectKey | None) -> None:
        await super()._behave(hook, name)
        if self.errors and hook != "release":
            error, *self.errors = self.errors
            raise error


@asynccontextmanager
async def retried(errors: Sequence[Exception], **options: Any) -> AsyncIterator[tuple[L2Adapter[Any], FailsSometimes]]:
    inside = registry(fails=FailsSometimes).adapter("fails://?timeout_s=0.5")
    assert isinstance(inside, FailsSometimes)
    async with RetryAdapter(inside, ResilienceConfig(**options)) as adapter:
        await put(adapter, key(0))
        inside.calls.clear()
        inside.errors = list(errors)
        yield adapter, inside
        inside.errors = ()


# --- deadlines ----------------------------------------------------------------------------------------------------


async def test_a_key_that_hangs_leaves_the_rest_of_its_batch_some_time() -> None:
    async with odd_inside(DeadlineAdapter, {"operation_timeout_s": 0.1}) as (adapter, inside):
        await put(adapter, key(0), key(1))
        inside.hung.add("load")
        with Stopwatch() as watch:
            outcomes = await get(adapter, *(key(n) for n in range(6)))
        assert watch.took_s < 2
        assert all(isinstance(outcome, BackendTimeoutError) for outcome in outcomes)
        assert "odd: no answer to a load within 0.1 s" in str(outcomes[0])
        assert adapter.counters["timeout.load"] == 6


@pytest.mark.parametrize("hook", ["lookup", "store"])
async def test_each_operation_has_a_deadline(hook: Any) -> None:
    async with odd_inside(DeadlineAdapter, {}, "odd://?timeout_s=0.2") as (adapter, inside):
        inside.hung.add(hook)
        if hook == "store":
            assert await put(adapter, key(0)) == ["failed"]
        else:
            with pytest.raises(BackendTimeoutError, match=r"no answer to a lookup within 0\.1 s"):
                await adapter.submit_lookup_and_lock_task([key(0)])


# --- retries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [TransientBackendError("lost"), BackendBusyError("busy")])
async def test_what_may_pass_is_retried(error: Exception) -> None:
    async with retried([error, error]) as (adapter, inside):
        assert await get(adapter, key(0)) == ["loaded"]
        assert inside.calls["load"] == 3
        assert adapter.counters["retry.load"] == 2
        inside.errors = [error]
        [found] = await adapter.submit_lookup_and_lock_task([key(0)])
        assert found.hit
        await adapter.submit_unlock_task([key(0)])
        inside.errors = [error]
        assert await put(adapter, key(1)) == ["stored"]


@pytest.mark.parametrize(
    "error", [BackendError("broken"), AuthError("denied"), BackendTimeoutError("late"), CapacityError("full")]
)
async def test_what_will_not_pass_is_not_retried(error: Exception) -> None:
    async with retried([error]) as (adapter, inside):
        assert await get(adapter, key(0)) == [error]
        assert inside.calls["load"] == 1


async def test_a_foreign_error_is_judged_by_its_translation() -> None:
    async with retried([ConnectionResetError("reset")]) as (adapter, inside):
        inside.translate_error = lambda _: TransientBackendError("translated")  # type: ignore[method-assign, assignment]
        assert await get(adapter, key(0)) == ["loaded"]


async def test_retries_end() -> None:
    lost = TransientBackendError("lost")
    async with retried([lost] * 9, max_retries=2) as (adapter, inside):
        assert await get(adapter, key(0)) == [lost]
        assert inside.calls["load"] == 3


async def test_a_delete_is_not_retried() -> None:
    async with odd_inside(RetryAdapter, {}) as (adapter, inside):

        async def fail(_: ObjectKey) -> bool:
            inside.calls["delete"] += 1
            raise TransientBackendError("lost")

        inside.delete_one = fail  # type: ignore[method-assign, assignment]
        [outcome] = await adapter.submit_delete_task([key(0)])
        assert outcome.status == "failed"
        assert inside.calls["delete"] == 1


async def test_a_failing_backend_gets_a_small_share_more_than_it_was_asked() -> None:
    async with retried([], retry_share=0.1, retry_burst=5, max_retries=2) as (adapter, inside):
        inside.failing["load"] = TransientBackendError("lost")
        for _ in range(300):
            await get(adapter, key(0))
        assert inside.calls["load"] <= 300 * 1.1 + 5
        assert adapter.counters["retry_refused.load"] > 200


@given(st.floats(0.01, 1), st.integers(1, 20), st.integers(0, 400))
def test_a_budget_is_never_overdrawn(share: float, burst: int, operations: int) -> None:
    budget = ShareBudget(share, burst)
    spent = 0
    for _ in range(operations):
        budget.earn()
        while budget.spend():
            spent += 1
    assert spent <= burst + share * operations + 1e-6


# --- the byte budget ----------------------------------------------------------------------------------------------


async def test_a_load_passes_stores_that_are_stuck() -> None:
    async with odd_inside(ByteBudgetAdapter, {"max_inflight_bytes": 4000}) as (adapter, inside):
        await put(adapter, key(0))
        inside.hung.add("store")
        objects = [MemoryObj.wrap(content(key(n), NBYTES), Layout.raw(NBYTES)) for n in range(1, 9)]
        storing = adapter.submit_store_task([key(n) for n in range(1, 9)], objects)
        await until(lambda: inside.waiting["store"])
        assert inside.waiting["store"] == 1, "stores have half of the budget"
        assert await get(adapter, key(0)) == ["loaded"]
        recover(inside)
        assert [outcome.status for outcome in await storing] == ["stored"] * 8


async def test_stores_that_would_wait_too_long_a_line_are_dropped() -> None:
    options = {"max_inflight_bytes": 2000, "max_waiting_store_bytes": 1500}
    async with odd_inside(ByteBudgetAdapter, options) as (adapter, inside):
        inside.hung.add("store")
        objects = [MemoryObj.wrap(content(key(n), NBYTES), Layout.raw(NBYTES)) for n in range(6)]
        task = adapter.submit_store_task([key(n) for n in range(6)], objects)
        await until(lambda: len(task._completed) == 4)
        recover(inside)
        assert sorted(outcome.status for outcome in await task) == ["dropped"] * 4 + ["stored"] * 2
        assert adapter.counters["store_over_budget"] == 4


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300), st.booleans()), max_size=40), st.randoms())
def test_a_gate_lets_everybody_in_and_never_too_much(
    transfers: list[tuple[bool, int, bool]], rng: random.Random
) -> None:
    async def play() -> None:
        gate = ByteGate(256)
        done: list[int] = []
        bounded = all(nbytes <= 128 for _, nbytes, _ in transfers)  # a larger one may go alone, beyond the limit
        storing = 0

        async def transfer(number: int, is_load: bool, nbytes: int, cancelled: bool) -> None:
            nonlocal storing
            with anyio.CancelScope() as scope:
                if cancelled:
                    scope.deadline = anyio.current_time() + rng.choice([0, 0.0001])
                await (gate.enter_load if is_load else gate.enter_store)(nbytes)
                storing += 0 if is_load else nbytes
                assert not bounded or (gate.inflight_bytes <= 256 and storing <= 128)
                try:
                    for _ in range(rng.randrange(3)):
                        await anyio.lowlevel.checkpoint()
                finally:
                    storing -= 0 if is_load else nbytes
                    (gate.leave_load if is_load else gate.leave_store)(nbytes)
            done.append(number)

        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                for number, (is_load, nbytes, cancelled) in enumerate(transfers):
                    group.start_soon(transfer, number, is_load, nbytes, cancelled)
        assert sorted(done) == list(range(len(transfers)))
        assert gate.inflight_bytes == gate.waiting_store_bytes == 0

    anyio.run(play)


# --- the circuit --------------------------------------------------------------------------------------------------


def circuit(**options: Any) -> Circuit:
    return Circuit(ResilienceConfig(breaker_calls=8, **options))


def test_a_circuit_opens_on_a_share_of_failures_and_not_on_the_first_ones() -> None:
    it = circuit()
    assert [it.failed(BackendError("no")) for _ in range(2)] == [False, True]
    it = circuit()
    for _ in range(3):
        it.succeeded()
        it.succeeded()
        assert not it.failed(BackendError("one in three is not half"))
    assert it.closed
    assert [it.failed(BackendError("no")) for _ in range(4)].index(True) <= 3


def test_each_probe_that_fails_doubles_the_pause_up_to_its_limit() -> None:
    it = circuit(breaker_pause_s=1, breaker_max_pause_s=5)
    while not it.failed(BackendError("no")):
        pass
    pauses = []
    for _ in range(4):
        pauses.append(it.next_pause_s())
        it.probing()
        assert it.state is CircuitState.HALF_OPEN
        it.probe_failed(BackendError("still no"))
    for pause, middle in zip(pauses, (1, 2, 4, 5), strict=True):
        assert 0.75 * middle <= pause <= 1.25 * middle
    it.probing()
    it.probe_succeeded()
    assert it.closed
    assert it.error is None
    assert it.next_pause_s() <= 1.25


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 30), st.floats(0.05, 1))
def test_a_circuit_opens_exactly_when_its_latest_calls_say_so(calls: list[bool], window: int, share: float) -> None:
    it = Circuit(ResilienceConfig(breaker_calls=window, breaker_failures=share))
    for number, failed in enumerate(calls):
        latest = calls[max(0, number + 1 - window) : number + 1]
        due = failed and len(latest) >= max(1, window // 4) and sum(latest) >= share * len(latest)
        if failed:
            assert it.failed(BackendError("no")) == due
        else:
            it.succeeded()
        if due:
            assert it.state is CircuitState.OPEN
            return
    assert it.closed


# --- the breaker --------------------------------------------------------------------------------------------------

QUICK = {"breaker_calls": 8, "breaker_pause_s": 0.05, "breaker_max_pause_s": 0.1}


async def test_reads_that_keep_failing_are_misses_until_a_probe_succeeds() -> None:
    async with odd_inside(BreakerAdapter, QUICK) as (adapter, inside):
        await put(adapter, key(0))
        inside.failing["load"] = inside.failing["lookup"] = BackendError("no disk")
        for _ in range(8):
            await get(adapter, key(0))
        assert "reads are suspended" in str(adapter.trouble)
        assert "no disk" in str(adapter.trouble)
        asked = inside.loads[key(0)]
        assert await get(adapter, key(0)) == ["miss"]
        [found] = await adapter.submit_lookup_and_lock_task([key(0)])
        assert found.status == "miss"
        assert inside.loads[key(0)] == asked, "the backend is left alone"
        assert await put(adapter, key(1)) == ["stored"], "writes are judged apart"
        await until(lambda: adapter.counters["circuit.read.probes"] >= 2)
        assert adapter.trouble is not None
        inside.failing.clear()
        await until(lambda: adapter.trouble is None)
        assert await get(adapter, key(0), key(1)) == ["loaded"] * 2
        assert adapter.counters["circuit.read.opened"] == 1


async def test_writes_that_keep_failing_are_dropped_and_reads_go_on() -> None:
    async with odd_inside(BreakerAdapter, QUICK) as (adapter, inside):
        await put(adapter, key(0))
        inside.failing["store"] = BackendError("read-only")
        for _ in range(8):
            await put(adapter, key(1))
        assert await put(adapter, key(1)) == ["dropped"]
        [deleted] = await adapter.submit_delete_task([key(0)])
        assert "writes are suspended" in str(deleted.error)
        assert await get(adapter, key(0)) == ["loaded"]
        inside.failing.clear()
        await until(lambda: adapter.trouble is None)
        assert await put(adapter, key(1)) == ["stored"]
        assert inside.keys == {key(0), key(1)}, "probes leave nothing behind"


async def test_a_full_backend_is_not_a_failing_one() -> None:
    async with odd_inside(BreakerAdapter, QUICK) as (adapter, inside):
        inside.failing["store"] = CapacityError("full")
        for _ in range(20):
            assert await put(adapter, key(0)) == ["failed"]
        inside.failing.clear()
        inside.stored_as = StoreStatus.DROPPED
        for _ in range(20):
            assert await put(adapter, key(0)) == ["dropped"]
        assert adapter.trouble is None


async def test_a_backend_that_hangs_opens_the_circuit_and_a_caller_in_a_hurry_does_not() -> None:
    async with odd_inside(BreakerAdapter, QUICK) as (adapter, inside):
        inside.hung.add("load")
        for _ in range(20):
            await get(adapter, key(0), deadline=anyio.current_time() + 0.01)
            task = adapter.submit_load_task([key(0)], [MemoryObj.allocate(Layout.raw(NBYTES))], deadline=math.inf)
            await until(lambda: inside.waiting["load"])
            task.cancel()
            await task.wait_ended()
        assert adapter.trouble is None
        for _ in range(8):
            await get(adapter, key(0), deadline=anyio.current_time() + 0.3)
        assert "no answer before the deadline" in str(adapter.trouble)
        recover(inside)
        await until(lambda: adapter.trouble is None)


async def test_a_lease_is_given_back_through_an_open_circuit() -> None:
    async with odd_inside(BreakerAdapter, QUICK) as (adapter, inside):
        await put(adapter, key(0))
        await adapter.submit_lookup_and_lock_task([key(0)])
        inside.failing["load"] = BackendError("no")
        for _ in range(8):
            await get(adapter, key(0))
        await adapter.submit_unlock_task([key(0)])
        assert not inside._locks


async def test_a_backend_that_deletes_nothing_is_not_filled_with_probes() -> None:
    async with odd_inside(BreakerAdapter, QUICK) as (adapter, inside):

        async def refuse(_: ObjectKey) -> bool:
            raise BackendError("no permission to delete")

        inside.delete_one = refuse  # type: ignore[method-assign, assignment]
        for turn in range(3):
            inside.failing["store"] = BackendError("read-only")
            for _ in range(8):
                await put(adapter, key(1))
            assert adapter.trouble is not None
            inside.failing.clear()
            await until(lambda: adapter.trouble is None)
            assert adapter.counters["circuit.write.opened"] == turn + 1
        assert len(inside.keys) == 1


# --- a backend that is not there ------------------------------------------------------------------------------------


class Absent(OddAdapter):
    """Cannot be opened as often as ``errors`` says."""

    errors: ClassVar[list[Exception]] = []

    async def open(self) -> None:
        await super().open()
        if self.errors:
            raise self.errors.pop(0)


@asynccontextmanager
async def reopening(*errors: Exception) -> AsyncIterator[ReopeningAdapter]:
    Absent.errors[:] = errors
    options = ResilienceConfig(breaker_pause_s=0.02)
    async with ReopeningAdapter(lambda: registry(absent=Absent).adapter("absent://"), options) as adapter:
        yield adapter
    Absent.errors.clear()


async def test_what_is_not_there_yet_is_left_out_and_opened_later(caplog: pytest.LogCaptureFixture) -> None:
    async with reopening(TransientBackendError("nothing listens"), *[BackendTimeoutError("no answer")] * 3) as adapter:
        assert adapter.trouble is not None
        assert await put(adapter, key(0)) == ["dropped"]
        assert await get(adapter, key(0)) == ["miss"]
        [found] = await adapter.submit_lookup_and_lock_task([key(0)])
        assert found.status == "miss"
        [deleted] = await adapter.submit_delete_task([key(0)])
        assert isinstance(deleted.error, TransientBackendError)
        with pytest.raises(TransientBackendError):
            await adapter.usage()
        await until(lambda: adapter.trouble is None)
        assert await put(adapter, key(0)) == ["stored"]
        assert await get(adapter, key(0)) == ["loaded"]
        assert (await adapter.usage()).objects == 1
    assert "is left out until its backend can be opened: nothing listens" in caplog.text
    assert "the backend is open now" in caplog.text


@pytest.mark.parametrize("error", [AuthError("wrong password"), ConfigError("no such directory"), BackendError("no")])
async def test_what_will_not_pass_keeps_it_from_opening(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        async with reopening(error):
            pytest.fail("it opened")
    assert caught.value is error


async def test_closing_while_the_backend_is_still_not_there() -> None:
    with Stopwatch() as watch:
        async with reopening(*[TransientBackendError("nothing listens")] * 1000) as adapter:
            await until(lambda: len(Absent.errors) < 998)
            assert adapter.trouble is not None
    assert watch.took_s < 5


# --- all of them --------------------------------------------------------------------------------------------------


def test_a_tier_is_resilient_and_an_adapter_only_when_asked() -> None:
    known = registry()
    assert isinstance(known.tier("odd://"), BreakerAdapter)
    assert isinstance(known.adapter("odd://"), OddAdapter)
    assert isinstance(known.adapter("odd://?resilience.max_retries=0"), BreakerAdapter)
    assert isinstance(known.tier("odd://?resilience.enabled=false"), OddAdapter)
    assert isinstance(known.tier({"url": "odd://", "resilience": {"breaker": False}}), ByteBudgetAdapter)
    assert isinstance(innermost(known.tier("odd://")), OddAdapter)


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ("odd://?resilience.max_retrys=3", r"odd: resilience: unknown option 'max_retrys'; did you mean 'max_retries'"),
        ("odd://?resilience.breaker_failures=2", r"odd: resilience: breaker_failures: Expected `float` <= 1"),
        ({"url": "odd://", "name": "a", "resilience": {"breaker": 7}}, r"a: resilience: breaker: Expected `bool`"),
        ({"url": "odd://", "resilience": True}, r"resilience: expected a table of options"),
    ],
)
def test_a_wrong_option_is_named(tier: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry().tier(tier)


class TestResilientMemory(AdapterConformance):
    """What surrounds an adapter must not show."""

    pytestmark = pytest.mark.slow

    @pytest.fixture
    def adapter_url(self) -> str:
        return "memory://"

    def open_adapter(self, url: str, **options: Any) -> L2Adapter[Any]:
        return resilient(lambda: registry().adapter(url, **options), ResilienceConfig())

    def raw_read(self, adapter: L2Adapter[Any], key: ObjectKey) -> bytes | None:
        found: bytes | None = innermost(adapter)._objects.get(key)  # type: ignore[attr-defined]
        return found

    def raw_write(self, adapter: L2Adapter[Any], key: ObjectKey, data: bytes) -> None:
        innermost(adapter)._objects[key] = data  # type: ignore[attr-defined]
