"""`ServerReport`: what a server says of itself, and where that will hurt. Asks; never changes a setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from l2kit.adapter import Usage
from l2kit_redis.config import RedisConfig
from l2kit_redis.connection import Connection
from l2kit_redis.faults import ProtocolError, ServerError
from l2kit_redis.stripes import whole_bytes

_OLDEST_VERSION: Final = (6, 0)
_UNKNOWN: Final = "unknown"


class ServerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one server is and how it is set.

    Attributes:
        flavor: ``redis``, ``valkey``, or what else it calls itself.
        version: of its own; empty when it may not be asked (by an ACL, or at a provider that hides INFO).
        max_bytes: its ``maxmemory``; 0 for no limit, None when that is unknown.
        used_bytes: its memory in use; None when that is unknown.
        policy: its ``maxmemory-policy``; empty when that is unknown.
        max_value_bytes: its ``proto-max-bulk-len``; None when it may not be asked.
        loading: whether it was still loading its data.
        warnings: what will hurt, each with the command that mends it.
    """

    flavor: str
    version: str
    max_bytes: int | None
    used_bytes: int | None
    policy: str
    max_value_bytes: int | None
    loading: bool
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line for a log."""
        limit = {None: _UNKNOWN, 0: "none"}.get(self.max_bytes) or f"{self.max_bytes} bytes"
        longest = _UNKNOWN if self.max_value_bytes is None else f"{self.max_value_bytes} bytes"
        line = (
            f"{self.flavor} {self.version or _UNKNOWN}, maxmemory {limit}, "
            f"policy {self.policy or _UNKNOWN}, proto-max-bulk-len {longest}"
        )
        return f"{line}, still loading its data" if self.loading else line


def ask(connection: Connection, config: RedisConfig) -> ServerReport:
    """Ask a server about itself. What it does not tell is unknown, and no error.

    Raises:
        OSError: it is not there any more.
    """
    info = _info(connection)
    longest = _setting(connection, b"proto-max-bulk-len")
    report = ServerReport(
        flavor=info.get("server_name") or ("valkey" if "valkey_version" in info else "redis"),
        version=info.get("valkey_version") or info.get("redis_version", ""),
        max_bytes=_number(info.get("maxmemory")),
        used_bytes=_number(info.get("used_memory")),
        policy=info.get("maxmemory_policy", ""),
        max_value_bytes=_number(longest),
        loading=info.get("loading", "0") != "0",
    )
    return msgspec.structs.replace(report, warnings=tuple(_warnings(report, config)))


def memory_usage(connection: Connection) -> Usage:
    """How much memory a server uses, and its limit.

    Raises:
        ServerError, ProtocolError: it does not say.
    """
    info = _fields(connection.call_bytes(b"INFO", b"memory"))
    used = _number(info.get("used_memory"))
    if used is None:
        raise ProtocolError("INFO does not say how much memory is used")
    return Usage(used, _number(info.get("maxmemory")) or None)


def _warnings(report: ServerReport, config: RedisConfig) -> list[str]:
    found: list[str] = []
    if report.max_bytes == 0:
        found.append(
            "there is no memory limit, so it grows until the operating system ends it; "
            "set one below the machine's memory: CONFIG SET maxmemory 8gb"
            + ("" if report.policy.startswith("allkeys-") else ", and CONFIG SET maxmemory-policy allkeys-lru")
        )
    elif report.policy == "noeviction":
        found.append(
            "the policy noeviction refuses every store once the server is full; let it evict what is used least: "
            "CONFIG SET maxmemory-policy allkeys-lru"
        )
    elif report.policy.startswith("volatile-") and config.ttl_s is None:
        found.append(
            f"the policy {report.policy} evicts only what expires, and without ttl_s nothing of ours does, so stores "
            "are refused once the server is full; set ttl_s, or: CONFIG SET maxmemory-policy allkeys-lru"
        )
    needed = whole_bytes(config.stripe_bytes)
    if report.max_value_bytes is not None and report.max_value_bytes < needed:
        found.append(
            f"it takes values of {report.max_value_bytes} bytes at most, and we send up to {needed}: longer ones are "
            f"refused; CONFIG SET proto-max-bulk-len 512mb, or set stripe_bytes to {report.max_value_bytes // 5}"
        )
    version = _version(report.version)
    if report.flavor == "redis" and version and version < _OLDEST_VERSION:
        found.append(f"version {report.version} is older than any that was tried; 6 is the oldest")
    return found


def _info(connection: Connection) -> Mapping[str, str]:
    try:
        reply = connection.call(b"INFO")
    except ServerError:
        return {}
    return _fields(reply) if isinstance(reply, bytes) else {}


def _setting(connection: Connection, name: bytes) -> str | None:
    try:
        reply = connection.call(b"CONFIG", b"GET", name)
    except ServerError:  # an ACL, or a provider that has renamed CONFIG
        return None
    match reply:
        case [_, bytes() as value]:
            return value.decode(errors="replace")
    return None


def _fields(text: bytes) -> dict[str, str]:
    lines = text.decode(errors="replace").splitlines()
    return {name: value for name, _, value in (line.partition(":") for line in lines)}


def _number(digits: str | None) -> int | None:
    return int(digits) if digits and digits.isascii() and digits.isdigit() and len(digits) < 20 else None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
