"""Export, import and evict, and the scrubber, over real servers: Redis to files to Valkey, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest

import l2kit
from l2kit.keys import ObjectKey
from l2kit.testing.servers import RespServer, run_server
from tests.unit.command_line import CommandLine, command, held, key, load, put
from tests.unit.odd_tiers import until

pytestmark = [pytest.mark.service, pytest.mark.timeout(120)]

__all__ = ["command"]

#: Small, large, and so large that servers get it in stripes.
SIZES = {key(number): nbytes for number, nbytes in enumerate([0, 1, 5000, 65_536, 1_200_000, 6 << 20])}


@pytest.fixture
def servers() -> Iterator[tuple[RespServer, RespServer]]:
    with ExitStack() as stack:
        yield stack.enter_context(run_server("redis")), stack.enter_context(run_server("valkey"))


def url(server: RespServer, prefix: str = "archives:") -> str:
    return f"{server.url()}?key_prefix={prefix}"


def names(server: RespServer, pattern: str = "*") -> list[bytes]:
    """Ours on the server."""
    found = server.command("KEYS", f"archives:{pattern}")
    assert isinstance(found, list)
    return [name for name in found if isinstance(name, bytes)]


@pytest.fixture(autouse=True)
def nothing_left(servers: tuple[RespServer, RespServer]) -> Iterator[None]:
    yield
    for server in servers:
        for name in names(server):
            server.command("DEL", name)


def test_from_redis_by_an_archive_to_files_and_to_valkey(
    command: CommandLine, servers: tuple[RespServer, RespServer]
) -> None:
    redis, valkey = map(url, servers)
    put(redis, SIZES)
    before = held(redis)
    archive, files, second = command.folder / "archive", command.url("file"), command.folder / "second"
    assert command("export", redis, archive).out.startswith("6 objects, ")
    assert command("import", archive, files).code == 0
    assert command("import", archive, valkey).code == 0
    assert command("export", valkey, second).code == 0
    assert held(files) == held(valkey) == held(redis) == before
    for target in (files, valkey):
        load(target, list(SIZES))
        assert command("verify", target).code == 0
    assert command("import", "--json", second, redis).report["present"] == 6


def test_evicting_from_a_server(command: CommandLine, servers: tuple[RespServer, RespServer]) -> None:
    redis = url(servers[0])
    put(redis, {**SIZES, ObjectKey("other", bytes(8)): 10})
    assert command("evict", redis, "--older-than", "1h").code in (0, 2)
    assert "no limit of its own" in command("evict", redis, "--to", "1MiB").err
    assert command("evict", redis, "--namespace", "cli").out.splitlines()[-1].startswith("6 objects, ")
    assert set(held(redis)) == {ObjectKey("other", bytes(8))}
    assert command("evict", redis, "--all", "--yes").code == 0
    assert names(servers[0]) == []


def test_the_scrubber_finds_rot_on_a_server(tmp_path: Path, servers: tuple[RespServer, RespServer]) -> None:
    server = servers[1]
    put(url(server), {key(number): 5000 for number in range(3)})
    [name] = names(server, f"*{key(1)}*")
    stored = server.command("GET", name)
    assert isinstance(stored, bytes)
    server.command("SET", name, stored[:-1] + bytes([stored[-1] ^ 1]))

    async def scrub() -> None:
        tier = {"url": url(server), "name": "server", "scrub": {"interval_s": 0.01}}
        async with l2kit.open_storage({"tiers": [tier], "l1": {"max_bytes": "1MiB"}}) as manager:
            adapter = manager.tiers[0].adapter
            await until(lambda: adapter.counters["scrub.corrupt"] == 1)
            await until(lambda: not server.command("EXISTS", name))
            assert adapter.counters["corrupt.checksum"] == 1
            assert manager.tiers[0].healthy

    anyio.run(scrub)
    assert set(held(url(server))) == {key(0), key(2)}
