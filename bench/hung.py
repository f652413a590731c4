"""A tier that hangs for ever beside one that works: what it costs the others, as a ratio to the same run without it.

Both sides run the same configuration of two tiers; on ours the first, preferred one never answers anything. A load or
lookup in it is cancelled at its deadline, as with a client that has time-outs.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio

import l2kit
from bench.pairs import Result, compare
from l2kit.layout import Layout
from l2kit.prefetch import WantedChunk, WantedObject
from l2kit.storage_manager import StorageManager

_LAYOUT = Layout.raw(1 << 20)
_CHUNKS = 16
_TIMEOUT_S = 2.0


class _Storage:
    """A storage manager over a first tier and a healthy second one, and a prompt of 16 MiB in it."""

    def __init__(self, manager: StorageManager) -> None:
        self.manager = manager
        self.chunks: list[WantedChunk] = [
            (WantedObject(l2kit.ObjectKey("hung", os.urandom(16)), _LAYOUT),) for _ in range(_CHUNKS)
        ]
        self.slowest_s = 0.0

    async def fill(self) -> None:
        """Bring the prompt into L1 and the healthy tier."""
        for chunk in self.chunks:
            reservation = self.manager.reserve_write(chunk[0].key, _LAYOUT)
            assert reservation is not None
            reservation.obj.segments[0][:] = os.urandom(_LAYOUT.nbytes)
            self.manager.finish_write([reservation])
        with anyio.move_on_after(_TIMEOUT_S * 2):  # one tier never has it
            await self.manager.drain()
        await self.manager.tiers[1].adapter.submit_store_task(*self._objects())

    async def read_from_l1(self) -> None:
        """The whole prompt, 100 times; nothing is asked of any tier."""
        for _ in range(100):
            await self._read()

    async def read_from_the_healthy_tier(self) -> None:
        """The whole prompt, once, with L1 empty."""
        for chunk in self.chunks:
            self.manager.l1.remove(chunk[0].key)
        await self._read()

    async def _read(self) -> None:
        started = time.perf_counter()
        prefetch = self.manager.start_prefetch(self.chunks, timeout_s=_TIMEOUT_S)
        await prefetch.wait_async()
        assert prefetch.ready_chunks == _CHUNKS, f"{prefetch.ready_chunks} of {_CHUNKS} chunks"
        prefetch.release()
        self.slowest_s = max(self.slowest_s, time.perf_counter() - started)

    def _objects(self) -> tuple[list[l2kit.ObjectKey], list[l2kit.MemoryObj]]:
        leases = self.manager.l1.acquire_prefix([chunk[0].key for chunk in self.chunks], owner="bench")
        keys, objects = [lease.key for lease in leases], [lease.obj for lease in leases]
        for lease in leases:
            lease.release()
        return keys, objects


def _config(folder: Path, first: dict[str, Any]) -> dict[str, Any]:
    return {
        "l1": {"max_bytes": 4 * _CHUNKS * _LAYOUT.nbytes},
        "lookup_timeout_s": _TIMEOUT_S,
        "drain_timeout_s": 1.0,
        "tiers": [first, {"url": f"file://{folder}", "name": "healthy"}],
    }


async def measure(*, quick: bool) -> list[Result]:
    """L1 hits, hits of the healthy tier, and closing."""
    rounds = 5 if quick else 15
    hang = {"load": ["hang"], "lookup": ["hang"], "store": ["hang"]}
    with tempfile.TemporaryDirectory() as scratch:
        works, hangs = Path(scratch, "works"), Path(scratch, "hangs")
        hung = {"url": f"fault+file://{hangs / 'hung'}", "name": "hung", "timeout_s": _TIMEOUT_S, "fault": hang}
        well = {"url": f"file://{works / 'first'}", "name": "first"}
        results: list[Result] = []
        closing: dict[str, float] = {}
        async with l2kit.open_storage(_config(works / "second", well)) as without:
            async with l2kit.open_storage(_config(hangs / "second", hung)) as with_it:
                ours, peer = _Storage(with_it), _Storage(without)
                for side in (ours, peer):
                    await side.fill()
                common = {"rounds": rounds, "peer_name": "no tier hangs"}
                results.append(
                    await compare(
                        "hung tier: L1 hits of 16 MiB",
                        ours.read_from_l1,
                        peer.read_from_l1,
                        amount=100,
                        unit="prompts/s",
                        **common,  # type: ignore[arg-type]
                    )
                )
                # The first prompt that needs a tier pays for finding out; it is not what a running system sees.
                ours.slowest_s = 0.0
                results.append(
                    await compare(
                        "hung tier: 16 x 1 MiB from the healthy tier",
                        ours.read_from_the_healthy_tier,
                        peer.read_from_the_healthy_tier,
                        amount=_CHUNKS * _LAYOUT.nbytes / 1e9,
                        unit="GB/s",
                        **common,  # type: ignore[arg-type]
                    )
                )
                slowest_s = ours.slowest_s
                started = time.perf_counter()
            closing["with"] = time.perf_counter() - started
            started = time.perf_counter()
        closing["without"] = time.perf_counter() - started
    limit_s = 1.0 + _TIMEOUT_S  # the drain time-out, and a deadline of the tier
    results += [
        Result("hung tier: slowest prompt", slowest_s, _TIMEOUT_S, "s", slowest_s / _TIMEOUT_S, rounds, "deadline"),
        Result("hung tier: close()", closing["with"], limit_s, "s", closing["with"] / limit_s, 1, "its bound"),
    ]
    return results
