"""``nvme://`` beside LMCache's ``raw_block``, a plain O_DIRECT loop, and ``fio``: on one preallocated file each.

All files are written over once beforehand, for a fresh extent costs several times as much to write. Sources and targets
are page-aligned, as L1's arena is. Ours makes and verifies checksums; the others do not. By itself: ``python -m
bench.nvme [--quick] [--json FILE]``.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import l2kit
from bench import fio
from bench.lmcache_peer import LMCachePeer, why_missing
from bench.objects import VERIFIED, Batch, blocking, our_load, our_lookup, our_store
from bench.pairs import Result, Side, Target, compare_all, run_all

_SHAPES: Final = [(256, 64 << 10), (64, 1 << 20), (16, 4 << 20), (4, 32 << 20)]
_SMALL_BYTES: Final = 64 << 10
_FILE_BYTES: Final = 1 << 30
_PREFILL: Final = bytes(4 << 20)
_THREADS: Final = 4
_UNIT: Final = 1 << 20
_LOOKUP_KEYS: Final = 512
_LOOKUPS: Final = 5
_LOOP: Final = "O_DIRECT loop"


class AlignedBatch(Batch):
    """A batch whose sources begin on a page, like its targets."""

    def __init__(self, count: int, nbytes: int) -> None:
        super().__init__(count, nbytes)
        aligned = [l2kit.MemoryObj.allocate(source.layout) for source in self.sources]
        for copy, source in zip(aligned, self.sources, strict=True):
            copy.segments[0][:] = source.segments[0]
        self.sources = aligned


async def measure(*, quick: bool) -> list[Result]:
    """Compare for objects from 64 KiB to 32 MiB, and lookup, in the folder for temporary files (``TMPDIR``)."""
    rounds = 5 if quick else 15
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="l2kit-bench-", dir=_disk())))
        url = f"nvme://{folder}/ours?size_bytes={_FILE_BYTES}&prefill=true"
        async with l2kit.open_adapter(url) as adapter:
            assert getattr(adapter, "direct", True), (
                "O_DIRECT is refused here: set TMPDIR to a file system that takes it"
            )
            for count, nbytes in _SHAPES:
                batch = AlignedBatch(count, nbytes)
                with contextlib.ExitStack() as peers_stack:
                    peers = [peers_stack.enter_context(contextlib.closing(peer)) for peer in _peers(folder, nbytes)]
                    loop = peers_stack.enter_context(_Loop(folder / "loop", batch))
                    limits = [
                        fio.side(batch, rw, queue_depth=_THREADS, file=_fio_file(folder))
                        for rw in ("write", "read")
                        if fio.is_here()
                    ]
                    common: dict[str, Any] = {"amount": batch.gigabytes, "unit": "GB/s", "rounds": rounds}
                    results += await compare_all(
                        f"nvme:// store {batch.size}",
                        our_store(adapter, batch),
                        [*(peer.storing(batch) for peer in peers), loop.storing(), *limits[:1]],
                        targets=_targets(peers, nbytes, 2.0),
                        note=VERIFIED,
                        **common,
                    )
                    results += await compare_all(
                        f"nvme:// load {batch.size}",
                        our_load(adapter, batch),
                        [*(peer.loading(batch) for peer in peers), loop.loading(), *limits[1:]],
                        targets=_targets(peers, nbytes, 1.5),
                        note=VERIFIED,
                        **common,
                    )
                    if nbytes > _SMALL_BYTES:
                        for what, side, peer, device in (
                            ("store", _bare_store(adapter, batch), loop.storing(), limits[:1]),
                            ("load", _bare_load(adapter, batch), loop.loading(), limits[1:]),
                        ):
                            results += await compare_all(
                                f"nvme:// {what} without checksums {batch.size}",
                                side,
                                [peer, *device],
                                targets={fio.NAME: Target(0.85)},
                                note="the adapter's own hooks; neither side verifies",
                                **common,
                            )
                    await adapter.submit_delete_task(batch.keys)
            results.append(await _measure_lookup(adapter, rounds=rounds))
    return results


async def _measure_lookup(adapter: l2kit.L2Adapter[Any], *, rounds: int) -> Result:
    batch = AlignedBatch(_LOOKUP_KEYS, 4096)
    await our_store(adapter, batch).work()
    names = {key.encode(): batch.nbytes for key in batch.keys}

    def look_around() -> None:
        for _ in range(_LOOKUPS):
            assert all(names.get(key.encode()) for key in batch.keys)

    [result] = await compare_all(
        f"nvme:// lookup of {_LOOKUP_KEYS} keys, all there",
        our_lookup(adapter, batch, _LOOKUPS),
        [Side(name="dictionary of names", work=blocking(look_around))],
        amount=_LOOKUPS,
        unit="lookups/s",
        rounds=rounds,
        note="ours learns the sizes, too, and holds every object until it is unlocked",
    )
    return result


def _bare_store(adapter: l2kit.L2Adapter[Any], batch: Batch) -> Side:
    """The adapter's own writes, with its threads, and without what makes them trustworthy."""
    head = memoryview(bytes(4096))

    async def store_one(number: int) -> None:
        assert await adapter.store_one(batch.keys[number], [head, *batch.sources[number].segments]) == "stored"

    async def store() -> None:
        await adapter.for_each(range(len(batch.keys)), store_one)

    async def delete() -> None:
        await adapter.submit_delete_task(batch.keys)

    return Side(name="ours", work=store, before=delete)


def _bare_load(adapter: l2kit.L2Adapter[Any], batch: Batch) -> Side:
    """The adapter's own reads."""

    async def load_one(number: int) -> None:
        into = [memoryview(bytearray(4096)), *batch.targets[number].segments]
        assert await adapter.load_one(batch.keys[number], into) == 4096 + batch.nbytes

    async def load() -> None:
        await adapter.for_each(range(len(batch.keys)), load_one)

    return Side(name="ours", work=load, first=batch.proven(load))


def _disk() -> str | None:
    """A folder on a disk: the one for temporary files, unless that is memory."""
    return os.environ.get("TMPDIR")


def _peers(folder: Path, nbytes: int) -> Iterator[LMCachePeer]:
    """LMCache's adapter for raw blocks, on a file, with O_DIRECT; slots of exactly an object and its header."""
    reason = why_missing()
    if reason is not None:
        print(f"# no LMCache: {reason}")
        return
    path = folder / "raw_block"
    _prefilled(path)
    try:
        peer = LMCachePeer(
            "raw_block",
            device_path=str(path),
            slot_bytes=nbytes + 4096,
            capacity_bytes=_FILE_BYTES,
            meta_total_bytes=64 << 20,
            use_odirect=True,
        )
    except RuntimeError as error:  # its extension in Rust is built apart from the wheel: rust/raw_block of its sources
        print(f"# no LMCache raw_block: {error}")
        return
    yield peer


def _prefilled(path: Path) -> None:
    """A file without fresh extents; its head is empty again, or the peer would take it for its own."""
    with path.open("wb", buffering=0) as file:
        for _ in range(_FILE_BYTES // len(_PREFILL)):
            file.write(_PREFILL)
        os.fsync(file.fileno())


def _targets(peers: list[LMCachePeer], nbytes: int, small: float) -> dict[str, Target]:
    targets = {peer.name: Target(small if nbytes <= _SMALL_BYTES else 1.0) for peer in peers}
    if nbytes > _SMALL_BYTES:
        targets[fio.NAME] = Target(0.85)
    return targets


class _Loop:
    """What a program without an index does: a few threads with preadv and pwritev, requests of up to 1 MiB."""

    def __init__(self, path: Path, batch: Batch) -> None:
        if not path.exists():
            _prefilled(path)
        self._batch = batch
        self._threads = ThreadPoolExecutor(_THREADS)
        self._fd = os.open(path, os.O_RDWR | os.O_DIRECT)

    def __enter__(self) -> _Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        os.close(self._fd)

    def storing(self) -> Side:
        """The side that writes the batch."""
        pieces = self._pieces(self._batch.sources)

        def write(piece: tuple[int, memoryview]) -> None:
            offset, view = piece
            assert os.pwritev(self._fd, [view], offset) == len(view)

        return Side(name=_LOOP, work=blocking(lambda: self._run(write, pieces)))

    def loading(self) -> Side:
        """The side that reads the batch."""
        pieces = self._pieces(self._batch.targets)

        def read(piece: tuple[int, memoryview]) -> None:
            offset, view = piece
            assert os.preadv(self._fd, [view], offset) == len(view)

        work = blocking(lambda: self._run(read, pieces))
        return Side(name=_LOOP, work=work, first=self._batch.proven(work))

    def _run(self, move: Any, pieces: list[tuple[int, memoryview]]) -> None:
        list(self._threads.map(move, pieces))

    def _pieces(self, objects: list[l2kit.MemoryObj]) -> list[tuple[int, memoryview]]:
        pieces: list[tuple[int, memoryview]] = []
        for number, obj in enumerate(objects):
            for start in range(0, obj.nbytes, _UNIT):
                pieces.append((number * obj.nbytes + start, obj.segments[0][start : start + _UNIT]))
        return pieces


def _fio_file(folder: Path) -> Path:
    """A file of its own, for the tool writes over it."""
    path = folder / "fio"
    if not path.exists():
        _prefilled(path)
    return path


if __name__ == "__main__":
    run_all({"nvme": measure}, "A slab, beside peers.", by_name=False)
