"""Sentinels for tests: `run_sentinels` for some of your own, the fixtures `redis_sentinels` and `valkey_sentinels`.

They are made of local binaries (see `l2kit.testing.servers`); without one the test is skipped, or fails when
``L2KIT_REQUIRE`` names the flavor.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

import pytest

from l2kit.testing.servers import (
    TEST_PASSWORD,
    Flavor,
    LocalProcess,
    LocalServer,
    Reply,
    RespServer,
    ServerError,
    free_port,
    required_binary,
    run_local,
)
from l2kit.testing.waiting import wait_until

SERVICE: Final = "mymaster"
SENTINEL_PASSWORD: Final = "sentinel's own:/?#"  # noqa: S105 - of sentinels that live for a test

_FORMING_S: Final = 60.0


class SentinelProcess(LocalProcess):
    """A sentinel that watches one primary."""

    def __init__(self, binary: Path, folder: Path, primary: RespServer, down_after_ms: int) -> None:
        """It does not run before `start`."""
        super().__init__(primary.flavor, folder, free_port(), password=SENTINEL_PASSWORD)
        self._binary = binary
        settings = f"""
            bind {self.host}
            port {self.port}
            dir {folder}
            requirepass "{SENTINEL_PASSWORD}"
            sentinel sentinel-pass "{SENTINEL_PASSWORD}"
            sentinel monitor {SERVICE} {primary.host} {primary.port} 2
            sentinel auth-pass {SERVICE} "{primary.password}"
            sentinel down-after-milliseconds {SERVICE} {down_after_ms}
            sentinel failover-timeout {SERVICE} 4000
        """
        (folder / "sentinel.conf").write_text("\n".join(line.strip() for line in settings.splitlines()) + "\n")

    def command_line(self) -> list[str]:
        """The server's program in its other role."""
        return [str(self._binary), str(self.folder / "sentinel.conf"), "--sentinel"]


class RespSentinels:
    """A primary and replicas, watched by sentinels.

    Attributes:
        servers: the first began as the primary.
        sentinels: who watches them.
    """

    def __init__(self, servers: Sequence[LocalServer], sentinels: Sequence[SentinelProcess]) -> None:
        """Describe servers and sentinels that run."""
        self.servers: Final = list(servers)
        self.sentinels: Final = list(sentinels)

    @property
    def primary(self) -> LocalServer:
        """The server that the sentinels name."""
        port = self._named_port(next(each for each in self.sentinels if each.runs))
        return next(server for server in self.servers if server.port == port)

    @property
    def replica(self) -> LocalServer:
        """A running server that they do not name."""
        primary = self.primary
        return next(server for server in self.servers if server is not primary and server.runs)

    def command(self, *words: str | bytes | int) -> Reply:
        """Run a command on the primary."""
        return self.primary.command(*words)

    def delete_all(self, prefix: str) -> None:
        """Remove every key under ``prefix``."""
        self.primary.delete_all(prefix)

    def url(self, scheme: str | None = None, **options: str) -> str:
        """The URL of the deployment, with credentials for servers and sentinels, and further options."""
        first, *others = (each for each in self.sentinels if each.runs)
        scheme = scheme or f"{first.flavor}+sentinel"
        options = {
            "sentinel_password": SENTINEL_PASSWORD,
            "hosts": ",".join(f"{each.host}:{each.port}" for each in others),
            **options,
        }
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in options.items())
        where = f"{first.host}:{first.port}/{SERVICE}"
        return f"{scheme}://:{quote(TEST_PASSWORD, safe='')}@{where}?{query}"

    def wait_until_well(self) -> None:
        """Wait until all sentinels agree on a primary, know each other, and every replica has its data."""
        wait_until(self._is_well, "sentinels and servers agreeing", _FORMING_S)

    def _is_well(self) -> bool:
        running = [each for each in self.sentinels if each.runs]
        try:
            ports = {self._named_port(each) for each in running}
            if len(ports) != 1:
                return False
            for server in self.servers:
                if server.runs:
                    state = server.info("replication")
                    wanted = "master" if server.port in ports else "slave"
                    if state["role"] != wanted or state.get("master_link_status", "up") != "up":
                        return False
            return all(self._knows(each, len(running) - 1, len(self.servers) - 1) for each in running)
        except (OSError, ServerError):
            return False

    def _named_port(self, sentinel: RespServer) -> int:
        match sentinel.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE):
            case [bytes(), bytes() as port]:
                return int(port)
            case reply:
                raise AssertionError(reply)

    def _knows(self, sentinel: RespServer, sentinels: int, replicas: int) -> bool:
        master = sentinel.command("SENTINEL", "MASTER", SERVICE)
        assert isinstance(master, list)
        words = [word.decode() for word in master if isinstance(word, bytes)]
        fields: Mapping[str, str] = dict(zip(words[::2], words[1::2], strict=True))
        others = int(fields["num-other-sentinels"])
        return others >= sentinels and int(fields["num-slaves"]) >= replicas and fields["flags"] == "master"


@contextmanager
def run_sentinels(flavor: Flavor, *, down_after_ms: int = 30_000, **options: str) -> Iterator[RespSentinels]:
    """Run a primary, a replica and three sentinels of one's own.

    Args:
        flavor: which servers.
        down_after_ms: after so long without a word a server counts as dead; low for tests that kill some.
        options: see `run_server`.
    """
    binary = required_binary(flavor)
    settings = {"masterauth": TEST_PASSWORD, "repl-diskless-sync-delay": "0", "repl-backlog-size": "16kb"}
    settings |= {name.replace("_", "-"): value for name, value in options.items()}
    with ExitStack() as stack:
        servers = [stack.enter_context(run_local(flavor, settings)) for _ in range(2)]
        primary, replica = servers
        replica.command("REPLICAOF", primary.host, primary.port)
        wait_until(lambda: replica.info("replication")["master_link_status"] == "up", "replication", _FORMING_S)
        sentinels = []
        for _ in range(3):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="l2kit-"))
            sentinel = SentinelProcess(binary, Path(folder), primary, down_after_ms)
            sentinel.start()
            stack.callback(sentinel.stop)
            sentinels.append(sentinel)
        deployment = RespSentinels(servers, sentinels)
        deployment.wait_until_well()
        yield deployment


@pytest.fixture(scope="session")
def redis_sentinels() -> Iterator[RespSentinels]:
    """One Redis with a replica and sentinels for the whole session; `run_sentinels` to break one."""
    with run_sentinels("redis") as deployment:
        yield deployment


@pytest.fixture(scope="session")
def valkey_sentinels() -> Iterator[RespSentinels]:
    """One Valkey with a replica and sentinels for the whole session; `run_sentinels` to break one."""
    with run_sentinels("valkey") as deployment:
        yield deployment
