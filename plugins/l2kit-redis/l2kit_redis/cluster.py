"""A Redis or Valkey cluster: keys spread over primaries by slot, replicas behind them, all of it subject to change."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from l2kit.errors import AuthError, ConfigError, L2Error, TransientBackendError
from l2kit_redis.config import RedisConfig
from l2kit_redis.connection import Connection
from l2kit_redis.dialer import Access, say_hello
from l2kit_redis.faults import NodeError, ProtocolError, ServerError
from l2kit_redis.fleet import Fleet, RunInThread, time_left_s
from l2kit_redis.pool import ConnectionPool
from l2kit_redis.slots import SlotMap, redirection, slot_map, slot_of
from l2kit_redis.topology import Topology, Way

_NO_CLUSTER: Final = "cluster support disabled"


class Cluster(Topology):
    """Nodes of a cluster, found through any one of them."""

    def __init__(self, config: RedisConfig, run_in_thread: RunInThread) -> None:
        """No I/O before :meth:`open`."""
        access = Access(config, config.credentials, tls=config.tls)
        greet = _read_from_replicas if config.read_from == "replica" else None
        super().__init__(config, Fleet(config, access, run_in_thread, greet))
        self._slots = SlotMap()

    async def open(self, deadline: float) -> None:
        """Find the nodes, and have a PING answered by each primary that is alive; one at least must be."""
        await self.fleet.prepare()
        await self.discover(deadline)
        self._note_age()
        failure: Exception | None = None
        alive = False
        for pool in self.primaries():
            try:
                await self.fleet.converse(pool, say_hello, deadline)
                alive = True
            except (ConfigError, AuthError):
                raise
            except Exception as error:  # one dead node is what a cluster is for
                failure = NodeError(str(pool.endpoint), error)
                if isinstance(error, ServerError) and issubclass(error.meaning[0], AuthError):
                    raise failure from error
        if failure is not None and not alive:
            raise failure from failure.__cause__

    def primaries(self) -> Sequence[ConnectionPool]:
        """The primaries that serve slots."""
        return [self.fleet.at(shard.primary) for shard in self._slots.distinct]

    def route(self, name: bytes, *, reads: bool) -> ConnectionPool | None:
        """The primary of the key's slot, or for lookups and loads one of its replicas, if that is configured."""
        slot = slot_of(name)
        shard = self._slots.shards[slot]
        if shard is None:
            return None
        if reads and self._reads_replicas:
            replica = self._replica(map(self.fleet.at, shard.replicas), slot)
            if replica is not None:
                return replica
        return self.fleet.at(shard.primary)

    def after(self, error: Exception, pool: ConnectionPool | None) -> Way:
        """Follow redirections; after a failure find out whether another node has taken over."""
        if isinstance(error, ServerError):
            way = _WAYS.get(error.code, Way.END)
            if pool is not None and way in (Way.MOVED, Way.ASK):
                try:
                    there = redirection(error, pool.endpoint.host)
                except ProtocolError:
                    return Way.END
                if way is Way.MOVED:
                    self._slots.move(there.slot, there.endpoint)
        else:
            way = Way.ELSEWHERE if isinstance(error, OSError) else Way.END
            if pool is not None and way is Way.ELSEWHERE:
                self._avoid(pool)
        self._outdated |= way not in (Way.END, Way.ASK)
        if pool is not None and way in (Way.LATER, Way.ELSEWHERE) and not self._slots.has_primary(pool.endpoint):
            self._avoid(pool)  # it is a replica: the primary can answer
            return Way.ELSEWHERE
        return way

    def asked_of(self, error: ServerError, pool: ConnectionPool) -> tuple[int, ConnectionPool]:
        """See `Topology.asked_of`."""
        asked = redirection(error, pool.endpoint.host)
        return asked.slot, self.fleet.at(asked.endpoint)

    def slot_of(self, name: bytes) -> int:
        """See `slots.slot_of`."""
        return slot_of(name)

    async def discover(self, deadline: float) -> None:
        """Ask node after node until one knows who serves all slots; what failed lately is asked last."""
        nodes = [node for shard in self._slots.distinct for node in (shard.primary, *shard.replicas)]
        random.shuffle(nodes)
        candidates = [self.fleet.at(endpoint) for endpoint in dict.fromkeys((*nodes, *self._config.endpoints))]
        best: SlotMap | None = None
        failure: Exception | None = None
        for pool in sorted(candidates, key=self._is_avoided):
            try:
                found = await self._slots_by(pool, deadline)
            except ConfigError:
                raise
            except Exception as error:  # the next one may know
                if time_left_s(deadline) > 0:
                    self._avoid(pool)
                failure = error if isinstance(error, L2Error) else NodeError(str(pool.endpoint), error)
                continue
            if best is None or found.complete:
                best = found
            if found.complete:
                break
        if best is not None and best.distinct:
            self._slots = best
            self.fleet.keep_only({node for shard in best.distinct for node in (shard.primary, *shard.replicas)})
        elif failure is not None:
            raise failure
        else:
            raise TransientBackendError(f"the cluster at {self._config.where} serves no slots yet; see CLUSTER INFO")

    async def _slots_by(self, pool: ConnectionPool, deadline: float) -> SlotMap:
        host = pool.endpoint.host

        def ask(connection: Connection) -> SlotMap:
            return slot_map(connection.call(b"CLUSTER", b"SLOTS"), host)

        try:
            return await self.fleet.converse(pool, ask, deadline, limit_s=self._config.connect_limit_s)
        except ServerError as error:
            if _NO_CLUSTER in str(error):
                raise ConfigError(f"mode: the server at {pool.endpoint} is in no cluster; use redis://") from error
            raise


#: What an error of a node means for the question that it did not answer.
_WAYS: Final = {
    "MOVED": Way.MOVED,
    "ASK": Way.ASK,
    "TRYAGAIN": Way.LATER,
    "CLUSTERDOWN": Way.LATER,
    "LOADING": Way.ELSEWHERE,
    "MASTERDOWN": Way.ELSEWHERE,
    "READONLY": Way.ELSEWHERE,
}


def _read_from_replicas(connection: Connection) -> None:
    """Have replicas answer for their primary; a primary takes no notice."""
    connection.call(b"READONLY")
