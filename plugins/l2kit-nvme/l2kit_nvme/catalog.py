"""What a slab holds and where, who holds on to it, and what goes next: all decisions, none of the I/O.

`Index` and `Space` behind one lock. A slot's way: reserved by a store, published when its record is committed, removed
when that is revoked, free when the last one who holds it lets go. Each reservation carries its generation: whoever
comes late with an old one, after a failure say, changes nothing.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from l2kit.adapter import KeyInfo
from l2kit.inventory import counts_as_use
from l2kit.keys import ObjectKey
from l2kit_nvme.adoption import adopt
from l2kit_nvme.eviction import Eviction
from l2kit_nvme.geometry import PAGE_BYTES, slot_pages
from l2kit_nvme.index import DYING, FLYING, FREE, LIVE, LOST, Index
from l2kit_nvme.records import Record, RegionShape, family_of
from l2kit_nvme.space import Space

#: A new region has this many bytes, or this part of the data area where that is less.
_REGION_BYTES: Final = 64 << 20
_REGION_PART: Final = 64
_USES_AT_ONCE: Final = 1024
#: One holder of a lease, above any record number.
_HOLDER: Final = 1 << 32
_MAX_USES: Final = 1 << 18


class Place(NamedTuple):
    """Where one version of an object lies: ``page`` of the data area, ``size`` in bytes."""

    record: int
    generation: int
    page: int
    size: int


class Crowded(NamedTuple):
    """There is no room: evict ``victims``. None to evict: ``busy`` says whether stores under way may change that."""

    victims: list[Place]
    busy: bool = False


class Catalog:
    """Thread-safe; one lock, held for memory operations only and never around a system call."""

    def __init__(self, pages: int, records: int, max_bytes: int | None) -> None:
        """A slab of so many pages and records, none of them in use; ``max_bytes`` limits what slots take."""
        self._lock: Final = threading.Lock()
        self._index: Final = Index(records)
        self._space: Final = Space(pages, max(1, min(_REGION_BYTES // PAGE_BYTES, pages // _REGION_PART)))
        self._pages: Final = pages
        self.max_bytes: Final = min(pages * PAGE_BYTES, max_bytes or pages * PAGE_BYTES)
        self._pins: Final[dict[int, int]] = {}
        self._leases: dict[bytes, int] = {}  # by short key: how many `_HOLDER`, and the record
        self._uses = array("I")  # records, in the order of their use, which the index does not know of yet
        self._taken_pages = 0
        self._flying = 0
        self._leaving = 0
        self._clock = 0
        self._eviction: Final = Eviction(self._index, self._space, self._pins)

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots that are not free: those of objects, of stores under way, of what is gone but held."""
        return self._taken_pages * PAGE_BYTES

    @property
    def objects(self) -> int:
        """How many objects are there."""
        return self._index.objects

    @property
    def busy(self) -> bool:
        """Whether there are reservations that are neither published nor abandoned, or removed ones not yet free."""
        return self._flying > 0 or self._leaving > 0

    # --- asking -----------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[ObjectKey], *, lease: bool = False) -> list[int | None]:
        """Each object's size in bytes or None; a hit is a use, and with ``lease`` also a hold.

        Runs on the event loop: what a use means for the order is worked out when something must go.
        """
        sizes: list[int | None] = []
        families, by_key, size_of = self._index.families, self._index.by_key, self._index.sizes
        leases, pins, uses = self._leases, self._pins, self._uses
        with self._lock:
            for key in keys:
                layer = key.layer  # as `family_of`, without the call: this is most of what a lookup does
                family = families.get((key.namespace, key.shard, key.shards, key.group, -1 if layer is None else layer))
                short = b"" if family is None else key.chunk_hash + family
                record = by_key.get(short)
                if record is None:
                    sizes.append(None)
                    continue
                uses.append(record)
                sizes.append(size_of[record])
                if lease:
                    if short in leases:
                        self._lease_again(short, record)
                    else:
                        leases[short] = _HOLDER | record
                        pins[record] = pins.get(record, 0) + 1
            self._limit_uses()
        return sizes

    def release(self, keys: Sequence[ObjectKey]) -> None:
        """Undo one lease per key; unknown ones are passed over."""
        families, leases = self._index.families, self._leases
        with self._lock:
            for key in keys:
                family = families.get(family_of(key))
                short = b"" if family is None else key.chunk_hash + family
                held = leases.get(short)
                if held is None:
                    continue
                if held < 2 * _HOLDER:
                    del leases[short]
                    self._unpin(held - _HOLDER)
                else:
                    leases[short] = held - _HOLDER

    def has(self, key: ObjectKey, size: int) -> bool:
        """True when an object of exactly this size is there; that is a use."""
        with self._lock:
            record = self._index.find(key)
            if record is None or self._index.sizes[record] != size:
                return False
            self._use(record)
            return True

    def pin(self, key: ObjectKey) -> Place | None:
        """Where the object lies, or the version that a lease keeps; it stays there until :meth:`unpin`."""
        with self._lock:
            record = self._index.find(key)
            if record is not None:
                if counts_as_use():
                    self._use(record)
            else:
                held = self._leases.get(self._index.short(family_of(key), key.chunk_hash))
                if held is None:
                    return None
                record = held % _HOLDER
            self._pin(record)
            return self._place(record)

    def unpin(self, place: Place) -> None:
        """Let go; the slot of what is gone meanwhile is free when the last one lets go."""
        with self._lock:
            self._unpin(place.record)

    def settle_uses(self) -> None:
        """Bring the order of use up to date; in short pieces, so that nobody waits for the lock."""
        while self._uses:
            with self._lock:
                for record in self._uses[:_USES_AT_ONCE]:
                    self._clock += 1
                    self._index.touch(record, self._clock)
                del self._uses[:_USES_AT_ONCE]

    def listing(self, after: int, count: int) -> tuple[list[KeyInfo], int]:
        """The objects among ``count`` records from number ``after``, and where to go on; 0 when that was all."""
        index = self._index
        with self._lock:
            end = min(len(index.keys), after + count)
            found = [
                KeyInfo(index.key(short), index.sizes[record])
                for record in range(after, end)
                if index.states[record] == LIVE and (short := index.keys[record]) is not None
            ]
            return found, 0 if end == len(index.keys) else end

    # --- storing ----------------------------------------------------------------------------------------------------

    def reserve(self, size: int, batch: int = 1) -> Place | Crowded:
        """A slot and a record for an object of ``size`` bytes, or what to evict first: up to ``batch`` if one must go.

        - The least recently used object of the same size class goes, or whole regions of another class, when nothing
          in them was used since that object was; beyond ``max_bytes`` the least recently used object of all goes.
        """
        pages = slot_pages(size)
        self.settle_uses()
        with self._lock:
            if (self._taken_pages + pages) * PAGE_BYTES > self.max_bytes:
                return Crowded(self._places(self._eviction.oldest_of_all(batch)), self.busy)
            record = self._index.take()
            if record is None:
                return Crowded(self._places(self._eviction.oldest_of_all(batch)), self.busy)
            while (found := self._space.take(pages)) is None:
                victims = self._eviction.victims(pages, batch)
                if victims is not None:
                    self._index.put_back(record)
                    return Crowded(self._places(victims), self.busy)
            region, slot = found
            region.flying += 1
            region.records[slot] = record
            self._index.regions[record] = region
            self._index.slots[record] = slot
            self._index.sizes[record] = size
            self._taken_pages += pages
            self._flying += 1
            return self._place(record)

    def record_for(self, place: Place, key: ObjectKey) -> Record:
        """What to write to the table to commit a reservation; a sequence number is used once."""
        with self._lock:
            self._clock += 1
            region = self._index.regions[place.record]
            assert region is not None
            slot = self._index.slots[place.record]
            return Record(self._clock, place.generation, place.size, region.shape, slot, family_of(key), key.chunk_hash)

    def current(self, key: ObjectKey) -> Place | None:
        """Where the object lies now, without using it."""
        with self._lock:
            record = self._index.find(key)
            return None if record is None else self._place(record)

    def publish(self, place: Place, key: ObjectKey, sequence: int) -> Place | None:
        """The reservation is committed: it is the object now. Returns the version before it, which still has its slot.

        That one is no longer found, and :meth:`forget` frees it.
        """
        index = self._index
        self.settle_uses()
        with self._lock:
            assert self._is(place, FLYING)
            before = index.find(key)
            superseded = None if before is None else self._place(before)
            if before is not None:
                self._remove(before)
            index.insert(place.record, index.short(family_of(key), key.chunk_hash), sequence)
            region = index.regions[place.record]
            assert region is not None
            region.last_used = max(region.last_used, sequence)
            region.flying -= 1
            self._flying -= 1
            return superseded

    def abandon(self, place: Place, *, lost: bool = False) -> bool:
        """The store came to nothing: its slot is free, or, ``lost``, never used again. False when that came too late.

        Late is what has been published, or what belongs to another reservation by now.
        """
        with self._lock:
            if not self._is(place, FLYING):
                return False
            self._flying -= 1
            if lost:  # its region stays as it is: a flying slot is never moved
                self._index.states[place.record] = LOST
            else:
                region = self._index.regions[place.record]
                assert region is not None
                region.flying -= 1
                self._free(place.record)
            return True

    # --- evicting and deleting --------------------------------------------------------------------------------------

    def key_of(self, place: Place) -> ObjectKey | None:
        """The key of what lies there, or None when something else does by now."""
        with self._lock:
            short = self._index.keys[place.record]
            return self._index.key(short) if short is not None and self._is(place, LIVE) else None

    def evict(self, place: Place) -> bool:
        """Remove the object if it is still there and nobody holds it; as :meth:`remove`."""
        with self._lock:
            if not self._is(place, LIVE) or place.record in self._pins:
                return False
            self._remove(place.record)
            return True

    def remove(self, place: Place) -> bool:
        """The object is no longer found; :meth:`forget` frees its slot. False when it is gone already."""
        with self._lock:
            if not self._is(place, LIVE):
                return False
            self._remove(place.record)
            return True

    def forget(self, place: Place) -> None:
        """The slot of a removed or superseded version is free, as soon as nobody holds it."""
        with self._lock:
            self._leaving -= 1
            self._unpin(place.record)

    def lose(self, place: Place) -> None:
        """A removed version's record could not be revoked for certain: never use its slot again."""
        with self._lock:
            self._leaving -= 1
            self._index.states[place.record] = LOST  # its pin stays, so nothing of its region is moved

    def excess(self) -> list[Place]:
        """What to evict because objects take more than the limit."""
        with self._lock:
            return self._places(self._eviction.oldest_of_all(1)) if self.used_bytes > self.max_bytes else []

    # --- space that holds nothing -----------------------------------------------------------------------------------

    def idle_regions(self) -> set[RegionShape]:
        """Regions without an object."""
        with self._lock:
            return {region.shape for region in self._space.idle()}

    def detach(self, shapes: set[RegionShape]) -> list[RegionShape]:
        """Take those of ``shapes`` that are still empty away; each is nobody's until :meth:`put_back`."""
        with self._lock:
            return [self._space.detach(region) for region in self._space.idle() if region.shape in shapes]

    def put_back(self, shape: RegionShape) -> None:
        """Pages that were detached are free for any class."""
        with self._lock:
            self._space.put_back(shape)

    # --- recovery ---------------------------------------------------------------------------------------------------

    def adopt(self, found: Iterable[tuple[int, Record]], bound: int) -> list[int]:
        """Take over what recovery reads: numbers below ``bound`` and records, in any order. Once, at open.

        Returns the numbers of records that are outdated or contradict a newer one; they must be revoked.
        """
        with self._lock:
            refused = adopt(self._index, self._space, found, bound)
            self._taken_pages = self._space.used_pages
            self._clock = max(self._index.used_at, default=0)
        return refused

    # --- under the lock ---------------------------------------------------------------------------------------------

    def _is(self, place: Place, state: int) -> bool:
        return self._index.states[place.record] == state and self._index.generations[place.record] == place.generation

    def _place(self, record: int) -> Place:
        index = self._index
        region = index.regions[record]
        assert region is not None
        return Place(record, index.generations[record], region.page_of(index.slots[record]), index.sizes[record])

    def _remove(self, record: int) -> None:
        self._pin(record)  # until it is forgotten
        self._index.remove(record)
        self._leaving += 1

    def _lease_again(self, short: bytes, record: int) -> None:
        held = self._leases[short]
        before = held % _HOLDER
        if before != record:  # the object was replaced since: the newer one is as good or better
            self._pin(record)
            self._unpin(before)
        self._leases[short] = held - before + record + _HOLDER

    def _use(self, record: int) -> None:
        self._uses.append(record)
        self._limit_uses()

    def _limit_uses(self) -> None:
        """Where nothing is ever stored nothing must go, and the oldest uses may be forgotten."""
        if len(self._uses) > _MAX_USES:
            del self._uses[: _MAX_USES // 2]

    def _places(self, records: Iterable[int]) -> list[Place]:
        return [self._place(record) for record in records]

    def _pin(self, record: int) -> None:
        self._pins[record] = self._pins.get(record, 0) + 1

    def _unpin(self, record: int) -> None:
        holders = self._pins[record] - 1
        if holders:
            self._pins[record] = holders
            return
        del self._pins[record]
        if self._index.states[record] == DYING:
            self._free(record)

    def _free(self, record: int) -> None:
        region = self._index.regions[record]
        assert region is not None
        assert self._index.states[record] != FREE
        self._space.give(region, self._index.slots[record])
        self._taken_pages -= region.shape.slot_pages
        self._index.put_back(record)
