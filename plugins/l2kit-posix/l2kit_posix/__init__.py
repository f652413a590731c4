"""``file://``: l2kit's storage adapter for local disks and shared file systems. See `FileAdapter` and `FileConfig`."""

from __future__ import annotations

from l2kit_posix.adapter import FileAdapter
from l2kit_posix.config import FileConfig

__all__ = ["FileAdapter", "FileConfig"]
