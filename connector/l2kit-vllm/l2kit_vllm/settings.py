"""``kv_connector_extra_config`` of vLLM: the connector's own options, and those of the storage behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from l2kit.config import StorageConfig, build, load_storage_config
from l2kit.errors import ConfigError, nearest


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the connector.

    Attributes:
        config: path of a TOML or YAML file with the storage options; or give those next to this one instead.
        representation: ``native`` keeps pages in their own byte order: fastest, shared only by engines with the same
            block size and page arrangement. ``canonical`` re-arranges them so that any engine can read them.
        model_revision: identity of the weights. By default it is derived from the checkpoint; set it where it cannot
            be, and change it whenever the weights change.
    """

    config: str | None = None
    representation: Literal["native", "canonical"] = "native"
    model_revision: str | None = None


def parse_extra_config(extra: Mapping[str, Any]) -> tuple[ConnectorSettings, StorageConfig]:
    """Split and check ``kv_connector_extra_config``.

    Raises:
        ConfigError: names the unknown or wrong option and the nearest valid one.
    """
    where = "kv_connector_extra_config"
    own = {field.name for field in msgspec.structs.fields(ConnectorSettings)}
    storage = {field.name for field in msgspec.structs.fields(StorageConfig)}
    for name in extra:
        if name not in own | storage:
            raise ConfigError(f"{where}: unknown option {name!r}{nearest(name, own | storage)}")
    settings = build(ConnectorSettings, {name: extra[name] for name in extra if name in own}, where=where)
    inline = {name: extra[name] for name in extra if name in storage}
    if settings.config is None:
        return settings, build(StorageConfig, inline, where=where)
    if inline:
        raise ConfigError(f"{where}: {sorted(inline)[0]!r} stands beside 'config'; write it into {settings.config}")
    return settings, load_storage_config(settings.config)


def check_block_size(chunk_size: int, block_size: int) -> None:
    """Refuse chunks that are no whole number of blocks.

    Raises:
        ConfigError: names the two nearest chunk sizes that are.
    """
    if chunk_size % block_size:
        below = max(1, chunk_size // block_size) * block_size
        raise ConfigError(
            f"chunk_size: {chunk_size} is no multiple of vLLM's block size {block_size}; "
            f"use {below} or {below + block_size}"
        )
