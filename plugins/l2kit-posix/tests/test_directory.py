"""Many threads at one directory, without an event loop: what the index says is what lies on disk."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from l2kit import ObjectKey, StoreStatus
from l2kit_posix import FileConfig
from l2kit_posix.directory import ObjectDirectory

_LIMIT = 20_000


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as can be, so that what can meet does meet."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.slow
@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("how", ["alone", "exclusive", "beside another process"])
def test_random_work_in_many_threads_leaves_everything_in_order(tmp_path: Path, how: str) -> None:
    foreign, exclusive = how == "beside another process", how == "exclusive"
    seed = random.randrange(1 << 32)
    directory = ObjectDirectory(
        FileConfig(path=str(tmp_path), max_bytes=_LIMIT, max_open_files=8, exclusive=exclusive), lambda: None
    )
    other = ObjectDirectory(FileConfig(path=str(tmp_path)), lambda: None)
    directory.open()
    if foreign:
        other.open()
    keys = [ObjectKey("ns", bytes([number]) * 8) for number in range(3)]
    failures: list[BaseException] = []

    def work(name: str) -> None:
        choose = random.Random(name)
        locked: list[ObjectKey] = []
        try:
            for _ in range(12):
                key = choose.choice(keys)
                content = key.chunk_hash[:1]
                match choose.randrange(5 + foreign):
                    case 0 | 1:
                        data = content * choose.choice([1000, 5000, 9000])
                        assert directory.store(key, [memoryview(data)]) in StoreStatus
                    case 2:
                        received = bytearray(9000)
                        size = directory.load(key, [memoryview(received)])
                        assert received == (content * (size or 0)).ljust(9000, b"\0")
                        assert size or key not in locked, "a locked object was lost"
                    case 3:
                        directory.delete(key)
                    case 4:
                        if locked and choose.random() < 0.6:
                            directory.give_back(directory.release([locked.pop()]))
                        elif directory.acquire([key])[0] is not None:
                            locked.append(key)
                    case _:
                        if choose.random() < 0.5:
                            other.delete(key)
                        else:
                            other.store(key, [memoryview(content * 7000)])
            directory.give_back(directory.release(locked))
        except BaseException as failure:
            failures.append(failure)

    # Few operations at a time: later ones would mend what earlier ones left in disorder.
    for turn in range(120):
        threads = [threading.Thread(target=work, args=(f"{seed}/{turn}/{number}",)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures, f"seed {seed}: {failures}"
        if foreign:
            directory.lookup(keys)  # whatever another process did is seen now
        on_disk = sum(path.stat().st_size for path in (tmp_path / "objects").rglob("*") if path.is_file())
        assert directory._index.used_bytes == on_disk == directory.usage()[0], f"seed {seed}, turn {turn}"
        assert directory._index.excess_bytes(0) == on_disk, f"seed {seed}, turn {turn}: a reservation stayed"
        assert foreign or on_disk <= _LIMIT
        assert len(directory._leases) == 0
    directory.close()
    other.close()
    assert list((tmp_path / "staging").iterdir()) == []
