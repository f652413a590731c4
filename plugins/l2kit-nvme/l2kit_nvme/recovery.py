"""From the table on the medium to the catalog in memory. Reads each record that was ever in use once, in order, and no
payload: what a committed record promises is checked when the object is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from l2kit_nvme.catalog import Catalog
from l2kit_nvme.geometry import PAGE_BYTES, RECORD_BYTES, UNIT_BYTES
from l2kit_nvme.medium import Medium
from l2kit_nvme.records import REVOKED, Family, Record, RegionShape, decode, is_key

_RECORDS_PER_UNIT: Final = UNIT_BYTES // RECORD_BYTES


class Found(NamedTuple):
    """``damaged``: records that were torn or make no sense. ``outdated``: whole ones that a newer one contradicts."""

    damaged: int
    outdated: int


def recover(medium: Medium, catalog: Catalog, checkpoint: Callable[[], None]) -> Found:
    """Fill an empty ``catalog``, and revoke on the medium what does not count: it must not come back later.

    ``checkpoint`` is called between pieces of the table and may raise to stop.

    Raises:
        OSError: the table cannot be read or written.
    """
    damaged: list[int] = []
    outdated = catalog.adopt(_whole_records(medium, damaged, checkpoint), medium.bound)
    if damaged or outdated:
        medium.write_records(dict.fromkeys((*damaged, *outdated), REVOKED))
        medium.flush()
    return Found(len(damaged), len(outdated))


def _whole_records(medium: Medium, damaged: list[int], checkpoint: Callable[[], None]) -> Iterator[tuple[int, Record]]:
    """Numbers and records in the order of the table; the numbers of the others go to ``damaged``."""
    data_pages = medium.geometry.data_pages
    limits: dict[RegionShape, tuple[int, int]] = {}  # slots, and bytes of each
    families: dict[Family, bool] = {}
    for first in range(0, medium.bound, _RECORDS_PER_UNIT):
        checkpoint()
        count = min(_RECORDS_PER_UNIT, medium.bound - first)
        table = memoryview(medium.read_table(first, count))
        for number, record in enumerate(decode(table, medium.seed), first):
            if record is False:
                continue
            if record is True:
                damaged.append(number)
                continue
            _, _, size, region, slot, family, chunk_hash = record
            slots, slot_bytes = limits.get(region) or limits.setdefault(region, _limits(region, data_pages))
            if family not in families:
                families[family] = is_key(family, bytes(8))
            if slot < slots and 0 < size <= slot_bytes and families[family] and 8 <= len(chunk_hash) <= 32:
                yield number, record
            else:
                damaged.append(number)


def _limits(shape: RegionShape, data_pages: int) -> tuple[int, int]:
    if not 0 < shape.slot_pages <= shape.pages or shape.first_page + shape.pages > data_pages:
        return 0, 0
    return shape.pages // shape.slot_pages, shape.slot_pages * PAGE_BYTES
