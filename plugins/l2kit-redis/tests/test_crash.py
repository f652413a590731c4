"""The server is killed in the middle of 200 stores and loads and comes back two seconds later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest

import l2kit
from l2kit import Layout, MemoryObj, ObjectKey
from l2kit.testing.servers import Flavor, run_server

pytestmark = [pytest.mark.anyio, pytest.mark.service, pytest.mark.slow]

TIMEOUT_S = 5.0
SLACK_S = 1.0
OBJECTS = 200
NBYTES = 1_000_000  # so much that the kill comes in the middle


@pytest.mark.parametrize("flavor", ["redis", "valkey"])
async def test_a_crash_in_the_middle_of_traffic(flavor: Flavor, traffic: Callable[..., Any]) -> None:
    with run_server(flavor) as server:
        if not server.manageable:
            pytest.skip("needs a server that may be killed")
        async with l2kit.open_adapter(server.url(), timeout_s=TIMEOUT_S) as adapter:
            load = traffic(adapter, objects=OBJECTS, nbytes=NBYTES)
            await load.round()
            assert load.good_rounds == 1
            keys = [ObjectKey("traffic", number.to_bytes(16, "little")) for number in range(OBJECTS)]
            layout = Layout.raw(NBYTES)
            sources = [MemoryObj.wrap(load.content(number), layout) for number in range(OBJECTS)]
            targets = [MemoryObj.wrap(bytearray(NBYTES), layout) for _ in keys]
            storing, loading = adapter.submit_store_task(keys, sources), adapter.submit_load_task(keys, targets)
            ended = 0
            async for _ in loading:
                ended += 1
                if ended == 20:
                    break
            started = anyio.current_time()
            await anyio.to_thread.run_sync(server.kill)
            stored, loaded = await storing, await loading
            assert anyio.current_time() - started < TIMEOUT_S + SLACK_S
            assert not all(outcome.present for outcome in stored) or not all(outcome.loaded for outcome in loaded)
            for number, (outcome, target) in enumerate(zip(loaded, targets, strict=True)):
                assert not outcome.loaded or target.tobytes() == load.content(number)
            async with anyio.create_task_group() as group:
                group.start_soon(load.run)
                await anyio.sleep(2)  # not for a state: the outage itself is so long
                assert load.errors
                await anyio.to_thread.run_sync(server.start)
                await load.good(rounds=2, timeout_s=20)
                load.end()
            assert load.slowest_s < TIMEOUT_S + SLACK_S
