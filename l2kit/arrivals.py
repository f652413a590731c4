"""Objects on their way from a tier into L1, shared by all searches, so that no object is loaded twice at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from l2kit.keys import ObjectKey
from l2kit.l1 import WriteReservation
from l2kit.outcomes import LoadOutcome, LoadStatus
from l2kit.tier import Tier

if TYPE_CHECKING:
    from l2kit.search import Search


class Arrival:
    """One object that one tier is loading for one search, and the other searches that wait for it."""

    __slots__ = ("reservation", "search", "tier", "waiting")

    def __init__(self, reservation: WriteReservation, tier: Tier, search: Search) -> None:
        """``reservation`` is the memory it goes to."""
        self.reservation: Final = reservation
        self.tier: Final = tier
        self.search: Final = search
        self.waiting: set[Search] = set()

    def notify(self) -> None:
        """Let everybody who waits look again."""
        for search in self.waiting:
            search.notify()


class Arrivals:
    """What is on its way, by key. Loop-bound."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._by_key: dict[ObjectKey, Arrival] = {}

    def find(self, key: ObjectKey) -> Arrival | None:
        """How ``key`` is on its way."""
        return self._by_key.get(key)

    def add(self, arrival: Arrival) -> None:
        """It is on its way now."""
        self._by_key[arrival.reservation.key] = arrival

    def landed(self, arrival: Arrival) -> None:
        """It is on its way no longer, arrived or not; harmless when repeated."""
        key = arrival.reservation.key
        if self._by_key.get(key) is arrival:  # a load that hung may have been replaced by another one
            del self._by_key[key]
        arrival.notify()
        arrival.waiting.clear()

    def arrived(self, arrival: Arrival) -> None:
        """Its object is readable now, so whoever else is loading it is late."""
        first = self._by_key.pop(arrival.reservation.key, None)
        if first is not None and first is not arrival:
            first.notify()
            first.waiting.clear()
        self.landed(arrival)

    def give_up_on(self, arrival: Arrival) -> None:
        """Let the object come from elsewhere: its load hangs. It keeps its memory until it ends."""
        arrival.reservation.detach()
        self.landed(arrival)
        arrival.search.notify()


class Load:
    """One load task of one search."""

    __slots__ = ("arrivals", "brought", "ended", "hedge", "hedged", "progress", "tier", "timed_out")

    def __init__(self, tier: Tier, arrivals: list[tuple[int, Arrival]], now: float, *, hedge: bool) -> None:
        """``arrivals`` come with their positions in the search, in the order of the task's keys.

        Args:
            tier: where it loads from.
            arrivals: what it loads.
            now: on the loop's clock.
            hedge: whether it only runs because another load gives nothing.
        """
        self.hedge: Final = hedge
        self.hedged = False  # another load was started to help it
        self.progress = now  # when it last brought something
        self.tier: Final = tier
        self.arrivals: Final = arrivals
        self.brought = 0
        self.ended = 0  # keys with an outcome
        self.timed_out = False


def count_load(tier: Tier, outcome: LoadOutcome) -> None:
    """Put one outcome into the tier's counters and health."""
    names = {
        LoadStatus.LOADED: "loaded_objects",
        LoadStatus.MISS: "load_misses",
        LoadStatus.CORRUPT: "load_corrupt",
        LoadStatus.FAILED: "load_failures",
    }
    tier.counters.add(names[outcome.status])
    tier.counters.add("loaded_bytes", outcome.nbytes)
    if outcome.status is not LoadStatus.FAILED:
        tier.succeeded("load")
    elif outcome.error is not None:
        tier.failed("load", outcome.error)
