"""Which slot of a cluster a key belongs to, and which nodes serve it. Pure.

The specification: https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from typing import Final, NamedTuple

from l2kit_redis.endpoint import Endpoint, announced_endpoint
from l2kit_redis.faults import ProtocolError, ServerError
from l2kit_redis.resp import Reply

SLOTS: Final = 1 << 14


def slot_of(name: bytes) -> int:
    """The slot of a key: CRC16 (XMODEM) of its hash tag, or of all of it when it has none."""
    opening = name.find(b"{")
    if opening >= 0:
        closing = name.find(b"}", opening + 1)
        if closing > opening + 1:
            name = name[opening + 1 : closing]
    return binascii.crc_hqx(name, 0) % SLOTS


class Shard(NamedTuple):
    """A primary with its replicas."""

    primary: Endpoint
    replicas: tuple[Endpoint, ...] = ()


class SlotMap:
    """Who serves which slot, as far as is known.

    Attributes:
        shards: per slot; None for a slot that nobody serves.
    """

    __slots__ = ("_by_primary", "shards")

    def __init__(self, shards: Sequence[Shard | None] = ()) -> None:
        """Empty unless ``shards`` are given, one for each slot."""
        self.shards: list[Shard | None] = list(shards) or [None] * SLOTS
        self._by_primary: dict[Endpoint, Shard] = {}
        last = None
        for shard in self.shards:
            if shard is not None and shard is not last:
                self._by_primary.setdefault(shard.primary, shard)
            last = shard

    @property
    def complete(self) -> bool:
        """True when every slot is served."""
        return None not in self.shards

    @property
    def distinct(self) -> list[Shard]:
        """The shards, each once."""
        return list(self._by_primary.values())

    def has_primary(self, endpoint: Endpoint) -> bool:
        """True when ``endpoint`` is a primary that serves slots."""
        return endpoint in self._by_primary

    def move(self, slot: int, primary: Endpoint) -> None:
        """Note that ``slot`` is served by ``primary`` now, with whatever replicas that is known to have."""
        self.shards[slot] = self._by_primary.setdefault(primary, Shard(primary))


class Redirection(NamedTuple):
    """What MOVED and ASK say."""

    slot: int
    endpoint: Endpoint


def redirection(error: ServerError, default_host: str) -> Redirection:
    """Read ``MOVED 3999 127.0.0.1:6381`` or ``ASK …``.

    Args:
        error: the reply.
        default_host: where it came from; a server that does not know its own address names only a port.

    Raises:
        ProtocolError: it says something else.
    """
    match str(error).split(" "):
        case [_, slot, where] if slot.isdigit() and int(slot) < SLOTS:
            try:
                return Redirection(int(slot), announced_endpoint(where, default_host))
            except ValueError:
                pass
    raise ProtocolError(f"a redirection to nowhere: {error}")


def slot_map(reply: Reply, default_host: str) -> SlotMap:
    """Read the reply to CLUSTER SLOTS.

    Args:
        reply: what came.
        default_host: where it came from, for nodes that do not know their own address.

    Raises:
        ProtocolError: it is no such reply.
    """
    if not isinstance(reply, list):
        raise ProtocolError("CLUSTER SLOTS was not answered with a list")
    shards: list[Shard | None] = [None] * SLOTS
    for entry in reply:
        match entry:
            case [int() as first, int() as last, list() as primary, *replicas] if 0 <= first <= last < SLOTS:
                serving = _node(primary, default_host)
                if serving is not None:
                    others = (_node(replica, default_host) for replica in replicas)
                    shard = Shard(serving, tuple(node for node in others if node is not None))
                    shards[first : last + 1] = [shard] * (last + 1 - first)
            case _:
                raise ProtocolError("CLUSTER SLOTS was not answered with ranges and nodes")
    return SlotMap(shards)


def _node(reply: Reply, default_host: str) -> Endpoint | None:
    """One node of the reply; None for one whose host name is not known (``?``), which cannot be reached."""
    match reply:
        case [bytes() | None as host, int() as port, *_] if 0 < port < 1 << 16:
            if host == b"?":
                return None
            return Endpoint(host.decode(errors="replace") if host else default_host, port)
    raise ProtocolError("CLUSTER SLOTS names a node that has no port")
