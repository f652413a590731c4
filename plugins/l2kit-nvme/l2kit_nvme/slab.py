"""One slab, in plain blocking calls: what the adapter runs in its threads. It orders what reaches the medium.

- Store: payload into a free slot; flush; the record; flush. Only then is an older version's record revoked, and its
  slot free. The flushes are left out with ``durability=none``.
- Delete and evict: the record is revoked; flush; then the slot is free. So no record ever points at a slot in use by
  another, at whatever instant the process is killed, or (``durability=data``) the power lost.
- What happens to one key's records is serialised by one of a few locks, from the commit of a version to the revocation
  of the one before it: no older version can come back after a newer one was deleted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from l2kit.errors import CapacityError
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit_nvme.catalog import Catalog, Place
from l2kit_nvme.config import NvmeConfig
from l2kit_nvme.geometry import BOUND_STEP, PAGE_BYTES, slot_pages
from l2kit_nvme.medium import Medium
from l2kit_nvme.opening import open_medium
from l2kit_nvme.records import REVOKED, RegionShape, encode
from l2kit_nvme.recovery import recover
from l2kit_nvme.transfers import Transfer

_EVENTS: Final = ("evicted", "evicted_bytes", "damaged_records", "outdated_records", "lost_slots", "trimmed_bytes")
_KEY_LOCKS: Final = 256
#: When room must be made, so many objects go at once, and share a system call and a flush; never more than a small part
#: of what is there.
_EVICT_BATCH: Final = 16
_EVICT_PART: Final = 64


class Slab:
    """Every method blocks; all are thread-safe between :meth:`open` and :meth:`close`.

    Shared between threads: the catalog and the medium, with locks of their own; ``events``, under ``_events_lock``; the
    records of a key, under that key's lock; the bound of the table, under ``_bound_lock``. Key locks come first.

    Attributes:
        events: what happened, by name: ``evicted``, ``evicted_bytes``, ``damaged_records`` and ``outdated_records`` (at
            open), ``lost_slots`` (not used again before the next open, for the device failed), ``trimmed_bytes``.
    """

    def __init__(self, config: NvmeConfig, medium: Medium, checkpoint: Callable[[], None]) -> None:
        """Does no I/O. ``checkpoint`` is called between pieces of long work and may raise to stop it."""
        self.medium: Final = medium
        self.events: Final = Counter(dict.fromkeys(_EVENTS, 0))
        self.catalog: Catalog
        self._config: Final = config
        self._checkpoint: Final = checkpoint
        self._flushes: Final = config.durability == "data"
        self._events_lock: Final = threading.Lock()
        self._bound_lock: Final = threading.Lock()
        self._key_locks: Final = [threading.Lock() for _ in range(_KEY_LOCKS)]

    def open(self) -> None:
        """Open or make the slab, rebuild the catalog from the table, evict down to the limit.

        Raises:
            ConfigError: it does not fit the options, or something else lies there.
            TransientBackendError: somebody else has it open.
            OSError: it cannot be opened or read; nothing stays open.
        """
        try:
            open_medium(self.medium, self._config, self._checkpoint)
            geometry = self.medium.geometry
            self.catalog = Catalog(geometry.data_pages, geometry.records, self._config.max_bytes)
            found = recover(self.medium, self.catalog, self._checkpoint)
            self._count("damaged_records", found.damaged)
            self._count("outdated_records", found.outdated)
            while victims := self.catalog.excess():
                self._checkpoint()
                self.evict(victims)
        except BaseException:
            self.medium.close()
            raise

    def close(self) -> None:
        """Flush records, where payloads are on the device already, and give the members up. Harmless when repeated."""
        try:
            if self.medium.direct:
                self.medium.flush()
        finally:
            self.medium.close()

    # --- storing ----------------------------------------------------------------------------------------------------

    def reserve(self, size: int) -> Place | StoreStatus | None:
        """Make room for ``size`` bytes, evicting what must go; to be published or abandoned.

        Returns:
            A place; DROPPED when all that could make room is held; None when stores under way may make room yet.

        Raises:
            CapacityError: the slab, or its limit, can never hold an object of this size.
            OSError: nothing could be evicted.
        """
        taken = slot_pages(size) * PAGE_BYTES
        if taken > self.catalog.max_bytes:
            raise CapacityError(
                f"an object of {size} bytes takes {taken}, and the slab holds {self.catalog.max_bytes} in all; "
                "make it larger (size_bytes), or raise max_bytes"
            )
        while True:
            found = self.catalog.reserve(size, max(1, min(_EVICT_BATCH, self.catalog.objects // _EVICT_PART)))
            if isinstance(found, Place):
                return found
            if not found.victims:
                return None if found.busy else StoreStatus.DROPPED
            self._checkpoint()
            self.evict(found.victims)

    def plan_write(self, places: Sequence[Place], data: Sequence[Sequence[memoryview]]) -> list[Transfer]:
        """The transfers that write objects into the slots reserved for them."""
        return self.medium.plan([(place.page, views) for place, views in zip(places, data, strict=True)], write=True)

    def write(self, transfer: Transfer) -> None:
        """One of them."""
        self._checkpoint()
        self.medium.write(transfer)

    def commit(self, places: Sequence[Place], keys: Sequence[ObjectKey]) -> None:
        """Make objects, whose payload is written, the ones that are there; all of them or none.

        - They are found from when they are as durable as was asked for; then the versions before them are revoked.

        Raises:
            OSError: no object is there that was not before. What cannot be used again is lost until the next open.
        """
        if self._flushes:
            self.medium.flush()
        with self._locked(keys):
            records = [self.catalog.record_for(place, key) for place, key in zip(places, keys, strict=True)]
            seed = self.medium.seed
            try:
                self._raise_bound(max(place.record for place in places))
                sectors = {place.record: encode(record, seed) for place, record in zip(places, records, strict=True)}
                self.medium.write_records(sectors)
                if self._flushes:
                    self.medium.flush()
            except OSError:
                self._undo(places)
                raise
            before = [
                superseded
                for place, key, record in zip(places, keys, records, strict=True)
                if (superseded := self.catalog.publish(place, key, record.sequence)) is not None
            ]
            with suppress(OSError):  # counted as lost; recovery goes by the newer one
                self._revoke(before)

    def abandon(self, place: Place) -> None:
        """The store came to nothing before it was committed; harmless afterwards."""
        self.catalog.abandon(place)

    # --- loading ----------------------------------------------------------------------------------------------------

    def plan_read(self, places: Sequence[Place], into: Sequence[Sequence[memoryview]]) -> list[Transfer]:
        """The transfers that fill ``into`` from pinned places: as much as is stored, and as fits."""
        extents = [(place.page, _first(views, place.size)) for place, views in zip(places, into, strict=True)]
        return self.medium.plan([extent for extent in extents if extent[1]], write=False)

    def read(self, transfer: Transfer) -> None:
        """One of them."""
        self._checkpoint()
        self.medium.read(transfer)

    # --- deleting ---------------------------------------------------------------------------------------------------

    def delete(self, key: ObjectKey) -> bool:
        """Remove one object; False when there was none.

        Raises:
            OSError: its record could not be revoked; after this nobody knows whether it comes back at the next open.
        """
        with self._locked([key]):
            place = self.catalog.current(key)
            if place is None:
                return False
            self._revoke([place] if self.catalog.remove(place) else [])
            return True

    def evict(self, victims: Sequence[Place]) -> None:
        """Remove objects that nobody holds; one that is held, replaced or gone by now is passed over.

        Raises:
            OSError: as for :meth:`delete`.
        """
        known = [(place, key) for place in victims if (key := self.catalog.key_of(place)) is not None]
        with self._locked([key for _, key in known]):
            evicted = [place for place, _ in known if self.catalog.evict(place)]
            self._revoke(evicted)
        self._count("evicted", len(evicted))
        self._count("evicted_bytes", sum(place.size for place in evicted))

    # --- space that holds nothing -----------------------------------------------------------------------------------

    def trim(self, idle_before: set[RegionShape]) -> set[RegionShape]:
        """Discard regions that are empty now and were so in ``idle_before``; returns the other empty ones.

        Raises:
            OSError: the device takes no discards.
        """
        for shape in self.catalog.detach(idle_before):
            try:
                self._checkpoint()
                self.medium.discard(shape.first_page, shape.pages)
            finally:
                self.catalog.put_back(shape)
            self._count("trimmed_bytes", shape.pages * PAGE_BYTES)
        return self.catalog.idle_regions()

    # --- records ----------------------------------------------------------------------------------------------------

    def _revoke(self, removed: Sequence[Place]) -> None:
        """Revoke the records of versions that are no longer found; then their slots are free. Their keys are locked."""
        if not removed:
            return
        try:
            self.medium.write_records(dict.fromkeys((place.record for place in removed), REVOKED))
            if self._flushes:
                self.medium.flush()
        except OSError:
            for place in removed:
                self.catalog.lose(place)
            self._count("lost_slots", len(removed))
            raise
        for place in removed:
            self.catalog.forget(place)

    def _undo(self, places: Sequence[Place]) -> None:
        """Records may have been written, or a part of them: make sure that they do not count, or lose the slots."""
        lost = False
        try:
            self.medium.write_records(dict.fromkeys((place.record for place in places), REVOKED))
            if self._flushes:
                self.medium.flush()
        except OSError:
            lost = True
            self._count("lost_slots", len(places))
        for place in places:
            self.catalog.abandon(place, lost=lost)

    def _raise_bound(self, record: int) -> None:
        if record < self.medium.bound:
            return
        with self._bound_lock:
            records = self.medium.geometry.records
            if record >= self.medium.bound:
                step = min(BOUND_STEP, records)
                self.medium.raise_bound(min(records, (record // step + 1) * step))

    @contextmanager
    def _locked(self, keys: Sequence[ObjectKey]) -> Iterator[None]:
        """Nobody else changes the records of these keys. Always in the same order, so nobody waits in a circle."""
        with ExitStack() as stack:
            for number in sorted({hash(key) % _KEY_LOCKS for key in keys}):
                stack.enter_context(self._key_locks[number])
            yield

    def _count(self, event: str, number: int) -> None:
        with self._events_lock:
            self.events[event] += number


def _first(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first ``nbytes`` of a scatter/gather list; less when it is shorter."""
    kept: list[memoryview] = []
    for view in views:
        piece = view[:nbytes]
        if len(piece):
            kept.append(piece)
            nbytes -= len(piece)
    return kept
