"""`L2Task` and `TaskRunner`: every key gets its outcome, every waiter its answer, whatever happens in between."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from l2kit.errors import BackendError, BackendTimeoutError, TaskCancelledError
from l2kit.outcomes import DeleteOutcome, DeleteStatus
from l2kit.task import L2Task, TaskRunner

pytestmark = pytest.mark.anyio

DONE = DeleteOutcome(DeleteStatus.DELETED)
MISS = DeleteOutcome(DeleteStatus.MISS)

Task = L2Task[DeleteOutcome]
Body = Callable[[Task], Awaitable[None]]


@asynccontextmanager
async def runner() -> AsyncIterator[TaskRunner]:
    async with anyio.create_task_group() as group:
        yield TaskRunner(group, "test")
        group.cancel_scope.cancel()


def start(runner: TaskRunner, body: Body, count: int = 3, deadline: float = math.inf) -> Task:
    task = L2Task(count, DeleteOutcome)
    runner.start(lambda: task.run(body, deadline))
    return task


async def complete_all(task: Task) -> None:
    for index in range(len(task)):
        task.complete(index, DONE)
        await anyio.lowlevel.checkpoint()


async def complete_first_and_hang(task: Task) -> None:
    task.complete(0, DONE)
    await anyio.sleep_forever()


class TestAwaiting:
    async def test_outcomes_come_in_key_order(self) -> None:
        async def backwards(task: Task) -> None:
            for index in (2, 1, 0):
                task.complete(index, MISS if index == 1 else DONE)

        async with runner() as workers:
            task = start(workers, backwards)
            assert (task.state, task.ended) == ("running", False)
            assert await task == [DONE, MISS, DONE]
            assert (task.state, task.ended) == ("done", True)

    async def test_twice_and_by_several(self) -> None:
        async with runner() as workers:
            task = start(workers, complete_all)
            found: list[list[DeleteOutcome]] = []

            async def wait() -> None:
                found.append(await task)

            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                group.start_soon(wait)
            assert found == [[DONE] * 3] * 2
            assert await task == [DONE] * 3

    async def test_the_first_outcome_counts(self) -> None:
        async def twice(task: Task) -> None:
            task.complete(0, DONE)
            task.complete(0, MISS)

        async with runner() as workers:
            assert await start(workers, twice, count=1) == [DONE]

    async def test_a_key_without_an_outcome_is_never_a_success(self) -> None:
        async def forgetful(task: Task) -> None:
            task.complete(0, DONE)

        async with runner() as workers:
            outcomes = await start(workers, forgetful)
            assert [outcome.status for outcome in outcomes] == ["deleted", "failed", "failed"]


class TestIterating:
    async def test_in_order_of_completion(self) -> None:
        async def shuffled(task: Task) -> None:
            for index in (2, 0, 1):
                task.complete(index, DONE)
                await anyio.lowlevel.checkpoint()

        async with runner() as workers:
            task = start(workers, shuffled)
            assert [index async for index, _ in task] == [2, 0, 1]
            assert [index async for index, _ in task] == [2, 0, 1], "again, when it has ended"

    async def test_before_the_batch_ends(self) -> None:
        async with runner() as workers:
            task = start(workers, complete_first_and_hang)
            async for index, outcome in task:
                assert (index, outcome, task.ended) == (0, DONE, False)
                break
            assert not task.ended, "leaving the loop leaves the task running"
            task.cancel()
            await task.wait_ended()

    async def test_a_failed_call_raises_after_what_was_done(self) -> None:
        async def fail(task: Task) -> None:
            task.complete(1, DONE)
            raise BackendError("gone")

        async with runner() as workers:
            seen: list[int] = []

            async def iterate() -> None:
                async for index, _ in start(workers, fail):
                    seen.append(index)

            with pytest.raises(BackendError, match="gone"):
                await iterate()
            assert seen == [1]

    async def test_callbacks_see_each_outcome_once(self) -> None:
        seen: list[int] = []
        async with runner() as workers:
            task = start(workers, complete_all)
            async for _ in task:
                break
            task.on_outcome(lambda index, outcome: seen.append(index))
            await task
            assert seen == [0, 1, 2]


class TestCancelling:
    async def test_what_is_left_is_cancelled_what_is_done_stays(self) -> None:
        async with runner() as workers:
            task = start(workers, complete_first_and_hang)
            await anyio.lowlevel.checkpoint()
            task.cancel()
            first, *rest = await task
            assert first == DONE
            assert [type(outcome.error) for outcome in rest] == [TaskCancelledError] * 2
            assert task.state == "cancelled"

    async def test_before_it_began_nothing_is_done(self) -> None:
        async with runner() as workers:
            task = start(workers, complete_all)
            task.cancel()
            assert [type(outcome.error) for outcome in await task] == [TaskCancelledError] * 3

    async def test_after_the_end_it_is_harmless(self) -> None:
        async with runner() as workers:
            task = start(workers, complete_all)
            await task
            task.cancel()
            assert await task == [DONE] * 3
            assert await start(workers, complete_all) == [DONE] * 3, "nor does it reach the worker's next task"

    async def test_it_ends_only_when_in_flight_work_has(self) -> None:
        landed = anyio.Event()

        async def in_flight(task: Task) -> None:
            with anyio.CancelScope(shield=True):
                await landed.wait()

        async with runner() as workers:
            task = start(workers, in_flight)
            await anyio.lowlevel.checkpoint()
            task.cancel()
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            assert not task.ended
            landed.set()
            await task.wait_ended()
            assert task.ended

    async def test_a_cancelled_waiter_cancels_and_waits_for_the_buffers(self) -> None:
        landed = anyio.Event()
        events: list[str] = []

        async def in_flight(task: Task) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await landed.wait()
                events.append("landed")

        async with runner() as workers, anyio.create_task_group() as group:
            task = start(workers, in_flight)

            async def wait() -> None:
                try:
                    await task
                finally:
                    events.append("let go")

            group.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
            landed.set()
        assert events == ["landed", "let go"]

    async def test_a_cancelled_wait_ended_leaves_the_task_running(self) -> None:
        async with runner() as workers:
            task = start(workers, complete_first_and_hang)
            with anyio.move_on_after(0.01):
                await task.wait_ended()
            assert (task.state, task.ended) == ("running", False)
            task.cancel()
            await task


class TestDeadlines:
    async def test_it_turns_what_is_left_into_time_outs(self) -> None:
        async with runner() as workers:
            task = start(workers, complete_first_and_hang, deadline=anyio.current_time() + 0.02)
            first, *rest = await task
            assert first == DONE
            assert [type(outcome.error) for outcome in rest] == [BackendTimeoutError] * 2
            assert task.state == "done"

    async def test_in_the_past_nothing_is_done(self) -> None:
        async with runner() as workers:
            outcomes = await start(workers, complete_all, deadline=anyio.current_time() - 1)
            assert [type(outcome.error) for outcome in outcomes] == [BackendTimeoutError] * 3

    async def test_a_cancel_before_the_deadline_is_no_time_out(self) -> None:
        async with runner() as workers:
            task = start(workers, complete_first_and_hang, deadline=anyio.current_time() + 60)
            task.cancel()
            assert {type(outcome.error) for outcome in await task} == {TaskCancelledError}


class TestFailing:
    async def test_awaiting_raises_every_time(self) -> None:
        async def fail(task: Task) -> None:
            raise BackendError("gone")

        async with runner() as workers:
            task = start(workers, fail)
            for _ in range(2):
                with pytest.raises(BackendError, match="gone"):
                    await task
            assert (task.state, task.ended) == ("failed", True)
            assert isinstance(task.error, BackendError)

    async def test_the_worker_survives(self) -> None:
        async def fail(task: Task) -> None:
            raise BackendError("gone")

        async with runner() as workers:
            with pytest.raises(BackendError):
                await start(workers, fail)
            assert await start(workers, complete_all) == [DONE] * 3

    async def test_a_broken_callback_does_not_take_the_others_along(self, caplog: pytest.LogCaptureFixture) -> None:
        called: list[str] = []

        def broken() -> None:
            raise ValueError("broken")

        async with runner() as workers:
            task = start(workers, complete_all)
            task.on_ended(broken)
            task.on_ended(lambda: called.append("second"))
            assert await task == [DONE] * 3
            assert called == ["second"]
            assert "callback" in caplog.text
            task.on_ended(lambda: called.append("late"))
            assert called == ["second", "late"]


class TestWorkers:
    async def test_they_are_used_again(self) -> None:
        used: list[int] = []

        async def note(task: Task) -> None:
            used.append(anyio.get_current_task().id)
            await complete_all(task)

        async with runner() as workers:
            for _ in range(5):
                await start(workers, note)
            assert len(set(used)) == 1
            tasks = [start(workers, note) for _ in range(4)]
            for task in tasks:
                await task
            assert len(set(used)) == 4
            for _ in range(3):
                await start(workers, note)
            assert len(set(used)) == 4

    async def test_tasks_whose_worker_never_ran_can_be_ended(self) -> None:
        async with anyio.create_task_group() as group:
            task = start(TaskRunner(group, "test"), complete_all)
            group.cancel_scope.cancel()
        if not task.ended:
            task.end()
        assert [type(outcome.error) for outcome in await task] == [TaskCancelledError] * 3

    async def test_closing_ends_tasks_in_progress(self) -> None:
        async with anyio.create_task_group() as group:
            workers = TaskRunner(group, "test")
            tasks = [start(workers, complete_first_and_hang) for _ in range(3)]
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        for task in tasks:
            assert task.ended
            outcomes = await task
            assert outcomes[0] == DONE
            assert isinstance(outcomes[1].error, TaskCancelledError)

    async def test_an_empty_batch_ends_without_a_worker(self) -> None:
        task = L2Task(0, DeleteOutcome)
        task.end()
        assert await task == []
        assert [pair async for pair in task] == []
        assert task.state == "done"
