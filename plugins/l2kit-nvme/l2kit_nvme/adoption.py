"""From the records of a table to `Index` and `Space`, in time and memory fit for millions; no I/O."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from l2kit_nvme.index import Index
from l2kit_nvme.records import Record, RegionShape
from l2kit_nvme.space import NONE, Space


def adopt(index: Index, space: Space, found: Iterable[tuple[int, Record]], bound: int) -> list[int]:
    """Fill both, which are empty, with numbers below ``bound`` and records, in any order.

    - Of two records that contradict each other (the same key, the same slot, regions that overlap) the one with the
      higher sequence number is true.
    - Returns the numbers of the others.
    """
    numbers = array("I")
    shapes: dict[RegionShape, int] = {}
    shape_of = array("I", bytes(4 * bound))
    newest: list[int] = []  # by shape: the highest sequence number
    index.grow(bound)
    keys, slots, used_at = index.keys, index.slots, index.used_at
    for number, (sequence, generation, size, shape, slot, family, chunk_hash) in found:
        shape_number = shapes.get(shape)
        if shape_number is None:
            shape_number = shapes[shape] = len(newest)
            newest.append(0)
        newest[shape_number] = max(newest[shape_number], sequence)
        numbers.append(number)
        shape_of[number] = shape_number
        keys[number] = index.short(family, chunk_hash)
        slots[number] = slot
        used_at[number] = sequence
        index.sizes[number] = size
        index.generations[number] = generation
    # A region was made when all those that it overlaps were empty, so its youngest record tells which one is true.
    trusted = sorted(shapes, key=lambda shape: -newest[shapes[shape]])
    adopted = dict(zip(trusted, space.adopt(trusted), strict=True))
    regions = [adopted[shape] for shape in shapes]
    known: set[bytes] = set()
    kept, refused = array("I"), []
    for number in sorted(numbers, key=used_at.__getitem__, reverse=True):
        region, short = regions[shape_of[number]], keys[number]
        assert short is not None
        if region is None or region.records[slots[number]] != NONE or short in known:
            refused.append(number)
            keys[number] = None
            continue
        known.add(short)
        region.records[slots[number]] = number
        region.used += 1
        index.regions[number] = region
        kept.append(number)
    for region, sequence in zip(regions, newest, strict=True):
        if region is not None:
            region.last_used = sequence
    space.settle()
    index.load(kept)
    return refused
