"""Storage adapters of l2kit for object stores: S3, Google Cloud Storage, Azure, and what fsspec reaches."""

from __future__ import annotations

from l2kit_s3.adapter import AzAdapter, FsspecAdapter, GsAdapter, S3Adapter
from l2kit_s3.config import AzConfig, FsspecConfig, GsConfig, S3Config

__all__ = ["AzAdapter", "AzConfig", "FsspecAdapter", "FsspecConfig", "GsAdapter", "GsConfig", "S3Adapter", "S3Config"]
