"""`RedisAdapter`: l2kit's storage contract on Redis and Valkey servers. See `ObjectStore` for what lies where."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import msgspec

from l2kit.adapter import Capabilities, KeyInfo, L2Adapter, Probe, Usage
from l2kit.config import ParsedURL
from l2kit.errors import ConfigError, L2Error
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit_redis import lookups, server_report
from l2kit_redis.config import RedisConfig, options_from_url
from l2kit_redis.connection import Connection
from l2kit_redis.faults import ProtocolError, translate
from l2kit_redis.metering import MeteredTalk
from l2kit_redis.object_store import ObjectStore
from l2kit_redis.server_report import ServerReport
from l2kit_redis.talk import Talk
from l2kit_redis.upkeep import Upkeep

_MAX_OBJECT_BYTES: Final = 512 << 20
_SCAN_COUNT: Final = b"1000"
_GLOB: Final = re.compile(rb"[*?\[\]^\\-]")

_log = logging.getLogger(__name__)


class RedisAdapter(L2Adapter[RedisConfig]):
    """Objects in Redis or Valkey servers, under ``<key_prefix><encoded key>``.

    - Values go from the caller's memory to the socket and back without a copy, in blocking calls of the
      adapter's own threads. A call waits in short slices: it ends with its batch, cancelled or out of time,
      and is never abandoned.
    - A store is visible as a whole or not at all, and replaces the one before; also of a large object, which is a head
      and stripes in keys of their own.
    - A lookup extends the time to live of what it finds to ``lease_s`` at least. The server may evict objects at any
      time; one that has lost a part is a miss, and is removed by the load that finds that out.
    """

    api_version = (1, 1)
    config_type = RedisConfig
    capabilities = Capabilities(
        persistent=True, shared=True, lock="server", evicts=True, max_object_bytes=_MAX_OBJECT_BYTES, group_keys=128
    )

    #: What each server that is written to said of itself when the adapter was opened.
    report: tuple[ServerReport, ...] = ()

    @classmethod
    def options_from_url(cls, url: ParsedURL) -> dict[str, Any]:
        """Map a URL to options; see `RedisConfig`."""
        return options_from_url(url)

    async def open(self) -> None:
        """Read certificates, connect, log in and have a PING answered: what is wrong shows at start-up.

        Then each server is asked how it is set (`report`); what will hurt is logged, with the command that mends it.

        Raises:
            ConfigError: an option is wrong: a file, the database, the source of the password.
            AuthError: the server does not let us in.
            BackendError: nothing answers there, or what answers is no Redis.
        """
        self._prefix = self.config.prefix
        self._talk = Talk(self.config, self.run_in_thread, self.translate_error)
        self._metered = MeteredTalk(self._talk, self.count)
        ttl_ms = self.config.ttl_ms if self.config.refreshes_ttl else None
        self._upkeep = Upkeep(self._metered, self.count, ttl_ms)
        self._objects = ObjectStore(
            self.config, self._metered, self._upkeep, self.count, self.for_each, self.run_in_thread
        )
        try:
            await self._talk.open()
            await self._ask_servers()
        except BaseException:
            self._talk.close()
            raise
        self.run_in_background("removing stripes", self._upkeep.run_removals)
        if ttl_ms is not None:
            self.run_in_background("refreshing times to live", self._upkeep.run_refreshes)

    async def close(self) -> None:
        """Remove the stripes that are left to be removed, in a second at most, and close all connections."""
        try:
            await self._upkeep.flush()
        finally:
            self._talk.close()

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """One value, or stripes and then their head."""
        return await self._objects.put(self._name(key), data)

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """Into the caller's buffers. A key that holds something else than a string is a miss."""
        return await self._objects.get(self._name(key), into, heals=self.deletes_damaged)

    async def store_many(self, items: Sequence[StoreItem]) -> list[StoreStatus | Exception]:
        """In one pipeline, checksums included."""
        answers = await self._objects.put_each({self._name(item.key): item for item in items})
        return [self.translate_error(answer) if isinstance(answer, Exception) else answer for answer in answers]

    async def load_many(self, items: Sequence[LoadItem]) -> list[int | Exception | None]:
        """In one pipeline, into the caller's buffers, and verified there."""
        named = {self._name(item.key): item for item in items}
        answers = await self._objects.get_each(named, heals=self.deletes_damaged)
        return [self.translate_error(answer) if isinstance(answer, Exception) else answer for answer in answers]

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Existence and sizes in one round trip."""
        return await self._objects.sizes([self._name(key) for key in keys], lease=False)

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """The same, and in the same round trip what is found is made to stay for ``lease_s`` at least."""
        return await self._objects.sizes([self._name(key) for key in keys], lease=True)

    async def delete_one(self, key: ObjectKey) -> bool:
        """UNLINK: the server frees the memory in the background."""
        return await self._objects.delete(self._name(key))

    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        """SCAN below the prefix. Keys that are not ours are left out, and so are stripes without their head.

        Raises:
            L2Error: the server failed; ClosedError outside ``async with``.
        """
        self.check_open()
        pattern = glob_escape(self._prefix) + b"*"
        seen: set[bytes] = set()  # SCAN may show a key more than once
        for server in self._metered.servers():
            cursor = b""
            while cursor != b"0":
                self.check_open()
                scan = functools.partial(_scan_page, cursor=cursor or b"0", pattern=pattern, is_object=self._is_object)
                cursor, found = await self._metered.at(server, scan)
                for name, size in found:
                    key = self._key(name)
                    if key is not None and name not in seen:
                        seen.add(name)
                        yield KeyInfo(key, size)

    async def usage(self) -> Usage:
        """What the servers say of themselves: all their memory in use, and ``maxmemory``.

        Other people's data and the server's own overhead are included, because they count against
        ``maxmemory`` as ours does. How many objects are ours it does not know without a scan, so ``objects``
        is None.

        Raises:
            L2Error: the server failed; ClosedError outside ``async with``.
        """
        self.check_open()
        found = [await self._metered.at(server, server_report.memory_usage) for server in self._metered.servers()]
        limits = [usage.max_bytes for usage in found if usage.max_bytes is not None]
        return Usage(sum(usage.used_bytes for usage in found), sum(limits) if len(limits) == len(found) else None)

    async def probe(self) -> Probe:
        """See `L2Adapter.probe`; the details say what each server is, how it is set, and what will hurt."""
        probe = await super().probe()
        details = {f"server {number}": str(report) for number, report in enumerate(self.report, start=1)}
        for number, report in enumerate(self.report, start=1):
            details |= {f"server {number}, warning {n}": text for n, text in enumerate(report.warnings, start=1)}
        return msgspec.structs.replace(probe, details=details)

    def translate_error(self, error: Exception) -> L2Error:
        """See `l2kit_redis.faults.translate`."""
        return translate(error, f"{self.name} at {self.config.where}")

    async def _ask_servers(self) -> None:
        reports: list[ServerReport] = []
        ask = functools.partial(server_report.ask, config=self.config)
        for server in self._metered.servers():
            try:
                report = await self._metered.at(server, ask)
            except L2Error as error:  # it may be down while others are not; the first call finds out
                _log.warning("%s: %s does not say how it is set: %s", self.name, server.endpoint, error)
                continue
            reports.append(report)
            _log.info("%s: the server at %s is %s", self.name, server.endpoint, report)
            for warning in report.warnings:
                _log.warning("%s: the server at %s: %s", self.name, server.endpoint, warning)
        self.report = tuple(reports)

    def _name(self, key: ObjectKey) -> bytes:
        return self._prefix + key.encode().encode()

    def _key(self, name: bytes) -> ObjectKey | None:
        try:
            return ObjectKey.parse(name[len(self._prefix) :].decode("ascii"))
        except (ConfigError, UnicodeDecodeError):
            return None

    def _is_object(self, name: bytes) -> bool:
        return self._key(name) is not None


def glob_escape(literal: bytes) -> bytes:
    """A pattern for MATCH that fits ``literal`` and nothing else."""
    return _GLOB.sub(rb"\\\g<0>", literal)


def _scan_page(
    connection: Connection, *, cursor: bytes, pattern: bytes, is_object: Any
) -> tuple[bytes, list[tuple[bytes, int]]]:
    reply = connection.call(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT)
    match reply:
        case [bytes() as following, list() as page]:
            names = [name for name in page if isinstance(name, bytes) and is_object(name)]
        case _:
            raise ProtocolError("SCAN was not answered with a cursor and keys")
    found = lookups.find(connection, names) if names else []
    sizes = [(name, each.size) for name, each in zip(names, found, strict=True)]
    return following, [(name, size) for name, size in sizes if size is not None]
