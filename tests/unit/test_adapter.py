"""What the base class does for every adapter: errors, deadlines, fan-out, leases, the probe, opening and closing."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from l2kit import adapter as adapter_module
from l2kit.config import AdapterConfig, Secret, parse_url
from l2kit.errors import (
    AuthError,
    BackendBusyError,
    BackendError,
    BackendTimeoutError,
    CapacityError,
    ClosedError,
    ConfigError,
    L2Error,
    TaskCancelledError,
)
from l2kit.keys import ObjectKey
from tests.unit.dict_adapter import (
    DATA,
    KEY,
    DictAdapter,
    SmallAdapter,
    blank,
    hang,
    keys,
    make,
    raising,
    wrap,
)
from tests.unit.small_codecs import HalfCodec

pytestmark = pytest.mark.anyio


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (OSError(28, "No space left on device"), "tier: No space left on device (errno 28)"),
            (ConnectionResetError(), "tier: ConnectionResetError (errno None)"),
            (KeyError("password=hunter2"), "tier: unexpected KeyError"),
        ],
    )
    async def test_a_foreign_exception_is_the_outcome_of_its_key(self, error: Exception, text: str) -> None:
        async with make(DictAdapter) as adapter:

            async def fail_second(key: ObjectKey, into: Sequence[memoryview]) -> int | None:
                if key == keys(2)[1]:
                    raise error
                return adapter.fill(into, adapter.objects.get(key))

            await adapter.submit_store_task(keys(3), [wrap(DATA)] * 3)
            adapter.hooks["load"] = fail_second
            outcomes = await adapter.submit_load_task(keys(3), [blank(len(DATA)) for _ in range(3)])
            assert [outcome.status for outcome in outcomes] == ["loaded", "failed", "loaded"]
            assert type(outcomes[1].error) is BackendError
            assert str(outcomes[1].error) == text
            adapter.hooks["store"] = adapter.hooks["delete"] = raising(error)
            assert str((await adapter.submit_store_task([KEY], [wrap(DATA)]))[0].error) == text
            assert str((await adapter.submit_delete_task([KEY]))[0].error) == text

    async def test_a_foreign_exception_of_a_whole_call_is_raised_translated(self) -> None:
        async with make(DictAdapter) as adapter:
            adapter.hooks["lookup"] = raising(OSError(111, "Connection refused"))
            with pytest.raises(BackendError, match="Connection refused") as caught:
                await adapter.submit_lookup_and_lock_task(keys(2))
            assert isinstance(caught.value.__cause__, OSError)
            assert adapter.held_leases == 0

    async def test_errors_of_the_tree_pass_unchanged(self) -> None:
        async with make(DictAdapter) as adapter:
            error = AuthError("tier: the server refuses these credentials")
            for hook in ("load", "lookup"):
                adapter.hooks[hook] = raising(error)
            assert (await adapter.submit_load_task([KEY], [blank(1)]))[0].error is error
            with pytest.raises(AuthError):
                await adapter.submit_lookup_and_lock_task([KEY])

    @pytest.mark.parametrize("hook", ["store", "load", "lookup", "delete"])
    async def test_groups_are_unwrapped(self, hook: str) -> None:
        inner = BackendBusyError("tier: too much to do")
        async with make(DictAdapter) as adapter:
            adapter.hooks[hook] = raising(ExceptionGroup("outer", [ExceptionGroup("inner", [inner])]))
            if hook == "lookup":
                with pytest.raises(BackendBusyError):
                    await adapter.submit_lookup_and_lock_task([KEY])
            else:
                tasks: dict[str, Any] = {
                    "store": adapter.submit_store_task([KEY], [wrap(DATA)]),
                    "load": adapter.submit_load_task([KEY], [blank(1)]),
                    "delete": adapter.submit_delete_task([KEY]),
                }
                [outcome] = await tasks[hook]
                assert outcome.error is inner

    async def test_an_adapters_own_translation_counts(self) -> None:
        class Translating(DictAdapter):
            def translate_error(self, error: Exception) -> L2Error:
                return BackendBusyError("busy") if isinstance(error, LookupError) else super().translate_error(error)

        async with make(Translating) as adapter:
            adapter.hooks["load"] = raising(KeyError("x"))
            [outcome] = await adapter.submit_load_task([KEY], [blank(1)])
            assert type(outcome.error) is BackendBusyError

    async def test_a_translation_that_fails_is_no_disaster(self) -> None:
        class Broken(DictAdapter):
            def translate_error(self, error: Exception) -> L2Error:
                raise ValueError("oops")

        async with make(Broken) as adapter:
            adapter.hooks["load"] = raising(KeyError("x"))
            for _ in range(2):
                [outcome] = await adapter.submit_load_task([KEY], [blank(1)])
                assert str(outcome.error) == "tier: unexpected KeyError"

    @pytest.mark.parametrize("answer", [[], [1], [1, 2, 3], [5, -1]])
    async def test_a_lookup_that_answers_nonsense_fails_as_a_whole(self, answer: list[int | None]) -> None:
        async with make(DictAdapter) as adapter:

            async def nonsense(keys: object) -> list[int | None]:
                return answer

            adapter.hooks["lookup"] = nonsense
            with pytest.raises(BackendError):
                await adapter.submit_lookup_and_lock_task(keys(2))

    async def test_what_an_adapter_cannot_do_says_so(self) -> None:
        async with make(DictAdapter) as adapter:
            with pytest.raises(BackendError, match="tier: this adapter cannot report its usage"):
                await adapter.usage()
            with pytest.raises(BackendError, match="tier: this adapter cannot list its keys"):
                async for _ in adapter.iter_keys():
                    pass


class TestDeadlines:
    async def test_a_hang_is_bounded_by_the_deadline(self) -> None:
        async with make(DictAdapter) as adapter:
            for hook in ("store", "load", "lookup"):
                adapter.hooks[hook] = hang
            started = anyio.current_time()
            deadline = started + 0.05
            tasks: list[Any] = [
                adapter.submit_store_task([KEY], [wrap(DATA)], deadline=deadline),
                adapter.submit_load_task(keys(9), [blank(1) for _ in range(9)], deadline=deadline),
                adapter.submit_lookup_and_lock_task(keys(3), deadline=deadline),
            ]
            for task in tasks:
                for outcome in await task:
                    assert isinstance(outcome.error, BackendTimeoutError)
            assert anyio.current_time() - started < 1

    async def test_without_one_the_configured_time_counts(self) -> None:
        async with make(DictAdapter, timeout_s=0.05) as adapter:
            await adapter.submit_store_task([KEY], [wrap(DATA)])
            await adapter.submit_lookup_and_lock_task([KEY])
            for hook in ("load", "delete", "release"):
                adapter.hooks[hook] = hang
            tasks: list[Any] = [
                adapter.submit_load_task([KEY], [blank(1)]),
                adapter.submit_delete_task([KEY]),
            ]
            for task in tasks:
                [outcome] = await task
                assert isinstance(outcome.error, BackendTimeoutError)
            with pytest.raises(BackendTimeoutError):
                await adapter.submit_unlock_task([KEY])
            assert adapter.held_leases == 0
            adapter.hooks.clear()

    async def test_a_hung_key_does_not_hold_back_the_others(self) -> None:
        async with make(DictAdapter, max_concurrency=2) as adapter:
            await adapter.submit_store_task(keys(9), [wrap(DATA)] * 9)

            async def hang_on_first(key: ObjectKey, into: Sequence[memoryview]) -> int | None:
                if key == KEY:
                    await anyio.sleep_forever()
                return adapter.fill(into, adapter.objects[key])

            adapter.hooks["load"] = hang_on_first
            targets = [blank(len(DATA)) for _ in range(9)]
            outcomes = await adapter.submit_load_task(keys(9), targets, deadline=anyio.current_time() + 0.05)
            assert [outcome.status for outcome in outcomes] == ["failed"] + ["loaded"] * 8


class TestFanOut:
    @pytest.mark.parametrize("limit", [1, 3])
    async def test_it_is_bounded_and_used(self, limit: int) -> None:
        async with make(DictAdapter, max_concurrency=limit) as adapter:
            running = highest = 0

            async def count(*_: object) -> None:
                nonlocal running, highest
                running += 1
                highest = max(highest, running)
                await anyio.lowlevel.checkpoint()
                running -= 1

            adapter.hooks["store"] = adapter.hooks["delete"] = count
            await adapter.submit_store_task(keys(20), [wrap(DATA)] * 20)
            await adapter.submit_delete_task(keys(20))
            assert highest == limit

    async def test_a_key_given_twice_is_stored_once(self) -> None:
        async with make(DictAdapter) as adapter:
            outcomes = await adapter.submit_store_task([KEY, *keys(2), KEY], [wrap(DATA)] * 4)
            assert adapter.calls["store"] == 2
            assert [outcome.status for outcome in outcomes] == ["stored"] * 4
            assert adapter.counters["store.stored"] == 2

    async def test_threads_are_bounded_and_awaited(self) -> None:
        async with make(DictAdapter, max_concurrency=2) as adapter:
            go, lock = threading.Event(), threading.Lock()
            running = highest = done = 0

            def work() -> None:
                nonlocal running, highest, done
                with lock:
                    running += 1
                    highest = max(highest, running)
                go.wait(10)
                with lock:
                    running -= 1
                    done += 1

            async with anyio.create_task_group() as group:
                for _ in range(6):
                    group.start_soon(adapter.run_in_thread, work)
                while highest < 2:  # noqa: ASYNC110 - a thread sets it
                    await anyio.sleep(0.001)
                group.cancel_scope.cancel()
                go.set()
            assert highest == 2
            assert done == 2, "threads that began are awaited, the others never begin"


class TestLimits:
    async def test_an_object_above_the_limit_never_reaches_the_backend(self) -> None:
        async with make(SmallAdapter) as adapter:
            outcomes = await adapter.submit_store_task(keys(2), [wrap(bytes(45)), wrap(bytes(44))])
            assert [outcome.status for outcome in outcomes] == ["failed", "stored"]
            assert isinstance(outcomes[0].error, CapacityError)
            assert adapter.calls["store"] == 1

    async def test_an_element_type_that_no_codec_takes_is_refused_at_once(self) -> None:
        async with make(DictAdapter, [HalfCodec()]) as adapter:
            with pytest.raises(ConfigError, match="'half'"):
                _ = adapter.submit_store_task([KEY], [wrap(DATA)])


class TestLeases:
    async def test_an_unlock_that_starts_late_or_is_cancelled_still_unlocks(self) -> None:
        """Under load a batch can wait longer for its turn than it may take; a lock that is let go must not stay."""
        async with make(DictAdapter, timeout_s=0.02) as adapter:
            await adapter.submit_store_task(keys(2), [wrap(DATA)] * 2)
            await adapter.submit_lookup_and_lock_task(keys(2))
            late, cancelled = (adapter.submit_unlock_task([key]) for key in keys(2))
            cancelled.cancel()
            time.sleep(0.05)  # noqa: ASYNC251 - the loop has no time for anybody
            for task in (late, cancelled):
                assert [outcome.status for outcome in await task] == ["deleted"]
            assert adapter.held_leases == 0
            assert sorted(adapter.released) == sorted(keys(2))

    async def test_each_hit_is_released_once_and_the_rest_by_closing(self) -> None:
        async with make(DictAdapter) as adapter:
            await adapter.submit_store_task(keys(3), [wrap(DATA)] * 3)
            await adapter.submit_lookup_and_lock_task([*keys(4), KEY])
            await adapter.submit_lookup_and_lock_task([KEY])
            await adapter.submit_unlock_task(keys(2))
            assert adapter.released == keys(2)
        assert Counter(adapter.released) == Counter([KEY, *keys(3)])
        assert adapter.held_leases == 0

    async def test_a_failed_lookup_holds_nothing(self) -> None:
        async with make(DictAdapter) as adapter:
            adapter.hooks["lookup"] = raising(OSError(5, "Input/output error"))
            with pytest.raises(BackendError):
                await adapter.submit_lookup_and_lock_task([KEY])
            adapter.hooks["lookup"] = hang
            task = adapter.submit_lookup_and_lock_task([KEY])
            await anyio.lowlevel.checkpoint()
            task.cancel()
            assert isinstance((await task)[0].error, TaskCancelledError)
            assert adapter.held_leases == 0


class TestProbe:
    async def test_it_leaves_nothing(self) -> None:
        async with make(DictAdapter) as adapter:
            probe = await adapter.probe()
            assert (probe.ok, probe.error) == (True, None)
            assert adapter.objects == {}

    @pytest.mark.parametrize("hook", ["store", "load", "delete"])
    async def test_each_step_can_fail_and_says_why(self, hook: str) -> None:
        async with make(DictAdapter) as adapter:
            adapter.hooks[hook] = raising(PermissionError(13, "Permission denied"))
            probe = await adapter.probe()
            assert not probe.ok
            assert "Permission denied" in str(probe.error)

    async def test_a_backend_that_forgets_does_not_pass(self) -> None:
        async with make(DictAdapter) as adapter:

            async def forget(*_: object) -> None:
                return None

            adapter.hooks["load"] = forget
            probe = await adapter.probe()
            assert not probe.ok
            assert "miss" in str(probe.error)

    async def test_a_hang_ends(self) -> None:
        async with make(DictAdapter, timeout_s=0.05) as adapter:
            adapter.hooks["store"] = hang
            probe = await adapter.probe()
            assert isinstance(probe.error, BackendTimeoutError)


class TestOpeningAndClosing:
    async def test_a_failure_to_open_is_translated_and_can_be_tried_again(self) -> None:
        class Unopenable(DictAdapter):
            failures: Sequence[Exception] = (
                OSError(111, "Connection refused"),
                ExceptionGroup("several connections", [AuthError("tier: wrong password")]),
            )
            opened = 0

            async def open(self) -> None:
                await super().open()
                self.opened += 1
                if self.opened <= len(self.failures):
                    raise self.failures[self.opened - 1]

        adapter = make(Unopenable)
        with pytest.raises(BackendError, match="Connection refused"):
            await adapter.__aenter__()
        with pytest.raises(AuthError):
            await adapter.__aenter__()
        with pytest.raises(ClosedError, match="new"):
            _ = adapter.submit_delete_task([KEY])
        async with adapter:
            assert (await adapter.probe()).ok

    async def test_the_backend_closes_after_all_hooks_and_leases(self) -> None:
        events: list[str] = []

        class Closing(DictAdapter):
            async def close(self) -> None:
                await anyio.lowlevel.checkpoint()
                events.append("closed")

        async def slow(*_: object) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                events.append("hook ended")

        async def release(keys: object) -> None:
            await anyio.lowlevel.checkpoint()
            events.append("released")

        with anyio.CancelScope() as scope:
            async with make(Closing) as adapter:
                await adapter.submit_store_task([KEY], [wrap(DATA)])
                await adapter.submit_lookup_and_lock_task([KEY])
                adapter.hooks.update(store=slow, release=release)
                task = adapter.submit_store_task([KEY], [wrap(DATA)])
                await anyio.lowlevel.checkpoint()
                scope.cancel()
                await anyio.sleep_forever()
        assert events == ["hook ended", "released", "closed"]
        assert task.ended

    @pytest.mark.parametrize("hook", ["release", "close"])
    async def test_a_backend_that_hangs_at_the_end_is_left(
        self, hook: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(adapter_module, "_CLOSE_GRACE_S", 0.02)

        class Hanging(DictAdapter):
            closed = False

            async def close(self) -> None:
                if hook == "close":
                    await anyio.sleep_forever()
                self.closed = True

        async with make(Hanging) as adapter:
            await adapter.submit_store_task([KEY], [wrap(DATA)])
            await adapter.submit_lookup_and_lock_task([KEY])
            if hook == "release":
                adapter.hooks["release"] = hang
        assert adapter.closed == (hook == "release"), "one step does not keep the other out"
        assert "within" in caplog.text

    async def test_a_failure_to_close_is_logged_without_a_secret(self, caplog: pytest.LogCaptureFixture) -> None:
        class Failing(DictAdapter):
            async def close(self) -> None:
                raise RuntimeError("cannot log out of redis://:hunter2@host")

        async with make(Failing):
            pass
        assert "tier: failed to close" in caplog.text
        assert "hunter2" not in caplog.text

    async def test_opening_is_bounded(self) -> None:
        class Unopenable(DictAdapter):
            async def open(self) -> None:
                await anyio.sleep_forever()

        with pytest.raises(BackendTimeoutError, match=r"did not open within 0\.02 s"):
            await make(Unopenable, open_timeout_s=0.02).__aenter__()

    async def test_unexpected_errors_are_logged_with_their_place_but_not_their_text(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.ERROR)
        async with make(DictAdapter) as adapter:
            adapter.hooks["load"] = raising(ValueError("no reply from redis://:hunter2@host"))
            await adapter.submit_load_task([KEY], [blank(1)])
        assert "unexpected ValueError in the adapter" in caplog.text
        assert "dict_adapter.py" in caplog.text
        assert "hunter2" not in caplog.text


class HostConfig(AdapterConfig, frozen=True, kw_only=True):
    host: str
    port: int = 1
    password: Secret | None = None


class HostAdapter(DictAdapter):
    config_type = HostConfig


class TestOptionsFromURL:
    async def test_parts_fill_the_fields_of_their_name(self) -> None:
        options = HostAdapter.options_from_url(parse_url("s://:pass@h:7/?timeout_s=2"))
        assert options == {"host": "h", "port": 7, "password": Secret("pass"), "timeout_s": "2"}

    @pytest.mark.parametrize(("url", "part"), [("s://user@h", "username"), ("s://h/path", "path")])
    async def test_a_part_without_a_field_is_refused(self, url: str, part: str) -> None:
        with pytest.raises(ConfigError, match=f"{part} has no meaning"):
            HostAdapter.options_from_url(parse_url(url))
