"""Which pages of the data area are free: regions of equal slots, carved out of it on demand. In memory only.

A region is a run of slots of one size. A size class gets another region when it has no free slot left, and an empty
region's pages serve any class again. Nothing of this is written down as such: each record names its region, and
recovery makes the same regions of them.
"""

from __future__ import annotations

import bisect
import heapq
from array import array
from collections.abc import Container, Iterable
from typing import Final, NamedTuple

from l2kit_nvme.records import RegionShape

#: No record.
NONE: Final = (1 << 32) - 1


class Region:
    """A run of equal slots. ``records`` says whose each slot is; ``flying`` counts those that are being written."""

    __slots__ = ("flying", "free", "fresh", "last_used", "records", "shape", "slots", "used")

    def __init__(self, shape: RegionShape) -> None:
        self.shape: Final = shape
        self.slots: Final = shape.pages // shape.slot_pages
        self.records: Final = array("I", [NONE]) * self.slots
        #: Slots that were used and are free, a heap: the lowest first, so that what is stored together lies together.
        self.free: list[int] = []
        self.fresh = 0
        self.used = 0
        self.flying = 0
        self.last_used = 0

    def page_of(self, slot: int) -> int:
        """The first page of a slot."""
        return self.shape.first_page + slot * self.shape.slot_pages


class Window(NamedTuple):
    """Neighbouring regions that together would make enough room; ``last_used`` is when any of them was, 0 for empty."""

    regions: list[Region]
    last_used: int


class Space:
    """Free and used pages of a slab. Not thread-safe: `Catalog` holds its lock around every call."""

    def __init__(self, pages: int, region_pages: int) -> None:
        """``pages`` in all; a new region has about ``region_pages``."""
        self.pages: Final = pages
        self._region_pages: Final = region_pages
        self._runs: list[tuple[int, int]] = [(0, pages)]  # free (first page, pages), by first page
        self._regions: dict[int, Region] = {}  # by first page
        self._open: dict[int, list[Region]] = {}  # slot pages -> regions with a free slot
        self._classes: dict[int, int] = {}  # slot pages -> how many regions

    def take(self, slot_pages: int) -> tuple[Region, int] | None:
        """Take a slot, or return None when there is none and no room for a region."""
        regions = self._open.setdefault(slot_pages, [])
        if not regions:
            shape = self._carve(slot_pages)
            if shape is None:
                return None
            self._add(Region(shape))
        region = regions[-1]
        if region.free:
            slot = heapq.heappop(region.free)
        else:
            slot = region.fresh
            region.fresh += 1
        region.used += 1
        if region.used == region.slots:
            regions.pop()
        return region, slot

    def give(self, region: Region, slot: int) -> None:
        """Give a slot back."""
        if region.used == region.slots:
            self._open[region.shape.slot_pages].append(region)
        region.used -= 1
        region.records[slot] = NONE
        heapq.heappush(region.free, slot)

    def window(self, slot_pages: int, held: Container[int]) -> Window | None:
        """The neighbouring regions of other classes that are best given up for one slot; the least recently used ones.

        Regions of the same class are not among them, nor those that are written to, nor those whose ``id`` is in
        ``held``: something in them cannot be evicted now.
        """
        if len(self._classes) == (slot_pages in self._classes):
            return None
        spans: list[tuple[int, int, Region | None]] = [(*run, None) for run in self._runs]
        spans += [(region.shape.first_page, region.shape.pages, region) for region in self._regions.values()]
        spans.sort(key=lambda span: span[0])
        best: Window | None = None
        for start in range(len(spans)):
            regions: list[Region] = []
            pages = 0
            last_used = 0
            for _, length, region in spans[start:]:
                if region is not None:
                    if region.flying or id(region) in held or region.shape.slot_pages == slot_pages:
                        break
                    regions.append(region)
                    last_used = max(last_used, region.last_used if region.used else 0)
                pages += length
                if pages >= slot_pages:
                    if regions and (best is None or last_used < best.last_used):
                        best = Window(regions, last_used)
                    break
        return best

    @property
    def used_pages(self) -> int:
        """Pages of all slots that are taken; counted."""
        return sum(region.used * region.shape.slot_pages for region in self._regions.values())

    def idle(self) -> list[Region]:
        """Regions without a used slot."""
        return [region for region in self._regions.values() if not region.used]

    def detach(self, region: Region) -> RegionShape:
        """Take an empty region away; its pages are nobody's until :meth:`put_back`."""
        shape = region.shape
        self._open[shape.slot_pages].remove(region)
        del self._regions[shape.first_page]
        self._classes[shape.slot_pages] -= 1
        if not self._classes[shape.slot_pages]:
            del self._classes[shape.slot_pages]
        return shape

    def put_back(self, shape: RegionShape) -> None:
        """The pages of a detached region are free for any class."""
        first, pages = shape.first_page, shape.pages
        index = bisect.bisect(self._runs, (first, 0))
        if index < len(self._runs) and self._runs[index][0] == first + pages:
            pages += self._runs.pop(index)[1]
        if index and sum(self._runs[index - 1]) == first:
            index -= 1
            before = self._runs.pop(index)
            first, pages = before[0], before[1] + pages
        self._runs.insert(index, (first, pages))

    def adopt(self, shapes: Iterable[RegionShape]) -> list[Region | None]:
        """Make the regions that recovery found, most trustworthy first; None for one that overlaps those before it.

        To be called once, on a fresh space; :meth:`settle` ends it.
        """
        taken: list[tuple[int, int]] = []
        regions: list[Region | None] = []
        for shape in shapes:
            end = shape.first_page + shape.pages
            index = bisect.bisect(taken, (shape.first_page, 0))
            before = taken[index - 1][1] if index else 0
            after = taken[index][0] if index < len(taken) else self.pages
            if before > shape.first_page or end > after or not 0 < shape.slot_pages <= shape.pages:
                regions.append(None)
                continue
            taken.insert(index, (shape.first_page, end))
            region = Region(shape)
            self._regions[shape.first_page] = region
            regions.append(region)
        return regions

    def settle(self) -> None:
        """Find what is free, after every slot in use was entered in its region."""
        regions = sorted(self._regions.values(), key=lambda region: region.shape.first_page)
        self._regions.clear()
        self._runs.clear()
        end = 0
        for region in regions:
            if not region.used:
                continue
            shape = region.shape
            region.fresh = max(slot for slot, record in enumerate(region.records) if record != NONE) + 1
            region.free = [slot for slot in range(region.fresh) if region.records[slot] == NONE]
            if shape.first_page > end:
                self._runs.append((end, shape.first_page - end))
            end = shape.first_page + shape.pages
            self._add(region)
        if end < self.pages:
            self._runs.append((end, self.pages - end))

    def _add(self, region: Region) -> None:
        slot_pages = region.shape.slot_pages
        self._regions[region.shape.first_page] = region
        self._classes[slot_pages] = self._classes.get(slot_pages, 0) + 1
        regions = self._open.setdefault(slot_pages, [])
        if region.used < region.slots:
            regions.append(region)

    def _carve(self, slot_pages: int) -> RegionShape | None:
        wanted = max(1, self._region_pages // slot_pages) * slot_pages
        largest = max((pages for _, pages in self._runs), default=0)
        for index, (first, pages) in enumerate(self._runs):
            if pages >= wanted or pages == largest >= slot_pages:
                taken = min(wanted, pages // slot_pages * slot_pages)
                self._runs[index : index + 1] = [(first + taken, pages - taken)] if pages > taken else []
                return RegionShape(first, taken, slot_pages)
        return None
