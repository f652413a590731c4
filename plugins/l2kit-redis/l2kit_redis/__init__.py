"""Storage adapter of l2kit for Redis and Valkey servers."""

from __future__ import annotations

from l2kit_redis.adapter import RedisAdapter
from l2kit_redis.config import RedisConfig

__all__ = ["RedisAdapter", "RedisConfig"]
