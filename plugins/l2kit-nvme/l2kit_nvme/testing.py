"""A slab as its files show it, read and written around the adapter. For tests: it asks nobody whether it may."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from l2kit.keys import ObjectKey
from l2kit_nvme.geometry import COPIES, PAGE_BYTES, RECORD_BYTES, UNIT_BYTES, Superblock, newest
from l2kit_nvme.records import Record, decode, object_key


class SlabFiles:
    """The table and the payloads of a slab, whoever has it open."""

    def __init__(self, paths: Sequence[str]) -> None:
        """``paths`` are all its files and devices, in any order.

        Raises:
            ValueError: one of them is no part of a slab.
        """
        found: list[tuple[Superblock, str]] = []
        for path in paths:
            superblock = newest([_read(path, offset, PAGE_BYTES) for offset in COPIES])
            if superblock is None:
                raise ValueError(f"{path} is no part of a slab")
            found.append((superblock, path))
        found.sort(key=lambda pair: pair[0].member)
        self.superblock = found[0][0]
        self.paths = [path for _, path in found]

    def records(self) -> list[Record]:
        """Every record that is committed."""
        per_unit = UNIT_BYTES // RECORD_BYTES
        found: list[Record] = []
        for first in range(0, self.superblock.bound, per_unit):
            count = min(per_unit, self.superblock.bound - first)
            member, offset = self.superblock.geometry.locate(first * RECORD_BYTES)
            table = _read(self.paths[member], offset, count * RECORD_BYTES)
            found += [one for one in decode(memoryview(table), self.superblock.seed) if isinstance(one, Record)]
        return found

    @property
    def used_bytes(self) -> int:
        """What the slots of all records take."""
        return sum(record.region.slot_pages * PAGE_BYTES for record in self.records())

    def record(self, key: ObjectKey) -> Record | None:
        """The record that counts for ``key``."""
        found = [record for record in self.records() if object_key(record.family, record.chunk_hash) == key]
        return max(found, key=lambda record: record.sequence, default=None)

    def read(self, record: Record) -> bytes:
        """The stored bytes."""
        return b"".join(_read(path, offset, length) for path, offset, length in self._pieces(record))

    def write(self, record: Record, data: bytes) -> None:
        """Other bytes in their place."""
        position = 0
        for path, offset, length in self._pieces(record):
            with Path(path).open("r+b", buffering=0) as file:
                file.seek(offset)
                file.write(data[position : position + length])
            position += length

    def _pieces(self, record: Record) -> list[tuple[str, int, int]]:
        geometry = self.superblock.geometry
        address = geometry.data_address(record.region.first_page + record.slot * record.region.slot_pages)
        end = address + record.size
        pieces: list[tuple[str, int, int]] = []
        while address < end:
            length = min(end - address, UNIT_BYTES - address % UNIT_BYTES)
            member, offset = geometry.locate(address)
            pieces.append((self.paths[member], offset, length))
            address += length
        return pieces


def _read(path: str, offset: int, length: int) -> bytes:
    with Path(path).open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(length)
