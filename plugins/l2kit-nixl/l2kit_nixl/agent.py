"""`TransferAgent`: one NIXL agent with one backend plugin, in plain blocking calls. The only place that touches `nixl`.

NIXL's backends are not safe for two transfers at once (two threads on one POSIX backend damage each other's state,
whatever the agent's synchronisation mode), so an agent belongs to one thread at a time; `spares` hands them out.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple

from l2kit.errors import AdapterImportError, BackendError, BackendTimeoutError, TransientBackendError
from l2kit_nixl.regions import Descriptor, Regions

Operation = Literal["READ", "WRITE"]
#: What the far side of a transfer is.
Far = Literal["FILE", "DRAM"]

#: Most bytes of one transfer, which an object of 32 MiB fits in: a cancelled load or store ends with the one under way.
_TRANSFER_BYTES: Final = 33 << 20
#: So long a transfer that has not ended is asked again at once; then with pauses that grow with the time it has taken.
_SPIN_S: Final = 100e-6
_LONGEST_PAUSE_S: Final = 1e-3
#: Pauses are so small a part of the time taken: what polling adds to a transfer is at most this.
_PAUSE_PART: Final = 1 / 16

#: Shared libraries that a NIXL plugin needs and that do not come with the package, for the message.
_FOREIGN_LIBRARIES: Final[Mapping[str, tuple[str, ...]]] = {
    "GDS": ("libcuda.so.1", "libcufile.so.0"),
    "GDS_MT": ("libcuda.so.1", "libcufile.so.0"),
}
_LOST: Final = frozenset({"nixlRemoteDisconnectError", "nixlCancelledError", "nixlNotPostedError"})


class Piece(NamedTuple):
    """Bytes that lie in one piece on both sides: caller's memory here, ``address`` on ``device`` there.

    For a file ``address`` is the offset and ``device`` the file descriptor.
    """

    local: memoryview
    address: int
    device: int


class Span(NamedTuple):
    """The same as addresses on both sides; ``nbytes`` in bytes."""

    near: int
    nbytes: int
    far: int
    device: int


def cut(spans: Iterable[Span], max_bytes: int) -> Iterator[list[Span]]:
    """Cut a list of spans into lists of at most ``max_bytes`` each, in order; pure."""
    batch: list[Span] = []
    room = max_bytes
    for span in spans:
        near, nbytes, far, device = span
        while nbytes > room:
            if room:
                batch.append(Span(near, room, far, device))
            near, nbytes, far = near + room, nbytes - room, far + room
            yield batch
            batch, room = [], max_bytes
        if nbytes:
            batch.append(span if nbytes == span.nbytes else Span(near, nbytes, far, device))
            room -= nbytes
    if batch:
        yield batch


class TransferAgent:
    """One NIXL agent; used by one thread at a time, whichever.

    - Local memory that lies in a memory map (L1's arena, above all) is registered once; other memory for one transfer.
    - After a transfer that failed nobody knows what the backend still does with its buffers, so the agent is taken down
      before the error is raised: when :meth:`move` has returned or raised, no buffer is touched any more.

    Attributes:
        usable: False once it was taken down; make a new one then.
    """

    def __init__(self, plugin: str, parameters: Mapping[str, str]) -> None:
        """Load ``plugin``.

        Raises:
            AdapterImportError: the package or a library that the plugin needs is missing; says which.
            BackendError: the plugin does not start with these parameters.
        """
        api = _load_nixl()
        self.name: Final = f"l2kit-{uuid.uuid4().hex}"
        self.plugin: Final = plugin
        try:
            # No thread of NIXL's own: it would take a core from us whether there is anything to do or not.
            config = api.nixl_agent_config(
                enable_prog_thread=False,
                backends=[],
                sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
            self._agent: Any = api.nixl_agent(self.name, config)
            self._agent.create_backend(plugin, dict(parameters))
        except Exception as error:
            missing = [name for name in _FOREIGN_LIBRARIES.get(plugin, ()) if not _is_loadable(name)]
            if missing:
                raise AdapterImportError(
                    f"NIXL's plugin {plugin} needs {' and '.join(missing)}, which this machine does not have; "
                    f"install the NVIDIA driver and cuFile, or use another adapter"
                ) from error
            if type(error).__name__ == "nixlNotFoundError":
                raise AdapterImportError(
                    f"NIXL's plugin {plugin} cannot be loaded: it, or a library that it needs, is not installed"
                ) from error
            raise BackendError(f"NIXL's plugin {plugin} does not start: {error}") from error
        self.usable = True
        self._regions: Regions | None = Regions(self._register_memory, self._deregister)

    @property
    def regions(self) -> Regions:
        """The memory that is registered."""
        assert self._regions is not None, "the agent was taken down"
        return self._regions

    def metadata(self) -> bytes:
        """What another agent needs to reach the memory that is registered here."""
        with self._translating():
            blob: bytes = self._agent.get_agent_metadata()
            return blob

    def progress(self) -> None:
        """Do what other agents wait for: greet them, and move their bytes where their network cannot by itself."""
        with self._translating():
            self._agent.get_new_notifs([self.plugin])

    def connect(self, metadata: bytes) -> str:
        """Learn of another agent from its :meth:`metadata`; its name, for :meth:`move`.

        Raises:
            BackendError: these bytes are no agent's metadata.
        """
        with self._translating():
            name: str | bytes = self._agent.add_remote_agent(metadata)
            return name if isinstance(name, str) else name.decode()

    @contextmanager
    def files(self, files: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Register open files, each a file descriptor and the bytes of it that are moved, for the ``with`` block."""
        with self._translating():
            handle = self._agent.register_memory(
                [(0, nbytes, descriptor, "") for descriptor, nbytes in files], "FILE", [self.plugin]
            )
        try:
            yield
        finally:
            if self.usable:
                with self._translating():
                    self._deregister(handle)

    def move(
        self,
        operation: Operation,
        pieces: Sequence[Piece],
        far: Far,
        *,
        remote: str | None = None,
        checkpoint: Callable[[], None],
        give_up_s: float | None = None,
    ) -> None:
        """Read or write all ``pieces``; ``remote`` is the other agent, none for files.

        - ``checkpoint`` is called before each part of at most 33 MiB and may raise to stop there.
        - A part that has not ended after ``give_up_s`` is aborted by taking the agent down with it; with None it is
          waited for, however long it takes, because only the kernel can end it.

        Raises:
            BackendTimeoutError: it was given up.
            TransientBackendError: the other agent is gone.
            BackendError: the transfer failed; NIXL does not say why, nor how much of it took place.
        """
        views = [piece.local for piece in pieces]
        with self._translating(), self.regions.covering(views, copy_in=operation == "WRITE") as addresses:
            spans = [
                Span(near, len(local), far_address, device)
                for near, (local, far_address, device) in zip(addresses, pieces, strict=True)
            ]
            for part in cut(spans, _TRANSFER_BYTES):
                checkpoint()
                self._transfer(operation, part, far, remote or self.name, give_up_s)

    def close(self) -> None:
        """Deregister everything and take the agent down; harmless when repeated."""
        if self.usable:
            with self._translating():
                self.regions.drop_all()
        self._take_down()

    # Methods, not the agent's own: whoever holds one of those holds the agent, and it could not be taken down.
    def _register_memory(self, descriptors: Sequence[Descriptor]) -> Any:
        return self._agent.register_memory(list(descriptors), "DRAM", [self.plugin])

    def _deregister(self, handle: Any) -> None:
        self._agent.deregister_memory(handle, [self.plugin])

    def _transfer(
        self, operation: Operation, part: Sequence[Span], far: Far, remote: str, give_up_s: float | None
    ) -> None:
        agent = self._agent
        near = agent.get_xfer_descs([(one.near, one.nbytes, 0) for one in part], "DRAM")
        there = agent.get_xfer_descs([(one.far, one.nbytes, one.device) for one in part], far)
        handle = agent.initialize_xfer(operation, near, there, remote, b"", [self.plugin])
        try:
            state = agent.transfer(handle)
            started = time.perf_counter()
            while state == "PROC":
                waited = time.perf_counter() - started
                if give_up_s is not None and waited > give_up_s:
                    raise BackendTimeoutError(f"a NIXL transfer did not end within {give_up_s:g} s")
                if waited > _SPIN_S:
                    time.sleep(min(waited * _PAUSE_PART, _LONGEST_PAUSE_S))
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise BackendError("a NIXL transfer failed")
        except BaseException as error:
            with _ignoring_nixl():
                agent.release_xfer_handle(handle)
            traceback.clear_frames(error.__traceback__)  # frames of the bindings' API that hold agent and handle
            del handle, agent
            self._take_down()
            raise
        agent.release_xfer_handle(handle)

    def _take_down(self) -> None:
        """Destroy the agent: it ends all that it still does when its last reference goes, which is ours."""
        self.usable = False
        if self._regions is not None:
            self._regions.abandoned = True
        self._regions = None
        self._agent = None

    @contextmanager
    def _translating(self) -> Iterator[None]:
        """Errors of the bindings in our tree; an agent that raised one is not used again."""
        try:
            yield
        except Exception as error:
            if not type(error).__module__.endswith("._bindings"):
                raise
            self._take_down()
            text = f"NIXL's plugin {self.plugin} says {error}"
            if type(error).__name__ in _LOST:
                raise TransientBackendError(text) from error
            raise BackendError(text) from error


@contextmanager
def _ignoring_nixl() -> Iterator[None]:
    """For clean-up of what has failed already."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.endswith("._bindings"):
            raise


def _is_loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _load_nixl() -> Any:
    """NIXL's Python API, imported at first use: it takes up to some seconds and some hundred MB.

    Raises:
        AdapterImportError: it is not installed, or it cannot be imported.
    """
    first = "nixl" not in sys.modules
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        raise AdapterImportError(f"the package nixl cannot be imported ({error}); pip install 'l2kit[nixl]'") from error
    if first and "NIXL_LOG_LEVEL" not in os.environ:
        # By default it prints to standard output, which belongs to the program that we are a part of.
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
    return api
