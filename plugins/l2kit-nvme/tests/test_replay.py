"""Every state that a crash can leave: the log of all writes to the medium is replayed up to any point, and opened.

After a kill the medium holds a prefix of the log, its last write torn between two sectors at most. After a loss of
power it holds what was flushed, and of the rest any sectors of any writes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import l2kit
from l2kit import ObjectKey
from l2kit.testing.groups.base import content, destination, source
from l2kit_nvme import NvmeAdapter
from l2kit_nvme.medium import Medium
from l2kit_nvme.testing import SlabFiles

_SIZES = (1, 3000, 9000, 20_000, 40_000)
_KEYS = [ObjectKey("replay", bytes([number]) * 16) for number in range(6)]
_SECTOR = 512
_SLAB = "size_bytes=3MiB&max_objects=64"

Version = bytes | None


class Write(NamedTuple):
    """Bytes that were written at an offset."""

    offset: int
    data: bytes


class Flush(NamedTuple):
    """A flush that has ended: it covers the writes before position ``covers`` of the log."""

    covers: int


class Step(NamedTuple):
    """One batch: between positions ``start`` and ``end`` of the log, what its keys hold goes to ``after``."""

    start: int
    end: int
    after: dict[ObjectKey, Version]


class Recording:
    """What a history of batches wrote, and what it was told."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.log: list[Write | Flush] = []
        self.steps: list[Step] = []
        self.versions: dict[ObjectKey, set[Version]] = {key: {None} for key in _KEYS}
        self.image = b""

    def allowed(self, position: int, *, torn: bool = False) -> dict[ObjectKey, set[Version]]:
        """What each key may hold when the log ended at ``position``, or, ``torn``, within the write there."""
        held: dict[ObjectKey, set[Version]] = {key: {None} for key in _KEYS}
        for step in self.steps:
            for key, version in step.after.items():
                if step.end <= position:
                    held[key] = {version}
                elif step.start < position + torn:
                    held[key].add(version)
        return held


@contextmanager
def recorded(recording: Recording) -> Iterator[None]:
    """Adapters that are opened in this context record."""

    class RecordingMedium(Medium):
        def write_sector(self, member: int, offset: int, sector: bytes) -> None:
            with recording.lock:
                super().write_sector(member, offset, sector)
                recording.log.append(Write(offset, bytes(sector)))

        def write_vector(self, member: int, offset: int, vector: Sequence[memoryview]) -> None:
            with recording.lock:
                super().write_vector(member, offset, vector)
                recording.log.append(Write(offset, b"".join(vector)))

        def flush_members(self) -> None:
            covers = len(recording.log)
            super().flush_members()
            with recording.lock:
                recording.log.append(Flush(covers))

    before, NvmeAdapter.medium_type = NvmeAdapter.medium_type, RecordingMedium
    try:
        yield
    finally:
        NvmeAdapter.medium_type = before


async def play(path: Path, seed: int, steps: int, options: str) -> Recording:
    """Store, replace and delete at random, with some objects locked, and write down what happened."""
    random_ = random.Random(seed)
    recording = Recording()
    held: dict[ObjectKey, Version] = dict.fromkeys(_KEYS)
    async with l2kit.open_adapter(f"nvme://{path}?{_SLAB}&reset=true"):
        pass
    recording.image = path.read_bytes()
    with recorded(recording):
        async with l2kit.open_adapter(f"nvme://{path}?{options}") as adapter:
            for number in range(steps):
                keys = random_.sample(_KEYS, random_.randint(1, 4))
                start = len(recording.log)
                after: dict[ObjectKey, Version] = {}
                if random_.random() < 0.25:
                    await adapter.submit_delete_task(keys)
                    after = dict.fromkeys(keys)
                else:
                    wanted = {key: content((seed, number, key), random_.choice(_SIZES)) for key in keys}
                    outcomes = await adapter.submit_store_task(keys, [source(data) for data in wanted.values()])
                    for key, outcome in zip(keys, outcomes, strict=True):
                        assert outcome.present or ("max_bytes" in options and outcome.status == "dropped"), outcome
                        after[key] = wanted[key] if outcome.status == "stored" else held[key]
                        recording.versions[key].add(after[key])
                held.update(after)
                recording.steps.append(Step(start, len(recording.log), after))
                await adapter.submit_lookup_and_lock_task([random_.choice(_KEYS)])
    return recording


async def check(
    path: Path, allowed: dict[ObjectKey, set[Version]], *, evicts: bool = False, corrupt: bool = False
) -> None:
    """Open what a crash left: each key holds what it may, usage is what lies there, and what is deleted stays away."""
    async with l2kit.open_adapter(f"nvme://{path}") as adapter:
        listed = {info.key async for info in adapter.iter_keys()}
        usage = await adapter.usage()
        assert usage.used_bytes == SlabFiles([str(path)]).used_bytes
        assert usage.objects == len(listed)
        for key in _KEYS:
            target = destination(max(_SIZES))
            [outcome] = await adapter.submit_load_task([key], [target])
            if corrupt and outcome.status == "corrupt":
                continue
            assert outcome.status == ("loaded" if key in listed else "miss"), outcome
            found = target.tobytes()[: outcome.nbytes] if outcome.loaded else None
            assert found in allowed[key] or (found is None and (evicts or corrupt)), f"{key} holds something else"
        await adapter.submit_delete_task(_KEYS)
    async with l2kit.open_adapter(f"nvme://{path}") as adapter:
        assert [info async for info in adapter.iter_keys()] == [], "an older version came back"
        assert (await adapter.usage()).used_bytes == 0


def killed(recording: Recording, position: int, torn_bytes: int) -> bytes:
    """The medium after the writes before ``position``, and the first ``torn_bytes`` of the one there."""
    image = bytearray(recording.image)
    for event in recording.log[:position]:
        if isinstance(event, Write):
            image[event.offset : event.offset + len(event.data)] = event.data
    event = recording.log[position] if position < len(recording.log) else Flush(0)
    if isinstance(event, Write):
        part = event.data[:torn_bytes]
        image[event.offset : event.offset + len(part)] = part
    return bytes(image)


def unpowered(recording: Recording, position: int, kept: random.Random) -> bytes:
    """The medium after what had been flushed at ``position``, and any sectors of any writes since."""
    flushed = max((event.covers for event in recording.log[:position] if isinstance(event, Flush)), default=0)
    image = bytearray(killed(recording, flushed, 0))
    share = kept.random()
    for event in recording.log[flushed:position]:
        if isinstance(event, Write):
            for start in range(0, len(event.data), _SECTOR):
                if kept.random() < share:
                    part = event.data[start : start + _SECTOR]
                    image[event.offset + start : event.offset + start + len(part)] = part
    return bytes(image)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slab"


@pytest.mark.slow
@pytest.mark.parametrize("options", ["durability=none", "durability=data", "direct=false"])
def test_every_prefix_with_the_last_write_torn(path: Path, options: str) -> None:
    recording = anyio.run(play, path, 1, 30, options)
    positions = [number for number, event in enumerate(recording.log) if isinstance(event, Write)]
    assert len(positions) > 80
    for position in [*positions, len(recording.log)]:
        length = len(recording.log[position].data) if position < len(recording.log) else 0  # type: ignore[union-attr]
        for torn in sorted({0, length // 2 // _SECTOR * _SECTOR, max(0, length - _SECTOR)}):
            path.write_bytes(killed(recording, position, torn))
            anyio.run(check, path, recording.allowed(position, torn=torn > 0))


_EXAMPLES = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def _position(recording: Recording, part: float) -> int:
    return round(part * len(recording.log))


@pytest.mark.slow
@_EXAMPLES
@given(seed=st.integers(0, 1 << 32), part=st.floats(0, 1), torn=st.integers(0, 100))
def test_any_history_killed_anywhere(path: Path, seed: int, part: float, torn: int) -> None:
    recording = anyio.run(play, path, seed, 15, "durability=none")
    position = _position(recording, part)
    path.write_bytes(killed(recording, position, torn * _SECTOR))
    anyio.run(check, path, recording.allowed(position, torn=torn > 0))


@pytest.mark.slow
@_EXAMPLES
@given(seed=st.integers(0, 1 << 32), part=st.floats(0, 1))
def test_any_history_killed_while_it_evicts(path: Path, seed: int, part: float) -> None:
    """Objects may be missing then; none may be an older version than was acknowledged last."""
    recording = anyio.run(play, path, seed, 20, "durability=none&max_bytes=200KiB")
    position = _position(recording, part)
    path.write_bytes(killed(recording, position, 0))

    async def run() -> None:
        await check(path, recording.allowed(position), evicts=True)

    anyio.run(run)


@pytest.mark.slow
@_EXAMPLES
@given(seed=st.integers(0, 1 << 32), part=st.floats(0, 1), kept=st.integers(0, 1 << 32))
def test_any_history_without_power_keeps_what_was_acknowledged(path: Path, seed: int, part: float, kept: int) -> None:
    """With ``durability=data``: nothing acknowledged is lost, nothing is torn or stale."""
    recording = anyio.run(play, path, seed, 15, "durability=data")
    position = _position(recording, part)
    kept_by = random.Random(kept)  # not hypothesis's own: how much is drawn depends on how the threads ran
    for _ in range(3):
        path.write_bytes(unpowered(recording, position, kept_by))
        anyio.run(check, path, recording.allowed(position))


@pytest.mark.slow
@_EXAMPLES
@given(seed=st.integers(0, 1 << 32), part=st.floats(0, 1), kept=st.integers(0, 1 << 32))
def test_any_history_without_power_never_gives_other_bytes(path: Path, seed: int, part: float, kept: int) -> None:
    """With ``durability=none``: objects may be missing, old or damaged, and what is damaged is found out."""
    recording = anyio.run(play, path, seed, 15, "durability=none")
    path.write_bytes(unpowered(recording, _position(recording, part), random.Random(kept)))

    async def run() -> None:
        await check(path, recording.versions, corrupt=True)

    anyio.run(run)


def test_the_recording_sees_everything(path: Path) -> None:
    """Replaying the whole log gives the file that the history left."""
    recording = anyio.run(play, path, 7, 10, "durability=data")
    image = killed(recording, len(recording.log), 0)
    left = path.read_bytes()
    owner = slice(4096, 8192)  # the note of who has it open is none of the log
    assert image[: owner.start] == left[: owner.start]
    assert image[owner.stop :] == left[owner.stop :]
