"""``file://`` beside a plain loop of pwrite and pread, page cache warm; ours verifies every byte, the loop does not."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import anyio
import anyio.to_thread

import l2kit
from bench.objects import Batch, compare_adapter
from bench.pairs import Result


async def measure(*, quick: bool) -> list[Result]:
    """Compare for objects from 64 KiB to 4 MiB (32 MiB in a full run)."""
    shapes = [(64, 64 << 10), (32, 1 << 20), (16, 4 << 20)] + ([] if quick else [(8, 32 << 20)])
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="l2kit-bench-") as name:
        folder = Path(name)
        async with l2kit.open_adapter(f"file://{folder / 'ours'}") as adapter:
            for count, nbytes in shapes:
                batch = Batch(count, nbytes)
                plain = folder / f"plain-{nbytes}"
                plain.mkdir()

                def write(batch: Batch = batch, plain: Path = plain) -> None:
                    for index, source in enumerate(batch.sources):
                        temporary = plain / "temporary"
                        descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
                        try:
                            assert os.pwritev(descriptor, list(source.segments), 0) == batch.nbytes
                        finally:
                            os.close(descriptor)
                        temporary.rename(plain / str(index))

                def read(batch: Batch = batch, plain: Path = plain) -> None:
                    for index, target in enumerate(batch.targets):
                        descriptor = os.open(plain / str(index), os.O_RDONLY)
                        try:
                            assert os.preadv(descriptor, list(target.segments), 0) == batch.nbytes
                        finally:
                            os.close(descriptor)

                async def store(write=write) -> None:  # type: ignore[no-untyped-def]
                    await anyio.to_thread.run_sync(write)

                async def load(read=read) -> None:  # type: ignore[no-untyped-def]
                    await anyio.to_thread.run_sync(read)

                results += await compare_adapter(
                    "file://", adapter, batch, store, load, peer_name="pwrite/pread loop", rounds=5 if quick else 15
                )
    return results
