"""From a name to an adapter, codec or policy: the entry points of installed distributions.

Groups: ``l2kit.adapters`` (name = URL scheme, ``+`` written as ``_``), ``l2kit.codecs`` (name = codec id),
``l2kit.policies`` and ``l2kit.wrappers`` (name = what stands before ``+`` in a URL scheme). Installed metadata is
scanned once, at first use, never at import. There are five ways to fail and each has its own error: nobody claims the
name, its import fails, two claim it, the contract is broken, an option is bad.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, TypeVar, cast

import msgspec

from l2kit.adapter import API_VERSION, Capabilities, L2Adapter
from l2kit.config import AdapterConfig, ParsedURL, build, parse_url
from l2kit.errors import (
    AdapterConflictError,
    AdapterContractError,
    AdapterImportError,
    AdapterNotFoundError,
    ConfigError,
    L2Error,
    nearest,
)
from l2kit.policy import EvictionPolicy
from l2kit.resilience import ResilienceConfig, resilient
from l2kit.scrubbing import ScrubbingAdapter
from l2kit.serde import Codec, CodecChain
from l2kit.wrapper import WrappingAdapter

ClassT = TypeVar("ClassT")

ADAPTERS: Final = "l2kit.adapters"
CODECS: Final = "l2kit.codecs"
POLICIES: Final = "l2kit.policies"
WRAPPERS: Final = "l2kit.wrappers"
COMMANDS: Final = "l2kit.commands"
GROUPS: Final = (ADAPTERS, CODECS, POLICIES, WRAPPERS, COMMANDS)

_RESILIENCE: Final = "resilience"
_SCRUB: Final = "scrub"

#: Which of our extras brings a name, for the message when it is not installed.
_EXTRAS: Final = {
    "file": "posix",
    "nvme": "nvme",
    "redis": "redis",
    "rediss": "redis",
    "valkey": "redis",
    "redis_unix": "redis",
    "redis_cluster": "redis",
    "redis_sentinel": "redis",
    "rediss_cluster": "redis",
    "rediss_sentinel": "redis",
    "valkey_cluster": "redis",
    "valkey_sentinel": "redis",
    "s3": "s3",
    "gs": "s3",
    "az": "s3",
    "fsspec": "s3",
    "nixl_posix": "nixl",
    "nixl_gds": "nixl",
    "nixl_ucx": "nixl",
}


class PluginInfo(msgspec.Struct, frozen=True):
    """One entry point as ``l2kit plugins`` shows it; ``error`` says why it cannot be used."""

    group: str
    name: str
    distribution: str
    version: str
    api_version: str | None = None
    capabilities: Capabilities | None = None
    error: str | None = None


def entry_name(scheme: str) -> str:
    """The entry-point name of a URL scheme; entry points cannot hold a ``+``."""
    return scheme.replace("+", "_")


class Registry:
    """Looks names up among entry points. `default_registry` is the one over what is installed."""

    def __init__(self, points: Mapping[str, list[EntryPoint]]) -> None:
        """``points`` maps each group to its entry points."""
        self._points: Final = points

    def load(self, group: str, name: str) -> Any:
        """Import what the one distribution that claims ``name`` registered.

        Raises:
            AdapterNotFoundError: nobody claims it.
            AdapterConflictError: two distributions claim it.
            AdapterImportError: its import fails; the cause is chained.
        """
        kind = group.removeprefix("l2kit.")
        claims = [point for point in self._points.get(group, []) if point.name == name]
        if not claims:
            known = {point.name for point in self._points.get(group, [])}
            hint = f"; pip install 'l2kit[{_EXTRAS[name]}]' brings it" if name in _EXTRAS else nearest(name, known)
            raise AdapterNotFoundError(f"{kind}: no installed distribution offers {name!r}{hint}")
        if len(claims) > 1:
            who = " and ".join(sorted(_origin(point) for point in claims))
            raise AdapterConflictError(f"{kind}: {name!r} is claimed by {who}; uninstall one of them")
        try:
            return claims[0].load()
        except (Exception, SystemExit) as error:  # a module that exits when imported must not end its host
            raise AdapterImportError(
                f"{kind}: {name!r} of {_origin(claims[0])} cannot be imported: {type(error).__name__}: {error}"
            ) from error

    def adapter_class(self, scheme: str) -> type[L2Adapter[Any]]:
        """The adapter class for a URL scheme, with its contract checked.

        Raises:
            AdapterContractError: it is no complete `L2Adapter`, or is built for another API version.
        """
        loaded = self.load(ADAPTERS, entry_name(scheme))
        check_adapter_class(loaded, f"adapters: {scheme!r}")
        return loaded  # type: ignore[no-any-return]  # checked just above

    def codec(self, codec_id: str, params: Mapping[str, Any]) -> Codec:
        """Make a codec from its id and parameters.

        Raises:
            AdapterContractError: what is registered is no `Codec`.
            ConfigError: it takes no such parameters.
        """
        loaded = check_codec_class(self.load(CODECS, codec_id), codec_id)
        try:
            return loaded(**params)
        except TypeError as error:
            raise ConfigError(f"codecs: {codec_id!r}: {error}") from error

    def policy_class(self, name: str) -> type[EvictionPolicy]:
        """The eviction policy of that name.

        Raises:
            AdapterContractError: what is registered is no `EvictionPolicy`.
        """
        return check_policy_class(self.load(POLICIES, name), name)

    def codec_chain(self, names: tuple[str, ...]) -> CodecChain:
        """The chain of a tier's ``codecs`` option."""
        return CodecChain([self.codec(name, {}) for name in names])

    def adapter(self, url: str | Mapping[str, Any], *, name: str | None = None, **options: Any) -> L2Adapter[Any]:
        """Make an adapter, not yet entered and without any I/O; resilient or scrubbed only when an option asks for it.

        Args:
            url: ``SCHEME://…``, or a mapping with ``url``, optionally ``name``, and options.
            name: what to call the tier; by default the scheme.
            options: win over those in ``url``.

        Raises:
            ConfigError: a bad URL or option, and the errors of :meth:`adapter_class`.
        """
        return self._made(url, name, options, unasked=False)

    def tier(self, url: str | Mapping[str, Any]) -> L2Adapter[Any]:
        """Make an adapter as storage managers use it: like :meth:`adapter`, and resilient unless that is turned off."""
        return self._made(url, None, {}, unasked=True)

    def _made(
        self, url: str | Mapping[str, Any], name: str | None, options: Mapping[str, Any], *, unasked: bool
    ) -> L2Adapter[Any]:
        if isinstance(url, Mapping):
            merged = {**url, **options}
            address, name = merged.pop("url", None), merged.pop("name", name)
            if not isinstance(address, str):
                raise ConfigError("url: a tier needs an option 'url', for example 'file:///var/cache/l2kit'")
            url, options = address, merged
        parsed = parse_url(url)
        in_url, query = options_of(_RESILIENCE, parsed.query)
        given, options = options_of(_RESILIENCE, options)
        scrubs = _SCRUB in options  # an empty table asks for it as well
        scrub_in_url, query = options_of(_SCRUB, query)
        scrub_given, options = options_of(_SCRUB, options)
        bare_url = msgspec.structs.replace(parsed, query=query)
        where = name or parsed.scheme
        if unasked or in_url or given:
            config = build(ResilienceConfig, {**in_url, **given}, where=f"{where}: {_RESILIENCE}")
            adapter = resilient(lambda: self._adapter(bare_url, name, options), config)
        else:
            adapter = self._adapter(bare_url, name, options)
        if scrubs or scrub_in_url or scrub_given:
            return ScrubbingAdapter.around(adapter, {**scrub_in_url, **scrub_given}, where=f"{where}: {_SCRUB}")
        return adapter

    def _adapter(self, url: ParsedURL, name: str | None, options: Mapping[str, Any]) -> L2Adapter[Any]:
        outer, _, rest = url.scheme.partition("+")
        if rest and not self._claimed(ADAPTERS, entry_name(url.scheme)) and self._claimed(WRAPPERS, outer):
            wrapper = check_wrapper_class(self.load(WRAPPERS, outer), outer)
            ours, query = options_of(outer, url.query)
            also, others = options_of(outer, options)
            inner_url = msgspec.structs.replace(url, scheme=rest, query=query)
            inner = self._adapter(inner_url, name or rest, others)
            return wrapper.around(inner, {**ours, **also}, where=outer)
        adapter_class = self.adapter_class(url.scheme)
        config_type: type[AdapterConfig] = adapter_class.config_type
        raw = {**adapter_class.options_from_url(url), **options}
        config = build(config_type, raw, where=name or url.scheme)
        chain = self.codec_chain(config.codecs)
        return adapter_class(config, name=name or url.scheme, codecs=chain, codec_source=self)

    def commands(self) -> list[str]:
        """Names of the commands that plugins add to ``l2kit``."""
        return sorted({point.name for point in self._points.get(COMMANDS, [])})

    def command(self, name: str) -> Callable[[Sequence[str]], int]:
        """The command ``l2kit NAME`` of a plugin: takes the arguments behind its name, returns an exit code.

        Raises:
            L2Error: it cannot be used.
        """
        return check_command(self.load(COMMANDS, name), name)

    def _claimed(self, group: str, name: str) -> bool:
        return any(point.name == name for point in self._points.get(group, []))

    def plugins(self) -> list[PluginInfo]:
        """Everything installed, loadable or not, by group and name."""
        return [self._describe(group, point) for group in GROUPS for point in sorted(self._points.get(group, []))]

    def _describe(self, group: str, point: EntryPoint) -> PluginInfo:
        info = PluginInfo(
            group, point.name, point.dist.name if point.dist else "?", point.dist.version if point.dist else "?"
        )
        try:
            loaded = self.load(group, point.name)
            if group == CODECS:
                check_codec_class(loaded, point.name)
            elif group == POLICIES:
                check_policy_class(loaded, point.name)
            elif group == WRAPPERS:
                check_wrapper_class(loaded, point.name)
            elif group == COMMANDS:
                check_command(loaded, point.name)
            else:
                check_adapter_class(loaded, f"adapters: {point.name!r}")
        except L2Error as error:
            return msgspec.structs.replace(info, error=str(error))
        if group != ADAPTERS:
            return info
        version = ".".join(map(str, loaded.api_version))
        return msgspec.structs.replace(info, api_version=version, capabilities=loaded.capabilities)


def check_adapter_class(loaded: object, where: str) -> None:
    """Check that ``loaded`` keeps the adapter contract as far as a class shows it.

    Raises:
        AdapterContractError: says what is missing, or names both API versions.
    """
    if not (isinstance(loaded, type) and issubclass(loaded, L2Adapter)):
        raise AdapterContractError(f"{where}: {loaded!r} is no subclass of l2kit.L2Adapter")
    _check_version(loaded, where)
    _complete(loaded, where)
    if not isinstance(getattr(loaded, "capabilities", None), Capabilities):
        raise AdapterContractError(f"{where}: {loaded.__name__} does not declare its capabilities")


def _check_version(loaded: type[L2Adapter[Any]], where: str) -> None:
    if not any("api_version" in vars(kind) for kind in loaded.__mro__ if kind is not L2Adapter):
        silent = f"{loaded.__name__} does not say for which contract it was written"
        raise AdapterContractError(f"{where}: {silent}; add api_version = {API_VERSION}")
    version: object = loaded.api_version
    if not (isinstance(version, tuple) and version and all(isinstance(part, int) for part in version)):
        raise AdapterContractError(f"{where}: api_version is {version!r}, not a pair of numbers like {API_VERSION}")
    if version[0] != API_VERSION[0]:
        theirs, ours = (".".join(map(str, v)) for v in (version, API_VERSION))
        raise AdapterContractError(
            f"{where}: built for adapter API {theirs}, this l2kit has {ours}; upgrade one of them"
        )


def check_codec_class(loaded: object, codec_id: str) -> type[Codec]:
    """Check that ``loaded`` is the codec class ``codec_id``.

    Raises:
        AdapterContractError: it is not, or it is incomplete.
    """
    if not (isinstance(loaded, type) and issubclass(loaded, Codec)) or getattr(loaded, "codec_id", None) != codec_id:
        raise AdapterContractError(f"codecs: {codec_id!r} must be a subclass of l2kit.Codec with that codec_id")
    return _complete(loaded, f"codecs: {codec_id!r}")


def check_policy_class(loaded: object, name: str) -> type[EvictionPolicy]:
    """Check that ``loaded`` is an eviction policy.

    Raises:
        AdapterContractError: it is not, or it is incomplete.
    """
    if not (isinstance(loaded, type) and issubclass(loaded, EvictionPolicy)):
        raise AdapterContractError(f"policies: {name!r} is no subclass of l2kit.policy.EvictionPolicy")
    return _complete(loaded, f"policies: {name!r}")


def check_command(loaded: object, name: str) -> Callable[[Sequence[str]], int]:
    """Check that ``loaded`` is a command, as far as that shows.

    Raises:
        AdapterContractError: it cannot be called.
    """
    if not callable(loaded) or isinstance(loaded, type):
        raise AdapterContractError(f"commands: {name!r} is {loaded!r}, no function of arguments")
    return cast(Callable[[Sequence[str]], int], loaded)


def check_wrapper_class(loaded: object, name: str) -> type[WrappingAdapter[Any]]:
    """Check that ``loaded`` is an adapter around adapters.

    Raises:
        AdapterContractError: it is not, or it is built for another API version.
    """
    if not (isinstance(loaded, type) and issubclass(loaded, WrappingAdapter)):
        raise AdapterContractError(f"wrappers: {name!r} is no subclass of l2kit.wrapper.WrappingAdapter")
    _check_version(loaded, f"wrappers: {name!r}")
    return loaded


def options_of(name: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part ``options`` into those of ``name``, written ``name.option`` or as one mapping ``name``, and all others.

    Raises:
        ConfigError: ``name`` itself has a value that is no mapping.
    """
    own: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for option, value in options.items():
        if option == name:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name}: expected a table of options, or options written as '{name}.option'")
            own.update(value)
        elif option.startswith(f"{name}."):
            own[option.removeprefix(f"{name}.")] = value
        else:
            others[option] = value
    return own, others


def _complete(loaded: type[ClassT], where: str) -> type[ClassT]:
    missing = sorted(getattr(loaded, "__abstractmethods__", ()))
    if missing:
        raise AdapterContractError(f"{where}: {loaded.__name__} does not implement {', '.join(missing)}")
    return loaded


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


@cache
def default_registry() -> Registry:
    """The registry over everything that is installed; scanned once per process."""
    return Registry({group: list(entry_points(group=group)) for group in GROUPS})
