"""Options of the adapters: from a URL to checked Structs. No I/O."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from l2kit.config import AdapterConfig, ParsedURL, PositiveInt, PositiveSeconds, Seconds, Secret
from l2kit.errors import ConfigError

_PREFIX: Final = re.compile(r"[A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*\Z")
_DEFAULT_CONNECT_TIMEOUT_S: Final = 2.0
_DEFAULT_SOCKET_TIMEOUT_S: Final = 5.0

PieceBytes = Annotated[int, msgspec.Meta(ge=64 << 10, le=1 << 30)]
PartBytes = Annotated[int, msgspec.Meta(ge=5 << 20, le=1 << 30)]
Retries = Annotated[int, msgspec.Meta(ge=0, le=10)]
Pages = Annotated[int, msgspec.Meta(ge=0, le=1000)]


class ObjectStoreConfig(AdapterConfig, frozen=True, kw_only=True):
    """Options of all object stores.

    Attributes:
        max_concurrency: requests in progress at once for reading, and as many for writing; 8 by default. Each has a
            thread and a connection. Far stores need more to fill the line, small machines fewer.
        prefix: path below the bucket that all objects lie under; from the URL. Neither of two prefixes may lie below
            the other, or listings show both.
        piece_bytes: a larger object is read in pieces of this size, side by side; 8 MiB by default. Small pieces cost
            more requests; large ones leave less to do at once.
        connect_timeout_s: longest time for one attempt to connect; 2 by default, or half of ``timeout_s`` if that is
            less. Must be below ``timeout_s``.
        socket_timeout_s: a connection on which no byte moves for so long is given up; 5 by default, or half of
            ``timeout_s`` if that is less. Must be below ``timeout_s``.
        retries: so many further attempts after a failure that another one may mend (500, 503, "slow down", a broken
            connection), after a pause of 0.1 s that doubles, give or take; 2 by default. Many retries use up the
            deadline and add load to a store that has too much.
        lookup: ``exact`` finds out about each key. ``prefix`` assumes that keys come in the order of a prompt and that
            nothing is there behind the first gap: some tens of requests for any number of keys, but what lies
            behind a gap counts as a miss, and what was removed from the middle of a prefix may count as a hit, whose
            load is a miss then.
        list_pages: a lookup of many keys of one namespace asks for a listing first, of so many pages (of 1,000
            objects) at most; 8 by default, 0 never lists. What it leaves open is asked one by one, and the
            namespace is not listed again for a minute.
        hit_cache_s: what was found, stored or loaded counts as found for so long without asking again; 0 by default,
            never. A load that finds the object missing or damaged ends that at once. Meanwhile lookups may find what
            another process has deleted.
        hit_cache_keys: most keys in that cache; 65,536 by default.
    """

    max_concurrency: PositiveInt = 8
    prefix: str = ""
    piece_bytes: PieceBytes = 8 << 20
    connect_timeout_s: PositiveSeconds | None = None
    socket_timeout_s: PositiveSeconds | None = None
    retries: Retries = 2
    lookup: Literal["exact", "prefix"] = "exact"
    list_pages: Pages = 8
    hit_cache_s: Seconds = 0.0
    hit_cache_keys: PositiveInt = 65_536

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "socket_timeout_s"):
            value = getattr(self, name)
            if value is not None and value >= self.timeout_s:
                raise ConfigError(f"{name}: {value} must be below timeout_s, which is {self.timeout_s}")
        if self.prefix and (not _PREFIX.match(self.prefix) or {".", ".."} & set(self.prefix.split("/"))):
            raise ConfigError("prefix: only A-Z a-z 0-9 . _ = - and single slashes between them can stand there")

    @property
    def connect_limit_s(self) -> float:
        """``connect_timeout_s`` with its default worked out."""
        return self.connect_timeout_s or min(_DEFAULT_CONNECT_TIMEOUT_S, self.timeout_s / 2)

    @property
    def socket_limit_s(self) -> float:
        """``socket_timeout_s`` with its default worked out."""
        return self.socket_timeout_s or min(_DEFAULT_SOCKET_TIMEOUT_S, self.timeout_s / 2)

    @property
    def where(self) -> str:
        """The place, as people write it, without credentials."""
        raise NotImplementedError


class BucketConfig(ObjectStoreConfig, frozen=True, kw_only=True):
    """What ``s3://``, ``gs://`` and ``az://`` have in common.

    Attributes:
        bucket: the bucket or container; from the URL. It is never created.
        endpoint: where the store is, ``https://HOST[:PORT]``; by default the provider's own.
        anonymous: send no credentials, for public buckets.
        if_absent: store only what is not there yet (a conditional PUT); on by default. Off for stores that do not know
            conditions: then objects that are there are replaced.
        multipart: larger objects than ``multipart_bytes`` are stored in parts, side by side; on by default. Off for
            stores that refuse it: then each object is one PUT.
        multipart_bytes: see there; 128 MiB by default.
        part_bytes: size of these parts; 16 MiB by default. Each that is on its way takes as much memory.
        verify: check the store's certificate. Off means that anybody on the way can read and alter.
        ca_file: PEM file of further authorities that may sign it, besides the system's.
    """

    bucket: str
    endpoint: str | None = None
    anonymous: bool = False
    if_absent: bool = True
    multipart: bool = True
    multipart_bytes: PositiveInt = 128 << 20
    part_bytes: PartBytes = 16 << 20
    verify: bool = True
    ca_file: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bucket:
            raise ConfigError("bucket: the URL needs one, for example s3://BUCKET/PREFIX")
        if self.endpoint is not None:
            parts = urlsplit(self.endpoint)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError("endpoint: expected http://HOST[:PORT] or https://HOST[:PORT]")
            if parts.username or parts.password or parts.query or parts.path.strip("/"):
                raise ConfigError("endpoint: takes no credentials, no path and no options")
        if self.ca_file is not None and not self.verify:
            raise ConfigError("ca_file: has no meaning with verify=false")

    @property
    def tls(self) -> bool:
        """Whether the store is spoken to in TLS."""
        return self.endpoint is None or self.endpoint.startswith("https:")

    def read_ca_file(self) -> str | None:
        """The certificates in ``ca_file``.

        Raises:
            ConfigError: it cannot be read.
        """
        if self.ca_file is None:
            return None
        try:
            return Path(self.ca_file).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"ca_file: {self.ca_file} cannot be read as PEM ({type(error).__name__})") from error


class S3Config(BucketConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``s3://BUCKET/PREFIX?option=value``.

    Attributes:
        region: the bucket's region; by default ``AWS_REGION``, ``AWS_DEFAULT_REGION`` or ``us-east-1``.
        addressing: ``path`` puts the bucket into the path, ``virtual`` in front of the host name. By default ``path``
            with an ``endpoint``, ``virtual`` at AWS.
        access_key_id: access key; by default found in the environment (``AWS_ACCESS_KEY_ID``, …), in a profile, or
            as a web identity, container or instance role.
        secret_access_key: its secret; never shown.
        session_token: the token that temporary keys have; never shown.
        profile: section of the credentials file; by default ``AWS_PROFILE``, or ``default``.
        credentials_file: file with profiles; by default ``AWS_SHARED_CREDENTIALS_FILE``, or ``~/.aws/credentials``.
            Read anew every minute, and when keys are refused, so that rotated keys need no restart.
        unsigned_payload: do not sign the content of a PUT, which saves hashing it; every object carries a checksum of
            its own. By default with TLS only: without it, somebody on the way could store what he likes.
        direct: bulk data travels between the caller's memory and the socket without a copy; on by default. Off has
            obstore do all, which knows proxies (``HTTPS_PROXY``) and costs two to three times the CPU.
    """

    region: str | None = None
    addressing: Literal["path", "virtual"] | None = None
    access_key_id: str | None = None
    secret_access_key: Secret | None = None
    session_token: Secret | None = None
    profile: str | None = None
    credentials_file: str | None = None
    unsigned_payload: bool | None = None
    direct: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ConfigError("access_key_id: needs secret_access_key, and the other way round")
        if self.session_token is not None and self.access_key_id is None:
            raise ConfigError("session_token: needs access_key_id and secret_access_key")
        if self.profile is not None and self.access_key_id is not None:
            raise ConfigError("profile: has no meaning with access_key_id")
        if self.anonymous and (self.access_key_id is not None or self.profile is not None):
            raise ConfigError("anonymous: contradicts access_key_id and profile")

    @property
    def signs_payload(self) -> bool:
        """Whether the content of a PUT is signed; see ``unsigned_payload``."""
        return not self.anonymous and not (self.tls if self.unsigned_payload is None else self.unsigned_payload)

    @property
    def virtual(self) -> bool:
        """Whether the bucket stands in front of the host name; see ``addressing``."""
        # A dot in the bucket's name would fall outside the wildcard of the provider's certificate.
        by_default = self.endpoint is None and "." not in self.bucket
        return by_default if self.addressing is None else self.addressing == "virtual"

    @property
    def where(self) -> str:
        """See `ObjectStoreConfig.where`."""
        place = f"bucket {self.bucket!r} at {self.endpoint or 'AWS'}"
        return f"{place}, region {self.region}" if self.region else place


class GsConfig(BucketConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``gs://BUCKET/PREFIX?option=value``.

    Attributes:
        service_account_file: JSON key of a service account; by default Google's application default credentials
            (``GOOGLE_APPLICATION_CREDENTIALS``, gcloud's, or the machine's account).
    """

    service_account_file: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anonymous and self.service_account_file is not None:
            raise ConfigError("anonymous: contradicts service_account_file")

    @property
    def where(self) -> str:
        """See `ObjectStoreConfig.where`."""
        return f"bucket {self.bucket!r} at {self.endpoint or 'Google Cloud Storage'}"


class AzConfig(BucketConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``az://CONTAINER/PREFIX?option=value``.

    Attributes:
        account: name of the storage account; by default ``AZURE_STORAGE_ACCOUNT_NAME``.
        account_key: its key; by default found in the environment, or as workload or managed identity. Never shown.
        sas_token: a shared access signature in place of a key; never shown.
    """

    account: str | None = None
    account_key: Secret | None = None
    sas_token: Secret | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("account_key", "sas_token") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError("sas_token: contradicts account_key")
        if given and self.account is None:
            raise ConfigError(f"account: needed with {given[0]}")
        if self.anonymous and given:
            raise ConfigError(f"anonymous: contradicts {given[0]}")

    @property
    def where(self) -> str:
        """See `ObjectStoreConfig.where`."""
        return f"container {self.bucket!r} of {self.account or os.environ.get('AZURE_STORAGE_ACCOUNT_NAME', 'Azure')}"


class FsspecConfig(ObjectStoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``fsspec+PROTOCOL://PATH?option=value`` and ``fsspec:///PATH?protocol=PROTOCOL``.

    Attributes:
        protocol: fsspec's name of the file system; from the URL's scheme.
        path: where the objects lie; from the URL, with its host if it has one.
        storage_options: what the file system is made with, as a JSON object. Never shown: it may hold credentials.
        publish: ``rename`` writes under another name and renames it, for file systems; ``direct`` writes at once, for
            object stores, where a write is visible as a whole and renaming is a copy.
    """

    protocol: str
    path: str
    storage_options: Secret | None = None
    publish: Literal["rename", "direct"] = "rename"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path.strip("/"):
            raise ConfigError("path: the URL needs one, for example fsspec+sftp://host/directory")
        if self.prefix:
            raise ConfigError("prefix: has no meaning here; it is a part of path")

    @property
    def where(self) -> str:
        """See `ObjectStoreConfig.where`."""
        return f"{self.protocol} at {self.path}"


def bucket_options_from_url(url: ParsedURL) -> dict[str, Any]:
    """``SCHEME://BUCKET/PREFIX?option=value``.

    Raises:
        ConfigError: the URL has a part that has no meaning, or an option in two places.
    """
    options: dict[str, Any] = dict(url.query)
    if url.username is not None or url.password is not None:
        raise ConfigError(f"{url.scheme}: credentials have no place in this URL; the README says where they are found")
    if url.port is not None:
        raise ConfigError(f"{url.scheme}: port: write endpoint=http://HOST:PORT; the URL begins with the bucket")
    for name, value in (("bucket", url.host or ""), ("prefix", url.path.strip("/"))):
        if value and name in options:
            raise ConfigError(f"{name}: given twice in the {url.scheme}:// URL")
        if value:
            options[name] = value
    return options


def fsspec_options_from_url(url: ParsedURL) -> dict[str, Any]:
    """``fsspec+PROTOCOL://[HOST[:PORT]]/PATH?option=value``.

    Raises:
        ConfigError: as `bucket_options_from_url`.
    """
    options: dict[str, Any] = dict(url.query)
    if url.username is not None or url.password is not None:
        raise ConfigError(f"{url.scheme}: credentials belong into storage_options")
    protocol = url.scheme.partition("+")[2]
    if protocol:
        if "protocol" in options:
            raise ConfigError(f"protocol: given twice in the {url.scheme}:// URL")
        options["protocol"] = protocol
    if url.host and protocol in ("sftp", "ssh", "smb", "webhdfs", "hdfs", "ftp"):  # a server, not a bucket
        options["path"] = f"{protocol}://{url.host}{f':{url.port}' if url.port else ''}{url.path}"
    elif url.path.strip("/") or url.host:
        options["path"] = f"{url.host or ''}{url.path}"
    return options
