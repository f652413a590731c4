"""Many threads at one directory, without an event loop: what the index says is what lies on disk."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from l2kit_posix import FileConfig
from l2kit_posix.directory import ObjectDirectory

from l2kit import ObjectKey, StoreStatus

_LIMIT = 25_000


def _bytes_on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "objects").rglob("*") if path.is_file())


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as can be, so that what can meet does meet."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("foreign", [False, True], ids=["alone", "beside another process"])
def test_random_work_in_many_threads_leaves_everything_in_order(tmp_path: Path, foreign: bool) -> None:
    seed = random.randrange(1 << 32)
    directory = ObjectDirectory(FileConfig(path=str(tmp_path), max_bytes=_LIMIT, max_open_files=8), lambda: None)
    other = ObjectDirectory(FileConfig(path=str(tmp_path)), lambda: None)
    directory.open()
    other.open()
    keys = [ObjectKey("ns", bytes([number]) * 8) for number in range(4)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        choose = random.Random(f"{seed}/{number}")
        locked: list[ObjectKey] = []
        try:
            for _ in range(1500):
                key = choose.choice(keys)
                content = key.chunk_hash[:1]
                match choose.randrange(5 + foreign):
                    case 0 | 1:
                        size = choose.choice([1000, 5000, 9000])
                        assert directory.store(key, [memoryview(content * size)]) in StoreStatus
                    case 2:
                        received = bytearray(9000)
                        size_or_none = directory.load(key, [memoryview(received)])
                        if size_or_none is not None:
                            assert received == (content * size_or_none).ljust(9000, b"\0")
                        assert size_or_none is not None or key not in locked, "a locked object was lost"
                    case 3:
                        directory.delete(key)
                    case 4:
                        if locked and choose.random() < 0.6:
                            directory.give_back(directory.release([locked.pop()]))
                        elif directory.acquire([key])[0] is not None:
                            locked.append(key)
                    case _:
                        other.delete(key) if choose.random() < 0.5 else other.store(key, [memoryview(content * 7000)])
            directory.give_back(directory.release(locked))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, f"seed {seed}: {failures}"
    assert len(directory._leases) == 0
    assert directory._index.excess_bytes(0) == directory._index.used_bytes, "a reservation stayed"
    if not foreign:
        assert directory._index.used_bytes == _bytes_on_disk(tmp_path)
    directory.lookup(keys)  # whatever another process did is seen now
    assert directory._index.used_bytes == _bytes_on_disk(tmp_path) == directory.usage()[0]
    if not foreign:
        assert _bytes_on_disk(tmp_path) <= _LIMIT
    directory.close()
    other.close()
    assert list((tmp_path / "staging").iterdir()) == []
    reopened = ObjectDirectory(FileConfig(path=str(tmp_path)), lambda: None)
    reopened.open()
    assert reopened._index.used_bytes == _bytes_on_disk(tmp_path)
    reopened.close()
