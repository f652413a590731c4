"""``file://`` beside LMCache's ``fs`` and ``fs_native`` adapters and a plain loop of pwritev and preadv.

Page cache warm, same bytes, same file system, same rounds. Ours makes and verifies checksums; the others do not. The
same reads through ours without its verification stand beside the loop, too. Then past the page cache (``direct=true``)
beside a few threads that do the same with O_DIRECT, and beside ``fio`` where it is installed, from 1 MiB. By itself:
``python bench/posix.py [--quick] [--json FILE]``.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import l2kit
from bench import fio
from bench.lmcache_peer import LMCachePeer, why_missing
from bench.objects import VERIFIED, Batch, blocking, our_load, our_lookup, our_store
from bench.pairs import Result, Side, Target, compare_all, run_all
from l2kit.items import LoadItem, Receiving

_SHAPES: Final = [(256, 64 << 10), (64, 1 << 20), (16, 4 << 20), (4, 32 << 20)]
_DIRECT_SHAPES: Final = [(64, 1 << 20), (16, 4 << 20), (4, 32 << 20)]
_SMALL_BYTES: Final = 64 << 10
_MEDIUM_BYTES: Final = 4 << 20
_LOOKUP_KEYS: Final = 512
_LOOKUPS: Final = 5
_LOOP: Final = "pwritev/preadv loop"
_DIRECT_LOOP: Final = "O_DIRECT, 4 threads"
_DIRECT_THREADS: Final = 4
#: What the reads have in one call and one thread, as the adapter's own batches: up to so many bytes; and objects below
#: the second size one call after the other.
_GROUP_BYTES: Final = 16 << 20
_SHARED_BYTES: Final = 256 << 10


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
                common: dict[str, Any] = {"amount": batch.gigabytes, "unit": "GB/s", "rounds": rounds}
                storing = [peer.storing(batch) for peer in peers.values()]
                results += await compare_all(
                    f"file:// store {batch.size}",
                    our_store(adapter, batch),
                    [*storing, plain.storing()],
                    targets=_targets(peers, nbytes),
                    note=VERIFIED,
                    **common,
                )
                results += await compare_all(
                    f"file:// load {batch.size}",
                    our_load(adapter, batch),
                    [*(peer.loading(batch) for peer in peers.values()), plain.loading()],
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
            note = (
                "ours learns the sizes, too, and holds every object open until it is unlocked; the peer opens nothing"
            )
            results += await _measure_lookup("", adapter, list(peers.values()), note, rounds=rounds)
        async with l2kit.open_adapter(f"file://{folder / 'exclusive'}?exclusive=true") as adapter:
            note = "ours learns the sizes, too, and holds every object, in memory, until it is unlocked"
            results += await _measure_lookup(" exclusive", adapter, list(peers.values()), note, rounds=rounds)
        async with l2kit.open_adapter(f"file://{folder / 'direct'}?direct=true") as adapter:
            for count, nbytes in _DIRECT_SHAPES:
                results += await _measure_direct(adapter, folder, _aligned(Batch(count, nbytes)), rounds=rounds)
    return results


async def _measure_lookup(
    how: str, adapter: l2kit.L2Adapter[Any], peers: Sequence[LMCachePeer], note: str, *, rounds: int
) -> list[Result]:
    batch = Batch(_LOOKUP_KEYS, 4096)
    for side in (our_store(adapter, batch), *(peer.storing(batch) for peer in peers)):
        await side.work()
    return await compare_all(
        f"file://{how} lookup of {_LOOKUP_KEYS} keys, all there",
        our_lookup(adapter, batch, _LOOKUPS),
        [peer.looking_up(batch, _LOOKUPS) for peer in peers],
        amount=_LOOKUPS,
        unit="lookups/s",
        rounds=rounds,
        note=note,
    )


async def _measure_direct(adapter: l2kit.L2Adapter[Any], folder: Path, batch: Batch, *, rounds: int) -> list[Result]:
    loop = _DirectLoop(folder / f"direct-{batch.nbytes}", batch)
    limits = [fio.side(batch, rw, queue_depth=8, directory=folder) for rw in ("write", "read") if fio.is_here()]
    common: dict[str, Any] = {"amount": batch.gigabytes, "unit": "GB/s", "rounds": rounds, "note": VERIFIED}
    common["targets"] = {name: Target(0.85) for name in (_DIRECT_LOOP, fio.NAME)}
    ours, theirs = our_store(adapter, batch), loop.storing()
    results = await compare_all(f"file://direct store {batch.size}", ours, [theirs, *limits[:1]], **common)
    results += await compare_all(
        f"file://direct load {batch.size}", our_load(adapter, batch), [loop.loading(), *limits[1:]], **common
    )
    for side in (ours, theirs):
        assert side.before is not None
        await side.before()
    return results


def _aligned(batch: Batch) -> Batch:
    """The same with sources on pages, as L1's memory is."""
    for index, source in enumerate(batch.sources):
        batch.sources[index] = l2kit.MemoryObj.allocate(source.layout)
        batch.sources[index].segments[0][:] = source.segments[0]
    return batch


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

    def receive(self) -> Receiving:
        """An attempt that takes what it gets."""
        return _UnverifiedReceiving(self.frame, lambda *_: None)


class _UnverifiedReceiving(Receiving):
    def advance(self, nbytes: int) -> None:
        """Nothing."""

    def finish(self, size: int) -> None:
        """Nothing."""


def _unverified(adapter: l2kit.L2Adapter[Any], batch: Batch) -> Side:
    """The adapter's own reads, with its threads and its concurrency, and without what makes them trustworthy."""
    most = max(1, min(_GROUP_BYTES // batch.nbytes, adapter.capabilities.group_keys))
    shared = batch.nbytes >= _SHARED_BYTES
    if shared:
        most = min(most, -(-len(batch.keys) // adapter.config.max_concurrency))
    items = [_Unverified(key, target, adapter) for key, target in zip(batch.keys, batch.targets, strict=True)]
    groups = [items[start : start + most] for start in range(0, len(items), most)]

    async def load_group(group: list[_Unverified]) -> None:
        for size in await adapter.load_many(group):
            assert isinstance(size, int), size

    async def load() -> None:
        if shared:
            await adapter.for_each(groups, load_group)
        else:
            for group in groups:
                await load_group(group)

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


class _DirectLoop:
    """One system call past the page cache for each object, on a few threads; no temporary name, nothing renamed."""

    def __init__(self, folder: Path, batch: Batch) -> None:
        folder.mkdir()
        self._folder = folder
        self._batch = batch
        self._threads = ThreadPoolExecutor(_DIRECT_THREADS)

    def storing(self) -> Side:
        """The side that stores the batch, absent before."""

        def write(index: int) -> None:
            self._move(os.pwritev, index, os.O_CREAT | os.O_WRONLY | os.O_EXCL, self._batch.sources[index])

        def delete() -> None:
            for path in self._folder.iterdir():
                path.unlink()

        return Side(name=_DIRECT_LOOP, work=blocking(lambda: self._run(write)), before=blocking(delete))

    def loading(self) -> Side:
        """The side that loads the batch."""

        def read(index: int) -> None:
            self._move(os.preadv, index, os.O_RDONLY, self._batch.targets[index])

        work = blocking(lambda: self._run(read))
        return Side(name=_DIRECT_LOOP, work=work, first=self._batch.proven(work))

    def _move(self, call: Callable[..., int], index: int, flags: int, obj: l2kit.MemoryObj) -> None:
        descriptor = os.open(f"{self._folder}/{index}", flags | os.O_DIRECT)
        try:
            assert call(descriptor, list(obj.segments), 0) == obj.nbytes
        finally:
            os.close(descriptor)

    def _run(self, work: Callable[[int], None]) -> None:
        list(self._threads.map(work, range(len(self._batch.keys))))


if __name__ == "__main__":
    run_all({"posix": measure}, "Files, beside peers.", by_name=False)
