"""`Sharing`: whether a batch goes to its backend in one worker's calls, or is shared out among all workers.

Neither is always faster. Threads that move bytes between memory and a server on the same machine take turns at the
interpreter's lock, and at the cores; threads that wait for a disk or for a network wait side by side. What a backend is
like shows in how fast its batches end, so both ways are tried, and the faster one is kept to until it no longer is.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: What ends sooner than this tells nothing.
_TELLING_S: Final = 1e-3
#: Objects of at least this size are shared out until measured otherwise.
_LARGE_BYTES: Final = 256 << 10
#: The share of a new measurement in what is known of a way.
_NEW: Final = 0.25
#: How much faster the other way must be: what differs less does not differ.
_CLEARLY: Final = 1.1
#: The other way is tried after so many batches, then after twice as many, and so on up to the second number.
_FIRST_TRY, _LAST_TRY = 2, 64


class Plan(NamedTuple):
    """How one batch is done; to be given back to :meth:`Sharing.took`.

    Attributes:
        shared: whether all workers take part.
        size_class: of its objects.
    """

    shared: bool
    size_class: int


class _Choice:
    """What is known about objects of about one size."""

    __slots__ = ("bytes_per_s", "next_try", "pause", "shared")

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        self.bytes_per_s: dict[bool, float] = {}
        self.pause = self.next_try = _FIRST_TRY


class Sharing:
    """The choice for one kind of work of one adapter, by the size of the objects. Loop-bound."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._choices: Final[dict[int, _Choice]] = {}

    def plan(self, count: int, nbytes: int) -> Plan:
        """How to do a batch of ``count`` objects with ``nbytes`` in all."""
        mean = nbytes // count
        size_class = mean.bit_length() // 2  # a step is a factor of four
        choice = self._choices.get(size_class)
        if choice is None:
            choice = self._choices[size_class] = _Choice(shared=mean >= _LARGE_BYTES)
        shared = choice.shared
        if count > 1:
            choice.next_try -= 1
            if choice.next_try <= 0:
                choice.pause = min(2 * choice.pause, _LAST_TRY)
                choice.next_try = choice.pause
                shared = not shared
        return Plan(shared, size_class)

    def took(self, plan: Plan, count: int, nbytes: int, seconds: float) -> None:
        """A batch without failures took so long."""
        if count < 2 or seconds < _TELLING_S:
            return
        choice = self._choices[plan.size_class]
        rates, rate = choice.bytes_per_s, nbytes / seconds
        rates[plan.shared] = rates.get(plan.shared, rate) * (1 - _NEW) + rate * _NEW
        known, other = rates.get(choice.shared), rates.get(not choice.shared)
        if known is not None and other is not None and other > known * _CLEARLY:
            choice.shared = not choice.shared
