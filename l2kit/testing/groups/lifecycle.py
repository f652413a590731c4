"""From open to close: closing while busy, opening again, another process's view, forks, the probe, secrets."""

# ruff: noqa: D102 - the names of the tests say what they test

from __future__ import annotations

import logging
import os
import signal
import time
import traceback
import warnings
from typing import Any

import anyio
import msgspec
import pytest

from l2kit.config import Secret
from l2kit.errors import ClosedError, L2Error
from l2kit.testing.groups.base import (
    Adapter,
    Conformance,
    content,
    destination,
    pass_time,
    same,
    source,
    whole_story,
)

_OBJECT_BYTES = 1 << 20


class LifecycleTests(Conformance):
    """Opening, closing and everything around."""

    #: How long closing may take while transfers of some megabytes are in flight.
    close_bound_s = 10.0

    async def test_using_it_before_opening_or_after_closing(self, url: str) -> None:
        adapter = self.open_adapter(url)
        await self._expect_closed(adapter)
        async with adapter:
            await self.store(adapter, {self.key(): b"open"})
        await self._expect_closed(adapter)
        with pytest.raises(ClosedError):
            await adapter.__aenter__()

    async def test_opening_and_closing_leaves_nothing(self, url: str) -> None:
        for _ in range(3):
            async with self.open_adapter(url):
                pass

    async def test_closing_while_busy_ends_every_task(self, url: str) -> None:
        objects = {key: content(key, _OBJECT_BYTES) for key in self.keys(16)}
        buffers = [destination(_OBJECT_BYTES) for _ in objects]
        async with self.open_adapter(url) as adapter:
            await self.store(adapter, objects)
            loading = adapter.submit_load_task(list(objects), buffers)
            storing = adapter.submit_store_task(self.keys(48)[32:], [source(d) for d in objects.values()])
            looking = adapter.submit_lookup_and_lock_task(list(objects))
            late = adapter.submit_load_task(self.keys(1), [destination(_OBJECT_BYTES)])
            await pass_time(2)
            started = anyio.current_time()
        assert anyio.current_time() - started < self.close_bound_s
        assert [task.ended for task in (loading, storing, looking, late)] == [True] * 4
        kept = [buffer.tobytes() for buffer in buffers]
        for outcome, received, data in zip(await loading, kept, objects.values(), strict=True):
            assert not outcome.loaded or same(received, data)
        assert len(await storing) == 16
        assert len(await looking) == 16
        await pass_time()
        assert same([buffer.tobytes() for buffer in buffers], kept), "a buffer was written to after closing"
        assert adapter.held_leases == 0

    async def test_an_exception_inside_the_block_comes_through(self, url: str) -> None:
        async def use() -> None:
            async with self.open_adapter(url) as adapter:
                _ = adapter.submit_load_task(self.keys(4), [destination(_OBJECT_BYTES) for _ in range(4)])
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await use()

    async def test_cancellation_of_the_block_closes_it(self, url: str) -> None:
        with anyio.CancelScope() as scope:
            async with self.open_adapter(url) as adapter:
                task = adapter.submit_store_task(self.keys(4), [source(content(n, 50_000)) for n in range(4)])
                scope.cancel()
                await anyio.sleep(60)
        assert scope.cancelled_caught
        assert task.ended
        await self._expect_closed(adapter)

    async def test_objects_persist(self, url: str) -> None:
        objects = {key: content(key, 20_000) for key in self.keys(5)}
        async with self.open_adapter(url) as adapter:
            if not adapter.capabilities.persistent:
                self.skip("the capability persistent")
            await self.store(adapter, objects)
            await adapter.submit_delete_task([self.key(4)])
        async with self.open_adapter(self.reopen_url(url)) as adapter:
            await self.expect(adapter, {**objects, self.key(4): None})

    async def test_objects_are_shared(self, url: str) -> None:
        async with self.open_adapter(url) as one:
            if not one.capabilities.shared:
                self.skip("the capability shared")
            async with self.open_adapter(self.reopen_url(url)) as other:
                await self.store(one, {self.key(0): content(0, 20_000)})
                await self.expect(other, {self.key(0): content(0, 20_000), self.key(1): None})
                await self.store(other, {self.key(1): content(1, 3000)})
                await other.submit_delete_task([self.key(0)])
                await self.expect(one, {self.key(0): None, self.key(1): content(1, 3000)})

    async def test_a_forked_child_is_refused(self, adapter: Adapter) -> None:
        await self.store(adapter, {self.key(): content("fork", 5000)})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forks with threads: that is what is tested
            child = os.fork()
        if child == 0:
            status = 1
            try:
                _ = adapter.submit_load_task([self.key()], [destination(5000)])
            except ClosedError:
                status = 0
            finally:
                os._exit(status)
        assert await self._exit_status(child) == 0, "the child must get a ClosedError"
        await self.expect(adapter, {self.key(): content("fork", 5000)})

    async def test_the_probe_is_content(self, adapter: Adapter) -> None:
        probe = await adapter.probe()
        assert probe.ok, probe.error
        assert probe.error is None
        assert probe.latency_s > 0

    async def test_the_probe_of_a_closed_adapter_says_so(self, url: str) -> None:
        probe = await self.open_adapter(url).probe()
        assert not probe.ok
        assert isinstance(probe.error, ClosedError)

    async def test_no_secret_shows(self, url: str, caplog: pytest.LogCaptureFixture) -> None:
        sesame = "xyzzy-open-sesame"
        fields = [
            field.name for field in msgspec.structs.fields(self.open_adapter(url).config) if _may_be_secret(field.type)
        ]
        if not fields:
            self.skip("an option of type Secret")
        caplog.set_level(logging.DEBUG)
        for field in fields:
            adapter = self.open_adapter(url, **{field: sesame})
            shown = [repr(adapter), repr(adapter.config), str(adapter.config), adapter.name]
            try:
                async with adapter:  # a wrong password: most servers refuse it here
                    shown += map(repr, await adapter.submit_lookup_and_lock_task([self.key()]))
                    shown.append(repr(await adapter.probe()))
            except L2Error as error:
                shown += [whole_story(error), "".join(traceback.format_exception(error))]
            assert sesame not in "\n".join(shown), f"{field} shows"
        assert sesame not in caplog.text, "a secret was logged"

    async def _expect_closed(self, adapter: Adapter) -> None:
        with pytest.raises(L2Error):  # ClosedError, or that this adapter cannot do it
            await adapter.usage()
        with pytest.raises(L2Error):
            await anext(aiter(adapter.iter_keys()))
        with pytest.raises(ClosedError):
            _ = adapter.submit_store_task([self.key()], [source(b"closed")])
        with pytest.raises(ClosedError):
            _ = adapter.submit_lookup_and_lock_task([self.key()])
        with pytest.raises(ClosedError):
            _ = adapter.submit_load_task([self.key()], [destination(1)])
        with pytest.raises(ClosedError):
            _ = adapter.submit_unlock_task([self.key()])
        with pytest.raises(ClosedError):
            _ = adapter.submit_delete_task([self.key()])

    async def _exit_status(self, child: int) -> int:
        give_up = time.monotonic() + 20
        while time.monotonic() < give_up:
            pid, status = os.waitpid(child, os.WNOHANG)  # noqa: ASYNC222 - WNOHANG does not block
            if pid == child:
                return os.waitstatus_to_exitcode(status)
            await anyio.sleep(0.005)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)  # noqa: ASYNC222 - it was killed just now
        pytest.fail("the forked child hangs")


def _may_be_secret(kind: Any) -> bool:
    return kind is Secret or Secret in getattr(kind, "__args__", ())
