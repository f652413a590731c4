"""`PoolIndex`: who may write and read which part of the pool's memory. No sockets, no NIXL, no waiting.

- A reservation belongs to one connection. Its object is visible to nobody before `commit`, and a commit takes effect
  only by the generation that the same connection was given: a client that comes too late, or back from another life,
  commits nothing.
- A lease keeps an object's memory as it is until the connection that has it returns it or ends. Eviction passes it by.
- When a connection ends, its reservations do not: the client may be cut off and yet be writing, one-sided, past us. Its
  memory is quarantined until ``grace_s`` has passed and, where the kernel can tell, the client's process is gone. Other
  clients may write the same keys elsewhere meanwhile.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import secrets
import time
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from l2kit.keys import ObjectKey
from l2kit.l1 import L1Manager, ReadLease, WriteReservation
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.policy import LRUPolicy
from l2kit_nixl.pool_protocol import Holding, Page, Place

OwnedT = TypeVar("OwnedT")

#: Most reservations, and most leases, that one connection may have at once.
_MAX_OUT: Final = 4096
_PAGE_KEYS: Final = 1000


class _Readable(LRUPolicy):
    """The order of eviction, and what there is: L1 says what comes and goes.

    Attributes:
        sizes: bytes of all readable objects.
        names: their keys as text, sorted, for listings.
        nbytes: what they take together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Final[dict[ObjectKey, int]] = {}
        self.names: Final[list[str]] = []
        self.nbytes = 0

    def inserted(self, key: ObjectKey, nbytes: int) -> None:
        """It became readable."""
        super().inserted(key, nbytes)
        self.sizes[key] = nbytes
        self.nbytes += nbytes
        bisect.insort(self.names, key.encode())

    def removed(self, key: ObjectKey) -> None:
        """It is gone."""
        super().removed(key)
        self.nbytes -= self.sizes.pop(key)
        del self.names[bisect.bisect_left(self.names, key.encode())]


class _Lent:
    """A lease with several users: holds, and reads of what is held."""

    __slots__ = ("_lease", "_users", "obj")

    def __init__(self, lease: ReadLease) -> None:
        self._lease: Final = lease
        self._users = 1
        self.obj: Final = lease.obj

    def share(self) -> _Lent:
        self._users += 1
        return self

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._lease.release()


class Session:
    """What all connections of one adapter share: the objects that its lookups hold."""

    def __init__(self, name: bytes) -> None:
        """Made by `PoolIndex` only."""
        self.name: Final = name
        self.connections = 0
        self.holds: Final[dict[ObjectKey, list[_Lent]]] = {}


class Connection:
    """One connection's reservations and leases, by generation."""

    def __init__(self, session: Session, is_gone: Callable[[], bool]) -> None:
        """Made by `PoolIndex` only."""
        self.session: Final = session
        self.is_gone: Final = is_gone
        self.writing: Final[dict[int, WriteReservation]] = {}
        self.reading: Final[dict[int, _Lent]] = {}


class _Quarantined(NamedTuple):
    until: float
    is_gone: Callable[[], bool]
    reservation: WriteReservation


class PoolIndex:
    """The objects of one pool; used by one thread, the server's event loop.

    Attributes:
        memory: the one memory map that all objects lie in.
    """

    def __init__(self, max_bytes: int, *, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Map ``max_bytes`` of memory; ``grace_s`` is the quarantine, in seconds of ``clock``.

        Raises:
            ConfigError: this machine does not map so much.
        """
        self._grace_s: Final = grace_s
        self._clock: Final = clock
        self._readable: Final = _Readable()
        self._objects: Final = L1Manager(max_bytes, self._readable)
        self._sessions: Final[dict[bytes, Session]] = {}
        self._connections: Final[set[Connection]] = set()
        self._quarantine: list[_Quarantined] = []
        # Begins anywhere, so that numbers from a pool that was here before mean nothing.
        self._generation = secrets.randbits(62)
        self.memory: Final = self._find_memory()

    def close(self) -> None:
        """Give the memory up."""
        self._objects.close()

    # --- connections ------------------------------------------------------------------------------

    def connect(self, session: bytes, is_gone: Callable[[], bool]) -> Connection:
        """A connection of the adapter ``session``.

        ``is_gone`` says later whether the client's process has ended; True as well where nobody can know.
        """
        shared = self._sessions.setdefault(session, Session(session))
        shared.connections += 1
        connection = Connection(shared, is_gone)
        self._connections.add(connection)
        return connection

    def disconnect(self, connection: Connection) -> None:
        """Return its leases, quarantine its reservations, and end its session with the session's last connection."""
        self._connections.discard(connection)
        for lent in connection.reading.values():
            lent.release()
        connection.reading.clear()
        until = self._clock() + self._grace_s
        self._quarantine += [_Quarantined(until, connection.is_gone, one) for one in connection.writing.values()]
        connection.writing.clear()
        session = connection.session
        session.connections -= 1
        if session.connections == 0:
            for held in session.holds.values():
                for lent in held:
                    lent.release()
            session.holds.clear()
            self._sessions.pop(session.name, None)

    def release_quarantined(self) -> None:
        """Free what has been in quarantine for long enough; called now and then."""
        now = self._clock()
        kept: list[_Quarantined] = []
        for one in self._quarantine:
            if now >= one.until and one.is_gone():
                one.reservation.abort()
            else:
                kept.append(one)
        self._quarantine = kept

    # --- writing ----------------------------------------------------------------------------------

    def reserve(self, connection: Connection, key: ObjectKey, size: int) -> Place | str:
        """A place for a new object of ``size`` bytes, evicting on demand; ``present``, or ``full``."""
        if key in self._readable.sizes:
            self._objects.touch([key])
            return "present"
        if len(connection.writing) >= _MAX_OUT:
            return "full"
        made = self._objects.reserve_beside(key, Layout.raw(size), owner="client")
        if not isinstance(made, WriteReservation):
            return "full"
        return self._place(made, connection.writing, made.obj)

    def commit(self, connection: Connection, generation: int) -> bool:
        """Make a written object readable; False for a generation that this connection was not given, or has used."""
        reservation = connection.writing.pop(generation, None)
        if reservation is None:
            return False
        reservation.finish()
        return True

    def abandon(self, connection: Connection, generation: int) -> bool:
        """Free what its client has stopped to write; False as for :meth:`commit`."""
        reservation = connection.writing.pop(generation, None)
        if reservation is None:
            return False
        reservation.abort()
        return True

    # --- reading ----------------------------------------------------------------------------------

    def lease(self, connection: Connection, key: ObjectKey) -> Place | str:
        """Where an object lies, and that it stays; ``absent``. What its session holds is there, deleted or not."""
        if len(connection.reading) >= _MAX_OUT:
            return "full"
        lease = self._objects.acquire(key, owner="client")
        held = connection.session.holds.get(key)
        if lease is not None:
            lent = _Lent(lease)
        elif held:
            lent = held[-1].share()
        else:
            return "absent"
        return self._place(lent, connection.reading, lent.obj)

    def give_back(self, connection: Connection, generation: int) -> bool:
        """End a lease; True says that the memory was the object's up to now."""
        lent = connection.reading.pop(generation, None)
        if lent is None:
            return False
        lent.release()
        return True

    def look(self, connection: Connection, key: ObjectKey, *, hold: bool) -> int | None:
        """An object's size in bytes, or None. With ``hold`` it stays loadable for the session until `let_go`."""
        size = self._readable.sizes.get(key)
        if size is not None and hold:
            lease = self._objects.acquire(key, owner="hold")
            assert lease is not None
            connection.session.holds.setdefault(key, []).append(_Lent(lease))
        return size

    def let_go(self, connection: Connection, key: ObjectKey) -> bool:
        """Undo one hold; False when there is none."""
        holds = connection.session.holds
        held = holds.get(key)
        if not held:
            return False
        held.pop(0).release()
        if not held:
            del holds[key]
        return True

    def delete(self, key: ObjectKey) -> bool:
        """Delete an object for all who do not hold it; False when there is none."""
        return self._objects.remove(key)

    def page(self, after: str) -> Page:
        """The next objects behind ``after``, in the order of keys."""
        start = bisect.bisect_right(self._readable.names, after)
        names = self._readable.names[start : start + _PAGE_KEYS]
        return Page(names, [self._readable.sizes[ObjectKey.parse(name)] for name in names])

    @property
    def is_moving(self) -> bool:
        """Whether some client may be reading or writing the memory now."""
        return any(one.writing or one.reading for one in self._connections)

    def holding(self) -> Holding:
        """What the pool holds."""
        return Holding(
            used_bytes=self._readable.nbytes,
            max_bytes=len(self.memory),
            objects=len(self._readable.sizes),
            writing=sum(len(one.writing) for one in self._connections),
            quarantined=len(self._quarantine),
            evicted=self._objects.evictions,
        )

    def _place(self, owned: OwnedT, by_generation: dict[int, OwnedT], obj: MemoryObj) -> Place:
        self._generation += 1
        by_generation[self._generation] = owned
        address = ctypes.addressof(ctypes.c_char.from_buffer(obj.segments[0])) if obj.segments else 0
        return Place(self._generation, address, obj.nbytes)

    def _find_memory(self) -> mmap.mmap:
        probe = self._objects.reserve_write(ObjectKey("pool", bytes(16)), Layout.raw(1), owner="pool")
        assert isinstance(probe, WriteReservation)
        memory = probe.obj.segments[0].obj
        probe.abort()
        assert isinstance(memory, mmap.mmap)
        return memory
