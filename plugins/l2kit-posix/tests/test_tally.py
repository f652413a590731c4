"""Several processes at one directory: together they keep one limit, and each knows whether it knows all objects."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from l2kit import ObjectKey, StoreStatus
from l2kit_posix import FileConfig
from l2kit_posix.directory import ObjectDirectory
from l2kit_posix.tally import Tally, is_local

_SIZE = 10_000

#: Stores objects of random sizes under keys of its own, without end. Run as ``python -c WRITER FOLDER SEED LIMIT``.
WRITER = """
import random, sys
from l2kit import ObjectKey
from l2kit_posix import FileConfig
from l2kit_posix.directory import ObjectDirectory

choose = random.Random(sys.argv[2])
directory = ObjectDirectory(FileConfig(path=sys.argv[1], max_bytes=int(sys.argv[3])), lambda: None)
directory.open()
print("open", flush=True)
number = 0
while True:
    number += 1
    data = bytes(choose.choice([3000, 20_000, 60_000]))
    directory.store(ObjectKey(f"writer-{sys.argv[2]}", number.to_bytes(8, "big")), [memoryview(data)])
    if number % 100 == 0:
        print(number, flush=True)
"""


def key(number: int) -> ObjectKey:
    return ObjectKey("tally", number.to_bytes(8, "big"))


@contextmanager
def opened(path: Path, max_bytes: int | None = None) -> Iterator[ObjectDirectory]:
    directory = ObjectDirectory(FileConfig(path=str(path), max_bytes=max_bytes), lambda: None)
    directory.open()
    try:
        yield directory
    finally:
        directory.close()


def put(directory: ObjectDirectory, *numbers: int) -> None:
    for number in numbers:
        assert directory.store(key(number), [memoryview(bytes(_SIZE))]) is StoreStatus.STORED


def tallied(directory: ObjectDirectory) -> int:
    with directory._tally:
        return directory._tally.used_bytes


def files(path: Path) -> dict[str, int]:
    """Size of each object, finished or not, by its path; no path is used twice here."""
    found: dict[str, int] = {}
    for folder, _, names in os.walk(path):
        for name in names:
            if name not in ("lock", "tally"):
                with suppress(FileNotFoundError):
                    found[f"{folder}/{name}"] = os.lstat(f"{folder}/{name}").st_size
    return found


def on_disk(path: Path) -> int:
    return sum(files(path).values())


def on_disk_at_once(path: Path) -> int:
    """While others write: a walk sees no one moment, but what two walks both see was there between them."""
    before, after = files(path), files(path)
    return sum(min(size, after[name]) for name, size in before.items() if name in after)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    if not is_local(str(tmp_path)):
        pytest.skip("needs a file system of this machine")
    return tmp_path


def test_a_tally_comes_with_the_first_and_goes_with_the_last(local: Path) -> None:
    page = local / "staging" / "tally"
    with opened(local) as first:
        assert first.limit_is_shared
        with opened(local) as second:
            assert second.limit_is_shared
        assert page.exists()
        put(first, 1)
        assert tallied(first) == _SIZE
    assert not page.exists()


def test_two_keep_one_limit(local: Path) -> None:
    with opened(local, 5 * _SIZE) as one, opened(local, 5 * _SIZE) as other:
        put(one, 1, 2, 3)
        put(other, 4, 5)
        assert on_disk(local) == 5 * _SIZE
        put(other, 6, 7)  # it knows its own only, so those go first
        assert on_disk(local) == 5 * _SIZE == tallied(one) == tallied(other)


def test_who_knows_nothing_to_evict_learns_what_others_wrote(local: Path) -> None:
    with opened(local, 3 * _SIZE) as one, opened(local, 3 * _SIZE) as other:
        put(one, 1, 2, 3)
        put(other, 4, 5)
        assert other.events["recounts"] == 1
        assert other.lookup([key(number) for number in range(1, 6)]) == [None, None, _SIZE, _SIZE, _SIZE]
        assert on_disk(local) == 3 * _SIZE == tallied(one)


def test_what_another_has_set_aside_counts(local: Path) -> None:
    with opened(local, 2 * _SIZE) as one, opened(local, 2 * _SIZE) as other:
        with one._tally as tally:
            assert tally.reserve(2 * _SIZE, 2 * _SIZE)
        done: list[StoreStatus] = []
        storing = threading.Thread(target=lambda: done.append(other.store(key(1), [memoryview(bytes(_SIZE))])))
        storing.start()
        give_up = time.monotonic() + 30
        while not other.events["recounts"]:  # it has looked for something to evict, and goes on waiting
            assert time.monotonic() < give_up
        assert not done
        with one._tally as tally:
            tally.unreserve(2 * _SIZE)
        storing.join(30)
        assert done == [StoreStatus.STORED]


def test_a_second_store_of_one_object_counts_once(local: Path) -> None:
    with opened(local) as one, opened(local) as other:
        put(one, 1)
        (local / "aside").mkdir()
        path = Path(one._names.place(key(1))[1])
        path.rename(local / "aside" / "object")  # absent while the other looks, there when it publishes
        unfinished = other._writing.write([memoryview(bytes(_SIZE))], None, other._index.now_ns)
        (local / "aside" / "object").rename(path)
        (local / "aside").rmdir()
        other._writing.publish(unfinished.path, str(path), _SIZE)
        assert tallied(one) == _SIZE == on_disk(local)


def test_misses_are_known_until_another_publishes(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(local) as one:
        put(one, *range(5))
        with monkeypatch.context() as patched:
            patched.setattr("l2kit_posix.directory.open_object", None)  # nobody may ask the file system
            assert one.acquire([key(number) for number in range(100, 200)]) == [None] * 100
        with opened(local) as other:
            put(other, 100)
            assert one.acquire([key(100), key(101)]) == [_SIZE, None]
            with monkeypatch.context() as patched:
                patched.setattr("l2kit_posix.directory.open_object", None)
                with pytest.raises(TypeError):
                    one.acquire([key(102)])
            assert one.should_recount()
            one.recount()
            assert not one.should_recount()
            with monkeypatch.context() as patched:
                patched.setattr("l2kit_posix.directory.open_object", None)
                assert one.acquire([key(102)]) == [None]
            one.give_back(one.release([key(100)]))


def test_a_recount_forgets_what_is_gone_and_learns_what_came(local: Path) -> None:
    with opened(local, 10 * _SIZE) as one, opened(local) as other:
        put(one, 1, 2)
        put(other, 3)
        Path(one._names.place(key(1))[1]).unlink()
        assert tallied(one) == 3 * _SIZE, "who removed it is not known"
        one.recount()
        assert tallied(one) == 2 * _SIZE == on_disk(local)
        assert (len(one._index), one._index.used_bytes) == (2, 2 * _SIZE)


def test_what_is_removed_by_hand_makes_room_at_once_when_nobody_else_is_there(local: Path) -> None:
    with opened(local, 3 * _SIZE) as one:
        put(one, 1, 2, 3)
        Path(one._names.place(key(2))[1]).unlink()
        assert one.lookup([key(2)]) == [None]
        put(one, 4)
        assert one.events["evicted"] == 0
        assert on_disk(local) == 3 * _SIZE == tallied(one)


def test_what_another_removed_and_left_behind_is_not_taken_off_twice(local: Path) -> None:
    with opened(local, 3 * _SIZE) as one:
        put(one, 1, 2, 3)
        with opened(local) as other:
            assert other.delete(key(2))
        assert one.lookup([key(2)]) == [None]
        assert tallied(one) == 2 * _SIZE == on_disk(local)


def test_two_who_miss_the_same_object_take_it_off_once(local: Path) -> None:
    with opened(local) as one, opened(local) as other:
        put(one, 1, 2)
        other.recount()
        Path(one._names.place(key(1))[1]).unlink()
        assert one.lookup([key(1)]) == other.lookup([key(1)]) == [None]
        assert tallied(one) == _SIZE == on_disk(local)


def test_a_tally_that_is_removed_by_hand_is_made_anew(local: Path) -> None:
    with opened(local) as one:
        put(one, 1, 2)
        (local / "staging" / "tally").unlink()
        with opened(local) as other:
            put(other, 3)
            assert tallied(other) == 3 * _SIZE
            assert one.should_recount()
            one.recount()
            put(one, 4)
            assert tallied(one) == tallied(other) == 4 * _SIZE == on_disk(local)


def test_after_clearing_nobody_claims_to_know_all(local: Path) -> None:
    with opened(local) as one, opened(local) as other:
        put(one, 1)
        for folder in ("objects", "staging"):
            shutil.rmtree(local / folder)
        put(other, 2)
        put(one, 3)
        assert one.lookup([key(2)]) == other.lookup([key(3)]) == [_SIZE]
        for directory in (one, other):
            if directory.should_recount():
                directory.recount()
        assert tallied(one) == tallied(other) == 2 * _SIZE == on_disk(local)


def test_times_of_use_are_saved_without_a_close(local: Path) -> None:
    with opened(local) as one:
        put(one, 1, 2)
        assert one.lookup([key(1)]) == [_SIZE]
        first, second = (Path(one._names.place(key(number))[1]) for number in (1, 2))
        assert first.stat().st_mtime_ns < second.stat().st_mtime_ns
        one.save_uses()
        assert first.stat().st_mtime_ns > second.stat().st_mtime_ns


def test_rows_of_the_dead_are_cleared(local: Path) -> None:
    with opened(local, 2 * _SIZE) as one:
        with one._tally as tally:
            row = tally._row + 2
            tally._page[row], tally._page[row + 1] = 12345, 2 * _SIZE  # of one that was killed while it wrote
        put(one, 1)
        assert on_disk(local) == _SIZE


def test_a_newcomer_waits_until_the_first_has_counted(local: Path) -> None:
    (local / "staging").mkdir()
    first, second = (Tally(f"{local}/staging/tally", 0o600, lambda: None) for _ in range(2))
    first.open(1, lambda: {1})
    joining = threading.Thread(target=lambda: second.open(2, lambda: {1, 2}))
    joining.start()
    joining.join(0.05)
    assert not second.shared
    first.settle(777, complete=True)
    joining.join(30)
    with second as tally:
        assert tally.used_bytes == 777
    second.close()
    first.close()


def test_more_than_there_are_rows_for(local: Path) -> None:
    (local / "staging").mkdir()
    tallies = [Tally(f"{local}/staging/tally", 0o600, lambda: None) for _ in range(61)]
    try:
        for number, tally in enumerate(tallies[:60], 1):
            tally.open(number, lambda: set(range(1, 62)))
            tally.settle(0, complete=True)
        with pytest.raises(OSError, match="more than 60 adapters"):
            tallies[60].open(61, lambda: set(range(1, 62)))
        assert not tallies[60].shared
    finally:
        for tally in tallies:
            tally.close()


@pytest.mark.slow
def test_processes_that_write_and_are_killed_stay_within_the_limit(local: Path) -> None:
    """At every moment, as far as a walk can see one, and to the byte afterwards."""
    limit, seed = 600_000, random.randrange(1 << 30)
    most = 0
    for turn in range(4):
        with ExitStack() as stack:
            processes = []
            for number in range(3):
                command = [sys.executable, "-c", WRITER, str(local), f"{seed}-{turn}-{number}", str(limit)]
                process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
                stack.callback(process.kill)
                processes.append(process)
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "open\n"
            for process in processes:
                assert process.stdout is not None
                process.stdout.readline()
                most = max(most, on_disk_at_once(local))
            for process in processes:
                process.send_signal(signal.SIGKILL)
        with opened(local, limit) as directory:
            assert tallied(directory) == on_disk(local) == directory.usage()[0], f"seed {seed}"
    assert 0 < most <= limit, f"seed {seed}"
