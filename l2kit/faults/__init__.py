"""Fault injection: `FaultyAdapter` hurts any adapter as a seeded plan says; ``fault+…`` in URLs."""

from __future__ import annotations

from l2kit.faults.adapter import FaultyAdapter
from l2kit.faults.options import FaultOptions
from l2kit.faults.plan import KINDS, OPERATIONS, Fault, FaultPlan, FaultRule

__all__ = ["KINDS", "OPERATIONS", "Fault", "FaultOptions", "FaultPlan", "FaultRule", "FaultyAdapter"]
