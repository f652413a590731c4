"""What lies where in a slab, and the block that says so; pure.

Each member (file or device) begins with a header: the superblock in two copies, of which the newer whole one counts,
and a note of who has the slab open. Behind the headers the members form one address space, striped in units: first the
table of records (see `records`), then the pages of data.

``newer`` is decided by a serial number, and an update overwrites the older copy only: one that is torn costs nothing.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import xxhash

from l2kit.errors import ConfigError

#: Everything in the data area begins and ends on such a boundary; O_DIRECT asks for it.
PAGE_BYTES: Final = 4096
RECORD_BYTES: Final = 512
HEADER_BYTES: Final = 1 << 20
#: Where the two copies of the superblock lie, and the note of the owner, in the header.
COPIES: Final = (0, HEADER_BYTES // 2)
OWNER_OFFSET: Final = PAGE_BYTES
#: Consecutive bytes on one member, and about the size of one system call.
UNIT_BYTES: Final = 1 << 20
#: The table is cleared, and its bound moved, in steps of this many records.
BOUND_STEP: Final = 4096
FORMAT_VERSION: Final = 1
MAGIC: Final = b"L2KSLAB\0"

_SUPERBLOCK: Final = struct.Struct("<8sII16sIIQQQQ")
_CHECKSUM_BYTES: Final = 16
_BYTES_PER_OBJECT: Final = 32 << 10
_MIN_OBJECTS: Final = 64


class Geometry(NamedTuple):
    """The fixed properties of a slab: ``members`` of ``member_bytes`` each, with room for ``records`` records."""

    members: int
    member_bytes: int
    records: int

    @property
    def table_bytes(self) -> int:
        """Bytes of the address space before the data."""
        return -(-self.records * RECORD_BYTES // UNIT_BYTES) * UNIT_BYTES

    @property
    def data_pages(self) -> int:
        """Pages of data."""
        return (self._striped_bytes - self.table_bytes) // PAGE_BYTES

    @property
    def _striped_bytes(self) -> int:
        return (self.member_bytes - HEADER_BYTES) // UNIT_BYTES * UNIT_BYTES * self.members

    def locate(self, address: int) -> tuple[int, int]:
        """The member and the offset in it of a byte of the address space."""
        unit, rest = divmod(address, UNIT_BYTES)
        row, member = divmod(unit, self.members)
        return member, HEADER_BYTES + row * UNIT_BYTES + rest

    def data_address(self, page: int) -> int:
        """Where a page of data lies in the address space."""
        return self.table_bytes + page * PAGE_BYTES


class Superblock(NamedTuple):
    """What one member says of itself and of the slab.

    ``bound``: records below it may be in use, and no other has ever been; only the first member's counts.
    """

    slab_id: bytes
    member: int
    geometry: Geometry
    bound: int
    serial: int

    @property
    def copy_offset(self) -> int:
        """Where this superblock is written: over the older copy."""
        return COPIES[self.serial % len(COPIES)]

    @property
    def seed(self) -> int:
        """Goes into every record's checksum, so that records of a former slab are none of this one."""
        return int.from_bytes(self.slab_id[:8], "little")

    def encode(self) -> bytes:
        """One page."""
        geometry = self.geometry
        body = _SUPERBLOCK.pack(
            MAGIC,
            FORMAT_VERSION,
            UNIT_BYTES,
            self.slab_id,
            self.member,
            geometry.members,
            geometry.member_bytes,
            geometry.records,
            self.bound,
            self.serial,
        )
        return (body + xxhash.xxh3_128_digest(body)).ljust(PAGE_BYTES, b"\0")


def plan(smallest_bytes: int, members: int, max_objects: int | None) -> Geometry:
    """The geometry of a new slab whose smallest member has ``smallest_bytes``.

    Raises:
        ConfigError: there is no room for a table and one unit of data.
    """
    data = max(0, smallest_bytes - HEADER_BYTES) * members
    records = max_objects or max(_MIN_OBJECTS, data // _BYTES_PER_OBJECT)
    geometry = Geometry(members, smallest_bytes // PAGE_BYTES * PAGE_BYTES, records)
    if geometry.data_pages * PAGE_BYTES < UNIT_BYTES:
        least = HEADER_BYTES + -(-(geometry.table_bytes + UNIT_BYTES) // (members * UNIT_BYTES)) * UNIT_BYTES
        raise ConfigError(
            f"size_bytes: {smallest_bytes} bytes for each of {members} leave no room for data beside a table of "
            f"{records} objects; at least {least} are needed"
        )
    return geometry


def parse(block: bytes) -> Superblock | None:
    """The superblock in one copy, or None when it is none or torn.

    Raises:
        ConfigError: it is whole and of a format that is not readable here.
    """
    fields = _SUPERBLOCK.unpack_from(block)
    checksum = block[_SUPERBLOCK.size : _SUPERBLOCK.size + _CHECKSUM_BYTES]
    if fields[0] != MAGIC or xxhash.xxh3_128_digest(block[: _SUPERBLOCK.size]) != checksum:
        return None
    _, version, unit, slab_id, member, members, member_bytes, records, bound, serial = fields
    if version != FORMAT_VERSION or unit != UNIT_BYTES:
        raise ConfigError(
            f"path: the slab has format {version} with units of {unit} bytes, which is not readable here (known: "
            f"{FORMAT_VERSION} with {UNIT_BYTES}); use the version that made it, or make it anew with reset=true"
        )
    return Superblock(slab_id, member, Geometry(members, member_bytes, records), bound, serial)


def newest(copies: list[bytes]) -> Superblock | None:
    """The newer of the whole copies."""
    found = [superblock for superblock in map(parse, copies) if superblock is not None]
    return max(found, key=lambda superblock: superblock.serial, default=None)


def slot_pages(nbytes: int) -> int:
    """Pages of the slot that an object of ``nbytes`` takes: its size class.

    A page for the envelope, and the payload rounded up to a sixteenth of its power of two: payloads of 2^n bytes, and
    all up to 64 KiB, fit exactly, and no object wastes more than a sixteenth.
    """
    pages = max(1, -(-nbytes // PAGE_BYTES) - 1)
    step = 1 << max(0, (pages - 1).bit_length() - 5)
    return 1 + -(-pages // step) * step
