"""New connections: name resolution, TCP, Unix socket or TLS, credentials, database."""

from __future__ import annotations

import socket
import ssl
from typing import Final

import anyio

from l2kit.errors import ConfigError
from l2kit_redis.config import DEFAULT_HOST, RedisConfig
from l2kit_redis.connection import Connection
from l2kit_redis.faults import ProtocolError, ServerError
from l2kit_redis.stream import Address, Patience, Stream, connect, start_tls


class Dialer:
    """Makes connections to the one server of a configuration.

    Attributes:
        addresses: where the server was found; replaced as a whole on the loop, read by dialling threads.
        outdated: True when a connection was lost since; set by any thread, heeded by :meth:`resolve`.
    """

    def __init__(self, config: RedisConfig) -> None:
        """No I/O yet: :meth:`prepare`, then :meth:`resolve`, then :meth:`dial`."""
        self._config: Final = config
        self._tls: ssl.SSLContext | None = None
        self.addresses: tuple[Address, ...] = ()
        self.outdated = True

    def prepare(self) -> None:
        """Read certificates and check that the password can be read. Blocks on files.

        Raises:
            ConfigError: names the option whose file is wrong.
        """
        self._config.read_password()
        if self._config.tls:
            self._tls = _tls_context(self._config)

    async def resolve(self) -> None:
        """Look the server up, if that is due. A cancelled look-up's thread may go on: it touches no buffer.

        Raises:
            OSError: there is no such name, or no answer in time, and there was none before.
        """
        if not self.outdated:
            return
        self.outdated = False  # first: what is lost meanwhile must not be forgotten
        try:
            self.addresses = await self._look_up()
        except BaseException as error:
            self.outdated = True
            if not self.addresses or not isinstance(error, OSError):
                raise
            # The old addresses may still be good, while the name server is not.

    def dial(self, patience: Patience) -> Connection:
        """Make a connection that is logged in and in the right database. Blocks.

        Raises:
            ConfigError: the server has no such database, or the password cannot be read.
            ServerError, ProtocolError, OSError: what the peer did.
        """
        failure: OSError = ConnectionRefusedError("no address")
        share_s = self._config.connect_limit_s / max(1, len(self.addresses))
        for address in self.addresses:
            try:
                stream = self._reach(address, patience.at_most(share_s))
            except ssl.SSLError:
                raise
            except OSError as error:
                failure = error
                continue
            connection = Connection(stream)
            try:
                connection.begin(patience)
                self._log_in(connection)
            except BaseException:
                connection.close()
                raise
            return connection
        raise failure

    async def _look_up(self) -> tuple[Address, ...]:
        path = self._config.path
        if path is not None:
            return (Address(socket.AF_UNIX, path),)
        host, port = self._config.host or DEFAULT_HOST, self._config.tcp_port
        try:  # an address in digits needs no thread and no name server
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            return tuple(Address(family, target) for family, _, _, _, target in found)
        except socket.gaierror:
            pass
        with anyio.move_on_after(self._config.connect_limit_s):
            named = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return tuple(Address(family, target) for family, _, _, _, target in named)
        raise TimeoutError(f"the host name was not resolved within {self._config.connect_limit_s:g} s")

    def _reach(self, address: Address, patience: Patience) -> Stream:
        connected = connect(address, patience)
        if self._tls is not None:
            name = self._config.server_name or self._config.host or DEFAULT_HOST
            connected = start_tls(connected, self._tls, name, patience)
        return Stream(connected, patience)

    def _log_in(self, connection: Connection) -> None:
        password = self._config.read_password()
        if password is not None:
            user = () if self._config.username is None else (self._config.username.encode(),)
            connection.log_in(b"AUTH", *user, password.reveal().encode())
        if self._config.db:
            try:
                connection.call(b"SELECT", b"%d" % self._config.db)
            except ServerError as error:
                if error.code == "ERR":
                    raise ConfigError(
                        f"db: the server at {self._config.where} has no database {self._config.db} ({error})"
                    ) from error
                raise


def say_hello(connection: Connection) -> None:
    """Check that what answers is a Redis server that lets us in.

    Raises:
        ProtocolError, ServerError: it is not, or does not.
    """
    if connection.call_bytes(b"PING") != b"PONG":
        raise ProtocolError("PING was not answered with PONG")


def _tls_context(config: RedisConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ca_file: cannot use {config.ca_file}: {error.strerror or error}") from error
    if not config.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if config.client_cert_file is not None:
        try:
            context.load_cert_chain(config.client_cert_file, config.client_key_file, password=_refuse_to_ask)
        except (OSError, ssl.SSLError) as error:
            both = " with client_key_file" if config.client_key_file else ""
            raise ConfigError(
                f"client_cert_file: cannot use {config.client_cert_file}{both}: {error.strerror or error}"
            ) from error
    return context


def _refuse_to_ask() -> str:
    """In place of OpenSSL's question on the terminal, which would block the engine."""
    raise ConfigError("client_key_file: the key is encrypted; give one without a passphrase")
