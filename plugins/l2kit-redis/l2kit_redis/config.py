"""Options of the adapter: from a URL to a checked `RedisConfig`. The only I/O is reading the password."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from l2kit.config import AdapterConfig, ParsedURL, Port, PositiveSeconds, Secret
from l2kit.errors import ConfigError

DEFAULT_HOST: Final = "localhost"
DEFAULT_PORT: Final = 6379
UNIX_SCHEME: Final = "redis+unix"
TLS_SCHEME: Final = "rediss"

_MAX_UNIX_PATH_BYTES: Final = 107  # sun_path of Linux without its final zero
_MAX_PASSWORD_BYTES: Final = 64 << 10
_DEFAULT_CONNECT_TIMEOUT_S: Final = 2.0
_DEFAULT_SOCKET_TIMEOUT_S: Final = 5.0
_TLS_OPTIONS: Final = ("ca_file", "client_cert_file", "client_key_file", "server_name")

Database = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
KeyPrefix = Annotated[str, msgspec.Meta(max_length=256)]
TimeToLive = Annotated[float, msgspec.Meta(ge=0.001, le=10 * 365 * 86_400)]


class RedisConfig(AdapterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``redis://``, ``rediss://``, ``valkey://`` and ``redis+unix://``.

    Attributes:
        host: name or address of the server; ``localhost`` by default. From the URL.
        port: TCP port; 6379 by default. From the URL.
        path: the server's Unix socket, in place of host and port. From a ``redis+unix://`` URL.
        db: number of the logical database; 0 by default. From the URL: ``redis://host/3`` or ``?db=3``.
        username: ACL user; without it the password alone is sent, which means the user ``default``.
        password: the password itself; never shown. At most one of the three password options may be given.
        password_env: name of an environment variable that holds the password.
        password_file: file that holds the password, trailing newline ignored. Like the variable it is read
            anew for each connection, so that a rotated password needs no restart.
        key_prefix: put before every key. Neither of two prefixes on one server may be the beginning of the
            other, or listings show both.
        ttl_s: the server drops an object so many seconds after it was stored; never by default. Too short
            means misses, too long fills the server until its eviction policy or an OOM error steps in.
        connect_timeout_s: longest time for TCP and TLS set-up; 2 by default, or half of ``timeout_s`` if that
            is less. Must be below ``timeout_s``.
        socket_timeout_s: a connection on which no byte moves for so long is given up; 5 by default, or half
            of ``timeout_s`` if that is less. Must be below ``timeout_s``. Too short breaks on a server that
            saves or forks for a moment, too long lets a hung server use up the batch's deadline.
        tls: speak TLS; set by ``rediss://``, and an option for the other TCP schemes.
        verify: check the server's certificate and name. Off means that anybody on the way can read and alter.
        ca_file: PEM file of the authorities that sign server certificates; the system's by default.
        client_cert_file: PEM file of our own certificate (with its chain), for servers that ask for one.
        client_key_file: PEM file of its private key, without a passphrase; ``client_cert_file`` by default.
        server_name: name that the certificate must carry when it is not ``host``.
    """

    host: str | None = None
    port: Port | None = None
    path: str | None = None
    db: Database = 0
    username: str | None = None
    password: Secret | None = None
    password_env: str | None = None
    password_file: str | None = None
    key_prefix: KeyPrefix = "l2kit:"
    ttl_s: TimeToLive | None = None
    connect_timeout_s: PositiveSeconds | None = None
    socket_timeout_s: PositiveSeconds | None = None
    tls: bool = False
    verify: bool = True
    ca_file: str | None = None
    client_cert_file: str | None = None
    client_key_file: str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "socket_timeout_s"):
            value = getattr(self, name)
            if value is not None and value >= self.timeout_s:
                raise ConfigError(f"{name}: {value} must be below timeout_s, which is {self.timeout_s}")
        if self.path is not None:
            if self.host is not None or self.port is not None or self.tls:
                raise ConfigError("path: a Unix socket takes no host, no port and no tls")
            if len(os.fsencode(self.path)) > _MAX_UNIX_PATH_BYTES:
                raise ConfigError(f"path: a Unix socket's path has at most {_MAX_UNIX_PATH_BYTES} bytes")
        for name in _TLS_OPTIONS:
            if getattr(self, name) is not None and not self.tls:
                raise ConfigError(f"{name}: has a meaning only with TLS; use {TLS_SCHEME}:// or tls=true")
        if not self.verify and not self.tls:
            raise ConfigError(f"verify: has a meaning only with TLS; use {TLS_SCHEME}:// or tls=true")
        if self.client_key_file is not None and self.client_cert_file is None:
            raise ConfigError("client_key_file: needs client_cert_file")
        sources = [name for name in ("password", "password_env", "password_file") if getattr(self, name) is not None]
        if len(sources) > 1:
            raise ConfigError(f"{sources[0]}: given together with {sources[1]}; choose one of them")
        if self.username is not None and not sources:
            raise ConfigError("username: needs password, password_env or password_file")

    @property
    def where(self) -> str:
        """The server as people write it: ``host:port`` or the path of its socket."""
        if self.path is not None:
            return self.path
        host = self.host or DEFAULT_HOST
        return f"[{host}]:{self.tcp_port}" if ":" in host else f"{host}:{self.tcp_port}"

    @property
    def tcp_port(self) -> int:
        """The port to connect to."""
        return self.port or DEFAULT_PORT

    @property
    def connect_limit_s(self) -> float:
        """``connect_timeout_s`` with its default worked out."""
        return self.connect_timeout_s or min(_DEFAULT_CONNECT_TIMEOUT_S, self.timeout_s / 2)

    @property
    def socket_limit_s(self) -> float:
        """``socket_timeout_s`` with its default worked out."""
        return self.socket_timeout_s or min(_DEFAULT_SOCKET_TIMEOUT_S, self.timeout_s / 2)

    @property
    def prefix(self) -> bytes:
        """``key_prefix`` as the server sees it."""
        return self.key_prefix.encode()

    def read_password(self) -> Secret | None:
        """Return the password from where it is kept, or None when none is configured. May read a file.

        Raises:
            ConfigError: its source is missing or unreadable.
        """
        if self.password_env is not None:
            value = os.environ.get(self.password_env)
            if value is None:
                raise ConfigError(f"password_env: the environment variable {self.password_env!r} is not set")
            return Secret(value)
        if self.password_file is not None:
            try:
                with Path(self.password_file).open("rb") as file:
                    content = file.read(_MAX_PASSWORD_BYTES + 1)
                text = content.decode()
            except OSError as error:
                raise ConfigError(f"password_file: cannot read {self.password_file}: {error.strerror}") from error
            except UnicodeDecodeError:  # not chained: the exception holds the file's content
                raise ConfigError(f"password_file: {self.password_file} is not UTF-8 text") from None
            if len(content) > _MAX_PASSWORD_BYTES:
                raise ConfigError(f"password_file: {self.password_file} is longer than any password")
            return Secret(text.rstrip("\r\n"))
        return self.password


def options_from_url(url: ParsedURL) -> dict[str, Any]:
    """Map the parts of a URL to options.

    Raises:
        ConfigError: a part has no meaning here, or an option is given in two places.
    """
    options: dict[str, Any] = dict(url.query)

    def put(name: str, value: object) -> None:
        if value is None:
            return
        if name in options:
            raise ConfigError(f"{name}: given twice in the {url.scheme}:// URL")
        options[name] = value

    put("username", url.username)
    put("password", url.password)
    if url.scheme == UNIX_SCHEME:
        if url.host is not None or url.port is not None:
            raise ConfigError("host: a Unix socket has none; write redis+unix:///path/to/redis.sock, three slashes")
        if not url.path.strip("/"):
            raise ConfigError("path: redis+unix:// needs the socket's path, for example redis+unix:///run/redis.sock")
        put("path", url.path)
        return options
    put("host", url.host or None)
    put("port", url.port)
    database = url.path.strip("/")
    if database:
        if not (database.isascii() and database.isdigit()):
            raise ConfigError(f"db: {database!r} in the URL's path is no database number; write {url.scheme}://host/0")
        put("db", database)
    if url.scheme == TLS_SCHEME:
        put("tls", True)
    return options
