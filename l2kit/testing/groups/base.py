"""What all groups stand on: the fixtures and hooks that a plugin's tests override, and the words that tests use."""

from __future__ import annotations

import hashlib
import inspect
import os
import random
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, NoReturn

import anyio.lowlevel
import pytest

import l2kit
from l2kit.adapter import L2Adapter
from l2kit.errors import L2Error
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.outcomes import LoadOutcome, StoreOutcome
from l2kit.testing.leaks import no_leaked_tasks, no_leaked_temporary_files, no_leaked_threads_or_files

Adapter = L2Adapter[Any]

#: What a destination holds before a load, so that bytes which nobody wrote can be told.
UNTOUCHED: Final = 0xA5


@pytest.mark.anyio
class Conformance:
    """Fixtures, hooks and helpers; the tests are in the groups."""

    # --- what a plugin's tests override ---------------------------------------------------------------------------

    #: All of it by name. A subclass that defines another name of the suite anew fails it.
    hooks: ClassVar[frozenset[str]] = frozenset(
        {
            "adapter",
            "adapter_url",
            "open_adapter",
            "reopen_url",
            "raw_read",
            "raw_write",
            "raw_unfinished",
            "raw_time_to_live_s",
            "close_bound_s",
            "history_examples",
            "history_steps",
            "anyio_backend",
            "setup_method",
        }
    )

    @pytest.fixture
    def adapter_url(self) -> str | None:
        """The URL of a place for objects: override this one.

        An empty place for each test is best. One that is shared works as well: keys are fresh in every test.
        """
        return None

    @pytest.fixture
    async def adapter(self, adapter_url: str | None) -> AsyncIterator[Adapter]:
        """An entered adapter; override it only where a URL alone does not describe one."""
        if adapter_url is None:
            pytest.fail("override the fixture adapter_url (or adapter) in your subclass of AdapterConformance")
        async with self.open_adapter(adapter_url) as adapter:
            yield adapter

    def open_adapter(self, url: str, **options: Any) -> Adapter:
        """Make an adapter that is not entered yet; override it where `l2kit.open_adapter` cannot find the plugin."""
        return l2kit.open_adapter(url, **options)

    def reopen_url(self, adapter_url: str) -> str:
        """A URL that opens the same objects again; by default the same URL."""
        return adapter_url

    def raw_read(self, adapter: Adapter, key: ObjectKey) -> bytes | Awaitable[bytes | None] | None:
        """The stored bytes of ``key``, read around the adapter; None for none. May be a coroutine function."""
        raise NotImplementedError

    def raw_write(self, adapter: Adapter, key: ObjectKey, data: bytes) -> Awaitable[None] | None:
        """Make ``data`` the stored bytes of ``key``, around the adapter. May be a coroutine function."""
        raise NotImplementedError

    def raw_unfinished(self, adapter: Adapter) -> Sequence[str] | Awaitable[Sequence[str]]:
        """Names of what unfinished stores left in the backend, read around the adapter: temporary files, parts."""
        raise NotImplementedError

    def raw_time_to_live_s(self, adapter: Adapter, key: ObjectKey) -> float | Awaitable[float]:
        """How long the server will keep ``key``, read around the adapter; for ``lock="server"``."""
        raise NotImplementedError

    # --- fixtures that stay as they are -----------------------------------------------------------------------------

    @pytest.fixture(scope="session")
    @classmethod
    def anyio_backend(cls) -> str:
        """Adapters run on asyncio."""
        return "asyncio"

    @pytest.fixture(autouse=True)
    def no_leaks(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        """No test leaves a thread, a file descriptor (sockets are among them) or a temporary file behind."""
        tmp_path_factory.getbasetemp()  # made now, it is none of the test's temporary files
        with no_leaked_temporary_files(), no_leaked_threads_or_files():
            yield

    @pytest.fixture(autouse=True)
    async def no_task_leaks(self, no_leaks: None) -> AsyncIterator[None]:
        """No test leaves a task behind."""
        async with no_leaked_tasks():
            yield

    @pytest.fixture
    def url(self, adapter_url: str | None) -> str:
        """The URL, for tests that open adapters of their own."""
        if adapter_url is None:
            self.skip("the fixture adapter_url: this test opens adapters of its own")
        return adapter_url

    # --- words ------------------------------------------------------------------------------------------------------

    def setup_method(self) -> None:
        """Make keys that no other test has."""
        self._run = os.urandom(8)

    def skip(self, missing: str) -> NoReturn:
        """Skip the test and say what it needs."""
        pytest.skip(f"needs {missing}")

    def key(self, number: int = 0) -> ObjectKey:
        """The test's key of that number."""
        digest = hashlib.blake2b(number.to_bytes(8, "little"), key=self._run, digest_size=16).digest()
        return ObjectKey("conformance", digest)

    def keys(self, count: int) -> list[ObjectKey]:
        """The test's first keys."""
        return [self.key(number) for number in range(count)]

    async def store(self, adapter: Adapter, objects: Mapping[ObjectKey, bytes]) -> list[StoreOutcome]:
        """Store and expect every object to be present then."""
        sources = [source(data) for data in objects.values()]
        outcomes = await adapter.submit_store_task(list(objects), sources)
        assert all(outcome.present for outcome in outcomes), outcomes
        return outcomes

    async def load(self, adapter: Adapter, key: ObjectKey, nbytes: int) -> tuple[LoadOutcome, bytes]:
        """Load into a destination of ``nbytes``; the outcome and all bytes of the destination."""
        target = destination(nbytes)
        [outcome] = await adapter.submit_load_task([key], [target])
        return outcome, target.tobytes()

    async def expect(self, adapter: Adapter, objects: Mapping[ObjectKey, bytes | None]) -> None:
        """Check that lookup and load agree and give exactly ``objects``; None stands for a miss."""
        keys = list(objects)
        found = await adapter.submit_lookup_and_lock_task(keys)
        targets = [destination(1 if data is None else len(data)) for data in objects.values()]
        loaded = await adapter.submit_load_task(keys, targets)
        await adapter.submit_unlock_task([key for key, outcome in zip(keys, found, strict=True) if outcome.hit])
        for key, lookup, load, target in zip(keys, found, loaded, targets, strict=True):
            wanted = objects[key]
            assert lookup.status == ("miss" if wanted is None else "hit"), (key, lookup)
            assert load.status == ("miss" if wanted is None else "loaded"), (key, load)
            if wanted is None:
                assert same(target.tobytes(), bytes([UNTOUCHED])), "the destination of a miss was written to"
            else:
                assert load.nbytes == len(wanted)
                assert same(target.tobytes(), wanted), "other bytes came back than were stored"

    async def agreed(self, adapter: Adapter, keys: Sequence[ObjectKey], room: int) -> list[bytes | None]:
        """What each key holds, as lookup and load say alike: in one batch, and key by key in the other order."""

        async def look_up(some: Sequence[ObjectKey]) -> list[bool]:
            found = await adapter.submit_lookup_and_lock_task(some)
            await adapter.submit_unlock_task([key for key, outcome in zip(some, found, strict=True) if outcome.hit])
            return [outcome.hit for outcome in found]

        hits = await look_up(keys)
        targets = [destination(room) for _ in keys]
        loads = await adapter.submit_load_task(keys, targets)
        held: list[bytes | None] = []
        for key, hit, outcome, target in zip(keys, hits, loads, targets, strict=True):
            assert hit or outcome.status == "miss", f"lookup misses {key}, load says {outcome}"
            assert not hit or outcome.loaded, f"lookup finds {key}, load says {outcome}"
            held.append(target.tobytes()[: outcome.nbytes] if hit else None)
        for key, data in reversed(list(zip(keys, held, strict=True))):
            outcome, _ = await self.load(adapter, key, room)
            assert outcome.status == ("miss" if data is None else "loaded"), (key, outcome)
            assert await look_up([key]) == [data is not None], f"another answer for {key} when it is asked alone"
        return held

    async def raw(self, adapter: Adapter, key: ObjectKey, data: bytes | None = None) -> bytes:
        """Go around the adapter: write ``data`` if given, and return what is stored then."""
        try:
            if data is not None:
                written = self.raw_write(adapter, key, data)
                if inspect.isawaitable(written):
                    await written
            stored = self.raw_read(adapter, key)
            if inspect.isawaitable(stored):
                stored = await stored
        except NotImplementedError:
            self.skip("the hooks raw_read and raw_write, which go around the adapter")
        assert stored is not None, f"raw_read finds nothing under {key}"
        return bytes(stored)

    async def tiny(self, url: str, max_bytes: int) -> Adapter:
        """An adapter, not entered, that may hold ``max_bytes``."""
        adapter = self.open_adapter(url)
        if "max_bytes" not in adapter.config.__struct_fields__:
            self.skip("an option max_bytes")
        return self.open_adapter(url, max_bytes=max_bytes)


def same(found: object, expected: object) -> bool:
    """True for equal bytes, or equal lists of them.

    Not ``==`` in an assertion: where ``CI`` is set, pytest explains the difference of megabytes for minutes.
    """
    return bool(found == expected)


def content(name: object, nbytes: int) -> bytes:
    """Bytes that only this name and this size have, so that no part of another object passes for them."""
    return random.Random(f"{name}/{nbytes}").randbytes(nbytes)


def source(data: bytes | bytearray) -> MemoryObj:
    """A raw object over these bytes."""
    return MemoryObj.wrap(data, Layout.raw(len(data)))


def destination(nbytes: int) -> MemoryObj:
    """A raw destination, filled with `UNTOUCHED`."""
    return MemoryObj.wrap(bytearray([UNTOUCHED]) * nbytes, Layout.raw(nbytes))


def split(buffer: bytes | bytearray, *sizes: int) -> list[memoryview]:
    """Cut a buffer into segments of these sizes and a last one with the rest."""
    view = memoryview(buffer)
    segments: list[memoryview] = []
    for size in sizes:
        segments.append(view[:size])
        view = view[size:]
    return [*segments, view]


async def pass_time(turns: int = 20) -> None:
    """Let the event loop turn: what was left running gets the chance to do its damage."""
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()


def whole_story(error: BaseException | None) -> str:
    """An error with all that it was raised from, as a log would show it."""
    lines: list[str] = []
    while error is not None:
        lines.append(f"{type(error).__name__}: {error} {error!r}")
        error = error.__cause__ or error.__context__
    return "\n".join(lines)


def errors_of(outcomes: Sequence[Any]) -> list[type[L2Error] | None]:
    """The error type of each outcome."""
    return [type(outcome.error) if outcome.error else None for outcome in outcomes]
