"""New connections to a server: name resolution, TCP, Unix socket or TLS, credentials, database."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import Final

import anyio

from l2kit.errors import ConfigError
from l2kit_redis.config import RedisConfig
from l2kit_redis.connection import Connection
from l2kit_redis.credentials import Credentials
from l2kit_redis.endpoint import Endpoint
from l2kit_redis.faults import ProtocolError, ServerError
from l2kit_redis.redirected import RedirectedConnection
from l2kit_redis.stream import Address, Patience, Stream, connect, start_tls


class Access:
    """What it takes to be let in by servers of one kind; shared by all their dialers."""

    def __init__(self, config: RedisConfig, credentials: Credentials, *, tls: bool, db: int = 0) -> None:
        """No I/O yet: :meth:`prepare`, then :meth:`secure` and :meth:`log_in` for each connection."""
        self._config: Final = config
        self._credentials: Final = credentials
        self._tls: Final = tls
        self._db: Final = db
        self._context: ssl.SSLContext | None = None

    def prepare(self) -> None:
        """Read certificates and check that the password can be read. Blocks on files.

        Raises:
            ConfigError: names the option whose file is wrong.
        """
        self._credentials.read_password()
        if self._tls:
            self._context = _tls_context(self._config)

    def secure(self, connected: socket.socket, host: str, patience: Patience) -> socket.socket:
        """Put TLS on a connected socket, if that is configured, and check that the certificate is for ``host``.

        Raises:
            OSError: the peer and we do not agree.
        """
        if self._context is None:
            return connected
        return start_tls(connected, self._context, self._config.server_name or host, patience)

    def log_in(self, connection: Connection, endpoint: Endpoint) -> None:
        """Send credentials and choose the database, as far as they are configured.

        Raises:
            ConfigError: the server has no such database, or the password cannot be read.
            ServerError: it does not let us in.
        """
        password = self._credentials.read_password()
        if password is not None:
            username = self._credentials.username
            user = () if username is None else (username.encode(),)
            connection.log_in(b"AUTH", *user, password.reveal().encode())
        if self._db:
            try:
                connection.call(b"SELECT", b"%d" % self._db)
            except ServerError as error:
                if error.code == "ERR":
                    raise ConfigError(f"db: the server at {endpoint} has no database {self._db} ({error})") from error
                raise


class Dialer:
    """Makes connections to one server.

    Attributes:
        endpoint: the server.
        addresses: where it was found; replaced as a whole on the loop, read by dialling threads.
        outdated: True when a connection was lost since; set by any thread, heeded by :meth:`resolve`.
    """

    def __init__(
        self,
        config: RedisConfig,
        access: Access,
        endpoint: Endpoint,
        greet: Callable[[Connection], None] | None = None,
    ) -> None:
        """No I/O yet: :meth:`resolve`, then :meth:`dial`. ``greet`` is said on each connection after logging in."""
        self._config: Final = config
        self._access: Final = access
        self._greet: Final = greet
        self.endpoint: Final = endpoint
        self.addresses: tuple[Address, ...] = ()
        self.outdated = True

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
        """Make a connection that is logged in, in the right database, and greeted. Blocks.

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
            connection = RedirectedConnection(stream)
            try:
                connection.begin(patience)
                self._access.log_in(connection, self.endpoint)
                if self._greet is not None:
                    self._greet(connection)
            except BaseException:
                connection.close()
                raise
            return connection
        raise failure

    async def _look_up(self) -> tuple[Address, ...]:
        host, port = self.endpoint
        if not port:
            return (Address(socket.AF_UNIX, host),)
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
        return Stream(self._access.secure(connected, self.endpoint.host, patience), patience)


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
