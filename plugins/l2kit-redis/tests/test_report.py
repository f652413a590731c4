"""What a server says of itself when an adapter opens: told once, with the command that mends what will hurt."""

from __future__ import annotations

import logging
import os

import anyio
import pytest

import l2kit
from l2kit import Layout, LoadStatus, MemoryObj, ObjectKey
from l2kit.cli.command import main
from l2kit.testing.servers import RespServer, run_server
from l2kit_redis import RedisAdapter
from l2kit_redis.server_report import ServerReport

pytestmark = [pytest.mark.anyio, pytest.mark.service]

SECRET = "xyzzy-open-sesame"


async def report_of(url: str, **options: object) -> ServerReport:
    async with l2kit.open_adapter(url, **options) as adapter:
        assert isinstance(adapter, RedisAdapter)
        [report] = adapter.report
        return report


def warned(report: ServerReport, word: str) -> bool:
    return any(word in warning for warning in report.warnings)


async def test_a_server_that_is_set_well_is_only_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "l2kit_redis")
    with run_server("redis", maxmemory="100mb", maxmemory_policy="allkeys-lru") as server:
        report = await report_of(server.url())
    assert report.flavor == "redis"
    assert int(report.version.split(".")[0]) >= 6
    assert (report.max_bytes, report.policy, report.loading) == (100 << 20, "allkeys-lru", False)
    assert report.max_value_bytes == 512 << 20
    assert report.used_bytes
    assert report.warnings == ()
    [record] = [record for record in caplog.records if record.name.startswith("l2kit_redis")]
    assert record.levelno == logging.INFO
    for word in (f"{server.host}:{server.port}", f"redis {report.version}", "allkeys-lru", str(100 << 20)):
        assert word in record.getMessage()


async def test_valkey_is_told_from_redis(valkey_server: RespServer) -> None:
    report = await report_of(valkey_server.url())
    assert report.flavor == "valkey"
    assert not report.version.startswith("7.2"), "the version of Redis that it can be taken for"


@pytest.mark.parametrize(
    ("options", "word", "command"),
    [
        ({"maxmemory": "0", "maxmemory_policy": "allkeys-lru"}, "no memory limit", ("maxmemory", "64mb")),
        (
            {"maxmemory": "64mb", "maxmemory_policy": "noeviction"},
            "noeviction",
            ("maxmemory-policy", "allkeys-lru"),
        ),
        (
            {"maxmemory": "64mb", "maxmemory_policy": "volatile-lru"},
            "volatile-lru",
            ("maxmemory-policy", "allkeys-lru"),
        ),
        (
            {"maxmemory": "64mb", "maxmemory_policy": "allkeys-lru", "proto_max_bulk_len": "1mb"},
            "1048576 bytes at most",
            ("proto-max-bulk-len", "512mb"),
        ),
    ],
    ids=["no limit", "noeviction", "nothing to evict", "short values"],
)
async def test_what_will_hurt_is_said_with_what_mends_it(
    options: dict[str, str], word: str, command: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with run_server("redis", **options) as server:
        report = await report_of(server.url())
        assert len(report.warnings) == 1
        assert warned(report, word)
        assert warned(report, f"CONFIG SET {command[0]} ")
        assert word in caplog.text
        caplog.clear()
        server.command("CONFIG", "SET", *command)
        assert (await report_of(server.url())).warnings == ()
        assert not caplog.records


async def test_volatile_policies_evict_what_expires() -> None:
    with run_server("redis", maxmemory="64mb", maxmemory_policy="volatile-ttl") as server:
        assert warned(await report_of(server.url()), "ttl_s")
        assert (await report_of(server.url(), ttl_s=60)).warnings == ()


@pytest.mark.parametrize("rights", ["-info", "-config", "-info -config"])
async def test_what_may_not_be_asked_is_unknown(redis_server: RespServer, prefix: str, rights: str) -> None:
    name = f"user-{os.urandom(4).hex()}"
    redis_server.command("ACL", "SETUSER", name, "on", f">{SECRET}", "~*", "+@all", *rights.split())
    try:
        url = f"redis://{name}:{SECRET}@{redis_server.host}:{redis_server.port}?key_prefix={prefix}"
        async with l2kit.open_adapter(url) as adapter:
            assert isinstance(adapter, RedisAdapter)
            [report] = adapter.report
            assert (report.version == "") == ("-info" in rights)
            assert (report.max_bytes is None) == ("-info" in rights)
            assert (report.max_value_bytes is None) == ("-config" in rights)
            assert "unknown" in str(report)
            assert (await adapter.probe()).ok
    finally:
        redis_server.command("ACL", "DELUSER", name)


async def test_a_probe_tells_it_to_people(
    redis_server: RespServer, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with l2kit.open_adapter(url) as adapter:
        probe = await adapter.probe()
    assert probe.ok
    assert redis_server.flavor in probe.details["server 1"]
    assert "CONFIG SET maxmemory" in probe.details["server 1, warning 1"]
    status = await anyio.to_thread.run_sync(main, ["probe", url])
    assert status == 0
    assert "CONFIG SET maxmemory" in capsys.readouterr().out


async def test_what_an_adapter_counts(own_server: RespServer) -> None:
    key, nbytes = ObjectKey("report", bytes(16)), 100_000
    async with l2kit.open_adapter(own_server.url(), stripe_bytes=10_000, max_concurrency=2) as adapter:
        counters = adapter.counters
        sent, received = counters["sent_bytes"], counters["received_bytes"]
        [stored] = await adapter.submit_store_task([key], [MemoryObj.wrap(bytes(nbytes), Layout.raw(nbytes))])
        assert stored.present
        assert nbytes < counters["sent_bytes"] - sent < nbytes + 5000
        target = MemoryObj.wrap(bytearray(nbytes), Layout.raw(nbytes))
        [loaded] = await adapter.submit_load_task([key], [target])
        assert loaded.loaded
        assert nbytes < counters["received_bytes"] - received < nbytes + 5000
        assert counters["stripes_written"] == counters["stripes_read"] == 11
        assert counters["round_trips"] >= counters["conversations"] > 0
        assert counters["latency_le_1ms"] <= counters["latency_le_100ms"] <= counters["conversations"]
        assert counters["latency_le_5000ms"] == counters["conversations"]
        assert counters["conversation_us"] > 0
        assert 1 <= counters["connects"] <= 4
        assert counters["reconnects"] == 0
        own_server.kill()
        own_server.start()
        [loaded] = await adapter.submit_load_task([key], [target])
        assert loaded.status is LoadStatus.MISS
        assert counters["reconnects"] == 1
