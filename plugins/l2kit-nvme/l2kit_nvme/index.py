"""Objects by key, in little memory, and in the order of their use. In memory only.

An object costs an entry of one dictionary, its short key, and a few machine words in arrays that are indexed by the
number of its record: about 200 bytes. The short key is the chunk hash and the number of the object's family (namespace,
shard, group, layer), so a full key can be told without reading the medium.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable
from typing import Final

from l2kit.keys import ObjectKey
from l2kit_nvme.records import Family, family_of, object_key
from l2kit_nvme.space import NONE, Region

#: What a record number stands for. FLYING: a store is under way. DYING: gone for all but those who still hold it.
#: LOST: what the medium says of it could not be made sure; it is not used again before the slab is opened anew.
FREE, FLYING, LIVE, DYING, LOST = range(5)

_FAMILY_BYTES: Final = 4


class Index:
    """What is known of each record, by its number. Not thread-safe: `Catalog` holds its lock around every call."""

    def __init__(self, capacity: int) -> None:
        """At most ``capacity`` records."""
        self.capacity: Final = capacity
        self.by_key: Final[dict[bytes, int]] = {}
        self.keys: Final[list[bytes | None]] = []
        self.regions: Final[list[Region | None]] = []
        self.slots: Final = array("I")
        self.sizes: Final = array("Q")
        self.used_at: Final = array("Q")
        self.generations: Final = array("I")
        self.states: Final = bytearray()
        #: How many objects are LIVE.
        self.objects = 0
        self._newer: Final = array("I")
        self._older: Final = array("I")
        #: Slot pages -> [least, most recently used] of the class.
        self._ends: dict[int, list[int]] = {}
        self._free: list[int] = []  # a heap: neighbouring records are written together
        self.families: Final[dict[Family, bytes]] = {}
        self._family_names: list[Family] = []

    def find(self, key: ObjectKey) -> int | None:
        """The record of the object that is there under ``key``."""
        family = self.families.get(family_of(key))
        return None if family is None else self.by_key.get(key.chunk_hash + family)

    def short(self, family: Family, chunk_hash: bytes) -> bytes:
        """The short key; injective, for its last bytes have a fixed length."""
        number = self.families.get(family)
        if number is None:
            number = self.families[family] = len(self._family_names).to_bytes(_FAMILY_BYTES, "little")
            self._family_names.append(family)
        return chunk_hash + number

    def family(self, short: bytes) -> Family:
        """The family of a short key."""
        return self._family_names[int.from_bytes(short[-_FAMILY_BYTES:], "little")]

    def key(self, short: bytes) -> ObjectKey:
        """The full key."""
        return object_key(self.family(short), short[:-_FAMILY_BYTES])

    def take(self) -> int | None:
        """A record number that is free, in a new generation; None when all are in use."""
        if self._free:
            record = heapq.heappop(self._free)
        elif len(self.keys) < self.capacity:
            record = len(self.keys)
            self.grow(record + 1)
        else:
            return None
        self.generations[record] = (self.generations[record] + 1) & NONE
        self.states[record] = FLYING
        return record

    def put_back(self, record: int) -> None:
        """A record number is free again."""
        self.states[record] = FREE
        self.keys[record] = self.regions[record] = None
        heapq.heappush(self._free, record)

    def grow(self, count: int) -> None:
        """Make room for record numbers below ``count``."""
        more = count - len(self.keys)
        if more <= 0:
            return
        nothing: list[None] = [None]
        self.keys.extend(nothing * more)
        self.regions.extend(nothing * more)
        self.states.extend(bytes(more))
        for numbers in (self.slots, self.sizes, self.used_at, self.generations):
            numbers.extend(array(numbers.typecode, [0]) * more)
        for links in (self._newer, self._older):
            links.extend(array("I", [NONE]) * more)

    def load(self, newest_first: Iterable[int]) -> None:
        """The arrays are filled and these records are there: find them by key, put them in order. Once, at open."""
        last: dict[int, int] = {}
        by_key, keys, regions, states = self.by_key, self.keys, self.regions, self.states
        older, newer = self._older, self._newer
        for record in newest_first:
            short, region = keys[record], regions[record]
            assert short is not None
            assert region is not None
            by_key[short] = record
            states[record] = LIVE
            slot_pages = region.shape.slot_pages
            before = last.get(slot_pages, NONE)
            if before == NONE:
                self._ends[slot_pages] = [record, record]
            else:
                older[before] = record
                newer[record] = before
            last[slot_pages] = record
        for slot_pages, record in last.items():
            self._ends[slot_pages][0] = record
        self.objects = len(by_key)
        self.settle()

    def settle(self) -> None:
        """Find the free numbers, after recovery has entered the others."""
        self._free = [record for record, state in enumerate(self.states) if state == FREE]

    def insert(self, record: int, short: bytes, used_at: int) -> None:
        """The object of ``record`` is there, and was used last."""
        self.by_key[short] = record
        self.keys[record] = short
        self.states[record] = LIVE
        self.used_at[record] = used_at
        self.objects += 1
        self._link(record)

    def remove(self, record: int) -> None:
        """The object is no longer there; its record is DYING."""
        short = self.keys[record]
        if short is not None and self.by_key.get(short) == record:
            del self.by_key[short]
        self._unlink(record)
        self.states[record] = DYING
        self.objects -= 1

    def touch(self, record: int, now: int) -> None:
        """The object was used; harmless when it is gone."""
        if self.states[record] != LIVE:
            return
        self.used_at[record] = now
        region = self.regions[record]
        assert region is not None
        region.last_used = now
        if self._newer[record] != NONE:
            self._unlink(record)
            self._link(record)

    def classes(self) -> list[int]:
        """The size classes, in pages of a slot, that objects are in."""
        return [pages for pages, ends in self._ends.items() if ends[0] != NONE]

    def oldest(self, slot_pages: int) -> int:
        """The least recently used record of a class, or NONE."""
        ends = self._ends.get(slot_pages)
        return NONE if ends is None else ends[0]

    def newer(self, record: int) -> int:
        """The record of the same class that was used next, or NONE."""
        return self._newer[record]

    def _link(self, record: int) -> None:
        ends = self._ends_of(record)
        last = ends[1]
        if last == NONE:
            ends[0] = ends[1] = record
        else:
            self._newer[last] = record
            self._older[record] = last
            ends[1] = record

    def _unlink(self, record: int) -> None:
        ends = self._ends_of(record)
        older, newer = self._older[record], self._newer[record]
        if older == NONE:
            ends[0] = newer
        else:
            self._newer[older] = newer
        if newer == NONE:
            ends[1] = older
        else:
            self._older[newer] = older
        self._older[record] = self._newer[record] = NONE

    def _ends_of(self, record: int) -> list[int]:
        region = self.regions[record]
        assert region is not None
        return self._ends.setdefault(region.shape.slot_pages, [NONE, NONE])
