"""The members of a slab as one address space, and what has been written to it so far."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from l2kit_nvme.aligned import ZEROS, AlignedPool, address_of
from l2kit_nvme.geometry import HEADER_BYTES, PAGE_BYTES, RECORD_BYTES, UNIT_BYTES, Geometry, Superblock
from l2kit_nvme.member import Member
from l2kit_nvme.transfers import Extent, Transfer, runs, transfers

_log = logging.getLogger(__name__)


class Medium:
    """Reads and writes by record number and by page. Thread-safe: positioned system calls, and one lock for flushes.

    Attributes:
        members: the files and devices, in the slab's order once it is opened.
        geometry: what lies where; set when the slab is opened.
        direct_errno: why O_DIRECT is not in effect although it was asked for.
        written_bytes: all bytes written to the members since they were opened, rounding, records and all.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        """Does no I/O."""
        self.members = [Member(path) for path in paths]
        self.geometry: Geometry = Geometry(len(paths), 0, 0)
        self.direct_errno: int | None = None
        self.written_bytes = 0
        self._superblocks: list[Superblock] = []
        self._aligned: Final = AlignedPool()
        self._flushing: Final = threading.Condition()
        self._flush_running = False
        self._flushes_begun = 0
        self._flushes_ended = 0
        self._flush_errors: dict[int, OSError] = {}
        self._count_lock: Final = threading.Lock()

    # --- the superblock ---------------------------------------------------------------------------------------------

    @property
    def seed(self) -> int:
        """What the checksums of this slab's records begin with."""
        return self._superblocks[0].seed

    @property
    def bound(self) -> int:
        """Records from this number on have never been used."""
        return self._superblocks[0].bound

    def format(self, geometry: Geometry) -> None:
        """Make an empty slab; until the first member's superblock is written, the last step, there is none."""
        self.geometry = geometry
        slab_id = os.urandom(16)
        self._superblocks = [Superblock(slab_id, member, geometry, 0, 0) for member in range(geometry.members)]
        for member in self.members:
            member.clear(0, HEADER_BYTES)
        self.flush()
        for superblock in reversed(self._superblocks):
            self._write_superblock(superblock)
        self.flush()

    def use(self, superblocks: Sequence[Superblock]) -> None:
        """Take over an existing slab; ``superblocks`` in the order of the members."""
        self._superblocks = list(superblocks)
        self.geometry = superblocks[0].geometry

    def raise_bound(self, bound: int) -> None:
        """Clear the table up to record ``bound`` and say that it may be in use; both are on the medium then."""
        per_unit = UNIT_BYTES // RECORD_BYTES
        record = self.bound
        while record < bound:
            count = min(bound, (record // per_unit + 1) * per_unit) - record
            member, offset = self.geometry.locate(record * RECORD_BYTES)
            self.write_sector(member, offset, bytes(count * RECORD_BYTES))
            record += count
        self.flush()
        before = self._superblocks[0]
        self._superblocks[0] = before._replace(bound=bound, serial=before.serial + 1)
        self._write_superblock(self._superblocks[0])
        self.flush()

    # --- the table --------------------------------------------------------------------------------------------------

    def read_table(self, first: int, count: int) -> bytes:
        """The sectors of consecutive records, at most those of one unit."""
        member, offset = self.geometry.locate(first * RECORD_BYTES)
        return self.members[member].read_cached(offset, count * RECORD_BYTES)

    def write_records(self, sectors: Mapping[int, bytes]) -> None:
        """Records by number, neighbours together: from now on they survive this process, after :meth:`flush` more."""
        per_unit = UNIT_BYTES // RECORD_BYTES
        together: list[bytes] = []
        first = -1
        for record in sorted(sectors):
            if together and (record != first + len(together) or record % per_unit == 0):
                self._write_records(first, together)
                together = []
            if not together:
                first = record
            together.append(sectors[record])
        if together:
            self._write_records(first, together)

    # --- payloads ---------------------------------------------------------------------------------------------------

    @property
    def direct(self) -> bool:
        """Whether payloads go around the page cache."""
        return all(member.direct for member in self.members)

    def plan(self, extents: Sequence[tuple[int, Sequence[memoryview]]], *, write: bool) -> list[Transfer]:
        """The transfers that move ``extents``: each a page of the data area, and memory for what begins there."""
        padding = ZEROS if write else memoryview(bytearray(PAGE_BYTES))
        geometry = self.geometry
        whole = [Extent(geometry.data_address(page), views) for page, views in extents]
        return transfers(whole, geometry, padding)

    def write(self, transfer: Transfer) -> None:
        """Write one transfer."""
        self._move(transfer, write=True)
        self._count(transfer.nbytes)

    def read(self, transfer: Transfer) -> None:
        """Read one transfer."""
        self._move(transfer, write=False)

    def probe_direct(self) -> None:
        """Turn O_DIRECT on where it works, for all members or for none, and warn where it does not."""
        for member in self.members:
            member.use_direct()
        codes = [member.direct_error for member in self.members if not member.direct]
        if not codes:
            try:
                for number in range(len(self.members)):
                    self._move(Transfer(number, 0, [memoryview(bytearray(PAGE_BYTES))], PAGE_BYTES), write=False)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                codes = [error.errno]
        if codes:
            for member in self.members:
                member.refuse_direct(codes[0])
            self.direct_errno = codes[0]
            _log.warning(
                "%s: O_DIRECT is refused (%s); payloads go through the page cache",
                ", ".join(member.path for member in self.members),
                errno.errorcode.get(codes[0] or 0, codes[0]),
            )

    def discard(self, first_page: int, pages: int) -> None:
        """Tell the devices that these pages are of no use.

        Raises:
            OSError: one does not take this.
        """
        address = self.geometry.data_address(first_page)
        end = address + pages * PAGE_BYTES
        while address < end:
            length = end - address
            if len(self.members) > 1:
                length = min(length, UNIT_BYTES - address % UNIT_BYTES)
            member, offset = self.geometry.locate(address)
            self.members[member].discard(offset, length)
            address += length

    # --- all of it --------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """What was written before this call is on the medium when it returns. Calls at the same time share one flush.

        Raises:
            OSError: nobody knows what is on the medium.
        """
        with self._flushing:
            wanted = self._flushes_begun + 1
            while self._flushes_ended < wanted:
                if self._flush_running:
                    self._flushing.wait()
                    continue
                self._flushes_begun += 1
                number = self._flushes_begun
                self._flush_running = True
                self._flushing.release()
                failure: OSError | None = None
                try:
                    self.flush_members()
                except OSError as error:
                    failure = error
                finally:
                    self._flushing.acquire()
                    self._flush_running = False
                    self._flushes_ended = number
                    if failure is not None:
                        self._flush_errors[number] = failure
                    self._flush_errors.pop(number - 8, None)
                    self._flushing.notify_all()
            error_then = self._flush_errors.get(wanted)
        if error_then is not None:
            raise OSError(error_then.errno, error_then.strerror, error_then.filename)

    def close(self) -> None:
        """Give the members up; harmless when repeated."""
        for member in self.members:
            member.close()
        self._aligned.clear()

    # --- the three things that change the medium; a test can stand here and see everything ----------------------------

    def write_sector(self, member: int, offset: int, sector: bytes) -> None:
        """Records or a superblock."""
        self.members[member].write_cached(offset, sector)

    def write_vector(self, member: int, offset: int, vector: Sequence[memoryview]) -> None:
        """Payload."""
        self.members[member].write(offset, vector)

    def flush_members(self) -> None:
        """Flush each member."""
        for member in self.members:
            member.flush()

    def _write_records(self, first: int, sectors: list[bytes]) -> None:
        member, offset = self.geometry.locate(first * RECORD_BYTES)
        data = b"".join(sectors)
        self._count(len(data))
        if not self.members[member].direct_sectors:
            self.write_sector(member, offset, data)
            return
        buffer = self._aligned.take()
        try:
            self.write_vector(member, offset, [buffer.copy(data)])
        finally:
            self._aligned.give_back(buffer)

    def _write_superblock(self, superblock: Superblock) -> None:
        self.write_sector(superblock.member, superblock.copy_offset, superblock.encode())
        self._count(PAGE_BYTES)

    def _move(self, transfer: Transfer, *, write: bool) -> None:
        if not self.members[transfer.member].direct:
            if write:
                self.write_vector(transfer.member, transfer.offset, transfer.views)
            else:
                self.members[transfer.member].read(transfer.offset, transfer.views)
            return
        parts = runs(transfer.views, address_of)
        buffer = self._aligned.take()
        try:
            vector = buffer.vector(parts)
            if write:
                buffer.fill(parts)
                self.write_vector(transfer.member, transfer.offset, vector)
            else:
                self.members[transfer.member].read(transfer.offset, vector)
                buffer.drain(parts)
        finally:
            self._aligned.give_back(buffer)

    def _count(self, nbytes: int) -> None:
        with self._count_lock:
            self.written_bytes += nbytes
