"""``file://`` beside LMCache's ``fs`` and ``fs_native`` adapters and a plain loop of pwritev and preadv.

Page cache warm, same bytes, same file system, same rounds. Ours makes and verifies checksums; the others do not. The
same reads through ours without its verification stand beside the loop, too, and ``fio`` with O_DIRECT, where it is
installed, for what the device does. By itself: ``python bench/posix.py [--quick] [--json FILE]``.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import l2kit
from bench import fio
from bench.lmcache_peer import LMCachePeer, why_missing
from bench.objects import VERIFIED, Batch, blocking, our_load, our_lookup, our_store
from bench.pairs import Result, Side, Target, compare_all, run_all
from l2kit.items import LoadItem

_SHAPES: Final = [(256, 64 << 10), (64, 1 << 20), (16, 4 << 20), (4, 32 << 20)]
_SMALL_BYTES: Final = 64 << 10
_MEDIUM_BYTES: Final = 4 << 20
_LOOKUP_KEYS: Final = 512
_LOOKUPS: Final = 5
_LOOP: Final = "pwritev/preadv loop"
#: What the reads have in one call and one thread: as many as the adapter's own batches.
_GROUP_BYTES: Final = 1 << 20


async def measure(*, quick: bool) -> list[Result]:
    """Compare for objects from 64 KiB to 32 MiB, and lookup, in the folder for temporary files (``TMPDIR``)."""
    rounds = 5 if quick else 15
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="l2kit-bench-")))
        peers = {kind: stack.enter_context(contextlib.closing(peer)) for kind, peer in _peers(folder)}
        async with l2kit.open_adapter(f"file://{folder / 'ours'}") as adapter:
            for count, nbytes in _SHAPES:
                batch = Batch(count, nbytes)
                plain = _PlainLoop(folder / f"plain-{nbytes}", batch)
                limits = [
                    fio.side(batch, rw, queue_depth=8, directory=folder) for rw in ("write", "read") if fio.is_here()
                ]
                common: dict[str, Any] = {"amount": batch.gigabytes, "unit": "GB/s", "rounds": rounds}
                storing = [peer.storing(batch) for peer in peers.values()]
                results += await compare_all(
                    f"file:// store {batch.size}",
                    our_store(adapter, batch),
                    [*storing, plain.storing(), *limits[:1]],
                    targets=_targets(peers, nbytes),
                    note=VERIFIED,
                    **common,
                )
                results += await compare_all(
                    f"file:// load {batch.size}",
                    our_load(adapter, batch),
                    [*(peer.loading(batch) for peer in peers.values()), plain.loading(), *limits[1:]],
                    targets=_targets(peers, nbytes) | {_LOOP: Target(0.65)},
                    note=VERIFIED,
                    **common,
                )
                results += await compare_all(
                    f"file:// load without verification {batch.size}",
                    _unverified(adapter, batch),
                    [plain.loading()],
                    targets={_LOOP: Target(0.85)},
                    note="the adapter's own reads; neither side verifies",
                    **common,
                )
                for side in (our_store(adapter, batch), *storing, plain.storing()):
                    assert side.before is not None
                    await side.before()
            results += await _measure_lookup(adapter, list(peers.values()), rounds=rounds)
    return results


async def _measure_lookup(adapter: l2kit.L2Adapter[Any], peers: Sequence[LMCachePeer], *, rounds: int) -> list[Result]:
    batch = Batch(_LOOKUP_KEYS, 4096)
    for side in (our_store(adapter, batch), *(peer.storing(batch) for peer in peers)):
        await side.work()
    return await compare_all(
        f"file:// lookup of {_LOOKUP_KEYS} keys, all there",
        our_lookup(adapter, batch, _LOOKUPS),
        [peer.looking_up(batch, _LOOKUPS) for peer in peers],
        amount=_LOOKUPS,
        unit="lookups/s",
        rounds=rounds,
        note="ours learns the sizes, too, and holds every object open until it is unlocked; the peer opens nothing",
    )


def _peers(folder: Path) -> Iterator[tuple[str, LMCachePeer]]:
    """LMCache's adapters for files, with their default (and documented) settings: the page cache, four workers."""
    reason = why_missing()
    if reason is not None:
        print(f"# no LMCache: {reason}")
        return
    for kind in ("fs", "fs_native"):
        path = folder / kind
        path.mkdir()
        yield kind, LMCachePeer(kind, base_path=str(path))


def _targets(peers: dict[str, LMCachePeer], nbytes: int) -> dict[str, Target]:
    if nbytes <= _SMALL_BYTES:
        targets = {"fs": Target(8.0), "fs_native": Target(1.3)}
    elif nbytes <= _MEDIUM_BYTES:
        targets = {"fs": Target(1.1), "fs_native": Target(0.95)}
    else:
        targets = {"fs_native": Target(0.95)}
    return {peer.name: targets[kind] for kind, peer in peers.items() if kind in targets}


class _Unverified(LoadItem):
    """Takes what it gets."""

    def verify(self, size: int | None) -> None:
        """Nothing."""


def _unverified(adapter: l2kit.L2Adapter[Any], batch: Batch) -> Side:
    """The adapter's own reads, with its threads and its concurrency, and without what makes them trustworthy."""
    most = max(1, min(_GROUP_BYTES // batch.nbytes, adapter.capabilities.group_keys))
    items = [_Unverified(key, target, adapter) for key, target in zip(batch.keys, batch.targets, strict=True)]
    groups = [items[start : start + most] for start in range(0, len(items), most)]

    async def load_group(group: list[_Unverified]) -> None:
        for size in await adapter.load_many(group):
            assert isinstance(size, int), size

    async def load() -> None:
        await adapter.for_each(groups, load_group)

    return Side(name="ours", work=load, first=batch.proven(load))


class _PlainLoop:
    """One system call for each object on one thread: temporary name, write, rename; open, read."""

    def __init__(self, folder: Path, batch: Batch) -> None:
        folder.mkdir()
        self._folder = folder
        self._batch = batch

    def storing(self) -> Side:
        """The side that stores the batch, absent before."""

        def store() -> None:
            for index, source in enumerate(self._batch.sources):
                temporary = f"{self._folder}/temporary"
                descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_EXCL)
                try:
                    assert os.pwritev(descriptor, list(source.segments), 0) == self._batch.nbytes
                finally:
                    os.close(descriptor)
                os.rename(temporary, f"{self._folder}/{index}")  # noqa: PTH104 - not to time the making of paths

        def delete() -> None:
            for path in self._folder.iterdir():
                path.unlink()

        return Side(name=_LOOP, work=blocking(store), before=blocking(delete))

    def loading(self) -> Side:
        """The side that loads the batch."""

        def load() -> None:
            for index, target in enumerate(self._batch.targets):
                descriptor = os.open(f"{self._folder}/{index}", os.O_RDONLY)
                try:
                    assert os.preadv(descriptor, list(target.segments), 0) == self._batch.nbytes
                finally:
                    os.close(descriptor)

        return Side(name=_LOOP, work=blocking(load), first=self._batch.proven(blocking(load)))


if __name__ == "__main__":
    run_all({"posix": measure}, "Files, beside peers.", by_name=False)
