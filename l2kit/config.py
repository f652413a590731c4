"""Typed configuration: frozen msgspec Structs from a URL, TOML, YAML or a mapping.

Unknown or ill-typed options are errors that name the field and the nearest valid choice; nothing is ignored.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from l2kit.errors import ConfigError, nearest

_UNITS: Final = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS_BINARY: Final = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*\Z", re.ASCII)

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class Secret:
    """A string that shows itself to nobody but :meth:`reveal`."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        """Wrap ``value``."""
        self._value = value

    def reveal(self) -> str:
        """Return the secret, to be handed to a client library and to nothing else."""
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return "Secret(***)"


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options that every adapter has; each adapter subclasses this with its own.

    Attributes:
        timeout_s: longest time for one batch when the caller gives no deadline.
        open_timeout_s: longest time for opening the backend (connecting, rebuilding an index).
        max_concurrency: keys of one batch that are in progress at once.
        codecs: serde codecs that objects pass through on their way to this backend, in order.
    """

    timeout_s: PositiveSeconds = 10.0
    open_timeout_s: PositiveSeconds = 60.0
    max_concurrency: PositiveInt = 4
    codecs: tuple[str, ...] = ()


class L1Config(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory tier.

    Attributes:
        max_bytes: size of the arena of this node.
        policy: eviction policy by name (entry-point group ``l2kit.policies``).
    """

    max_bytes: PositiveInt = 1 << 30
    policy: str = "lru"


class StorageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One storage manager: L1 and its L2 tiers in the order in which they are preferred.

    Attributes:
        chunk_size: tokens per chunk; a multiple of the engine's block size.
        l1: host memory tier.
        tiers: each a URL, or a mapping with ``url`` and further options of that adapter, and optionally ``name``.
        hedge_after_s: when a tier that is loading an object has given nothing for so long, and for twice as long as is
            usual for it, another tier that has the object is asked, too, and the first answer counts; 0 turns that off.
            Never for more than a tenth of all loads.
        lookup_timeout_s: deadline of lookup and prefetch together; then the prefix found so far is the answer.
        max_store_queue_bytes: objects that wait for a slow tier beyond this are dropped and counted, per tier; never
            more than three quarters of L1, or what waits for a slow tier would keep new objects and loads out.
        drain_timeout_s: how long closing waits for stores that are still on their way.
        max_pending_prefetches: lookups beyond this many that wait for tiers are answered from L1 alone.
    """

    chunk_size: PositiveInt = 256
    l1: L1Config = L1Config()
    tiers: tuple[str | dict[str, Any], ...] = ()
    hedge_after_s: Seconds = 0.1
    lookup_timeout_s: PositiveSeconds = 5.0
    max_store_queue_bytes: PositiveInt = 1 << 30
    drain_timeout_s: PositiveSeconds = 10.0
    max_pending_prefetches: PositiveInt = 256

    def __repr__(self) -> str:
        """Without what tiers are opened with: their URLs and options may hold credentials."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["tiers"] = [_shown(tier if isinstance(tier, str) else tier.get("url")) for tier in self.tiers]
        return f"StorageConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


StructT = TypeVar("StructT", bound=msgspec.Struct)


class ParsedURL(msgspec.Struct, frozen=True):
    """An adapter URL taken apart, percent-decoding done. ``query`` holds the options, each given once."""

    scheme: str
    path: str
    host: str | None = None
    port: int | None = None
    username: str | None = None
    password: Secret | None = None
    query: dict[str, str] = msgspec.field(default_factory=dict)

    def __str__(self) -> str:
        """The URL without credentials and options, for messages."""
        where = f"{self.host or ''}{f':{self.port}' if self.port else ''}"
        return f"{self.scheme}://{where}{self.path}"

    def __repr__(self) -> str:
        return f"ParsedURL({str(self)!r})"  # an option may be a secret


def on_this_machine(url: ParsedURL, what: str) -> ParsedURL:
    """``url``, whose path is a path on this machine, without the host that it may name for form's sake (localhost).

    Raises:
        ConfigError: another host, which mostly means that a slash is missing; ``what`` says what the path is, for
            example ``DIRECTORY``. Or the path stands among the options as well.
    """
    if url.host not in (None, "localhost"):
        raise ConfigError(
            f"{url.scheme}: path: a relative path or a host ({url.host!r}) has no meaning in this URL; "
            f"write {url.scheme}:///{what} with three slashes"
        )
    if url.path and "path" in url.query:
        raise ConfigError(f"{url.scheme}: path: given twice, as the URL's path and as an option")
    return msgspec.structs.replace(url, host=None)


def parse_url(url: str) -> ParsedURL:
    """Take an adapter URL apart.

    Raises:
        ConfigError: it has no scheme, an impossible port, or an option twice. The message shows no credentials.
    """
    scheme, separator, _ = url.partition("://")
    if not separator or not re.match(r"[A-Za-z][A-Za-z0-9+.-]*\Z", scheme):
        raise ConfigError("url: expected SCHEME://…, for example file:///var/cache/l2kit or redis://localhost:6379/0")
    if "#" in url:  # urlsplit would cut the rest off: half a path, or half a password
        raise ConfigError(f"url: '#' has no meaning in the {scheme}:// URL; write %23 where a value holds one")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"url: the host in the {scheme}:// URL is malformed") from None
    try:
        port = parts.port
    except ValueError as error:
        several = "; a URL names one host, further ones go into the option hosts" if "," in parts.netloc else ""
        where = f"port: {scheme}:// URL has no port in 1..65535 ({_without_value(error)})"
        raise ConfigError(f"{where}{several}") from None
    if port == 0:
        raise ConfigError(f"port: 0 in the {scheme}:// URL is not in 1..65535")
    query: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in query:
            raise ConfigError(f"{name}: given twice in the {scheme}:// URL")
        query[name] = value
    password = None if parts.password is None else Secret(unquote(parts.password))
    username = unquote(parts.username) if parts.username else None
    return ParsedURL(scheme.lower(), unquote(parts.path), parts.hostname, port, username, password, query)


def _shown(url: object) -> str:
    """A tier's URL without credentials and options."""
    try:
        return str(parse_url(str(url)))
    except ConfigError:
        return "?"


def _without_value(error: ValueError) -> str:
    return "out of range" if "range" in str(error) else "not a number"


def build(struct: type[StructT], options: Mapping[str, Any], *, where: str) -> StructT:
    """Check ``options`` against ``struct`` and build it. Strings are converted, so URL options are typed like TOML.

    Args:
        struct: the configuration class.
        options: raw options; fields ending in ``_bytes`` also take sizes like ``"10GiB"``.
        where: what is being configured, for messages.

    Raises:
        ConfigError: names the unknown or wrong field and the nearest valid choice.
    """
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in fields:
            raise ConfigError(f"{where}: unknown option {name!r}{nearest(str(name), fields)}")
        if name.endswith("_bytes") and isinstance(value, str):
            value = parse_size_bytes(value, where=f"{where}: {name}")
        if isinstance(value, str) and fields[name].type == tuple[str, ...]:
            value = [part for part in value.split(",") if part]
        if isinstance(value, Mapping) and name == "l1":
            value = build(L1Config, value, where=f"{where}: l1")
        values[name] = value
    missing = [name for name, field in fields.items() if field.required and name not in values]
    if missing:
        raise ConfigError(f"{where}: option {missing[0]!r} is required")
    try:
        return msgspec.convert(values, struct, strict=False, dec_hook=_decode_secret, from_attributes=True)
    except msgspec.ValidationError as error:
        # msgspec's message names the JSON path and the constraint, and never the value.
        text, _, path = str(error).partition(" - at `$.")
        field = f"{path.rstrip('`')}: " if path else ""  # a check over several fields names them itself
        raise ConfigError(f"{where}: {field}{text}") from None


def _decode_secret(kind: type, value: object) -> object:
    if kind is Secret:
        if not isinstance(value, str | Secret):
            raise ValueError(f"Expected `str`, got `{type(value).__name__}`")
        return value if isinstance(value, Secret) else Secret(value)
    raise NotImplementedError(f"no conversion to {kind.__name__}")


def parse_size_bytes(text: str, *, where: str) -> int:
    """Parse ``"4096"``, ``"10GiB"``, ``"1.5 GB"`` into bytes.

    Raises:
        ConfigError: no such size.
    """
    match = _SIZE.match(text)
    unit = (_UNITS | _UNITS_BINARY).get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{where}: {text!r} is no size; write bytes or a size like 512MiB or 10GiB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def load_storage_config(config: str | Path | Mapping[str, Any] | StorageConfig) -> StorageConfig:
    """Make a `StorageConfig` from a path (``.toml``, ``.yaml``, ``.yml``), a mapping, or take it as it is.

    Raises:
        ConfigError: unreadable file, unknown suffix, or a wrong option.
    """
    if isinstance(config, StorageConfig):
        return config
    if isinstance(config, Mapping):
        return build(StorageConfig, config, where="storage")
    path = Path(config)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config: {path} is no UTF-8 text") from error
    return build(StorageConfig, _parse_file(path, text), where=str(path))


def _parse_file(path: Path, text: str) -> Mapping[str, Any]:
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix in (".yaml", ".yml"):
            return msgspec.yaml.decode(text, type=dict[str, Any])
    except ImportError as error:
        raise ConfigError(f"config: reading {path} needs PyYAML: pip install 'l2kit[yaml]'") from error
    except (tomllib.TOMLDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(f"config: {path} cannot be parsed: {error}") from error
    raise ConfigError(f"config: {path} has the suffix {path.suffix!r}; known are .toml, .yaml and .yml")
