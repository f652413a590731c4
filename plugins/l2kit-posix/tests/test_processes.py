"""Other processes at the same directory: they write, delete, and are killed."""

# ruff: noqa: ASYNC220 - tests look at files directly, on a loop that nobody else uses

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from l2kit import ObjectKey
from l2kit.testing.groups.base import Adapter, Conformance, content, source
from l2kit_posix.names import object_path

#: Stores ``COUNT`` objects of ``NBYTES`` under keys of ``SEED``, the same ones again and again if there is one only,
#: and says which are stored. Run as ``python -c WRITER URL SEED COUNT NBYTES``.
WRITER = """
import hashlib, random, sys
import anyio, l2kit

def key(seed, number):
    return l2kit.ObjectKey("writer", hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=16).digest())

async def main(url, seed, count, nbytes):
    async with l2kit.open_adapter(url) as adapter:
        for number in range(count):
            data = random.Random(f"{(seed, number)}/{nbytes}").randbytes(nbytes)
            stored = l2kit.MemoryObj.wrap(data, l2kit.Layout.raw(nbytes))
            [outcome] = await adapter.submit_store_task([key(seed, number)], [stored])
            assert outcome.present, outcome
            print(number, flush=True)
        sys.stdin.read()

anyio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
"""


def writer_key(seed: str, number: int) -> ObjectKey:
    return ObjectKey("writer", hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=16).digest())


@contextmanager
def writer(url: str, seed: str, count: int, nbytes: int) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `WRITER`; it stays open until its standard input is closed."""
    command = [sys.executable, "-c", WRITER, url, seed, str(count), str(nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(predicate: Callable[[], bool], patience_s: float = 30.0) -> None:
    give_up = time.monotonic() + patience_s
    while not predicate():
        assert time.monotonic() < give_up, "waited in vain"


class TestProcesses(Conformance):
    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/cache"

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return tmp_path / "cache"

    @pytest.mark.slow
    async def test_a_killed_writer_leaves_no_torn_object_and_is_swept(self, url: str, root: Path) -> None:
        nbytes = 32 << 20

        def writing() -> bool:
            """The writer has begun an object and has not published it."""
            return any(0 < path.stat().st_size < nbytes for path in root.glob("staging/*/[0-9]*") if path.exists())

        for attempt in range(20):
            with writer(url, f"killed {attempt}", 2, nbytes) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "0\n"
                try:
                    wait_for(writing, 5.0)
                except (AssertionError, FileNotFoundError):  # it was faster than we could look
                    continue
                process.send_signal(signal.SIGKILL)
                acknowledged = {0, *map(int, process.stdout.read().split())}
                process.wait()
            unfinished = list(root.glob("staging/*/[0-9]*"))
            if unfinished:
                break
            shutil.rmtree(root)
        else:
            pytest.fail("the writer was never caught in the middle of an object")
        async with self.open_adapter(url) as adapter:
            assert adapter.counters["orphans_swept"] == 1
            assert len(list(root.glob("staging/*/"))) == 1
            assert not any(path.exists() for path in unfinished)
            listed = {info.key async for info in adapter.iter_keys()}
            seed = f"killed {attempt}"
            assert listed >= {writer_key(seed, number) for number in acknowledged}
            assert listed < {writer_key(seed, number) for number in range(2)}
            for number in range(2):
                outcome, received = await self.load(adapter, writer_key(seed, number), nbytes)
                assert outcome.loaded == (writer_key(seed, number) in listed)
                assert not outcome.loaded or received == content((seed, number), nbytes)
            assert (await adapter.usage()).used_bytes == sum(
                path.stat().st_size for path in root.glob("objects/**/*") if path.is_file()
            )

    async def test_a_living_process_is_not_swept(self, url: str, root: Path) -> None:
        with writer(url, "alive", 1, 1000) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "0\n"
            [theirs] = root.glob("staging/*/")
            async with self.open_adapter(url) as adapter:
                assert adapter.counters["orphans_swept"] == 0
                assert theirs.exists()
                outcome, received = await self.load(adapter, writer_key("alive", 0), 1000)
                assert outcome.loaded
                assert received == content(("alive", 0), 1000)
            process.communicate()
            assert process.returncode == 0
            assert list(root.glob("staging/*")) == []

    async def test_objects_of_a_running_process_are_seen_at_once(self, url: str) -> None:
        async with self.open_adapter(url) as adapter:
            key = writer_key("seen", 0)
            assert not (await adapter.submit_lookup_and_lock_task([key]))[0].hit
            with writer(url, "seen", 1, 5000) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "0\n"
                await self.expect(adapter, {key: content(("seen", 0), 5000)})

    @pytest.mark.slow
    async def test_two_processes_store_one_key(self, url: str) -> None:
        """Both write objects of other lengths under one key, over and over; a reader sees one of them, whole."""
        script = WRITER.replace('{seed}/{number}".encode()', 'one key".encode()')
        key = ObjectKey("writer", hashlib.blake2b(b"one key", digest_size=16).digest())
        sizes = {"short": 3 << 20, "long": 5 << 20}
        versions = [content((seed, number), nbytes) for seed, nbytes in sizes.items() for number in range(8)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", script, url, seed, "8", str(nbytes)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            for seed, nbytes in sizes.items()
        ]
        reads = 0
        try:
            async with self.open_adapter(url) as adapter:
                while any(process.poll() is None for process in processes):
                    outcome, received = await self.load(adapter, key, 5 << 20)
                    assert outcome.status in ("loaded", "miss"), outcome
                    if outcome.loaded:
                        assert received[: outcome.nbytes] in versions
                        reads += 1
                    await anyio.sleep(0.001)
                assert [process.wait() for process in processes] == [0, 0]
                assert (await self.load(adapter, key, 5 << 20))[0].loaded
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert reads

    async def test_what_is_deleted_behind_our_back_is_a_miss_everywhere(self, url: str, root: Path) -> None:
        objects = {self.key(n): content(n, 2000) for n in range(4)}
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, objects)
            Path(object_path(f"{root}/objects", self.key(1))).unlink()
            await self.expect(adapter, {**objects, self.key(1): None})
            [outcome] = await self.store(adapter, {self.key(1): objects[self.key(1)]})
            assert outcome.status == "stored", "it was not present"
            await self.expect(adapter, objects)
            assert (await adapter.usage()).objects == 4

    async def test_what_is_cut_behind_our_back_is_not_taken_for_present(self, url: str, root: Path) -> None:
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, {self.key(): content("cut", 9000)})
            os.truncate(object_path(f"{root}/objects", self.key()), 5000)
            [outcome] = await self.store(adapter, {self.key(): content("cut", 9000)})
            assert outcome.status == "stored"
            await self.expect(adapter, {self.key(): content("cut", 9000)})

    async def test_a_directory_that_is_cleared_serves_on(self, url: str, root: Path) -> None:
        objects = {self.key(n): content(n, 2000) for n in range(20)}
        async with self.open_adapter(url, max_bytes="1MiB") as adapter:
            await self.store(adapter, objects)
            shutil.rmtree(root)
            await self.expect(adapter, dict.fromkeys(objects))
            assert (await adapter.usage()).used_bytes == 0
            await self.store(adapter, objects)
            await self.expect(adapter, objects)
            async with self.open_adapter(url) as second:
                assert second.counters["orphans_swept"] == 0, "the folder that was made anew is locked again"
        assert list(root.glob("staging/*")) == []

    async def test_a_cancelled_store_stops_and_leaves_no_file(self, url: str, root: Path) -> None:
        data = bytes(128 << 20)

        def unfinished() -> list[Path]:
            return list(root.glob("staging/*/[0-9]*"))

        async with self.open_adapter(url) as adapter:
            task = adapter.submit_store_task([self.key()], [source(data)])
            with anyio.fail_after(30):
                while not unfinished():
                    await anyio.lowlevel.checkpoint()
            task.cancel()
            [outcome] = await task
            assert outcome.status == "failed", "128 MiB were written in no time"
            assert unfinished() == []
            await self.expect(adapter, {self.key(): None})
            assert (await adapter.usage()).used_bytes == 0

    @pytest.mark.slow
    async def test_a_thousand_objects(self, url: str) -> None:
        objects = {self.key(n): content(n, 700) for n in range(1000)}
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, objects)
            keys = [key for n, key in enumerate(objects) for key in (key, self.key(10_000 + n))]
            started = time.monotonic()
            found = await adapter.submit_lookup_and_lock_task(keys)
            took_s = time.monotonic() - started
            assert [outcome.hit for outcome in found] == [True, False] * 1000
            assert took_s < 2.0, "a lookup must not take a round trip per key"
            await adapter.submit_unlock_task(list(objects))
            assert {info.key async for info in adapter.iter_keys()} == set(objects)
        async with self.open_adapter(url) as adapter:
            assert (await adapter.usage()).objects == 1000
            await self.expect(adapter, objects)


class TestReadErrors(Conformance):
    """An object that is there and cannot be read is an error, never a miss."""

    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/cache"

    def path(self, adapter: Adapter, number: int) -> Path:
        return Path(object_path(f"{adapter.config.path}/objects", self.key(number)))

    async def test_a_device_that_fails(self, url: str) -> None:
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, {self.key(0): b"data", self.key(1): b"data"})
            with failing(self.path(adapter, 0)):
                outcome, _ = await self.load(adapter, self.key(0), 4)
                assert outcome.status == "failed"
                assert "EIO" in str(outcome.error)
            await self.expect(adapter, {self.key(0): b"data", self.key(1): b"data"})

    async def test_an_object_without_permission(self, url: str) -> None:
        if os.geteuid() != 0:
            pytest.skip("needs root: only then another user's files can be made")
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, {self.key(0): b"data"})
            os.seteuid(65534)
            try:
                loaded, _ = await self.load(adapter, self.key(0), 4)
                [stored] = await adapter.submit_store_task([self.key(1)], [source(b"data")])
                [deleted] = await adapter.submit_delete_task([self.key(0)])
            finally:
                os.seteuid(0)
            for outcome in (loaded, stored, deleted):
                assert outcome.status == "failed"
                assert type(outcome.error).__name__ == "AuthError"
                assert "EACCES" in str(outcome.error)
                assert adapter.config.path in str(outcome.error)
            await self.expect(adapter, {self.key(0): b"data", self.key(1): None})


@contextmanager
def failing(path: Path) -> Iterator[None]:
    """Make every read of the file fail with EIO, as a broken device does: nothing is mapped at address 0."""
    if subprocess.run(
        ["mount", "--bind", f"/proc/{os.getpid()}/mem", path], capture_output=True, check=False
    ).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


class TestLargeObjects(Conformance):
    """They are verified piece by piece, as they arrive."""

    @pytest.fixture
    def adapter_url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/cache"

    @pytest.mark.parametrize("position", [4096, 5 << 20, -1])
    async def test_damage_anywhere_is_found(self, url: str, root: Path, position: int) -> None:
        nbytes = (9 << 20) + 5
        data = content("large", nbytes)
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, {self.key(): data})
            await self.expect(adapter, {self.key(): data})
            path = Path(object_path(f"{root}/objects", self.key()))
            damaged = bytearray(path.read_bytes())
            damaged[position] ^= 1
            path.write_bytes(damaged)
            outcome, _ = await self.load(adapter, self.key(), nbytes)
            assert outcome.status == "corrupt"
            await self.expect(adapter, {self.key(): None})

    async def test_one_that_is_cut_is_found(self, url: str, root: Path) -> None:
        nbytes = 9 << 20
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, {self.key(): content("cut", nbytes)})
            os.truncate(object_path(f"{root}/objects", self.key()), 5 << 20)
            outcome, _ = await self.load(adapter, self.key(), nbytes)
            assert outcome.status == "corrupt"

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return tmp_path / "cache"
