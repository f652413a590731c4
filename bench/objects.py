"""Objects and batches that the adapter benchmarks share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import l2kit
from bench.pairs import Side, Work

#: What to know before comparing.
VERIFIED = "ours makes the checksum on store and verifies every byte on load; the peer does neither"


class Batch:
    """``count`` objects of ``nbytes`` each, and a second set of buffers to load into."""

    def __init__(self, count: int, nbytes: int) -> None:
        layout = l2kit.Layout.raw(nbytes)
        pattern = os.urandom(nbytes - 8)
        self.keys = [l2kit.ObjectKey("bench", os.urandom(16)) for _ in range(count)]
        self.sources = [
            l2kit.MemoryObj.wrap(bytearray(index.to_bytes(8, "big") + pattern), layout) for index in range(count)
        ]
        self.targets = [l2kit.MemoryObj.allocate(layout) for _ in range(count)]
        self.nbytes = nbytes
        self.gigabytes = count * nbytes / 1e9

    @property
    def size(self) -> str:
        """For people."""
        return f"{self.nbytes >> 10} KiB x {len(self.keys)}"

    def proven(self, load: Work) -> Work:
        """``load`` once, with proof that it brought every byte."""

        async def proof() -> None:
            for target in self.targets:
                target.segments[0][:] = bytes(self.nbytes)
            await load()
            for source, target in zip(self.sources, self.targets, strict=True):
                assert source.segments == target.segments, "the bytes that were loaded are not those that were stored"

        return proof


def blocking(work: Callable[[], float | None]) -> Work:
    """Blocking work as it is, on the calling thread: no hop to a thread that it would have to pay for."""

    async def run() -> float | None:
        return work()

    return run


def our_store(adapter: l2kit.L2Adapter[Any], batch: Batch, before: Work | None = None) -> Side:
    """Our side of storing ``batch``, absent before; ``before`` runs behind the deletion."""

    async def delete() -> None:
        await adapter.submit_delete_task(batch.keys)
        if before is not None:
            await before()

    async def store() -> None:
        outcomes = await adapter.submit_store_task(batch.keys, batch.sources)
        assert all(outcome.status is l2kit.StoreStatus.STORED for outcome in outcomes), outcomes

    return Side(name="ours", work=store, before=delete)


def our_load(adapter: l2kit.L2Adapter[Any], batch: Batch) -> Side:
    """Our side of loading ``batch``."""

    async def load() -> None:
        outcomes = await adapter.submit_load_task(batch.keys, batch.targets)
        assert all(outcome.loaded for outcome in outcomes), outcomes

    return Side(name="ours", work=load, first=batch.proven(load))


def our_lookup(adapter: l2kit.L2Adapter[Any], batch: Batch, repeats: int) -> Side:
    """Our side of looking up all of ``batch``, ``repeats`` times; leases are given back unmeasured."""

    async def lookup() -> None:
        for _ in range(repeats):
            outcomes = await adapter.submit_lookup_and_lock_task(batch.keys)
            assert all(outcome.status is l2kit.LookupStatus.HIT for outcome in outcomes), outcomes

    async def unlock() -> None:
        for _ in range(repeats):
            await adapter.submit_unlock_task(batch.keys)

    return Side(name="ours", work=lookup, after=unlock)
