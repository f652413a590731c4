"""`AdapterConformance`: the adapter contract as a test suite, for plugins inside and outside this repository.

Ten lines tell an author when he is done (``pip install 'l2kit[testing]'``, then ``pytest``)::

    from pathlib import Path

    import pytest

    from l2kit.testing import AdapterConformance


    class TestDirStore(AdapterConformance):
        @pytest.fixture
        def adapter_url(self, tmp_path: Path) -> str:
            return f"dirstore://{tmp_path}/objects"

- No configuration is needed: the suite brings its event loop with it.
- What an adapter cannot do is skipped, and the skip names the capability, option or hook that is missing. Give
  `raw_read` and `raw_write` as well: only they let the suite damage stored objects and watch what becomes of them.
- An adapter that has a limit calls its option ``max_bytes``; then capacity and eviction are tested.
- A test that cannot hold is overridden under ``@pytest.mark.xfail(reason="…")``, nothing less: a test that is
  removed, or weakened in silence, fails the suite.
"""

from __future__ import annotations

from typing import Any

import pytest

from l2kit.testing.completeness import check_complete, forbid_override
from l2kit.testing.groups.agreement import AgreementTests
from l2kit.testing.groups.batches import BatchTests
from l2kit.testing.groups.concurrency import ConcurrencyTests
from l2kit.testing.groups.corruption import CorruptionTests
from l2kit.testing.groups.histories import HistoryTests
from l2kit.testing.groups.hostile_keys import HostileKeyTests
from l2kit.testing.groups.inventory import InventoryTests
from l2kit.testing.groups.lifecycle import LifecycleTests
from l2kit.testing.groups.locks import LockTests
from l2kit.testing.groups.round_trip import RoundTripTests


class AdapterConformance(
    RoundTripTests,
    BatchTests,
    AgreementTests,
    LockTests,
    ConcurrencyTests,
    LifecycleTests,
    HostileKeyTests,
    CorruptionTests,
    InventoryTests,
    HistoryTests,
):
    """Subclass it as ``Test…`` and override the fixture ``adapter_url``.

    More can be overridden, all of it named in ``hooks``: the fixture ``adapter`` (an entered adapter), the hooks
    ``raw_read(adapter, key)``, ``raw_write(adapter, key, data)`` and ``raw_unfinished(adapter)`` that go around the
    adapter, ``reopen_url(adapter_url)`` and ``open_adapter(url, **options)``. Everything else stays as it is.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Take a plain string for the fixture ``adapter_url``; refuse who drops the test that keeps the suite whole."""
        super().__init_subclass__(**arguments)
        url = vars(cls).get("adapter_url")
        if isinstance(url, str):
            cls.adapter_url = pytest.fixture(lambda _self: url, name="adapter_url")  # type: ignore[method-assign]
        forbid_override(cls, "test_no_test_is_missing")

    async def test_no_test_is_missing(self) -> None:
        """Every test of the suite is there as it was written, or marked as an expected failure with its reason."""
        check_complete(AdapterConformance, type(self), AdapterConformance.hooks)
