"""What a fault plan is configured with, from Python, a URL or a file."""

from __future__ import annotations

import msgspec

from l2kit.faults.plan import OPERATIONS, FaultPlan, FaultRule


class FaultOptions(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Options of ``fault+…``: a seed and, for each operation, rules ``KIND[:VALUE][@CALLS][~PROBABILITY]``.

    They are checked when they are made: `ConfigError` names the operation, the rule and the nearest valid choice.

    Attributes:
        seed: the same seed and rules give the same faults at the same calls.
        open: rules for opening the backend, once it is reached.
        lookup: rules for lookups, one call for each batch.
        load: rules for loads, one call for each object; a second call where an object must be read as a whole.
        store: rules for stores, one call for each object.
        delete: rules for deletes, one call for each object; the deletion of a damaged object is one.
        release: rules for giving leases back, one call for each batch; what is hurt is the answer, never the release.
    """

    seed: int = 0
    open: tuple[str, ...] = ()
    lookup: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    store: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    release: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.plan()

    def plan(self) -> FaultPlan:
        """A plan at its first call."""
        rules = {
            operation: [FaultRule.parse(text, operation) for text in getattr(self, operation)]
            for operation in OPERATIONS
        }
        return FaultPlan(rules, self.seed)
