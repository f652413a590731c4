"""What must go when there is no room. It only names records; `Slab` revokes them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from l2kit_nvme.index import Index
from l2kit_nvme.space import NONE, Space

#: Looking for something older in other classes costs some milliseconds; after one look in vain, so many are left out.
_COMPARE_EVERY: Final = 32


class Eviction:
    """Least recently used first, never what is held. Not thread-safe: `Catalog` holds its lock around every call."""

    def __init__(self, index: Index, space: Space, pins: Collection[int]) -> None:
        """Choose from ``index``; what is in ``pins`` is held."""
        self._index: Final = index
        self._space: Final = space
        self._pins: Final = pins
        self._patience = 0

    def oldest_of_all(self, count: int) -> list[int]:
        """The least recently used records of all classes."""
        candidates = [record for pages in self._index.classes() for record in self._oldest(pages, count)]
        candidates.sort(key=self._index.used_at.__getitem__)
        return candidates[:count]

    def victims(self, slot_pages: int, count: int) -> list[int] | None:
        """What to evict for a slot of this class; None when empty regions of others have been given up for it.

        The oldest ``count`` of the class itself; or all that is in neighbouring regions of other classes, when there is
        nothing of the class, or nothing of it was used so long ago as all of that.
        """
        own = self._oldest(slot_pages, count)
        if own:
            if self._patience:
                self._patience -= 1
                return own
            used_at = self._index.used_at
            if all(used_at[self._index.oldest(pages)] >= used_at[own[0]] for pages in self._index.classes()):
                return own
        held = {id(self._index.regions[record]) for record in self._pins}
        window = self._space.window(slot_pages, held)
        if window is None or (own and window.last_used >= self._index.used_at[own[0]]):
            self._patience = _COMPARE_EVERY
            return own
        if any(region.used for region in window.regions):
            return [record for region in window.regions for record in region.records if record != NONE]
        for region in window.regions:
            self._space.put_back(self._space.detach(region))
        return None

    def _oldest(self, slot_pages: int, count: int) -> list[int]:
        """The least recently used records of a class that nobody holds."""
        found: list[int] = []
        record = self._index.oldest(slot_pages)
        while record != NONE and len(found) < count:
            if record not in self._pins:
                found.append(record)
            record = self._index.newer(record)
        return found
