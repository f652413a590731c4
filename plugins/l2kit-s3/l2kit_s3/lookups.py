"""Finding out which of many objects are there, in few requests.

A listing says it exactly for all objects of a small namespace. Where a namespace is too large for that, each name is
asked (``exact``), or only as many as it takes to find the end of a prefix (``prefix``).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from l2kit_s3.config import ObjectStoreConfig
from l2kit_s3.objects import PAGE_OBJECTS, Objects

_WORTH_LISTING: Final = 8
_TOO_LARGE_FOR_S: Final = 60.0
_MAX_FOLDERS: Final = 10_000
#: How many names a search asks about at once when it knows between which two the end lies.
_PROBES: Final = 15

RunInThread = Callable[[Callable[[], None]], Awaitable[None]]


class ForEach(Protocol):
    """`L2Adapter.for_each` for parts of a list of names."""

    def __call__(self, items: Sequence[list[str]], work: Callable[[list[str]], Awaitable[None]], /) -> Awaitable[None]:
        """Do ``work`` for each, several at once."""
        ...


class HitCache:
    """Sizes of objects that were there a moment ago. Loop-bound; holds so many, the latest."""

    def __init__(self, kept_s: float, most: int) -> None:
        """Keep each for ``kept_s`` seconds; 0 keeps none."""
        self._kept_s: Final = kept_s
        self._most: Final = most
        self._hits: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def add(self, name: str, size: int) -> None:
        """The object was there."""
        if self._kept_s:
            self._hits[name] = (time.monotonic() + self._kept_s, size)
            self._hits.move_to_end(name)
            if len(self._hits) > self._most:
                self._hits.popitem(last=False)

    def discard(self, name: str) -> None:
        """The object is gone, or nobody knows."""
        self._hits.pop(name, None)

    def get(self, name: str) -> int | None:
        """The size, if it is still to be believed."""
        until, size = self._hits.get(name, (0.0, 0))
        return size if time.monotonic() < until else None


class Lookups:
    """Sizes of many objects. Loop-bound, but for what it does in threads."""

    def __init__(
        self,
        objects: Objects,
        config: ObjectStoreConfig,
        *,
        run_in_thread: RunInThread,
        for_each: ForEach,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask ``objects``, in threads of the adapter."""
        self.hits: Final = HitCache(config.hit_cache_s, config.hit_cache_keys)
        self._objects: Final = objects
        self._config: Final = config
        self._run_in_thread: Final = run_in_thread
        self._for_each: Final = for_each
        self._now: Final = now
        self._too_large: OrderedDict[str, float] = OrderedDict()  # folder, and when to try again

    async def sizes(self, names: Sequence[str]) -> list[int | None]:
        """The size of each, or None; ``names`` in the order of a prompt."""
        known: dict[str, int | None] = {}
        for name in names:
            size = self.hits.get(name)
            if size is not None:
                known[name] = size
        await self._list([name for name in names if name not in known], known)
        left = [name for name in names if name not in known]
        if self._config.lookup == "prefix":
            await self._search(left, known)
        else:
            await self._ask(left, known)
        for name in names:
            found = known[name]
            if found is not None:
                self.hits.add(name, found)
        return [known[name] for name in names]

    async def _list(self, names: Sequence[str], known: dict[str, int | None]) -> None:
        """Learn from listings what they say about ``names``."""
        folders: dict[str, set[str]] = {}
        for name in names:
            folders.setdefault(folder_of(name), set()).add(name)
        for folder, wanted in folders.items():
            if len(wanted) < _WORTH_LISTING or not self._config.list_pages:
                continue
            if self._too_large.get(folder, 0.0) > self._now():
                continue
            if not await self._list_folder(folder, wanted, known):
                self._too_large[folder] = self._now() + _TOO_LARGE_FOR_S
                if len(self._too_large) > _MAX_FOLDERS:
                    self._too_large.popitem(last=False)

    async def _list_folder(self, folder: str, wanted: set[str], known: dict[str, int | None]) -> bool:
        """List until all of ``wanted`` are found or there is no more; False when that is too much."""
        left = set(wanted)
        complete = False

        def read() -> None:
            nonlocal complete
            for number, page in enumerate(self._objects.pages(folder), start=1):
                for name, size in page:
                    if name in left:
                        known[name] = size
                        left.discard(name)
                if not left:
                    break
                if number == self._config.list_pages and len(page) >= PAGE_OBJECTS:
                    return
            complete = True

        await self._run_in_thread(read)
        if complete:
            known.update(dict.fromkeys(left))
        return complete

    async def _ask(self, names: Sequence[str], known: dict[str, int | None]) -> None:
        """Ask for each of ``names``, shared out among the threads."""
        shares = min(len(names), self._config.max_concurrency)

        async def ask(share: list[str]) -> None:
            found: dict[str, int | None] = {}

            def read() -> None:
                for name in share:
                    found[name] = self._objects.size(name)

            await self._run_in_thread(read)
            known.update(found)

        await self._for_each([list(names[number::shares]) for number in range(shares)], ask)

    async def _search(self, names: Sequence[str], known: dict[str, int | None]) -> None:
        """Find where a prefix ends, and take what lies before it for present, and what lies behind it for absent."""
        low, high = 0, len(names)  # all before low are there, the one at high is not
        size: int | None = None
        while low < high:
            asked = probes(low, high, len(names))
            await self._ask([names[index] for index in asked], known)
            for index in asked:
                found = known[names[index]]
                if found is None:
                    high = index
                    break
                size, low = found, index + 1
        for index, name in enumerate(names):
            if name not in known:
                known[name] = size if index < low else None


def probes(low: int, high: int, count: int) -> list[int]:
    """Which positions to ask about next, when the end of the prefix lies from ``low`` to ``high``. Pure.

    At first, when nothing is known, in steps that double, and the last one; then evenly spread in between.
    """
    if low == 0 and high == count:
        steps = {(1 << number) - 1 for number in range(count.bit_length()) if (1 << number) <= count}
        return sorted(steps | {count - 1})
    width = high - low
    if width <= _PROBES:
        return list(range(low, high))
    return [low + width * number // (_PROBES + 1) for number in range(1, _PROBES + 1)]


def folder_of(name: str) -> str:
    """The namespace's folder: what stands before the last segment."""
    return name.rpartition("/")[0]
