"""Tiers that are slow, hung, lying, failing or damaged on command, and what the storage tests share around them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import EntryPoint
from typing import Any, Final, Literal

import anyio
import pytest

from l2kit.errors import BackendError
from l2kit.keys import Namespace, ObjectKey
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.memory_adapter import MemoryAdapter, MemoryConfig
from l2kit.outcomes import StoreStatus
from l2kit.prefetch import WantedChunk, WantedObject
from l2kit.registry import ADAPTERS, CODECS, POLICIES, Registry
from l2kit.storage_manager import StorageManager, open_storage
from l2kit.wrapper import innermost

Hook = Literal["lookup", "load", "store", "release", "open"]
Hang = Literal["hung", "stuck"]  # a wait that can be cancelled; a thread that cannot
BOTH_HANGS = pytest.mark.parametrize("hang", ["hung", "stuck"])

#: A short deadline, and what an answer "by the deadline" may take on a busy machine.
SHORT_S: Final = 0.15
SLACK_S: Final = 1.0

CHUNK_TOKENS: Final = 16
OBJECT_BYTES: Final = 512 * CHUNK_TOKENS
PAGE: Final = 4096

_SHELVES: dict[str, OrderedDict[ObjectKey, bytes]] = {}


class OddConfig(MemoryConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``shelf`` names objects that outlive the adapter; ``broken`` makes opening fail, late if asked for."""

    shelf: str | None = None
    broken: bool = False
    slow_to_open_s: float = 0.0


class OddAdapter(MemoryAdapter):
    """A `MemoryAdapter` whose hooks can be held up and made to fail while it runs."""

    config_type = OddConfig

    @property
    def _options(self) -> OddConfig:
        assert isinstance(self.config, OddConfig)
        return self.config

    async def open(self) -> None:
        await super().open()
        await anyio.sleep(self._options.slow_to_open_s)
        if self._options.broken:
            raise BackendError(f"{self.name}: broken on purpose")
        self.hung: set[Hook] = set()  # waits for `gate`, cancellable
        self.stuck: set[Hook] = set()  # waits for `thread_gate` in a thread that nothing can cancel
        self.gate = anyio.Event()
        self.thread_gate = threading.Event()
        self.failing: dict[Hook, Exception] = {}
        self.failing_keys: dict[ObjectKey, Exception] = {}
        self.claimed: set[ObjectKey] = set()  # lookups say that these are here
        self.damaged: set[ObjectKey] = set()  # a bit of these flips on the way
        self.delay_s: dict[Hook, float] = {}
        self.calls: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        self.loads: Counter[ObjectKey] = Counter()
        self.order: list[ObjectKey] = []  # of stores
        self.stored_as = StoreStatus.STORED
        if self._options.shelf is not None:
            self._objects = _SHELVES.setdefault(self._options.shelf, OrderedDict())

    async def close(self) -> None:
        if self._options.shelf is not None:
            self._objects = OrderedDict()
        await super().close()

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        await self._behave("store", key)
        self.order.append(key)
        status = await super().store_one(key, data)
        return self.stored_as if status is StoreStatus.STORED else status

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        self.loads[key] += 1
        await self._behave("load", key)
        size = await super().load_one(key, into)
        if key in self.damaged and size is not None:
            into[-1][-1] ^= 1
        return size

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        await self._behave("lookup", None)
        sizes = await super().acquire_many(keys)
        return [OBJECT_BYTES if key in self.claimed else size for key, size in zip(keys, sizes, strict=True)]

    async def release_many(self, keys: Sequence[ObjectKey]) -> None:
        await self._behave("release", None)
        await super().release_many(keys)

    @property
    def keys(self) -> set[ObjectKey]:
        return set(self._objects)

    def forget(self, *keys: ObjectKey) -> None:
        for key in keys:
            self._objects.pop(key, None)
            self._locked.pop(key, None)

    def let_go(self) -> None:
        self.gate.set()
        self.thread_gate.set()

    async def _behave(self, hook: Hook, key: ObjectKey | None) -> None:
        self.calls[hook] += 1
        self.waiting[hook] += 1
        try:
            if hook in self.hung:
                await self.gate.wait()
            if hook in self.stuck:
                await self.run_in_thread(self.thread_gate.wait)
            if hook in self.delay_s:
                await anyio.sleep(self.delay_s[hook])
        finally:
            self.waiting[hook] -= 1
        error = self.failing_keys.get(key) if key is not None else None
        error = error or self.failing.get(hook)
        if error is not None:
            raise error


def hold_up(adapter: OddAdapter, hang: Hang, hook: Hook) -> None:
    """Let one hook hang until :func:`recover`."""
    (adapter.hung if hang == "hung" else adapter.stuck).add(hook)


def recover(adapter: OddAdapter) -> None:
    """Let go of whatever hangs, and hang no more."""
    adapter.hung.clear()
    adapter.stuck.clear()
    adapter.let_go()


class Stopwatch:
    """How long a block took."""

    def __enter__(self) -> Stopwatch:
        self.started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.took_s = time.monotonic() - self.started


def _point(group: str, name: str, target: type) -> EntryPoint:
    return EntryPoint(name=name, value=f"{target.__module__}:{target.__qualname__}", group=group)


def registry(**adapters: type) -> Registry:
    """A registry with ``odd://``, ``memory://``, the LRU policy and ``adapters``."""
    known = {"odd": OddAdapter, "memory": MemoryAdapter, **adapters}
    return Registry(
        {
            ADAPTERS: [_point(ADAPTERS, name, target) for name, target in known.items()],
            CODECS: [],
            POLICIES: [EntryPoint(name="lru", value="l2kit.policy:LRUPolicy", group=POLICIES)],
        }
    )


def odd(manager: StorageManager, position: int = 0) -> OddAdapter:
    """The adapter of one tier."""
    adapter = innermost(manager.tiers[position].adapter)
    assert isinstance(adapter, OddAdapter)
    return adapter


def is_at_rest(manager: StorageManager) -> bool:
    """True when nothing is held and L1 counts exactly what its entries take."""
    usage = manager.l1.usage()
    entries = sum(entry.slot.slot_bytes for entry in manager.l1._readable.values())
    held = sum(tier.adapter.held_leases for tier in manager.tiers)
    return usage.leases == usage.writing == held == 0 and usage.used_bytes == entries and not manager._open_prefetches


async def until(predicate: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Wait for a predicate, with a bound."""
    with anyio.fail_after(timeout_s):
        while not predicate():  # noqa: ASYNC110 - tests watch state that sets no event
            await anyio.sleep(0.002)


def odd_storage(
    *tiers: str | dict[str, Any], l1_objects: int = 64, known: Registry | None = None, **options: Any
) -> StorageManager:
    """A storage manager over ``tiers``, not opened yet; ``a`` is ``odd://`` with that name."""
    named = [{"url": "odd://", "name": tier} if isinstance(tier, str) else tier for tier in tiers]
    config = {"tiers": named, "l1": {"max_bytes": l1_objects * OBJECT_BYTES}, "chunk_size": CHUNK_TOKENS, **options}
    return open_storage(config, registry=known or registry())


@asynccontextmanager
async def storage(*tiers: str | dict[str, Any], **options: Any) -> AsyncIterator[StorageManager]:
    """An open storage manager, see `odd_storage`; at the end every tier recovers, and all must be at rest."""
    async with odd_storage(*tiers, **options) as manager:
        yield manager
        for tier in manager.tiers:
            adapter = innermost(tier.adapter)
            if isinstance(adapter, OddAdapter):
                adapter.let_go()
        await until(lambda: is_at_rest(manager))
    assert_closed_clean(manager)


def assert_closed_clean(manager: StorageManager) -> None:
    """A closed storage manager holds nothing."""
    usage = manager.l1.usage()
    assert (usage.leases, usage.writing, usage.used_bytes) == (0, 0, 0)
    assert [tier.adapter.held_leases for tier in manager.tiers] == [0] * len(manager.tiers)


NAMESPACE: Final = Namespace(
    model="odd",
    revision="1",
    kv_dtype="bfloat16",
    layout="canonical:kv_2ltd:1",
    layers=2,
    kv_heads=1,
    head_dim=64,
    chunk_size=CHUNK_TOKENS,
)


def layout(tokens: int = CHUNK_TOKENS) -> Layout:
    """512 bytes for each token."""
    return Layout.kv(layers=2, tokens=tokens, kv_heads=1, head_dim=64, dtype="bfloat16")


def key(number: int, group: int = 0) -> ObjectKey:
    """The key of one numbered object."""
    return ObjectKey("odd", number.to_bytes(8, "big"), group=group)


def content(name: ObjectKey | str, nbytes: int = OBJECT_BYTES) -> bytes:
    """Bytes that belong to ``name`` and to nothing else."""
    return hashlib.shake_128(str(name).encode()).digest(nbytes)


def wanted(count: int, *, first: int = 0, groups: int = 1) -> list[WantedChunk]:
    """``count`` numbered chunks of one object per group."""
    return [
        tuple(WantedObject(key(number, group), layout()) for group in range(groups))
        for number in range(first, first + count)
    ]


def put_in_l1(manager: StorageManager, *keys: ObjectKey) -> None:
    """Make objects readable in L1 without offering them to any tier."""
    for name in keys:
        reservation = manager.l1.reserve_write(name, layout(), owner="test")
        assert not isinstance(reservation, str)
        reservation.obj.segments[0][:] = content(name)
        reservation.finish()


async def put_in_tier(manager: StorageManager, position: int, *keys: ObjectKey) -> None:
    """Store objects in one tier, around L1."""
    adapter = manager.tiers[position].adapter
    objects = [MemoryObj.wrap(content(name), layout()) for name in keys]
    assert all(outcome.present for outcome in await adapter.submit_store_task(keys, objects))


def write(manager: StorageManager, *keys: ObjectKey) -> None:
    """Write objects through the storage manager, as an engine does."""
    reservations = []
    for name in keys:
        reservation = manager.reserve_write(name, layout())
        if reservation is not None:
            reservation.obj.segments[0][:] = content(name)
            reservations.append(reservation)
    manager.finish_write(reservations)


async def read(manager: StorageManager, chunks: Sequence[WantedChunk], *, timeout_s: float | None = None) -> int:
    """Prefetch, compare every byte that came, release; how many chunks came."""
    prefetch = manager.start_prefetch(chunks, timeout_s=timeout_s)
    try:
        with anyio.fail_after(10):
            await prefetch.wait_async()
        keys = [item.key for chunk in chunks[: prefetch.ready_chunks] for item in chunk]
        objects = prefetch.objects()
        assert len(objects) == len(keys)
        for name, obj in zip(keys, objects, strict=True):
            assert obj.tobytes() == content(name, obj.nbytes)
        return prefetch.ready_chunks
    finally:
        prefetch.release()
