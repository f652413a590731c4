"""What a plugin's tests use: the conformance suite, leak checks, real servers (extra ``l2kit[testing]``)."""

from __future__ import annotations

import pytest

# Before the import: only then do failing assertions of the suite show their values, in anybody's project.
pytest.register_assert_rewrite("l2kit.testing.groups")

from l2kit.testing.conformance import AdapterConformance  # noqa: E402

__all__ = ["AdapterConformance"]
