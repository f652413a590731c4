"""StorageManager: configuration, life, forks, threads, and what survives a restart."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from l2kit.errors import AdapterNotFoundError, BackendError, ClosedError, ConfigError
from l2kit.prefetch import Prefetch
from l2kit.storage_manager import open_storage
from tests.unit.odd_tiers import (
    OBJECT_BYTES,
    OddAdapter,
    assert_closed_clean,
    content,
    key,
    layout,
    odd,
    odd_storage,
    put_in_l1,
    put_in_tier,
    read,
    registry,
    storage,
    until,
    wanted,
    write,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


# --- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"tiers": ["memory://", "memory://"]}, "'memory' is the name of two tiers"),
        ({"tiers": [{"url": "memory://", "name": "x"}, {"url": "odd://", "name": "x"}]}, "'x' is the name of two"),
        ({"l1": {"policy": "lur"}}, "did you mean 'lru'"),
        ({"l1": {"max_byte": 1}}, "did you mean 'max_bytes'"),
        ({"tears": []}, "did you mean 'tiers'"),
        ({"tiers": [{"name": "x"}]}, "needs an option 'url'"),
        ({"tiers": [{"url": "memory://", "max_byte": 3}]}, "did you mean 'max_bytes'"),
        ({"tiers": ["memroy://"]}, "did you mean 'memory'"),
        ({"lookup_timeout_s": 0}, "lookup_timeout_s"),
        ({"chunk_size": "many"}, "chunk_size"),
    ],
)
def test_a_wrong_configuration_is_one_clear_error(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_storage(config, registry=registry())
    assert says in str(caught.value)


def test_an_unknown_policy_is_not_found() -> None:
    with pytest.raises(AdapterNotFoundError, match="policies: no installed distribution offers 'fifo'"):
        open_storage({"l1": {"policy": "fifo"}}, registry=registry())


@pytest.mark.parametrize("max_bytes", [1, 1 << 62])
async def test_an_impossible_size_of_l1_names_its_field(max_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"^l1\.max_bytes: "):
        await open_storage({"l1": {"max_bytes": max_bytes}}, registry=registry()).__aenter__()


async def test_it_opens_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "l2.toml").write_text('tiers = ["memory://"]\n[l1]\nmax_bytes = "64KiB"\n')
    async with open_storage(tmp_path / "l2.toml") as manager:
        write(manager, key(0))
        await manager.drain()
        assert manager.status()["l1"]["capacity_bytes"] == 65536


# --- life -----------------------------------------------------------------------------------------


async def test_outside_async_with_nothing_works() -> None:
    manager = odd_storage("a")
    for call in (
        lambda: manager.start_prefetch(wanted(1)),
        lambda: manager.reserve_write(key(0), layout()),
        lambda: manager.readable_prefix([key(0)]),
        manager.status,
    ):
        with pytest.raises(ClosedError, match="not open"):
            call()
    async with manager:
        pass
    with pytest.raises(ClosedError):
        manager.start_prefetch(wanted(1))
    with pytest.raises(ClosedError):
        await manager.lookup(wanted(1))
    with pytest.raises(ClosedError, match="opens once"):
        await manager.__aenter__()


async def test_a_tier_that_does_not_open_closes_those_before_it() -> None:
    manager = odd_storage("a", {"url": "odd://?broken=true", "name": "b"})
    with pytest.raises(BackendError, match="broken on purpose"):
        await manager.__aenter__()
    with pytest.raises(ClosedError):
        _ = manager.tiers[0].adapter.submit_delete_task([key(0)])
    assert manager.l1.usage().used_bytes == 0


class ClosesBadly(OddAdapter):
    """Fails in close, with an error that is not ours."""

    async def close(self) -> None:
        await super().close()
        raise OSError(28, "no space left")


async def test_a_tier_that_fails_to_close_does_not_keep_the_others_open(caplog: pytest.LogCaptureFixture) -> None:
    async with odd_storage("a", {"url": "bad://", "name": "b"}, "c", known=registry(bad=ClosesBadly)) as manager:
        write(manager, key(0))
        odd(manager, 0).hung.add("lookup")
        prefetch = manager.start_prefetch(wanted(2), timeout_s=60)
        await until(lambda: odd(manager, 0).waiting["lookup"])
    assert prefetch.done
    prefetch.release()
    assert_closed_clean(manager)
    assert "no space left" in caplog.text
    for position in (0, 2):
        with pytest.raises(ClosedError):
            _ = manager.tiers[position].adapter.submit_delete_task([key(0)])


class HangsInRelease(OddAdapter):
    """Never gives its leases back; its close must run all the same."""

    closed = False

    async def release_many(self, keys: Any) -> None:
        await anyio.sleep_forever()

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
        type(self).closed = True
        await super().close()


async def test_a_backend_that_hangs_in_its_leases_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("l2kit.adapter._CLOSE_GRACE_S", 0.1)
    async with odd_storage({"url": "hangs://", "name": "a"}, known=registry(hangs=HangsInRelease)) as manager:
        await put_in_tier(manager, 0, key(0))
        await manager.tiers[0].adapter.submit_lookup_and_lock_task([key(0)])
    assert HangsInRelease.closed


async def test_what_a_host_cancels_still_answers_and_leaves_nothing() -> None:
    """The host's own scope is cancelled around an open storage: threads that wait for an answer get one."""
    prefetches: list[Prefetch] = []
    manager = odd_storage("a", drain_timeout_s=30)
    with anyio.CancelScope() as scope:
        async with manager:
            odd(manager).hung |= {"lookup", "store"}
            write(manager, key(5))
            prefetches = [manager.start_prefetch(wanted(1), timeout_s=60) for _ in range(2)]
            await until(lambda: odd(manager).waiting["lookup"])
            started = time.monotonic()
            scope.cancel()
            with anyio.CancelScope(shield=True):  # workers are gone, the manager is still open
                await anyio.sleep(0.05)
                prefetches += [manager.start_prefetch(wanted(1), timeout_s=60) for _ in range(3)]
                await anyio.sleep(0.05)
    assert time.monotonic() - started < 3
    for prefetch in prefetches:
        assert prefetch.done
        prefetch.release()
    assert_closed_clean(manager)


# --- restart --------------------------------------------------------------------------------------


async def test_what_was_stored_is_there_after_a_restart(request: pytest.FixtureRequest) -> None:
    shelf = {"url": f"odd://?shelf={request.node.name}", "name": "a"}
    async with storage(shelf) as manager:
        write(manager, *(key(n) for n in range(12)))
    async with storage(shelf) as manager:  # the first one drained before it closed
        assert await manager.lookup(wanted(12)) == 12
        assert await read(manager, wanted(12)) == 12
        assert manager.tiers[0].counters.snapshot()["loaded_bytes"] == 12 * OBJECT_BYTES


# --- forks ----------------------------------------------------------------------------------------


def in_child(check: Callable[[], None]) -> int:
    """Run ``check`` in a forked child; 0 when it raised nothing."""
    pid = os.fork()
    if pid == 0:
        try:
            check()
        except BaseException:
            os._exit(1)
        os._exit(0)
    give_up = time.monotonic() + 10
    while time.monotonic() < give_up:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise TimeoutError("the child hangs")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
async def test_a_forked_child_is_refused() -> None:
    async with storage("a") as manager:
        put_in_l1(manager, key(0))
        prefetch = manager.start_prefetch(wanted(1))
        reservation = manager.reserve_write(key(1), layout())
        assert reservation is not None

        def check() -> None:
            for call in (
                lambda: manager.start_prefetch(wanted(1)),
                lambda: manager.reserve_write(key(2), layout()),
                lambda: manager.readable_prefix([key(0)]),
                lambda: manager.finish_write([reservation]),
                lambda: manager.tiers[0].adapter.submit_lookup_and_lock_task([key(0)]),
            ):
                with pytest.raises(ClosedError, match="fork"):
                    call()
            prefetch.release()  # harmless

        assert in_child(check) == 0
        assert prefetch.objects()[0].tobytes() == content(key(0))
        prefetch.release()
        reservation.abort()
        assert await read(manager, wanted(1)) == 1


# --- what people see ------------------------------------------------------------------------------


async def test_every_number_exists_at_zero_and_counts() -> None:
    async with storage("a") as manager:
        status = manager.status()
        assert set(status["storage"].values()) == {0}
        assert status["l1"]["evictions"] == 0
        tier = status["tiers"]["a"]
        assert (tier["healthy"], tier["last_error"], tier["stored_objects"]) == (True, None, 0)
        write(manager, key(0), key(0))
        await manager.drain()
        await read(manager, wanted(1))
        await read(manager, wanted(2))
        assert manager.reserve_write(key(9), layout(16 * 1000)) is None
        counted = manager.status()["storage"]
        assert counted == {
            "prefetches": 2,
            "prefetches_from_l1": 1,
            "prefetches_refused": 0,
            "writes_finished": 1,
            "writes_present": 1,
            "writes_refused": 1,
        }


async def test_a_write_is_reserved_once() -> None:
    async with storage("a") as manager:
        reservation = manager.reserve_write(key(0), layout())
        assert reservation is not None
        assert manager.reserve_write(key(0), layout()) is None
        reservation.abort()
        again = manager.reserve_write(key(0), layout())
        assert again is not None
        manager.finish_write([again])
        with pytest.raises(ClosedError):
            manager.finish_write([again])
        again.abort()


async def test_a_used_up_reservation_among_others_leaks_no_lease() -> None:
    async with storage("a") as manager:
        reservations = [r for r in (manager.reserve_write(key(n), layout()) for n in range(3)) if r is not None]
        reservations[1].abort()
        with pytest.raises(ClosedError):
            manager.finish_write(reservations)
        reservations[0].abort()
        await manager.drain()
        assert odd(manager).keys == {key(2)}
