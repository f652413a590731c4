"""L1: objects in one arena of host memory, with an explicit state for each.

``writing -> readable -> gone``. Memory under a write reservation or a read lease belongs to its holder until the holder
lets go: no time-out ever frees or completes anything. A reservation is the right to finish or abort, a lease the right
to read; both are objects, so nobody else can use them up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from l2kit.errors import ClosedError
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.memory import Arena, MemoryObj, Slot
from l2kit.policy import EvictionPolicy


class Refusal(StrEnum):
    """Why a write was not reserved. Each is an everyday answer, not an error."""

    PRESENT = "present"
    WRITING = "writing"  # somebody else holds the reservation of this key
    NO_MEMORY = "no_memory"


class L1Usage(msgspec.Struct, frozen=True):
    """What L1 holds now. At rest ``writing`` and ``leases`` are 0 and ``used_bytes`` is what the entries take."""

    capacity_bytes: int
    used_bytes: int
    entries: int
    writing: int
    leases: int


class Hold(msgspec.Struct, frozen=True):
    """A reservation or lease that is still out, for leak reports."""

    key: ObjectKey
    owner: str
    kind: str
    generation: int
    age_s: float


class _Entry:
    """One object's memory. It outlives its place in the index while leases are out."""

    __slots__ = ("generation", "indexed", "key", "leases", "obj", "slot")

    def __init__(self, key: ObjectKey, obj: MemoryObj, slot: Slot, generation: int) -> None:
        self.key: Final = key
        self.obj: Final = obj
        self.slot: Final = slot
        self.generation: Final = generation
        self.leases: set[ReadLease] = set()
        self.indexed = True


class WriteReservation:
    """The right to fill one new object. Exactly one of :meth:`finish` and :meth:`abort` takes effect, once.

    ``obj`` may be written until then. Thread-safe. The holder calls :meth:`abort` in ``finally``; after
    :meth:`finish` that does nothing.

    Attributes:
        detached: somebody else may reserve the key, see :meth:`detach`.
    """

    __slots__ = ("_entry", "_l1", "_since", "detached", "key", "obj", "owner")

    def __init__(self, l1: L1Manager, entry: _Entry, owner: str) -> None:
        """Made by `L1Manager.reserve_write` only."""
        self._l1 = l1
        self._entry: _Entry | None = entry
        self._since = time.monotonic()
        self.key: Final = entry.key
        self.obj: Final = entry.obj
        self.owner: Final = owner
        self.detached = False

    def finish(self, lease_owners: Iterable[str] = ()) -> list[ReadLease]:
        """Make the object readable and, in the same step, take one read lease for each of ``lease_owners``.

        - Nothing can evict the object between becoming readable and being leased.
        - When the object is there already (only after :meth:`detach`), this copy lives as long as its leases.

        Raises:
            ClosedError: the reservation was finished or aborted before.
        """
        return self._l1._finish(self, lease_owners)  # noqa: SLF001 - two halves of one state machine

    def abort(self) -> None:
        """Give the memory back unread. Harmless after :meth:`finish` or a first :meth:`abort`."""
        self._l1._abort(self)  # noqa: SLF001

    def detach(self) -> None:
        """Let others write this key, because this write hangs. The memory stays the holder's until it lets go."""
        self._l1._detach(self)  # noqa: SLF001


class ReadLease:
    """The right to read one object: its memory stays as it is until :meth:`release`. Thread-safe."""

    __slots__ = ("__weakref__", "_entry", "_l1", "_since", "key", "obj", "owner")

    def __init__(self, l1: L1Manager, entry: _Entry, owner: str) -> None:
        """Made by `L1Manager` only."""
        self._l1 = l1
        self._entry: _Entry | None = entry
        self._since = time.monotonic()
        self.key: Final = entry.key
        self.obj: Final = entry.obj
        self.owner: Final = owner

    def release(self) -> None:
        """Let go. Harmless when repeated."""
        self._l1._release(self)  # noqa: SLF001


class L1Manager:
    """The objects of one arena. Every method is thread-safe, takes microseconds and never waits for I/O."""

    def __init__(self, max_bytes: int, policy: EvictionPolicy) -> None:
        """Map an arena of ``max_bytes``; ``policy`` orders evictions and belongs to this manager."""
        self._arena = Arena(max_bytes)
        self._policy = policy
        self._lock = threading.Lock()
        self._readable: dict[ObjectKey, _Entry] = {}
        self._writing: dict[ObjectKey, WriteReservation] = {}
        self._detached: set[WriteReservation] = set()
        self._unindexed: set[_Entry] = set()  # removed while leased: their memory is freed by the last release
        self._generation = 0
        self._closed = False
        self.evictions = 0

    def reserve_write(self, key: ObjectKey, layout: Layout, *, owner: str) -> WriteReservation | Refusal:
        """Reserve memory for a new object, evicting on demand. Answers at once; it never waits for memory."""
        with self._lock:
            if key in self._writing:
                return Refusal.WRITING
            reservation = self._reserve(key, layout, owner)
            if isinstance(reservation, WriteReservation):
                self._writing[key] = reservation
            return reservation

    def reserve_beside(self, key: ObjectKey, layout: Layout, *, owner: str) -> WriteReservation | Refusal:
        """Reserve memory for an object that somebody else may be writing, too: whoever is first makes it readable.

        The reservation is detached from the start; besides that, like :meth:`reserve_write`.
        """
        with self._lock:
            reservation = self._reserve(key, layout, owner)
            if isinstance(reservation, WriteReservation):
                reservation.detached = True
                self._detached.add(reservation)
            return reservation

    def acquire(self, key: ObjectKey, *, owner: str) -> ReadLease | None:
        """Lease one object if it is readable."""
        return next(iter(self.acquire_prefix([key], owner=owner)), None)

    def acquire_prefix(self, keys: Sequence[ObjectKey], *, owner: str) -> list[ReadLease]:
        """Lease the longest run of readable objects from the start of ``keys``, in one step."""
        with self._lock:
            count = self._prefix(keys)
            leases = [self._lease(self._readable[key], owner) for key in keys[:count]]
            self._touch(keys[:count])
            return leases

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Count what is readable of ``keys`` as just read: of one prefix, the end is evicted before the start."""
        with self._lock:
            self._touch([key for key in keys if key in self._readable])

    def readable_prefix(self, keys: Sequence[ObjectKey]) -> int:
        """How many objects from the start of ``keys`` are readable now. Takes no lease and touches nothing."""
        with self._lock:
            return self._prefix(keys)

    def contains(self, key: ObjectKey) -> bool:
        """True when the object is readable now. Takes no lease and touches nothing."""
        with self._lock:
            return key in self._readable

    def is_known(self, key: ObjectKey) -> bool:
        """True when the object is readable or somebody is writing it."""
        with self._lock:
            return key in self._readable or key in self._writing

    def remove(self, key: ObjectKey) -> bool:
        """Make an object unreadable for new readers; its memory is freed when the last lease goes. False for a miss."""
        with self._lock:
            entry = self._readable.get(key)
            if entry is not None:
                self._unindex(entry)
            return entry is not None

    def usage(self) -> L1Usage:
        """A consistent snapshot."""
        with self._lock:
            leases = sum(len(entry.leases) for entry in (*self._readable.values(), *self._unindexed))
            writing, arena = len(self._writing) + len(self._detached), self._arena
            return L1Usage(arena.capacity_bytes, arena.used_bytes, len(self._readable), writing, leases)

    def holds(self, older_than_s: float = 0.0) -> list[Hold]:
        """Reservations and leases that are out for longer than ``older_than_s``: a report, never a reason to free."""
        now = time.monotonic()
        with self._lock:
            found = [
                Hold(lease.key, lease.owner, "lease", entry.generation, now - lease._since)  # noqa: SLF001
                for entry in (*self._readable.values(), *self._unindexed)
                for lease in entry.leases
            ]
            found += [
                Hold(r.key, r.owner, "reservation", r._entry.generation, now - r._since)  # noqa: SLF001
                for r in (*self._writing.values(), *self._detached)
                if r._entry is not None  # noqa: SLF001
            ]
        return [hold for hold in found if hold.age_s >= older_than_s]

    def close(self) -> None:
        """Refuse new work and unmap the arena, or leave that to the last holder of a view into it."""
        with self._lock:
            self._closed = True
            while self._readable:
                self._unindex(next(iter(self._readable.values())))
            self._arena.close()

    # --- called by reservations and leases --------------------------------------------------------

    def _finish(self, reservation: WriteReservation, lease_owners: Iterable[str]) -> list[ReadLease]:
        owners = list(lease_owners)
        with self._lock:
            entry = self._take(reservation)
            if entry is None:
                raise ClosedError(f"the reservation of {reservation.key} was finished or aborted before")
            leases = [self._lease(entry, owner) for owner in owners]
            if self._closed or entry.key in self._readable:
                entry.indexed = False
                self._unindexed.add(entry)
                self._free_if_unused(entry)
                return leases
            self._readable[entry.key] = entry
            self._policy.inserted(entry.key, entry.obj.nbytes)
            return leases

    def _abort(self, reservation: WriteReservation) -> None:
        with self._lock:
            entry = self._take(reservation)
            if entry is not None:
                self._arena.free(entry.slot)

    def _detach(self, reservation: WriteReservation) -> None:
        with self._lock:
            if reservation._entry is not None and not reservation.detached:  # noqa: SLF001
                del self._writing[reservation.key]
                self._detached.add(reservation)
                reservation.detached = True

    def _release(self, lease: ReadLease) -> None:
        with self._lock:
            entry, lease._entry = lease._entry, None  # noqa: SLF001
            if entry is not None:
                entry.leases.discard(lease)
                self._free_if_unused(entry)

    # --- under the lock ---------------------------------------------------------------------------

    def _reserve(self, key: ObjectKey, layout: Layout, owner: str) -> WriteReservation | Refusal:
        if self._closed:
            raise ClosedError("L1 is closed")
        if key in self._readable:
            return Refusal.PRESENT
        slot = self._allocate(layout.nbytes)
        if slot is None:
            return Refusal.NO_MEMORY
        self._generation += 1
        obj = MemoryObj.wrap(self._arena.view(slot, layout.nbytes), layout)
        return WriteReservation(self, _Entry(key, obj, slot, self._generation), owner)

    def _take(self, reservation: WriteReservation) -> _Entry | None:
        """Use a reservation up; None when it was before."""
        entry, reservation._entry = reservation._entry, None  # noqa: SLF001
        if entry is not None and reservation.detached:
            self._detached.discard(reservation)
        elif entry is not None:
            del self._writing[entry.key]
        return entry

    def _prefix(self, keys: Sequence[ObjectKey]) -> int:
        return next((index for index, key in enumerate(keys) if key not in self._readable), len(keys))

    def _touch(self, prefix: Sequence[ObjectKey]) -> None:
        for key in reversed(prefix):  # the start ends up the most recent: suffixes go first
            self._policy.touched(key)

    def _lease(self, entry: _Entry, owner: str) -> ReadLease:
        lease = ReadLease(self, entry, owner)
        entry.leases.add(lease)
        return lease

    def _unindex(self, entry: _Entry) -> None:
        del self._readable[entry.key]
        self._policy.removed(entry.key)
        entry.indexed = False
        self._unindexed.add(entry)
        self._free_if_unused(entry)

    def _free_if_unused(self, entry: _Entry) -> None:
        if not entry.indexed and not entry.leases:
            self._unindexed.discard(entry)
            self._arena.free(entry.slot)

    def _allocate(self, nbytes: int) -> Slot | None:
        slot = self._arena.allocate(nbytes)
        if slot is not None or self._arena.slot_bytes(nbytes) > self._arena.capacity_bytes:
            return slot
        for entry in self._victims(nbytes):
            self._unindex(entry)
            self.evictions += 1
        return self._arena.allocate(nbytes)

    def _victims(self, nbytes: int) -> list[_Entry]:
        """Whom to evict so that ``nbytes`` fit; nobody when that would be in vain. Changes nothing.

        One object of the same size makes room at once. Without one, other sizes' slabs are emptied, those first whose
        most recently used object is the oldest.
        """
        size = self._arena.slot_bytes(nbytes)
        slabs: dict[object, list[_Entry]] = {}
        for entry in self._idle():
            if entry.slot.slot_bytes == size:
                return [entry]
            mates = slabs.pop(entry.slot.slab, None) or []
            mates.append(entry)
            slabs[entry.slot.slab] = mates
        chosen: list[list[_Entry]] = []
        for mates in slabs.values():
            if len(mates) < len(mates[0].slot.slab.used):
                continue  # something in it is held
            if not self._arena.would_fit(nbytes, _slots([*chosen, mates])):
                chosen.append(mates)
                continue
            for spare in list(chosen):  # what did not help in the end stays
                fewer = [other for other in chosen if other is not spare]
                chosen = fewer if self._arena.would_fit(nbytes, _slots([*fewer, mates])) else chosen
            return [entry for group in [*chosen, mates] for entry in group]
        return []

    def _idle(self) -> Iterator[_Entry]:
        for key in self._policy.victims():
            entry = self._readable[key]
            if not entry.leases:
                yield entry


def _slots(groups: Iterable[list[_Entry]]) -> list[Slot]:
    return [entry.slot for group in groups for entry in group]
