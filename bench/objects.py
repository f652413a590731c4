"""Objects and batches that the adapter benchmarks share."""

from __future__ import annotations

import os
from typing import Any

import l2kit
from bench.pairs import Result, Work, compare


class Batch:
    """``count`` objects of ``nbytes`` each, and a second set of buffers to load into."""

    def __init__(self, count: int, nbytes: int) -> None:
        layout = l2kit.Layout.raw(nbytes)
        pattern = os.urandom(nbytes)
        self.keys = [l2kit.ObjectKey("bench", os.urandom(16)) for _ in range(count)]
        self.sources = [l2kit.MemoryObj.wrap(bytearray(pattern), layout) for _ in range(count)]
        self.targets = [l2kit.MemoryObj.allocate(layout) for _ in range(count)]
        self.nbytes = nbytes
        self.gigabytes = count * nbytes / 1e9


async def compare_adapter(
    name: str, adapter: l2kit.L2Adapter[Any], batch: Batch, store: Work, load: Work, *, peer_name: str, rounds: int
) -> list[Result]:
    """Store and load ``batch`` through ``adapter``, each beside the peer's ``store`` and ``load`` of the same bytes."""

    async def store_ours() -> None:
        await adapter.submit_delete_task(batch.keys)
        outcomes = await adapter.submit_store_task(batch.keys, batch.sources)
        assert all(outcome.status is l2kit.StoreStatus.STORED for outcome in outcomes), outcomes

    async def load_ours() -> None:
        outcomes = await adapter.submit_load_task(batch.keys, batch.targets)
        assert all(outcome.loaded for outcome in outcomes), outcomes

    size = f"{batch.nbytes >> 10} KiB x {len(batch.keys)}"
    common = {"amount": batch.gigabytes, "unit": "GB/s", "rounds": rounds, "peer_name": peer_name}
    return [
        await compare(f"{name} store {size}", store_ours, store, **common),  # type: ignore[arg-type]
        await compare(f"{name} load {size}", load_ours, load, **common),  # type: ignore[arg-type]
    ]
