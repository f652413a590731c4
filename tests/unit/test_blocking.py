"""The synchronous front: one thread more while it is open, none afterwards, whatever happened in between."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from l2kit.blocking import BlockingCacheEngine, BlockingStorage
from l2kit.engine import TokenRange
from l2kit.errors import BackendError, BackendTimeoutError, ClosedError, ConfigError
from tests.unit.odd_tiers import NAMESPACE, assert_closed_clean, content, key, layout, odd, registry, wanted, write
from tests.unit.paged_kv import PROMPT, Source, Target
from tests.unit.test_storage_manager import in_child

pytestmark = pytest.mark.timeout(60)


def storage(**options: Any) -> BlockingStorage:
    tiers = options.pop("tiers", [{"url": "odd://", "name": "a"}])
    config = {"tiers": tiers, "l1": {"max_bytes": 1 << 20}, "chunk_size": 16, **options}
    return BlockingStorage(config, registry=registry())


def l2kit_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "l2kit"]


@pytest.fixture
def opened() -> Iterator[BlockingStorage]:
    with storage() as front:
        yield front
    assert_closed_clean(front.manager)


def test_a_prompt_goes_out_and_comes_back(opened: BlockingStorage) -> None:
    engine = BlockingCacheEngine(opened, NAMESPACE, layout)
    assert engine.store(PROMPT, Source(PROMPT)) == [TokenRange(0, 96)]
    opened.call(opened.manager.drain)
    assert engine.lookup(PROMPT) == 96
    target = Target(PROMPT)
    assert engine.retrieve(PROMPT, target, skip_prefix_n_tokens=20) == TokenRange(20, 96)
    assert target.written[0] == (20, 32)
    assert engine.lookup(PROMPT, salt="other") == 0


def test_configuration_is_checked_before_any_thread_starts() -> None:
    with pytest.raises(ConfigError, match="did you mean 'tiers'"):
        BlockingStorage({"teirs": []})
    assert l2kit_threads() == []


@pytest.mark.parametrize(
    ("tier", "error"),
    [
        ("odd://?broken=true", BackendError),
        ({"url": "odd://?slow_to_open_s=30&resilience.reopen=false", "open_timeout_s": 0.1}, BackendTimeoutError),
    ],
)
def test_an_open_that_fails_leaves_no_thread(tier: Any, error: type[Exception]) -> None:
    front = storage(tiers=["memory://", tier])
    with pytest.raises(error):
        front.open()
    assert l2kit_threads() == []
    front.close()
    with pytest.raises(ClosedError):
        front.call(front.manager.drain)


def test_before_and_after() -> None:
    front = storage()
    engine = BlockingCacheEngine(front, NAMESPACE, layout)
    with pytest.raises(ClosedError, match="not open"):
        engine.lookup(PROMPT)
    assert front.open() is front
    assert l2kit_threads() == ["l2kit"]
    with pytest.raises(ClosedError, match="opens once"):
        front.open()
    assert l2kit_threads() == ["l2kit"]
    assert engine.lookup(PROMPT) == 0
    front.close()
    front.close()
    assert l2kit_threads() == []
    for call in (lambda: engine.lookup(PROMPT), lambda: engine.store(PROMPT, Source(PROMPT))):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(ClosedError):
        front.manager.start_prefetch(wanted(1))
    assert_closed_clean(front.manager)


def test_errors_of_a_source_come_through(opened: BlockingStorage) -> None:
    engine = BlockingCacheEngine(opened, NAMESPACE, layout)
    with pytest.raises(RuntimeError, match="the pages are gone"):
        engine.store(PROMPT, Source(PROMPT, fails_at=0))


def test_from_its_own_thread_it_refuses_instead_of_hanging(opened: BlockingStorage) -> None:
    engine = BlockingCacheEngine(opened, NAMESPACE, layout)

    async def inside() -> None:
        with pytest.raises(RuntimeError, match="event loop thread"):
            engine.lookup(PROMPT)

    opened.call(inside)


def test_many_threads(opened: BlockingStorage) -> None:
    engine = BlockingCacheEngine(opened, NAMESPACE, layout)
    failures: list[BaseException] = []

    def request(number: int) -> None:
        try:
            for turn in range(6):
                prompt = [(number + turn) % 5, *PROMPT]
                engine.store(prompt, Source(prompt))
                restored = engine.retrieve(prompt, Target(prompt))
                assert restored == TokenRange(0, 96)
                assert engine.lookup(prompt) == 96
                prefetch = opened.manager.start_prefetch(wanted(2))
                assert prefetch.wait(10)
                prefetch.release()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=request, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_closing_while_threads_call() -> None:
    front = storage(drain_timeout_s=0.2).open()
    engine = BlockingCacheEngine(front, NAMESPACE, layout)
    failures: list[BaseException] = []
    started = threading.Barrier(4)

    def request() -> None:
        started.wait()
        try:
            for number in range(100_000):
                prompt = [number % 7, *PROMPT]
                engine.store(prompt, Source(prompt))
                engine.retrieve(prompt, Target(prompt))
        except ClosedError:
            pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=request) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    time.sleep(0.05)
    front.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert failures == []
    assert l2kit_threads() == []
    assert_closed_clean(front.manager)


def test_closing_with_a_hung_tier_is_bounded() -> None:
    front = storage(drain_timeout_s=0.2).open()
    odd(front.manager).hung |= {"store", "lookup"}
    write(front.manager, key(0), key(1))
    prefetch = front.manager.start_prefetch(wanted(3), timeout_s=60)
    started = time.monotonic()
    front.close()
    assert time.monotonic() - started < 1.5
    assert prefetch.done
    for number, obj in enumerate(prefetch.objects()):
        assert obj.tobytes() == content(key(number))
    prefetch.release()
    assert_closed_clean(front.manager)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_may_close() -> None:
    with storage() as front:
        engine = BlockingCacheEngine(front, NAMESPACE, layout)
        engine.store(PROMPT, Source(PROMPT))

        def check() -> None:
            with pytest.raises(ClosedError, match="fork"):
                engine.lookup(PROMPT)
            with pytest.raises(ClosedError, match="fork"):
                front.manager.start_prefetch(wanted(1))
            front.close()
            front.__exit__(None, None, None)

        assert in_child(check) == 0
        assert engine.retrieve(PROMPT, Target(PROMPT)) == TokenRange(0, 96)
    assert_closed_clean(front.manager)


FORKING_HOST = """
import os, sys, time
from l2kit import BlockingStorage

front = BlockingStorage({"tiers": ["memory://"], "l1": {"max_bytes": 1 << 20}}).open()
child = os.fork()
if child == 0:
    if sys.argv[1] == "forgets":
        del front
    elif sys.argv[1] == "closes":
        front.close()
    sys.exit(7)
end = time.monotonic() + 10
while time.monotonic() < end:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        break
    time.sleep(0.01)
else:
    os.kill(child, 9)
    sys.exit("the child hangs")
front.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("child", ["keeps", "forgets", "closes"])
def test_a_forked_child_exits_whatever_it_does_with_the_storage(child: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING_HOST, child], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (7, "")
