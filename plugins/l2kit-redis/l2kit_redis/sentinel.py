"""A primary whose address only the sentinels know, and its replicas."""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from typing import Final, NamedTuple

from l2kit.errors import ConfigError, L2Error
from l2kit_redis.config import RedisConfig
from l2kit_redis.connection import Connection
from l2kit_redis.dialer import Access, say_hello
from l2kit_redis.endpoint import Endpoint
from l2kit_redis.faults import NodeError, NotPrimaryError, ProtocolError, ServerError
from l2kit_redis.fleet import Fleet, RunInThread, time_left_s
from l2kit_redis.pool import ConnectionPool
from l2kit_redis.resp import Reply
from l2kit_redis.topology import Topology, Way

_DOWN: Final = frozenset({"s_down", "o_down", "disconnected"})


class Service(NamedTuple):
    """What a sentinel says of a service."""

    primary: Endpoint
    replicas: tuple[Endpoint, ...] = ()


class Sentinels(Topology):
    """A primary, and its replicas if they are read from, as sentinels name them.

    Whoever is named as the primary is believed only when it says so itself, on each new connection.
    """

    def __init__(self, config: RedisConfig, run_in_thread: RunInThread) -> None:
        """No I/O before :meth:`open`."""
        access = Access(config, config.credentials, tls=config.tls, db=config.db)
        super().__init__(config, Fleet(config, access, run_in_thread, _check_primary))
        self._replica_fleet: Final = Fleet(config, access, run_in_thread)
        secured = config.tls if config.sentinel_tls is None else config.sentinel_tls
        sentinel_access = Access(config, config.sentinel_credentials, tls=secured)
        self._sentinel_fleet: Final = Fleet(config, sentinel_access, run_in_thread)
        self._sentinels: list[ConnectionPool] = []
        self._service: Service | None = None

    async def open(self, deadline: float) -> None:
        """Find the primary, and have a PING answered by it."""
        await self.fleet.prepare()
        await self._sentinel_fleet.prepare()
        self._sentinels = [self._sentinel_fleet.at(endpoint) for endpoint in self._config.endpoints]
        await self.discover(deadline)
        self._note_age()
        [primary] = self.primaries()
        try:
            await self.fleet.converse(primary, say_hello, deadline)
        except L2Error:
            raise
        except Exception as error:
            raise NodeError(str(primary.endpoint), error) from error

    def close(self) -> None:
        """Close all connections."""
        super().close()
        self._replica_fleet.close()
        self._sentinel_fleet.close()

    def primaries(self) -> Sequence[ConnectionPool]:
        """The primary."""
        return [] if self._service is None else [self.fleet.at(self._service.primary)]

    def route(self, name: bytes, *, reads: bool) -> ConnectionPool:
        """The primary, or for lookups and loads a replica, if that is configured."""
        assert self._service is not None, "not open"
        if reads and self._service.replicas:
            replica = self._replica(map(self._replica_fleet.at, self._service.replicas), binascii.crc32(name))
            if replica is not None:
                return replica
        return self.fleet.at(self._service.primary)

    def after(self, error: Exception, pool: ConnectionPool | None) -> Way:
        """After a failure ask the sentinels whether another server is the primary now."""
        if isinstance(error, ServerError):
            way = _WAYS.get(error.code, Way.END)
        elif isinstance(error, NotPrimaryError):
            way = Way.LATER
        else:
            way = Way.ELSEWHERE if isinstance(error, OSError) else Way.END
        if way is Way.END:
            return way
        self._outdated = True
        if pool is not None and pool not in self.primaries():
            self._avoid(pool)
            return Way.ELSEWHERE
        return way

    async def discover(self, deadline: float) -> None:
        """Ask one sentinel after the other until one knows the service; who answered last is asked last next time."""
        failure: Exception | None = None
        for sentinel in sorted(self._sentinels, key=self._is_avoided):
            try:
                found = await self._service_by(sentinel, deadline)
            except Exception as error:  # the next one may know
                if time_left_s(deadline) > 0:
                    self._avoid(sentinel)
                failure = error if isinstance(error, L2Error) else NodeError(str(sentinel.endpoint), error)
                continue
            self._sentinels.remove(sentinel)
            self._sentinels.append(sentinel)
            self._service = found
            self.fleet.keep_only({found.primary})
            self._replica_fleet.keep_only(set(found.replicas))
            return
        assert failure is not None, "there is always one sentinel"
        raise failure

    async def _service_by(self, sentinel: ConnectionPool, deadline: float) -> Service:
        name = self._config.service_name

        def ask(connection: Connection) -> Service:
            primary = primary_of(connection.call(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", name.encode()))
            if primary is None:
                where = sentinel.endpoint
                raise ConfigError(f"service: the sentinel at {where} knows no {name!r}; see SENTINEL MASTERS")
            if not self._reads_replicas:
                return Service(primary)
            return Service(primary, replicas_of(connection.call(b"SENTINEL", b"REPLICAS", name.encode())))

        return await self._sentinel_fleet.converse(sentinel, ask, deadline, limit_s=self._config.connect_limit_s)


#: What an error of a server means for the question that it did not answer.
_WAYS: Final = {
    "READONLY": Way.LATER,
    "LOADING": Way.ELSEWHERE,
    "MASTERDOWN": Way.ELSEWHERE,
}


def primary_of(reply: Reply) -> Endpoint | None:
    """Read the reply to SENTINEL GET-MASTER-ADDR-BY-NAME; None when the name is not known.

    Raises:
        ProtocolError: it is no such reply.
    """
    match reply:
        case None:
            return None
        case [bytes() as host, bytes() as port] if host and port.isdigit():
            return Endpoint(host.decode(errors="replace"), int(port))
    raise ProtocolError("the sentinel did not answer with an address")


def replicas_of(reply: Reply) -> tuple[Endpoint, ...]:
    """Read the reply to SENTINEL REPLICAS: those that are up and have their data from the primary.

    Raises:
        ProtocolError: it is no such reply.
    """
    if not isinstance(reply, list):
        raise ProtocolError("the sentinel did not answer with replicas")
    found: list[Endpoint] = []
    for entry in reply:
        if not isinstance(entry, list):
            raise ProtocolError("the sentinel did not answer with replicas")
        words = [word.decode(errors="replace") if isinstance(word, bytes) else "" for word in entry]
        fields = dict(zip(words[::2], words[1::2], strict=False))
        well = not _DOWN & set(fields.get("flags", "").split(",")) and fields.get("master-link-status") == "ok"
        if well and fields.get("ip") and fields.get("port", "").isdigit():
            found.append(Endpoint(fields["ip"], int(fields["port"])))
    return tuple(sorted(found))


def _check_primary(connection: Connection) -> None:
    """Raise when the server at the other end does not call itself a primary."""
    match connection.call(b"ROLE"):
        case [b"master", *_]:
            return
        case [bytes() as role, *_]:
            shown = "a replica" if role == b"slave" else f"no primary but {role.decode(errors='replace')!r}"
            raise NotPrimaryError(f"the server that the sentinels name as the primary is {shown}")
    raise ProtocolError("ROLE was not answered with a role")
