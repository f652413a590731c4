"""Faults in opening, closing, and what they leave behind."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
from collections.abc import Sequence
from types import TracebackType

import anyio
import anyio.lowlevel

from l2kit.adapter import Capabilities, Probe
from l2kit.config import Secret
from l2kit.errors import BackendError, ClosedError
from l2kit.keys import ObjectKey
from l2kit.memory_adapter import MemoryConfig
from l2kit.outcomes import StoreStatus
from tests.unit.broken_adapters.base import BrokenAdapter, leaked, stop


class ForgetsToSayThatItIsClosed(BrokenAdapter):
    """Using it outside ``async with`` ends in an error of the language instead of one that says what is wrong."""

    caught_by = "test_using_it_before_opening_or_after_closing"

    def check_open(self) -> None:
        """Everything goes."""


class LeaksFiles(BrokenAdapter):
    """Opens a file and does not close it."""

    caught_by = "test_opening_and_closing_leaves_nothing"

    async def open(self) -> None:
        await super().open()
        leaked.append(os.open(os.devnull, os.O_RDONLY))


class LeaksConnections(BrokenAdapter):
    """Connects to its server and does not disconnect."""

    caught_by = "test_opening_and_closing_leaves_nothing"

    async def open(self) -> None:
        await super().open()
        with socket.create_server(("127.0.0.1", 0)) as server:
            leaked.append(socket.create_connection(server.getsockname()).detach())


class LeaksTemporaryFiles(BrokenAdapter):
    """Makes a temporary file and does not remove it."""

    caught_by = "test_opening_and_closing_leaves_nothing"

    async def open(self) -> None:
        await super().open()
        descriptor, _ = tempfile.mkstemp()
        os.close(descriptor)


class LeaksThreads(BrokenAdapter):
    """Starts a thread and does not end it."""

    caught_by = "test_opening_and_closing_leaves_nothing"

    async def open(self) -> None:
        await super().open()
        threading.Thread(target=stop.wait, args=(30,), daemon=True).start()


class LeaksTasks(BrokenAdapter):
    """Starts a task and does not end it."""

    caught_by = "test_opening_and_closing_leaves_nothing"

    async def open(self) -> None:
        import asyncio

        await super().open()
        self.task = asyncio.get_running_loop().create_task(asyncio.sleep(30))


class HangsOnClose(BrokenAdapter):
    """Waits for the network when it is cancelled."""

    caught_by = "test_closing_while_busy_ends_every_task"

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        try:
            await anyio.lowlevel.checkpoint()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(1)
            raise
        return await super().store_one(key, data)


class SwallowsExceptions(BrokenAdapter):
    """An error inside ``async with`` disappears."""

    caught_by = "test_an_exception_inside_the_block_comes_through"

    async def __aexit__(  # type: ignore[override]
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        await super().__aexit__(kind, error, traceback)
        return True


class StaysOpenAfterACancel(BrokenAdapter):
    """Cancelling the block leaves it usable, with nothing behind it."""

    caught_by = "test_cancellation_of_the_block_closes_it"

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, traceback)
        if kind is not None:
            self._state = "open"


class OnlySaysThatItPersists(BrokenAdapter):
    """Promises that objects survive closing, and forgets them."""

    caught_by = "test_objects_persist"
    capabilities = Capabilities(persistent=True, shared=False)


class OnlySaysThatItShares(BrokenAdapter):
    """Promises that others see its objects, and keeps them to itself."""

    caught_by = "test_objects_are_shared"
    capabilities = Capabilities(persistent=False, shared=True)


class WorksInAForkedChild(BrokenAdapter):
    """Lets a forked child use the parent's connections."""

    caught_by = "test_a_forked_child_is_refused"

    def check_open(self) -> None:
        if self._state != "open":
            raise ClosedError("closed")


class FailsItsProbe(BrokenAdapter):
    """May write and not delete, so that it grows for ever."""

    caught_by = "test_the_probe_is_content"

    async def delete_one(self, key: ObjectKey) -> bool:
        raise PermissionError(13, "Permission denied")


class ProbesWithoutTrying(BrokenAdapter):
    """Says that all is well, whatever is."""

    caught_by = "test_the_probe_of_a_closed_adapter_says_so"

    async def probe(self) -> Probe:
        return Probe(True, 0.001)


class SecretConfig(MemoryConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """With a password."""

    password: Secret | None = None


class LogsItsPassword(BrokenAdapter):
    """Writes its password to the log."""

    caught_by = "test_no_secret_shows"
    config_type = SecretConfig

    async def open(self) -> None:
        await super().open()
        logging.getLogger("broken").debug("logging in with %s", self.revealed)

    @property
    def revealed(self) -> str:
        assert isinstance(self.config, SecretConfig)
        return self.config.password.reveal() if self.config.password else ""


class SaysItsPassword(LogsItsPassword):
    """Chains an error of its client that has the password in its text."""

    caught_by = "test_no_secret_shows"

    async def open(self) -> None:
        raise BackendError("wrong password") from ConnectionError(f"AUTH {self.revealed} was refused")


class ShowsItsPassword(LogsItsPassword):
    """Has its password in its repr."""

    caught_by = "test_no_secret_shows"

    async def open(self) -> None:
        await BrokenAdapter.open(self)

    def __repr__(self) -> str:
        return f"ShowsItsPassword(password={self.revealed!r})"
