"""`AdapterStateMachine`: histories of batches that hypothesis makes up, played on an adapter and on a dict.

The suite runs it as ``test_any_history_agrees_with_a_dict``; a plugin's own tests can run it longer, or on an adapter
that was made in another way, with `check_histories`::

    @pytest.mark.anyio
    async def test_long_histories() -> None:
        await check_histories(lambda: l2kit.open_adapter("mystore://localhost/test"), examples=500, steps=60)
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from typing import Any, ClassVar, Final, Literal

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.from_thread import BlockingPortal
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from l2kit.adapter import L2Adapter
from l2kit.keys import ObjectKey
from l2kit.task import L2Task
from l2kit.testing.history import DictModel, Flight, memory_objects

Connect = Callable[[], AbstractAsyncContextManager[L2Adapter[Any]]]

_SIZES = (0, 1, 300, 300, 4097)
_KEYS: Final = 3
_NUMBERS = st.integers(0, _KEYS - 1)
_EVERY: Final = list(range(_KEYS))
_BATCHES = st.sampled_from([_EVERY, [0], [1], [2], [0, 1], [2, 0, 2], [1, 1], [2, 1, 0, 0]])
#: What a rule does with its batch: leave it in flight, wait for it, or also look at once what its keys hold then.
Then = Literal["fly", "wait", "look"]
_THEN = st.sampled_from(["wait", "look", "fly"])


class AdapterStateMachine(RuleBasedStateMachine):
    """Batches over three keys, several in flight at once, each compared with a `DictModel`.

    `adapter_state_machine` makes a subclass for one adapter. Each example opens it anew and has keys of its own,
    which it deletes in the end.
    """

    portal: ClassVar[BlockingPortal]
    #: Makes the adapter; entered on the event loop of ``portal``.
    connect: ClassVar[Connect]
    #: Makes it again on the same objects, if they persist.
    reconnect: ClassVar[Connect | None] = None
    #: What went wrong so far, in any example.
    failures: ClassVar[list[Exception]]

    def __init__(self) -> None:
        super().__init__()
        self._run = os.urandom(15)
        self._content = random.Random(0)
        self._open(type(self).connect)
        capabilities = self.adapter.capabilities
        # What evicts without a limit of its own may be limited by its server.
        limited = capabilities.evicts and getattr(self.adapter.config, "max_bytes", 0) is not None
        self.model = DictModel(owned_locks=capabilities.lock == "owned", forgets=limited)

    @initialize(size=st.sampled_from(_SIZES))
    def fill(self, size: int) -> None:
        """Begin with something under each key: most of what goes wrong goes wrong with objects that are there."""
        self.store(_EVERY, size, then="wait")

    @rule(numbers=_BATCHES, size=st.sampled_from(_SIZES), then=_THEN)
    def store(self, numbers: list[int], size: int, then: Then) -> None:
        """Store new content; of a key given twice, the first counts."""
        keys = self._keys(numbers)
        contents = [self._content.randbytes(size) if size else b"" for _ in keys]
        versions: dict[ObjectKey, int] = {}
        for key, content in zip(keys, contents, strict=True):
            versions.setdefault(key, self.model.version_of(content))
        buffers = [bytearray(content) for content in contents]
        self._submit("store", keys, then, versions=versions, buffers=buffers)

    @rule(numbers=_BATCHES, then=_THEN)
    def lookup(self, numbers: list[int], then: Then) -> None:
        """Look up and lock."""
        self._submit("lookup", self._keys(numbers), then)

    @rule(numbers=_BATCHES, room=st.sampled_from(["exact", "large", "short"]), then=_THEN)
    def load(self, numbers: list[int], room: Literal["exact", "large", "short"], then: Then) -> None:
        """Load into memory of the right size, or with room to spare, or a byte too short."""
        keys = self._keys(numbers)
        buffers = []
        for key in keys:
            newest = max((version for version in self.model.possible[key] if version is not None), default=None)
            nbytes = 10 if newest is None else len(self.model.contents[newest])
            nbytes = {"exact": nbytes, "large": 5000, "short": max(0, nbytes - 1)}[room]
            buffers.append(bytearray(nbytes))
        self._submit("load", keys, then, buffers=buffers)

    @rule(numbers=_BATCHES, then=_THEN)
    def unlock(self, numbers: list[int], then: Then) -> None:
        """Release leases, and some that nobody holds."""
        self._unlock([key for key in self._keys(numbers) if not self.model.turning(key)], then)

    @rule(then=_THEN)
    def unlock_all(self, then: Then) -> None:
        """Release every lease whose lookup has ended."""
        self._unlock([key for key in self.model.leases.elements() if not self.model.turning(key)], then)

    @rule(number=_NUMBERS, then=_THEN)
    def delete(self, number: int, then: Then) -> None:
        """Delete."""
        self._submit("delete", self._keys([number]), then)

    @precondition(lambda self: self.model.flying)
    @rule(choice=st.integers(0, 10))
    def await_one(self, choice: int) -> None:
        """Wait for a batch that is in flight."""
        self._land(self.model.flying[choice % len(self.model.flying)])

    @precondition(lambda self: self.model.flying)
    @rule(choice=st.integers(0, 10))
    def cancel_one(self, choice: int) -> None:
        """Cancel a batch that is in flight."""
        flight = self.model.flying[choice % len(self.model.flying)]
        self.portal.call(flight.task.cancel)
        flight.cancelled = True

    @precondition(lambda self: self.model.flying)
    @rule(turns=st.integers(1, 4))
    def turn(self, turns: int) -> None:
        """Let the event loop turn."""
        self.portal.call(_turn, turns)

    @precondition(lambda self: type(self).reconnect is not None and self.adapter.capabilities.persistent)
    @rule()
    def reopen(self) -> None:
        """Close, with batches in flight, and open again."""
        reconnect = type(self).reconnect
        assert reconnect is not None
        for flight in self.model.flying:
            flight.cancelled = True  # closing cancels them
        self._close()
        self._land_all()
        self.model.closed()
        self._open(reconnect)

    @precondition(lambda self: type(self.adapter).iter_keys is not L2Adapter.iter_keys)
    @rule()
    def list_keys(self) -> None:
        """Compare a listing."""
        self._land_all()
        self.model.check_listing(self.portal.call(_listing, self.adapter))

    def teardown(self) -> None:
        """Leave nothing: no batch, no lease, no object, no connection."""
        failure = sys.exception()
        try:
            if failure is None:
                self._leave_nothing()
            else:
                self.portal.call(_clear, self.adapter, self._keys(_EVERY), list(self.model.leases.elements()))
        except BaseException as error:
            failure = failure or error
            raise
        finally:
            if isinstance(failure, Exception):  # others are how hypothesis ends an example
                self.failures.append(failure)
            self._close()

    def _leave_nothing(self) -> None:
        self._land_all()
        held = +self.model.leases
        assert self.adapter.held_leases == held.total(), f"{self.adapter.held_leases} leases, not {held}"
        self._unlock(list(held.elements()), then="wait")
        assert self.adapter.held_leases == 0, "a lease is left after all were released"
        self._submit("delete", self._keys(_EVERY), then="wait")
        self._submit("lookup", self._keys(_EVERY), then="wait")

    def _keys(self, numbers: list[int]) -> list[ObjectKey]:
        return [ObjectKey("history", self._run + bytes([number])) for number in numbers]

    def _open(self, connect: Connect) -> None:
        self._opened: AbstractContextManager[L2Adapter[Any]]
        self._opened = self.portal.wrap_async_context_manager(connect())
        self.adapter = self._opened.__enter__()

    def _close(self) -> None:
        self._opened.__exit__(None, None, None)

    def _unlock(self, keys: list[ObjectKey], then: Then) -> None:
        left = self.model.leases.copy()
        expected = []
        for key in keys:
            expected.append("deleted" if left[key] > 0 else "miss")
            left[key] -= 1
        self._submit("unlock", keys, then, expected=expected)

    def _submit(
        self,
        kind: Literal["store", "load", "lookup", "unlock", "delete"],
        keys: list[ObjectKey],
        then: Then,
        *,
        versions: dict[ObjectKey, int] | None = None,
        buffers: list[bytearray] | None = None,
        expected: list[str] | None = None,
    ) -> None:
        submit: dict[str, Callable[..., L2Task[Any]]] = {
            "store": self.adapter.submit_store_task,
            "load": self.adapter.submit_load_task,
            "lookup": self.adapter.submit_lookup_and_lock_task,
            "unlock": self.adapter.submit_unlock_task,
            "delete": self.adapter.submit_delete_task,
        }
        arguments: list[Any] = [keys] if buffers is None else [keys, memory_objects(buffers)]
        [task] = self.portal.call(lambda: [submit[kind](*arguments)])  # alone it would be awaited
        flight = Flight(kind, task, keys, versions=versions, buffers=buffers or (), expected=expected or ())
        self.model.take_off(flight)
        if then != "fly":
            self._land(flight)
        if then == "look":
            self.load(_EVERY, "large", "wait")

    def _land(self, flight: Flight) -> None:
        self.model.land(flight, self.portal.call(_outcomes, flight.task))
        self.model.check_reused_memory()

    def _land_all(self) -> None:
        for flight in list(self.model.flying):
            self._land(flight)


def adapter_state_machine(
    portal: BlockingPortal, connect: Connect, *, reconnect: Connect | None = None
) -> type[AdapterStateMachine]:
    """Make the state machine of one adapter, for hypothesis to run in another thread than the event loop's.

    Args:
        portal: leads to the event loop that the adapter is used on.
        connect: makes an adapter that is not entered yet, for each example.
        reconnect: makes one that finds the same objects; without it, an example never closes and reopens.
    """
    attributes = {
        "portal": portal,
        "failures": [],
        "connect": staticmethod(connect),
        "reconnect": reconnect and staticmethod(reconnect),
    }
    return type("AdapterHistory", (AdapterStateMachine,), attributes)


async def check_histories(
    connect: Connect, *, reconnect: Connect | None = None, examples: int = 15, steps: int = 40, shrinks: bool = False
) -> None:
    """Run `AdapterStateMachine` from an async test; the same histories every time.

    - The adapter runs on this event loop, hypothesis in one thread, which has ended when this returns.
    - ``examples`` histories each of at most a quarter of ``steps`` and of all of them: what shows in a short one is
      reported with a short one, and a failure takes no longer than a success.
    - With ``shrinks`` hypothesis also makes the failing history as short as it can, in up to five minutes.

    Raises:
        AssertionError: an answer that no dict would give; notes on it show the history.
    """
    failure: BaseException | None = None
    async with BlockingPortal() as portal:
        machine = adapter_state_machine(portal, connect, reconnect=reconnect)

        def run() -> None:
            for part in (4, 1):
                bounds = settings(
                    max_examples=examples,
                    stateful_step_count=max(1, steps // part),
                    deadline=None,
                    database=None,
                    derandomize=True,
                    suppress_health_check=list(HealthCheck),
                    phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
                    report_multiple_bugs=False,
                    print_blob=False,
                )
                run_state_machine_as_test(machine, settings=bounds)

        try:
            await anyio.to_thread.run_sync(run, limiter=anyio.CapacityLimiter(1))
        except Flaky as error:
            failure = machine.failures[0] if machine.failures else error
            failure.add_note("The same history went well when it was played again: it is a matter of timing.")
        except Exception as error:  # raised below: the portal's task group would wrap it
            failure = error
    if failure is not None:
        raise failure


async def _outcomes(task: L2Task[Any]) -> list[Any]:
    return await task


async def _turn(turns: int) -> None:
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()


async def _listing(adapter: L2Adapter[Any]) -> dict[ObjectKey, int]:
    return {info.key: info.size async for info in adapter.iter_keys()}


async def _clear(adapter: L2Adapter[Any], keys: list[ObjectKey], leased: list[ObjectKey]) -> None:
    """After a failure: as much as still works."""
    with suppress(Exception):
        await adapter.submit_unlock_task(leased)
        await adapter.submit_delete_task(keys)
