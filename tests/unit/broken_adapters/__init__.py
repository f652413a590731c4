"""Adapters that are broken on purpose, each in one way, with the conformance test that must notice it.

One module for each group of the suite. All are `memory://` with one fault, whose docstring says what it is. The
attribute ``caught_by`` names the test; a fault that only shows when the test's fixtures are torn down counts as well.
"""

from __future__ import annotations

from tests.unit.broken_adapters.base import BrokenAdapter, every_broken_adapter, leaked, stop

__all__ = ["BrokenAdapter", "every_broken_adapter", "leaked", "stop"]
