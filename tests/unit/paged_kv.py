"""A worker's paged KV in tests: sources that know what they computed, targets that check what they get."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from l2kit.engine import CacheEngine
from l2kit.memory import MemoryObj
from l2kit.storage_manager import StorageManager
from tests.unit.odd_tiers import CHUNK_TOKENS, NAMESPACE, layout

PROMPT = [(7 * n + 3) % 1000 for n in range(6 * CHUNK_TOKENS + 5)]


def kv(prompt: Sequence[int], start: int, end: int, nbytes: int, extra: object = None) -> bytes:
    """The KV of some tokens of a prompt: it depends on all tokens before them, as in a model."""
    return hashlib.shake_128(repr((list(prompt[:end]), start, extra)).encode()).digest(nbytes)


@dataclass
class Source:
    """Stands for the paged KV of a worker that has computed ``prompt``."""

    prompt: Sequence[int]
    extra: object = None
    fails_at: int | None = None
    gathered: list[tuple[int, int]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def gather(self, start: int, end: int, obj: MemoryObj) -> None:
        if self.fails_at is not None and start >= self.fails_at:
            raise RuntimeError("the pages are gone")
        self.gathered.append((start, end))
        self.threads.add(threading.get_ident())
        obj.segments[0][:] = kv(self.prompt, start, end, obj.nbytes, self.extra)


@dataclass
class Target:
    """Stands for the paged KV of a worker that restores ``prompt``; checks every byte that it is given."""

    prompt: Sequence[int]
    extra: object = None
    written: list[tuple[int, int]] = field(default_factory=list)
    error: Exception | None = None

    def scatter(self, start: int, end: int, obj: MemoryObj, *, skip_prefix_n_tokens: int = 0) -> None:
        if self.error is not None:
            raise self.error
        assert 0 <= skip_prefix_n_tokens < end - start
        assert obj.tobytes() == kv(self.prompt, start, end, obj.nbytes, self.extra)
        self.written.append((start + skip_prefix_n_tokens, end))


def make_engine(manager: StorageManager, **options: Any) -> CacheEngine:
    return CacheEngine(manager, NAMESPACE, layout, **options)


def forget_l1(manager: StorageManager) -> None:
    for name in list(manager.l1._readable):
        manager.l1.remove(name)
