"""The adapter contract for ``nixl+gds://``, where the machine has the driver and cuFile."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from l2kit.testing import AdapterConformance
from l2kit_nixl.testing import FilesUnderneath

try:
    for library in ("libcuda.so.1", "libcufile.so.0"):
        ctypes.CDLL(library)
except OSError as error:
    pytest.skip(f"NIXL's plugin GDS needs a library that is missing here: {error}", allow_module_level=True)


@pytest.mark.slow
class TestNixlGds(FilesUnderneath, AdapterConformance):
    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"nixl+gds://{tmp_path}/cache?max_bytes=1GiB"
