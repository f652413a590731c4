"""Background work: what dies is reported and started again."""

from __future__ import annotations

import logging

import anyio
import anyio.lowlevel
import pytest

from l2kit import supervision
from l2kit.errors import BackendError
from l2kit.supervision import Supervisor
from tests.unit.odd_tiers import key as object_key
from tests.unit.odd_tiers import odd, registry, storage, until, wanted, write

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]


class Mortal:
    """Work that dies as often as it is told."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.runs = 0

    async def __call__(self) -> None:
        self.runs += 1
        if self.errors:
            raise self.errors.pop(0)
        await anyio.sleep_forever()


async def test_what_dies_is_reported_and_started_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(supervision, "_PROVEN_S", 0.05)
    supervisor, work = Supervisor("tier a"), Mortal(BackendError("no disk"), BackendError("still no disk"))
    supervisor.start("scrubbing", work)
    assert supervisor.trouble is None
    async with anyio.create_task_group() as group:
        supervisor.run_in(group)
        await until(lambda: work.runs == 3)
        assert "tier a: scrubbing failed: still no disk" in str(supervisor.trouble)
        await until(lambda: supervisor.trouble is None)  # it has run for long enough
        group.cancel_scope.cancel()
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2


async def test_the_text_of_a_foreign_error_stays_out_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    supervisor, work = Supervisor("tier a"), Mortal(RuntimeError("redis://:hunter2@host"))
    async with anyio.create_task_group() as group:
        supervisor.run_in(group)
        supervisor.start("scrubbing", work)
        await until(lambda: supervisor.trouble)
        group.cancel_scope.cancel()
    assert "RuntimeError" in caplog.text
    assert "test_supervision.py" in caplog.text
    assert "hunter2" not in caplog.text + str(supervisor.trouble)


async def test_work_that_returns_is_done() -> None:
    supervisor = Supervisor("tier a")

    async def work() -> None:
        await anyio.lowlevel.checkpoint()

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            supervisor.run_in(group)
            supervisor.start("once", work)
    assert supervisor.trouble is None


async def test_background_work_of_an_adapter_ends_with_it_and_shows_in_its_trouble() -> None:
    adapter = registry().adapter("odd://")
    dying, living = Mortal(BackendError("gone"), BackendError("gone")), Mortal()
    async with adapter:
        adapter.run_in_background("dying", dying)
        adapter.run_in_background("living", living)
        await until(lambda: dying.runs and living.runs)
        assert "odd: dying failed: gone" in str(adapter.trouble)


async def test_a_tier_whose_background_work_died_is_unhealthy_and_works_on() -> None:
    async with storage("a") as manager:
        odd(manager).run_in_background("scrubbing", Mortal(BackendError("no disk")))
        await until(lambda: not manager.tiers[0].healthy)
        assert "scrubbing failed: no disk" in str(manager.status()["tiers"]["a"]["last_error"])
        write(manager, object_key(0))
        await manager.drain()
        assert await manager.lookup(wanted(1)) == 1
