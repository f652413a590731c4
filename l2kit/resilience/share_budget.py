"""A budget for extra work: never more than a share of the usual work."""

from __future__ import annotations


class ShareBudget:
    """How much extra work is still allowed: each operation earns ``share`` of one, ``burst`` can be saved up."""

    def __init__(self, share: float, burst: int) -> None:
        """Start with ``burst``."""
        self._share = share
        self._burst = burst
        self._saved = float(burst)

    def earn(self) -> None:
        """An operation was started."""
        self._saved = min(self._burst, self._saved + self._share)

    def spend(self) -> bool:
        """Take one; False when there is none left."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
