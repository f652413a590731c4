"""What a plugin's tests use: conformance suites, leak checks, real servers (extra ``l2kit[testing]``)."""

from __future__ import annotations

import pytest

# Before the imports: only then do failing assertions of the suites show their values, in anybody's project.
pytest.register_assert_rewrite(
    "l2kit.testing.groups", "l2kit.testing.codec_groups", "l2kit.testing.completeness", "l2kit.testing.history"
)

from l2kit.faults import FaultyAdapter  # noqa: E402
from l2kit.testing.codec_conformance import CodecConformance  # noqa: E402
from l2kit.testing.conformance import AdapterConformance  # noqa: E402
from l2kit.testing.state_machine import AdapterStateMachine, adapter_state_machine, check_histories  # noqa: E402

__all__ = [
    "AdapterConformance",
    "AdapterStateMachine",
    "CodecConformance",
    "FaultyAdapter",
    "adapter_state_machine",
    "check_histories",
]
