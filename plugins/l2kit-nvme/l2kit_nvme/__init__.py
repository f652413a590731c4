"""``nvme://``: l2kit's storage adapter for preallocated files and block devices. See `NvmeAdapter`, `NvmeConfig`."""

from __future__ import annotations

from l2kit_nvme.adapter import NvmeAdapter
from l2kit_nvme.config import NvmeConfig

__all__ = ["NvmeAdapter", "NvmeConfig"]
