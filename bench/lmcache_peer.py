"""LMCache's L2 adapters as peers: its own code, from its own package, driven through its public interface.

Submit a batch, wait for the event descriptor of the operation, take the result: on the calling thread, with nothing
in between. The benchmarks run without LMCache, too; then there are no such peers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import select
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import l2kit
from bench.objects import Batch, blocking
from bench.pairs import Side, Work

_TIMEOUT_S = 120
_ADAPTERS = "lmcache.v1.distributed.l2_adapters"


def why_missing() -> str | None:
    """The reason why LMCache cannot be measured here; None when it can."""
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    try:
        importlib.import_module(_ADAPTERS)
    except ImportError as error:
        return f"LMCache is not installed in this environment ({error}); 'make bench' runs in one that has it"
    return None


class LMCachePeer:
    """One LMCache L2 adapter."""

    def __init__(self, kind: str, **options: object) -> None:
        """Make the adapter of LMCache's type ``kind`` from ``options``.

        Raises:
            ImportError, RuntimeError: something that this type needs is not installed.
        """
        configs = importlib.import_module(f"{_ADAPTERS}.config")
        config = configs.get_l2_adapter_config_class(kind).from_dict({"type": kind, **options})
        self.name = f"LMCache {importlib.metadata.version('lmcache')} {kind}"
        self._adapter: Any = importlib.import_module(_ADAPTERS).create_l2_adapter(config)
        api = importlib.import_module("lmcache.v1.distributed.api")
        self._make_key: Any = api.ObjectKey
        self._no_layout: Any = {0: api.MemoryLayoutDesc(shapes=[], dtypes=[])}
        self._wait_store = _waiter(self._adapter.get_store_event_fd())
        self._wait_load = _waiter(self._adapter.get_load_event_fd())
        self._wait_lookup = _waiter(self._adapter.get_lookup_and_lock_event_fd())

    def close(self) -> None:
        """Close the adapter."""
        self._adapter.close()

    def storing(self, batch: Batch, before: Work | None = None) -> Side:
        """The side that stores ``batch``, absent before; ``before`` runs behind the deletion."""
        keys, objects = self._keys(batch), _objects(batch.sources)

        def store() -> None:
            task = self._adapter.submit_store_task(keys, objects)
            result = self._wait_store(lambda: self._adapter.pop_completed_store_tasks().get(task))
            assert result.is_successful()

        async def delete() -> None:
            self._adapter.delete(keys)
            if before is not None:
                await before()

        return Side(name=self.name, work=blocking(store), before=delete)

    def loading(self, batch: Batch) -> Side:
        """The side that loads ``batch``."""
        keys, objects = self._keys(batch), _objects(batch.targets)

        def load() -> None:
            task = self._adapter.submit_load_task(keys, objects)
            found = self._wait_load(partial(self._adapter.query_load_result, task))
            assert found.popcount() == len(keys)

        return Side(name=self.name, work=blocking(load), first=batch.proven(blocking(load)))

    def looking_up(self, batch: Batch, repeats: int) -> Side:
        """The side that looks up all of ``batch``, ``repeats`` times; locks are given back unmeasured."""
        keys = self._keys(batch)

        def look_up() -> None:
            for _ in range(repeats):
                task = self._adapter.submit_lookup_and_lock_task(keys, self._no_layout)
                found = self._wait_lookup(partial(self._adapter.query_lookup_and_lock_result, task))
                assert found.popcount() == len(keys)

        def unlock() -> None:
            for _ in range(repeats):
                self._adapter.submit_unlock(keys)

        return Side(name=self.name, work=blocking(look_up), after=blocking(unlock))

    def _keys(self, batch: Batch) -> list[Any]:
        return [self._make_key(chunk_hash=key.chunk_hash, model_name="bench", kv_rank=0) for key in batch.keys]


def _objects(objects: Sequence[l2kit.MemoryObj]) -> list[Any]:
    """The same memory as LMCache's own kind of object."""
    torch = importlib.import_module("torch")
    memory = importlib.import_module("lmcache.v1.memory_management")
    described: list[Any] = []
    for obj in objects:
        (segment,) = obj.segments
        metadata = memory.MemoryObjMetadata(
            shape=torch.Size([obj.nbytes]),
            dtype=torch.uint8,
            address=0,
            phy_size=obj.nbytes,
            fmt=memory.MemoryFormat.KV_2LTD,
            ref_count=1,
        )
        tensor = torch.frombuffer(segment, dtype=torch.uint8)
        described.append(memory.TensorMemoryObj(raw_data=tensor, metadata=metadata, parent_allocator=None))
    return described


def _waiter(event_fd: int) -> Callable[[Callable[[], Any]], Any]:
    """Wait for the descriptor until the result is there, and return it."""
    poll = select.poll()
    poll.register(event_fd, select.POLLIN)

    def wait(take: Callable[[], Any]) -> Any:
        while True:
            assert poll.poll(_TIMEOUT_S * 1000), "LMCache did not finish in time"
            os.eventfd_read(event_fd)
            result = take()
            if result is not None:
                return result

    return wait
