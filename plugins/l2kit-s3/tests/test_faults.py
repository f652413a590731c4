"""Whatever goes wrong on the way, no wrong byte is delivered, nothing hangs, and the outcome says what it was."""

from __future__ import annotations

import os
from email.utils import formatdate
from typing import Any

import anyio
import pytest

import l2kit
from l2kit import Layout, LoadOutcome, MemoryObj, ObjectKey, StoreOutcome
from l2kit.errors import (
    AuthError,
    BackendBusyError,
    BackendError,
    BackendTimeoutError,
    CapacityError,
    CorruptObjectError,
    L2Error,
    TransientBackendError,
)

pytestmark = [pytest.mark.anyio, pytest.mark.service]

NBYTES = 300_000
DATA = os.urandom(NBYTES)
KEY = ObjectKey("faults", bytes(16))


async def store(adapter: Any, data: bytes = DATA) -> StoreOutcome:
    [outcome] = await adapter.submit_store_task([KEY], [MemoryObj.wrap(data, Layout.raw(len(data)))])
    assert isinstance(outcome, StoreOutcome)
    return outcome


async def load(adapter: Any) -> LoadOutcome:
    """Load, and check that what is called loaded is what was stored."""
    target = MemoryObj.allocate(Layout.raw(NBYTES))
    [outcome] = await adapter.submit_load_task([KEY], [target])
    assert isinstance(outcome, LoadOutcome)
    assert not outcome.loaded or target.tobytes() == DATA
    return outcome


@pytest.mark.parametrize("piece_bytes", ["1MiB", "64KiB"])
@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500, "code": "InternalError"},
        {"status": 503, "code": "SlowDown"},
        {"status": 429},
        {"after": 40_000, "reset": True},
        {"after": 40_000},
        {"after": 0},
        {"headers": {"etag": '"of another version"'}},
        {"status": 400, "code": "ExpiredToken"},
    ],
    ids=str,
)
async def test_a_load_survives_what_happens_once(place: Any, fault: dict[str, Any], piece_bytes: str) -> None:
    async with l2kit.open_adapter(place.url(piece_bytes=piece_bytes)) as adapter:
        await store(adapter)
        place.proxy.once("GET", **fault)
        assert (await load(adapter)).loaded
        assert adapter.counters["load.failed"] == 0


@pytest.mark.parametrize(
    ("fault", "kind", "says", "most_requests"),
    [
        ({"status": 500, "code": "InternalError"}, TransientBackendError, "the store failed", 3),
        ({"status": 503, "code": "SlowDown"}, BackendBusyError, "max_concurrency", 3),
        ({"after": 40_000, "reset": True}, TransientBackendError, "the connection broke", 3),
        ({"after": 40_000}, TransientBackendError, "the connection broke", 3),
        ({"status": 400, "code": "ExpiredToken"}, AuthError, "have expired", 2),
        ({"status": 403, "code": "AccessDenied"}, AuthError, "access denied", 1),
        ({"status": 301, "headers": {"x-amz-bucket-region": "eu-west-1"}}, BackendError, "set region=eu-west-1", 1),
        ({"status": 307, "code": "TemporaryRedirect"}, TransientBackendError, "some minutes", 1),
        ({"status": 404, "code": "NoSuchBucket"}, BackendError, "no such bucket", 1),
        ({"status": 200, "headers": {"transfer-encoding": "chunked"}}, BackendError, "in chunks", 1),
        ({"status": 204}, BackendError, "HTTP 204", 1),
        ({"flip": True}, CorruptObjectError, "", 1),
        ({"headers": {"content-length": "none"}}, BackendError, "how long", 1),
    ],
    ids=str,
)
async def test_a_load_that_cannot_succeed_says_why(
    place: Any, fault: dict[str, Any], kind: type[L2Error], says: str, most_requests: int
) -> None:
    async with l2kit.open_adapter(place.url()) as adapter:
        await store(adapter)
        before = place.proxy.count("GET")
        place.proxy.always("GET", **fault)
        outcome = await load(adapter)
        assert isinstance(outcome.error, kind), outcome
        assert says in str(outcome.error)
        assert place.proxy.count("GET") - before <= most_requests


async def test_a_wrong_clock_is_named(place: Any) -> None:
    ahead = {"date": formatdate(4_000_000_000, usegmt=True)}
    async with l2kit.open_adapter(place.url()) as adapter:
        place.proxy.always("GET", status=403, code="AccessDenied", headers=ahead)
        error = (await load(adapter)).error
    assert isinstance(error, AuthError)
    assert "behind the store's" in str(error)
    assert "NTP" in str(error)


@pytest.mark.parametrize("direct", ["true", "false"])
@pytest.mark.parametrize("status", [400, 403])
async def test_a_head_that_is_refused_renews_the_credentials(place: Any, direct: str, status: int) -> None:
    """Its answer has no body that could say that the token has expired."""
    async with l2kit.open_adapter(place.url(direct=direct)) as adapter:
        await store(adapter)
        place.proxy.once("HEAD", status=status)
        [found] = await adapter.submit_lookup_and_lock_task([KEY])
        assert found.hit
        await adapter.submit_unlock_task([KEY])


async def test_an_object_replaced_under_the_pieces_is_read_again(place: Any) -> None:
    async with l2kit.open_adapter(place.url(piece_bytes="64KiB")) as adapter:
        await store(adapter)
        place.proxy.once("GET", headers={"etag": '"of another version"'})
        assert (await load(adapter)).loaded
        assert adapter.counters["changed_while_read"] == 1


async def test_part_of_another_place_is_refused(place: Any) -> None:
    async with l2kit.open_adapter(place.url(piece_bytes="64KiB")) as adapter:
        await store(adapter)
        place.proxy.once("GET", headers={"content-range": f"bytes 7-65542/{NBYTES}"})
        error = (await load(adapter)).error
    assert isinstance(error, BackendError)
    assert "another part" in str(error)


async def test_a_silent_store_costs_its_deadline_and_no_more(place: Any) -> None:
    async with l2kit.open_adapter(place.url(timeout_s="1", socket_timeout_s="0.4", retries="1")) as adapter:
        await store(adapter)
        place.proxy.always("GET", silent=True)
        with anyio.fail_after(5):
            assert isinstance((await load(adapter)).error, BackendTimeoutError)
        place.proxy.plan = lambda _: None
        assert (await load(adapter)).loaded


async def test_a_cancelled_load_lets_go_of_a_silent_store(place: Any) -> None:
    async with l2kit.open_adapter(place.url(timeout_s="60", socket_timeout_s="50")) as adapter:
        await store(adapter)
        place.proxy.always("GET", silent=True)
        task = adapter.submit_load_task([KEY], [MemoryObj.allocate(Layout.raw(NBYTES))])
        before = place.proxy.count("GET")
        with anyio.fail_after(5):
            while place.proxy.count("GET") == before:  # noqa: ASYNC110 - another thread counts
                await anyio.sleep(0.01)
            task.cancel()
            while not task.ended:  # noqa: ASYNC110 - for a bound over all of it
                await anyio.sleep(0.01)


@pytest.mark.parametrize(
    "fault",
    [{"status": 500}, {"status": 503, "code": "SlowDown"}, {"after": 0, "reset": True}, {"status": 409}],
    ids=str,
)
async def test_a_store_survives_what_happens_once(place: Any, fault: dict[str, Any]) -> None:
    """Also where the object was stored and only the answer was lost."""
    async with l2kit.open_adapter(place.url()) as adapter:
        place.proxy.once("PUT", headers={"content-length": "9"} if "after" in fault else {}, **fault)
        assert (await store(adapter)).present
        assert (await load(adapter)).loaded


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"status": 500}, TransientBackendError),
        ({"status": 403, "code": "AccessDenied"}, AuthError),
        ({"status": 507, "code": "XMinioStorageFull"}, CapacityError),
        ({"status": 501, "code": "NotImplemented"}, BackendError),
    ],
    ids=str,
)
async def test_a_store_that_cannot_succeed_leaves_nothing(
    place: Any, fault: dict[str, Any], kind: type[L2Error]
) -> None:
    async with l2kit.open_adapter(place.url()) as adapter:
        place.proxy.always("PUT", **fault)
        outcome = await store(adapter)
        assert isinstance(outcome.error, kind), outcome
        assert place.store.names(place.prefix) == []


async def test_a_present_object_is_not_sent_again(place: Any) -> None:
    async with l2kit.open_adapter(place.url()) as adapter:
        assert (await store(adapter)).status == "stored"
        assert (await store(adapter)).status == "already_present"
        place.store.write(place.name(KEY), b"")  # what a store that failed may leave
        assert (await store(adapter)).status == "stored"
        assert (await load(adapter)).loaded


@pytest.mark.slow
async def test_the_store_dies_and_comes_back(own_store: Any) -> None:
    async with l2kit.open_adapter(own_store.url("p", unsigned_payload="true", retries="0")) as adapter:
        await store(adapter)
        own_store.kill()
        outcome = await load(adapter)
        assert isinstance(outcome.error, TransientBackendError), outcome
        with pytest.raises(TransientBackendError):
            await adapter.submit_lookup_and_lock_task([KEY])
        own_store.start()
        assert (await load(adapter)).loaded


@pytest.mark.parametrize("direct", ["true", "false"])
async def test_lookups_and_deletes_fail_as_what_they_are(place: Any, direct: str) -> None:
    async with l2kit.open_adapter(place.url(direct=direct, retries="0")) as adapter:
        await store(adapter)
        place.proxy.always("HEAD", status=403)
        with pytest.raises(AuthError):
            await adapter.submit_lookup_and_lock_task([KEY])
        [deleted] = await adapter.submit_delete_task([KEY])
        assert isinstance(deleted.error, AuthError)
        place.proxy.always("GET", status=503, code="SlowDown")
        keys = [ObjectKey("faults", bytes([number] * 16)) for number in range(20)]
        with pytest.raises(BackendBusyError):
            await adapter.submit_lookup_and_lock_task(keys)
        with pytest.raises(BackendBusyError):
            await adapter.usage()
