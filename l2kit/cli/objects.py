"""``l2kit probe | ls | verify URL``: a look at one backend through its adapter."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import anyio

from l2kit import open_adapter
from l2kit.adapter import KeyInfo, L2Adapter
from l2kit.config import parse_url
from l2kit.envelope import INTACT_REASONS
from l2kit.errors import CapacityError, CorruptObjectError
from l2kit.inventory import listing
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.outcomes import LoadOutcome, LoadStatus

_FIRST_BUFFER_BYTES: Final = 1 << 20
_MAX_BUFFER_BYTES: Final = 4 << 30

_DAMAGED: Final = "damaged"
_DELETED: Final = ", deleted"
_GONE: Final = "gone meanwhile"


def run_probe(options: argparse.Namespace) -> int:
    """One line that says how long the probe took, or the error."""
    return anyio.run(_probe, options.url)


def run_ls(options: argparse.Namespace) -> int:
    """One line for each object on stdout, the sum on stderr."""
    return anyio.run(_ls, options.url)


def run_verify(options: argparse.Namespace) -> int:
    """One line for each object that is not well, then the counts; 1 when something is left that is not well."""
    return anyio.run(partial(_verify, options.url, delete=options.delete))


async def _probe(url: str) -> int:
    async with open_adapter(url) as adapter:
        probe = await adapter.probe()
    if probe.error is not None:
        raise probe.error
    print(f"{parse_url(url)}: ok in {probe.latency_s * 1000:.1f} ms")
    for name, value in sorted(probe.details.items()):
        print(f"  {name}: {value}")
    return 0


async def _ls(url: str) -> int:
    objects = stored_bytes = 0
    async with open_adapter(url) as adapter, aclosing(listing(adapter)) as found:
        async for info in found:
            print(f"{info.size:>12}  {info.key}")
            objects += 1
            stored_bytes += info.size
    print(f"{objects} objects, {stored_bytes} bytes", file=sys.stderr)
    return 0


async def _verify(url: str, *, delete: bool) -> int:
    counts: Counter[str] = Counter()
    async with open_adapter(url) as adapter:
        adapter.deletes_damaged = False  # whether to delete is for the caller of this command to say
        reader = _Reader(adapter)
        batch: list[KeyInfo] = []
        async with aclosing(listing(adapter)) as found:
            async for info in found:
                batch.append(info)
                if len(batch) == adapter.config.max_concurrency:
                    counts += await _verify_batch(reader, batch, delete=delete)
                    batch.clear()
        counts += await _verify_batch(reader, batch, delete=delete)
    print(f"{sum(counts.values())} objects")
    for name, count in sorted(counts.items(), key=lambda item: (item[0] != "ok", item[0])):
        print(f"  {count:>8}  {name}")
    return 1 if any(name != "ok" and not name.endswith((_DELETED, _GONE)) for name in counts) else 0


async def _verify_batch(reader: _Reader, batch: Sequence[KeyInfo], *, delete: bool) -> Counter[str]:
    counts: Counter[str] = Counter()
    for info, outcome in zip(batch, await reader.load(batch), strict=True):
        verdict = _verdict(outcome)
        if delete and verdict.startswith(_DAMAGED):
            deleted = (await reader.adapter.submit_delete_task([info.key]))[0]
            verdict += _DELETED if deleted.error is None else f", not deleted: {type(deleted.error).__name__}"
        if verdict != "ok":
            print(f"{verdict}: {info.key}")
        counts[verdict] += 1
    return counts


def _verdict(outcome: LoadOutcome) -> str:
    if outcome.status is LoadStatus.LOADED:
        return "ok"
    if outcome.status is LoadStatus.MISS:
        return _GONE
    if isinstance(outcome.error, CorruptObjectError):
        kind = "intact, not readable here" if outcome.error.reason in INTACT_REASONS else _DAMAGED
        return f"{kind} ({outcome.error.reason})"
    return f"failed ({type(outcome.error).__name__})"


class _Reader:
    """Loads objects of any size and codec into buffers that are used again."""

    def __init__(self, adapter: L2Adapter[Any]) -> None:
        self.adapter: Final = adapter
        self._buffers = [bytearray(_FIRST_BUFFER_BYTES) for _ in range(adapter.config.max_concurrency)]

    async def load(self, batch: Sequence[KeyInfo]) -> list[LoadOutcome]:
        """Load and verify up to ``max_concurrency`` objects at once."""
        for index, info in enumerate(batch):
            self._grow(index, info.size)
        outcomes = await self._load([info.key for info in batch], range(len(batch)))
        for index, info in enumerate(batch):
            # A listing tells the stored size; how long an encoded object is, only its envelope knows.
            while isinstance(outcomes[index].error, CapacityError) and len(self._buffers[index]) < _MAX_BUFFER_BYTES:
                self._grow(index, 2 * len(self._buffers[index]))
                outcomes[index] = (await self._load([info.key], [index]))[0]
        return outcomes

    async def _load(self, keys: Sequence[ObjectKey], indices: Sequence[int]) -> list[LoadOutcome]:
        buffers = [self._buffers[index] for index in indices]
        targets = [MemoryObj.wrap(buffer, Layout.raw(len(buffer))) for buffer in buffers]
        return await self.adapter.submit_load_task(keys, targets)

    def _grow(self, index: int, nbytes: int) -> None:
        if len(self._buffers[index]) < nbytes:
            self._buffers[index] = bytearray(nbytes)
