"""Options of the adapter: from a URL to a checked `RedisConfig`. The only I/O is reading the password."""

from __future__ import annotations

import os
from typing import Annotated, Any, Final, Literal

import msgspec

from l2kit.config import AdapterConfig, ParsedURL, Port, PositiveSeconds, Secret
from l2kit.errors import ConfigError
from l2kit_redis.credentials import Credentials
from l2kit_redis.endpoint import Endpoint, parse_endpoint
from l2kit_redis.stripes import MAX_STRIPE_BYTES

DEFAULT_HOST: Final = "localhost"
DEFAULT_PORT: Final = 6379
DEFAULT_SENTINEL_PORT: Final = 26379
UNIX_SCHEME: Final = "redis+unix"
TLS_SCHEME: Final = "rediss"

_MAX_UNIX_PATH_BYTES: Final = 107  # sun_path of Linux without its final zero
_DEFAULT_CONNECT_TIMEOUT_S: Final = 2.0
_DEFAULT_SOCKET_TIMEOUT_S: Final = 5.0
_DEFAULT_LEASE_S: Final = 60.0
_TLS_OPTIONS: Final = ("ca_file", "client_cert_file", "client_key_file", "server_name")

Database = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
KeyPrefix = Annotated[str, msgspec.Meta(max_length=256)]
TimeToLive = Annotated[float, msgspec.Meta(ge=0.001, le=10 * 365 * 86_400)]
StripeBytes = Annotated[int, msgspec.Meta(ge=1024, le=MAX_STRIPE_BYTES)]
Mode = Literal["server", "cluster", "sentinel"]


class RedisConfig(AdapterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``redis://``, ``rediss://``, ``valkey://``, ``redis+unix://``, and the first three with ``+cluster``
    or ``+sentinel``.

    Attributes:
        mode: what stands at ``host`` and ``hosts``: one ``server``, nodes of a ``cluster``, or ``sentinel`` for
            sentinels. From the URL's scheme.
        host: name or address of the server, of a node of the cluster, or of a sentinel; ``localhost`` by default,
            unless ``hosts`` is given. From the URL.
        port: TCP port; 6379 by default, 26379 for a sentinel. From the URL.
        hosts: further nodes or sentinels to begin with, each ``HOST`` or ``HOST:PORT``, with commas between them in a
            URL. The rest of a cluster is found through any one of them, so name as many as may be down together, and
            one more.
        service: what the sentinels call the primary; ``mymaster`` by default. From the URL: ``redis+sentinel://host/NAME``.
        read_from: ``replica`` has lookups and loads ask replicas, and the primary where none answers; ``primary`` by
            default. A replica lags: what was stored a moment ago may be a miss, what was deleted or replaced may still
            be there. Needs a cluster or sentinels.
        path: the server's Unix socket, in place of host and port. From a ``redis+unix://`` URL.
        db: number of the logical database; 0 by default, and always in a cluster. From the URL: ``redis://host/3`` or
            ``?db=3``, with sentinels ``redis+sentinel://host/NAME/3``.
        username: ACL user; without it the password alone is sent, which means the user ``default``.
        password: the password itself; never shown. At most one of the three password options may be given.
        password_env: name of an environment variable that holds the password.
        password_file: file that holds the password, trailing newline ignored. Like the variable it is read
            anew for each connection, so that a rotated password needs no restart.
        key_prefix: put before every key. Neither of two prefixes on one server may be the beginning of the
            other, or listings show both.
        ttl_s: the server drops an object so many seconds after it was stored; never by default. Too short
            means misses, too long fills the server until its eviction policy or an OOM error steps in.
        refresh_ttl: a lookup or load that finds an object starts its ``ttl_s`` anew, in the background, within a
            twentieth of it; on by default when there is a ``ttl_s``. Off means that what is used daily expires, too.
        lease_s: what a lookup finds stays for at least so long, unless the server evicts it; by default a minute, or
            ``ttl_s`` if that is less; without a ``ttl_s`` no lease, because nothing of ours expires. Too short, and an
            object may expire between its lookup and its load, which is then a miss; too long keeps what nobody comes
            for.
        stripe_bytes: objects of more than about four stripes of this size, or more than 4 MiB, are stored in such
            parts, which several connections carry at once; 1 MiB by default, 4 MiB at most. Smaller ones cost more
            round trips, and larger ones leave less to do at once. Readers need not have the same.
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
        server_name: name that all certificates must carry; by default the name or address of each server, as given or
            as the cluster or the sentinels announce it.
        sentinel_username: ACL user at the sentinels, whose users are apart from those of the servers.
        sentinel_password: password at the sentinels; none by default, also when the servers have one. At most one of
            these three.
        sentinel_password_env: name of an environment variable that holds it.
        sentinel_password_file: file that holds it.
        sentinel_tls: speak TLS with the sentinels; as ``tls`` by default.
    """

    mode: Mode = "server"
    host: str | None = None
    port: Port | None = None
    hosts: tuple[str, ...] = ()
    service: str | None = None
    read_from: Literal["primary", "replica"] = "primary"
    path: str | None = None
    db: Database = 0
    username: str | None = None
    password: Secret | None = None
    password_env: str | None = None
    password_file: str | None = None
    key_prefix: KeyPrefix = "l2kit:"
    ttl_s: TimeToLive | None = None
    refresh_ttl: bool | None = None
    lease_s: TimeToLive | None = None
    stripe_bytes: StripeBytes = 1 << 20
    connect_timeout_s: PositiveSeconds | None = None
    socket_timeout_s: PositiveSeconds | None = None
    tls: bool = False
    verify: bool = True
    ca_file: str | None = None
    client_cert_file: str | None = None
    client_key_file: str | None = None
    server_name: str | None = None
    sentinel_username: str | None = None
    sentinel_password: Secret | None = None
    sentinel_password_env: str | None = None
    sentinel_password_file: str | None = None
    sentinel_tls: bool | None = None

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "socket_timeout_s"):
            value = getattr(self, name)
            if value is not None and value >= self.timeout_s:
                raise ConfigError(f"{name}: {value} must be below timeout_s, which is {self.timeout_s}")
        if self.refresh_ttl and self.ttl_s is None:
            raise ConfigError("refresh_ttl: there is no ttl_s to start anew")
        if self.path is not None:
            if self.host is not None or self.port is not None or self.tls:
                raise ConfigError("path: a Unix socket takes no host, no port and no tls")
            if len(os.fsencode(self.path)) > _MAX_UNIX_PATH_BYTES:
                raise ConfigError(f"path: a Unix socket's path has at most {_MAX_UNIX_PATH_BYTES} bytes")
        secured = self.tls or bool(self.sentinel_tls)
        for name in _TLS_OPTIONS:
            if getattr(self, name) is not None and not secured:
                raise ConfigError(f"{name}: has a meaning only with TLS; use {TLS_SCHEME}:// or tls=true")
        if not self.verify and not secured:
            raise ConfigError(f"verify: has a meaning only with TLS; use {TLS_SCHEME}:// or tls=true")
        if self.client_key_file is not None and self.client_cert_file is None:
            raise ConfigError("client_key_file: needs client_cert_file")
        self.credentials.check()
        self.sentinel_credentials.check()
        self._check_mode()

    def _check_mode(self) -> None:
        if self.mode == "server":
            if self.hosts:
                raise ConfigError("hosts: one server has one; use redis+cluster:// or redis+sentinel://")
            if self.read_from != "primary":
                raise ConfigError("read_from: replicas are known only of redis+cluster:// and redis+sentinel://")
        elif self.path is not None:
            raise ConfigError(f"path: a {self.mode} is reached over TCP; give host and port")
        if self.mode == "cluster" and self.db:
            raise ConfigError(f"db: a cluster has only database 0, not {self.db}; tell users apart by key_prefix")
        if self.mode == "sentinel" and self.service == "":
            raise ConfigError("service: needs a name, for example redis+sentinel://host/mymaster")
        if self.mode != "sentinel" and self.service is not None:
            raise ConfigError("service: has a meaning only with redis+sentinel://")
        self.endpoints  # noqa: B018 - says what is wrong with them

    def check_for_sentinels(self) -> None:
        """Check that no option for sentinels is given where there are none; when the adapter is opened.

        Raises:
            ConfigError: names the option.
        """
        for name in self.__struct_fields__:
            if name.startswith("sentinel_") and getattr(self, name) is not None:
                raise ConfigError(f"{name}: has a meaning only with redis+sentinel://")

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where to begin: the server, or nodes of the cluster, or sentinels.

        Raises:
            ConfigError: ``hosts`` names something else.
        """
        if self.path is not None:
            return (Endpoint(self.path, 0),)
        default_port = DEFAULT_SENTINEL_PORT if self.mode == "sentinel" else DEFAULT_PORT
        found: list[Endpoint] = []
        if self.host is not None or self.port is not None or not self.hosts:
            found.append(Endpoint(self.host or DEFAULT_HOST, self.port or default_port))
        for text in self.hosts:
            try:
                found.append(parse_endpoint(text.strip(), default_port))
            except ValueError as error:
                raise ConfigError(f"hosts: {text!r} is not HOST or HOST:PORT ({error})") from error
        return tuple(dict.fromkeys(found))

    @property
    def where(self) -> str:
        """What is configured, as people write it: ``host:port``, several with commas, or the path of a socket."""
        places = ",".join(map(str, self.endpoints))
        return f"{self.service_name} of {places}" if self.mode == "sentinel" else places

    @property
    def service_name(self) -> str:
        """``service`` with its default."""
        return self.service or "mymaster"

    @property
    def credentials(self) -> Credentials:
        """With what to log in to a server."""
        return Credentials("", self.username, self.password, self.password_env, self.password_file)

    @property
    def sentinel_credentials(self) -> Credentials:
        """With what to log in to a sentinel."""
        return Credentials(
            "sentinel_",
            self.sentinel_username,
            self.sentinel_password,
            self.sentinel_password_env,
            self.sentinel_password_file,
        )

    @property
    def connect_limit_s(self) -> float:
        """``connect_timeout_s`` with its default worked out."""
        return self.connect_timeout_s or min(_DEFAULT_CONNECT_TIMEOUT_S, self.timeout_s / 2)

    @property
    def socket_limit_s(self) -> float:
        """``socket_timeout_s`` with its default worked out."""
        return self.socket_timeout_s or min(_DEFAULT_SOCKET_TIMEOUT_S, self.timeout_s / 2)

    @property
    def ttl_ms(self) -> int | None:
        """``ttl_s`` in milliseconds."""
        return None if self.ttl_s is None else max(1, round(self.ttl_s * 1000))

    @property
    def refreshes_ttl(self) -> bool:
        """``refresh_ttl`` with its default worked out."""
        return self.ttl_s is not None and self.refresh_ttl is not False

    @property
    def lease_ms(self) -> int | None:
        """``lease_s`` in milliseconds, with its default worked out."""
        lease_s = self.lease_s or (None if self.ttl_s is None else min(_DEFAULT_LEASE_S, self.ttl_s))
        return None if lease_s is None else max(1, round(lease_s * 1000))

    @property
    def prefix(self) -> bytes:
        """``key_prefix`` as the server sees it."""
        return self.key_prefix.encode()

    def read_password(self) -> Secret | None:
        """See `Credentials.read_password`."""
        return self.credentials.read_password()


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
    base, _, mode = url.scheme.partition("+")
    if mode:
        put("mode", mode)
    if url.host is not None and "," in url.host:
        raise ConfigError(f"host: a URL has one, further ones go into hosts: {url.scheme}://h1:7000?hosts=h2:7000,h3")
    put("host", url.host or None)
    put("port", url.port)
    database = url.path.strip("/")
    if options.get("mode") == "sentinel":
        service, _, database = database.partition("/")
        put("service", service or None)
    if database:
        if not (database.isascii() and database.isdigit()):
            raise ConfigError(f"db: {database!r} in the URL's path is no database number; write {url.scheme}://host/0")
        put("db", database)
    if base == TLS_SCHEME:
        put("tls", True)
    return options
