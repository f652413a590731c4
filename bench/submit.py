"""The price of a task: submitting and awaiting a lookup of one key in ``memory://``, beside an anyio task group."""

from __future__ import annotations

import anyio

import l2kit
from bench.objects import Batch
from bench.pairs import Result, compare

_TASKS = 2000


async def measure(*, quick: bool) -> list[Result]:
    """Compare tasks per second with 1,000 and more outstanding."""
    batch = Batch(1, 4096)
    async with l2kit.open_adapter("memory://") as adapter:
        await adapter.submit_store_task(batch.keys, batch.sources)

        async def ours() -> None:
            tasks = [adapter.submit_lookup_and_lock_task(batch.keys) for _ in range(_TASKS)]
            for task in tasks:
                await task

        async def peer() -> None:
            async with anyio.create_task_group() as group:
                for _ in range(_TASKS):
                    group.start_soon(_look_up)

        async def _look_up() -> None:
            with anyio.fail_after(10):
                await adapter.lookup_many(batch.keys)

        result = await compare(
            "submit and await, 2,000 outstanding",
            ours,
            peer,
            amount=_TASKS,
            unit="tasks/s",
            rounds=5 if quick else 15,
            peer_name="anyio task group with fail_after",
        )
    return [result]
