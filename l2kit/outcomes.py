"""What became of each key of a batch.

A miss is a value, a failed key is a value with an error, a failed call is an exception. Outcomes are plain facts:
nothing here defaults to success.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

import msgspec

from l2kit.errors import CorruptObjectError, L2Error


class StoreStatus(StrEnum):
    """How a store ended for one key."""

    STORED = "stored"
    ALREADY_PRESENT = "already_present"
    DROPPED = "dropped"  # refused for want of room or queue space: nothing is broken, nothing was written
    FAILED = "failed"


class LookupStatus(StrEnum):
    """What a lookup found for one key."""

    HIT = "hit"
    MISS = "miss"
    FAILED = "failed"


class LoadStatus(StrEnum):
    """How a load ended for one key."""

    LOADED = "loaded"
    MISS = "miss"
    CORRUPT = "corrupt"
    FAILED = "failed"


class DeleteStatus(StrEnum):
    """How a delete ended for one key."""

    DELETED = "deleted"
    MISS = "miss"
    FAILED = "failed"


class StoreOutcome(msgspec.Struct, frozen=True):
    """``error`` says why it FAILED or was DROPPED; ``nbytes`` is what went to the backend, envelope included."""

    status: StoreStatus
    nbytes: int = 0
    error: L2Error | None = None

    @property
    def present(self) -> bool:
        """True when the object is in the tier now, as far as the tier says."""
        return self.status in (StoreStatus.STORED, StoreStatus.ALREADY_PRESENT)

    @classmethod
    def failed(cls, error: L2Error) -> Self:
        """The key's store failed with ``error``."""
        return cls(StoreStatus.FAILED, 0, error)


class LookupOutcome(msgspec.Struct, frozen=True):
    """``size`` is the stored size in bytes, envelope included, when ``status`` is HIT."""

    status: LookupStatus
    size: int = 0
    error: L2Error | None = None

    @property
    def hit(self) -> bool:
        """True when the key is there."""
        return self.status is LookupStatus.HIT

    @classmethod
    def failed(cls, error: L2Error) -> Self:
        """The key's lookup failed with ``error``; whether the object exists is unknown."""
        return cls(LookupStatus.FAILED, 0, error)


class LoadOutcome(msgspec.Struct, frozen=True):
    """``nbytes`` is the size of the verified object in the destination when ``status`` is LOADED."""

    status: LoadStatus
    nbytes: int = 0
    error: L2Error | None = None

    @property
    def loaded(self) -> bool:
        """True when the destination holds the verified object. In every other case its content is undefined."""
        return self.status is LoadStatus.LOADED

    @classmethod
    def failed(cls, error: L2Error) -> Self:
        """The key's load failed with ``error``."""
        return cls(LoadStatus.CORRUPT if isinstance(error, CorruptObjectError) else LoadStatus.FAILED, 0, error)


class DeleteOutcome(msgspec.Struct, frozen=True):
    """``error`` says why when ``status`` is FAILED."""

    status: DeleteStatus
    error: L2Error | None = None

    @classmethod
    def failed(cls, error: L2Error) -> Self:
        """The key's delete failed with ``error``."""
        return cls(DeleteStatus.FAILED, error)
