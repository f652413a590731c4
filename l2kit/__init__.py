"""l2kit keeps the KV cache of LLM servers: chunk objects in host memory (L1) and in storage backends (L2).

Start with `open_adapter` for one backend, `open_storage` for the tiers behind one engine, and `CacheEngine` for token
ranges in and out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from l2kit.adapter import API_VERSION, Capabilities, KeyInfo, L2Adapter, Probe, Usage
from l2kit.blocking import BlockingCacheEngine, BlockingStorage
from l2kit.config import AdapterConfig, L1Config, Secret, StorageConfig
from l2kit.engine import CacheEngine, KVSource, KVTarget, RequestIdentity, TokenRange
from l2kit.errors import (
    AdapterConflictError,
    AdapterContractError,
    AdapterImportError,
    AdapterNotFoundError,
    AuthError,
    BackendBusyError,
    BackendError,
    BackendTimeoutError,
    CapacityError,
    ClosedError,
    ConfigError,
    CorruptObjectError,
    L2Error,
    TaskCancelledError,
    TransientBackendError,
)
from l2kit.keys import MultimodalHash, Namespace, ObjectKey, TokenDatabase
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.outcomes import (
    DeleteOutcome,
    DeleteStatus,
    LoadOutcome,
    LoadStatus,
    LookupOutcome,
    LookupStatus,
    StoreOutcome,
    StoreStatus,
)
from l2kit.registry import default_registry
from l2kit.resilience import ResilienceConfig
from l2kit.serde import Codec, CodecChain
from l2kit.storage_manager import StorageManager, open_storage
from l2kit.task import L2Task
from l2kit.wrapper import WrappingAdapter

__version__ = "0.1.0"

__all__ = [
    "API_VERSION",
    "AdapterConfig",
    "AdapterConflictError",
    "AdapterContractError",
    "AdapterImportError",
    "AdapterNotFoundError",
    "AuthError",
    "BackendBusyError",
    "BackendError",
    "BackendTimeoutError",
    "BlockingCacheEngine",
    "BlockingStorage",
    "CacheEngine",
    "Capabilities",
    "CapacityError",
    "ClosedError",
    "Codec",
    "CodecChain",
    "ConfigError",
    "CorruptObjectError",
    "DeleteOutcome",
    "DeleteStatus",
    "KVSource",
    "KVTarget",
    "KeyInfo",
    "L1Config",
    "L2Adapter",
    "L2Error",
    "L2Task",
    "Layout",
    "LoadOutcome",
    "LoadStatus",
    "LookupOutcome",
    "LookupStatus",
    "MemoryObj",
    "MultimodalHash",
    "Namespace",
    "ObjectKey",
    "Probe",
    "RequestIdentity",
    "ResilienceConfig",
    "Secret",
    "StorageConfig",
    "StorageManager",
    "StoreOutcome",
    "StoreStatus",
    "TaskCancelledError",
    "TokenDatabase",
    "TokenRange",
    "TransientBackendError",
    "Usage",
    "WrappingAdapter",
    "default_registry",
    "open_adapter",
    "open_storage",
]


def open_adapter(url: str | Mapping[str, Any], **options: Any) -> L2Adapter[Any]:
    """Make the adapter for one storage backend; an async context manager that does no I/O before it is entered.

    Args:
        url: ``SCHEME://…?option=value``, or a mapping with ``url`` and options.
        options: options of that adapter; they win over those in ``url``.

    Raises:
        ConfigError: a bad URL or option, named; or no single installed distribution offers the scheme.
        AdapterImportError: the plugin is installed but cannot be imported.
        AdapterContractError: the plugin breaks the adapter contract or was built for another API version.
    """
    return default_registry().adapter(url, **options)
