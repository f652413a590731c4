"""``nixl+posix://``, ``nixl+gds://`` and ``nixl+ucx://``: storage adapters of l2kit on NIXL."""

from __future__ import annotations

from l2kit_nixl.adapter import NixlGdsAdapter, NixlPosixAdapter, NixlUcxAdapter
from l2kit_nixl.config import NixlFileConfig, NixlGdsConfig, NixlUcxConfig

__all__ = [
    "NixlFileConfig",
    "NixlGdsAdapter",
    "NixlGdsConfig",
    "NixlPosixAdapter",
    "NixlUcxAdapter",
    "NixlUcxConfig",
]
