"""`RedisAdapter`: l2kit's storage contract on one Redis or Valkey server. One object is one string key."""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from l2kit.adapter import Capabilities, KeyInfo, L2Adapter, Usage, caught
from l2kit.config import ParsedURL
from l2kit.errors import ConfigError, L2Error
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit_redis.config import RedisConfig, options_from_url
from l2kit_redis.connection import UNREAD, Connection, Unread
from l2kit_redis.faults import ProtocolError, ServerError, translate
from l2kit_redis.talk import Talk

#: A server's default ``proto-max-bulk-len``.
_MAX_OBJECT_BYTES: Final = 512 << 20
_SCAN_COUNT: Final = b"1000"
_GLOB: Final = re.compile(rb"[*?\[\]^\\-]")


class RedisAdapter(L2Adapter[RedisConfig]):
    """Objects in a Redis or Valkey server, under ``<key_prefix><encoded key>``.

    - Values go from the caller's memory to the socket and back without a copy, in blocking calls of the
      adapter's own threads. A call waits in short slices: it ends with its batch, cancelled or out of time,
      and is never abandoned.
    - A store is one ``SET``, so an object is visible as a whole or not at all, and replaces the one before.
    - The server may evict or expire objects at any time; there are no locks yet.
    """

    api_version = (1, 1)
    config_type = RedisConfig
    capabilities = Capabilities(
        persistent=True, shared=True, lock="none", evicts=True, max_object_bytes=_MAX_OBJECT_BYTES, group_keys=16
    )

    @classmethod
    def options_from_url(cls, url: ParsedURL) -> dict[str, Any]:
        """Map a URL to options; see `RedisConfig`."""
        return options_from_url(url)

    async def open(self) -> None:
        """Read certificates, connect, log in and have a PING answered: what is wrong shows at start-up.

        Raises:
            ConfigError: an option is wrong: a file, the database, the source of the password.
            AuthError: the server does not let us in.
            BackendError: nothing answers there, or what answers is no Redis.
        """
        self._talk = Talk(self.config, self.run_in_thread, self.translate_error)
        try:
            await self._talk.open()
        except BaseException:
            self._talk.close()
            raise

    async def close(self) -> None:
        """Close all connections."""
        self._talk.close()

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """SET."""
        name = self._name(key)
        await self._talk.about(name, lambda connection: connection.set_value(name, data, self._ttl_ms), writes=True)
        return StoreStatus.STORED

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """GET into the caller's buffers. A key that holds something else than a string is a miss."""
        name = self._name(key)

        def get(connection: Connection) -> int | None:
            try:
                return connection.get_value(name, into)
            except ServerError as error:
                if _is_no_object(error):
                    return None
                raise

        return await self._talk.about(name, get, writes=False)

    async def store_many(
        self, keys: Sequence[ObjectKey], data: Sequence[Sequence[memoryview]]
    ) -> list[StoreStatus | Exception]:
        """Pipelined SET."""
        values = {self._name(key): parts for key, parts in zip(keys, data, strict=True)}

        def store(connection: Connection, names: Sequence[bytes]) -> Sequence[ServerError | None]:
            return connection.set_values(names, [values[name] for name in names], self._ttl_ms)

        errors = await self._talk.about_each(list(values), store, writes=True)
        return [StoreStatus.STORED if error is None else self.translate_error(error) for error in errors]

    async def load_many(
        self, keys: Sequence[ObjectKey], into: Sequence[Sequence[memoryview]]
    ) -> list[int | Exception | None]:
        """Pipelined GET into the caller's buffers."""
        buffers = {self._name(key): parts for key, parts in zip(keys, into, strict=True)}

        def load(connection: Connection, names: Sequence[bytes]) -> Sequence[int | ServerError | Unread | None]:
            return connection.get_values(names, [buffers[name] for name in names])

        found = await self._talk.about_each(list(buffers), load, writes=False)
        sizes: list[int | Exception | None] = []
        for key, parts, answer in zip(keys, into, found, strict=True):
            if answer is UNREAD:
                sizes.append(await caught(self.load_one(key, parts)))
            elif isinstance(answer, ServerError):
                sizes.append(None if _is_no_object(answer) else self.translate_error(answer))
            else:
                sizes.append(answer)
        return sizes

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Pipelined STRLEN: one round trip for existence and sizes of up to 1,024 keys."""
        return await self._talk.about_each([self._name(key) for key in keys], _sizes, writes=False)

    async def delete_one(self, key: ObjectKey) -> bool:
        """UNLINK: the server frees the memory in the background."""
        name = self._name(key)
        # Not repeated on a new connection: the second answer would be "there was none".
        deleted = await self._talk.about(
            name, lambda connection: connection.call_integer(b"UNLINK", name), writes=True, idempotent=False
        )
        return deleted > 0

    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        """SCAN below the prefix. Keys that are not ours are left out.

        Raises:
            L2Error: the server failed; ClosedError outside ``async with``.
        """
        pattern = glob_escape(self.config.prefix) + b"*"
        seen: set[bytes] = set()  # SCAN may show a key more than once
        self.check_open()
        for server in self._talk.servers():
            cursor = b""
            while cursor != b"0":
                self.check_open()
                scan = functools.partial(_scan_page, cursor=cursor or b"0", pattern=pattern)
                cursor, found = await self._talk.at(server, scan)
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
        found = [await self._talk.at(server, _memory_usage) for server in self._talk.servers()]
        limits = [usage.max_bytes for usage in found if usage.max_bytes is not None]
        return Usage(sum(usage.used_bytes for usage in found), sum(limits) if len(limits) == len(found) else None)

    def translate_error(self, error: Exception) -> L2Error:
        """See `l2kit_redis.faults.translate`."""
        return translate(error, f"{self.name} at {self.config.where}")

    @property
    def _ttl_ms(self) -> int | None:
        return None if self.config.ttl_s is None else round(self.config.ttl_s * 1000)

    def _name(self, key: ObjectKey) -> bytes:
        return self.config.prefix + key.encode().encode()

    def _key(self, name: bytes) -> ObjectKey | None:
        try:
            return ObjectKey.parse(name[len(self.config.prefix) :].decode("ascii"))
        except (ConfigError, UnicodeDecodeError):
            return None


def glob_escape(literal: bytes) -> bytes:
    """A pattern for MATCH that fits ``literal`` and nothing else."""
    return _GLOB.sub(rb"\\\g<0>", literal)


def _sizes(connection: Connection, names: Sequence[bytes]) -> list[int | None]:
    sizes: list[int | None] = []
    for answer in connection.call_integers(b"STRLEN", names):
        if isinstance(answer, ServerError):
            if not _is_no_object(answer):
                raise answer
            sizes.append(None)
        else:
            sizes.append(answer or None)  # no object is empty; STRLEN of a missing key is 0
    return sizes


def _is_no_object(answer: object) -> bool:
    """True when the server says that what is there is another type than a string."""
    return isinstance(answer, ServerError) and answer.code == "WRONGTYPE"


def _scan_page(connection: Connection, *, cursor: bytes, pattern: bytes) -> tuple[bytes, list[tuple[bytes, int]]]:
    reply = connection.call(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT)
    match reply:
        case [bytes() as following, list() as page]:
            names = [name for name in page if isinstance(name, bytes)]
        case _:
            raise ProtocolError("SCAN was not answered with a cursor and keys")
    sizes = _sizes(connection, names)
    return following, [(name, size) for name, size in zip(names, sizes, strict=True) if size is not None]


def _memory_usage(connection: Connection) -> Usage:
    lines = connection.call_bytes(b"INFO", b"memory").decode(errors="replace").splitlines()
    info = {name: value for name, _, value in (line.partition(":") for line in lines)}
    if not info.get("used_memory", "").isdecimal():
        raise ProtocolError("INFO does not say how much memory is used")
    limit = info.get("maxmemory", "")
    return Usage(int(info["used_memory"]), int(limit) or None if limit.isdecimal() else None)
