"""`L2Adapter`: the contract between l2kit and one storage backend.

A plugin author subclasses `L2Adapter`, declares `capabilities` and a config Struct, and writes coroutine hooks for one
key (or for a batch). The base class gives everything that must be the same everywhere: validation, the envelope with
its checksums, codec chains, deadlines, bounded fan-out, cancellation, leases and the close protocol. Because the
envelope is made and checked here, no adapter can deliver bytes that were not verified.
"""

from __future__ import annotations

import logging
import math
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, Literal, NamedTuple, Self, TypeVar

import anyio
import anyio.to_thread
import msgspec

from l2kit.batches import INLINE_CPU_BYTES, Batches, Lane, current_lane, for_each
from l2kit.config import AdapterConfig, ParsedURL
from l2kit.errors import BackendError, BackendTimeoutError, ClosedError, ConfigError, L2Error, first_error
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.outcomes import DeleteOutcome, LoadOutcome, LookupOutcome, StoreOutcome, StoreStatus
from l2kit.serde import CodecChain, CodecSource
from l2kit.supervision import Supervisor
from l2kit.task import L2Task, TaskRunner

#: Version of this contract; an adapter that declares another major version is refused.
API_VERSION: Final = (1, 1)

ConfigT = TypeVar("ConfigT", bound=AdapterConfig)
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_CLOSE_GRACE_S: Final = 5.0
_log = logging.getLogger(__name__)


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend can do; hosts and the conformance suite go by this, never by an adapter's name.

    Attributes:
        persistent: objects survive closing and reopening the adapter.
        shared: objects are visible to other processes that open the same URL.
        lock: how strong a lookup's lease is: ``owned`` (a locked object stays loadable until unlocked, whatever is
            evicted or deleted), ``server`` (a time-to-live is extended on the server), ``none``.
        evicts: the backend removes objects by itself to stay within a limit.
        alignment: payloads start at a multiple of this many bytes in the stored object.
        max_object_bytes: largest stored object, envelope included; None for no limit.
        group_keys: how many objects one `store_many` or `load_many` call takes, where each call costs something of its
            own (a thread, a round trip); 1 where nothing is gained: then these hooks are not called.
    """

    persistent: bool
    shared: bool
    lock: Literal["none", "server", "owned"] = "none"
    evicts: bool = False
    alignment: int = 1
    max_object_bytes: int | None = None
    group_keys: int = 1


class KeyInfo(msgspec.Struct, frozen=True):
    """One stored object as a listing shows it; ``size`` in bytes, envelope included."""

    key: ObjectKey
    size: int


class Usage(msgspec.Struct, frozen=True):
    """What a backend holds. ``max_bytes`` is None when there is no limit, ``objects`` None when it cannot be known."""

    used_bytes: int
    max_bytes: int | None = None
    objects: int | None = None


class Probe(msgspec.Struct, frozen=True):
    """Result of writing, reading, comparing and deleting one small object; ``details`` are for people."""

    ok: bool
    latency_s: float
    error: L2Error | None = None
    details: dict[str, str] = msgspec.field(default_factory=dict)


class L2Adapter(ABC, Generic[ConfigT]):
    """One storage backend under l2kit: an async context manager that takes batches and reports per key.

    What the framework guarantees to the hooks:

    - They run on the adapter's event loop, between :meth:`open` and :meth:`close`, under a deadline and cancellation.
    - Keys of one call are distinct; buffers are flat byte `memoryview` s that stay valid until the hook returns.
    - At most ``config.max_concurrency`` single-key hooks of one batch run at once.

    What the implementer guarantees:

    - A hook that returns **or raises, cancellation included,** no longer touches any buffer. Threads are awaited
      (:meth:`run_in_thread`), never abandoned; clients have time-outs of their own.
    - No blocking call on the loop.
    - A store becomes visible as a whole or not at all; after one that failed, the old object or none is there.
    - A missing key is a value (None or False), never an exception.
    """

    #: The contract that the plugin was written for, as numbers of its own: ``(1, 0)``. The registry refuses a class
    #: that only inherits this one, because that would say whatever is installed.
    api_version: ClassVar[tuple[int, int]] = API_VERSION
    config_type: ClassVar[type[AdapterConfig]] = AdapterConfig
    #: Declared on the class; only an adapter around another one has its own per instance.
    capabilities: Capabilities

    def __init__(self, config: ConfigT, *, name: str, codecs: CodecChain, codec_source: CodecSource) -> None:
        """Called by the registry; does no I/O. Subclasses need no constructor: :meth:`open` is the place for state.

        Args:
            config: this instance's options; never shared with another instance.
            name: what operators call this tier.
            codecs: the chain that objects are stored with.
            codec_source: where chains of stored objects are found.
        """
        self.config: Final = config
        self.name: Final = name
        self.codecs: Final = codecs
        self._codec_source: Final = codec_source
        #: Whether a load that finds a damaged object deletes it; tools that only look turn this off.
        self.deletes_damaged = True
        self._state: Literal["new", "open", "closed"] = "new"
        self._opened: _Opened | None = None
        self._limiters: dict[Lane, anyio.CapacityLimiter] = {}
        self._counters: Counter[str] = Counter()
        self._supervisor = Supervisor(name)

    # --- hooks: what an author writes -------------------------------------------------------------

    @classmethod
    def options_from_url(cls, url: ParsedURL) -> dict[str, Any]:
        """Map a URL to raw options. By default host, port, path, username and password fill the fields of that name.

        Raises:
            ConfigError: the URL has a part that the adapter has no use for.
        """
        options: dict[str, Any] = dict(url.query)
        known = {field.name for field in msgspec.structs.fields(cls.config_type)}
        for part in ("host", "port", "path", "username", "password"):
            value = getattr(url, part)
            if value is None or value in ("", "/"):
                continue
            if part not in known:
                raise ConfigError(f"{url.scheme}: {part} has no meaning in this URL")
            if part in options:
                raise ConfigError(f"{url.scheme}: {part} stands in the URL twice; drop '?{part}='")
            options[part] = value
        return options

    async def open(self) -> None:
        """Connect, create directories, rebuild indexes. Raises an `L2Error` that says what is wrong and where."""

    async def close(self) -> None:
        """Give everything back. Runs shielded from cancellation and bounded in time, after all batches have ended."""

    @abstractmethod
    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """Write one object: the concatenation of ``data``, which is only read.

        - Visible to lookups only when it is complete; an existing object may be kept (ALREADY_PRESENT) or replaced.
        - DROPPED means that there is no room for it and that this is no fault.
        """

    @abstractmethod
    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """Read one object into ``into``, filled one after the other, and return its stored size; None for a miss.

        The stored object may be longer than ``into`` (fill what fits, return the full size) or shorter (leave the
        rest untouched).
        """

    async def store_many(self, items: Sequence[StoreItem]) -> Sequence[StoreStatus | Exception]:
        """Write several objects, at most ``capabilities.group_keys``; per item what :meth:`store_one` would say.

        - ``item.data()`` is CPU-bound: call it in the thread that writes.
        - An exception in the answer is that key's failure, one that is raised is the failure of all.
        - By default one :meth:`store_one` after the other.
        """
        return [await caught(self._store_item(item)) for item in items]

    async def load_many(self, items: Sequence[LoadItem]) -> Sequence[int | Exception | None]:
        """Read several objects, at most ``capabilities.group_keys``; per item what :meth:`load_one` would say.

        - ``item.verify(size)`` may be called in the thread that has read; the framework does it otherwise.
        - An exception in the answer is that key's failure, one that is raised is the failure of all.
        - By default one :meth:`load_one` after the other.
        """
        return [await caught(self.load_one(item.key, item.into)) for item in items]

    @abstractmethod
    async def lookup_many(self, keys: Sequence[ObjectKey]) -> Sequence[int | None]:
        """Return each key's stored size or None, in as few round trips as the backend allows."""

    @abstractmethod
    async def delete_one(self, key: ObjectKey) -> bool:
        """Delete one object; False when there was none."""

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> Sequence[int | None]:
        """Look up and, as far as ``capabilities.lock`` promises, lock. By default a plain :meth:`lookup_many`.

        For every hit the framework calls :meth:`release_many` with the key exactly once. When this raises,
        cancellation included, nothing may stay locked.
        """
        return await self.lookup_many(keys)

    async def release_many(self, keys: Sequence[ObjectKey]) -> None:
        """Undo one :meth:`acquire_many` hit per key (a key may come several times). By default nothing."""

    def iter_keys(self) -> AsyncIterator[KeyInfo]:
        """Yield every object of this tier once, in no order (write it as an async generator).

        Objects that come or go meanwhile may be missed. Begin with :meth:`check_open`.
        """
        raise BackendError(f"{self.name}: this adapter cannot list its keys")

    async def usage(self) -> Usage:
        """Report what this tier holds. Begin with :meth:`check_open`."""
        raise BackendError(f"{self.name}: this adapter cannot report its usage")

    def translate_error(self, error: Exception) -> L2Error:
        """Turn a foreign exception into the error tree: the one seam. Never let a secret into the message.

        `OSError` and unknown errors become `BackendError` by default; override for the client library's own.
        """
        if isinstance(error, OSError):
            return BackendError(f"{self.name}: {error.strerror or type(error).__name__} (errno {error.errno})")
        return BackendError(f"{self.name}: unexpected {type(error).__name__}")

    # --- tools for hooks --------------------------------------------------------------------------

    def check_open(self) -> None:
        """Refuse use outside ``async with``; :meth:`iter_keys` and :meth:`usage` call it first.

        Raises:
            ClosedError: not entered yet, closed, or in a forked child.
        """
        if self._state != "open" or self._opened is None:
            raise ClosedError(f"{self.name}: the adapter is {self._state}; use it inside 'async with'")
        if os.getpid() != self._opened.pid:
            raise ClosedError(f"{self.name}: the adapter was opened before a fork; open a new one in the child")

    async def run_in_thread(self, function: Callable[[], ResultT]) -> ResultT:
        """Run ``function`` in this adapter's own bounded threads and wait for it, cancelled or not.

        - A function that takes long asks ``anyio.from_thread.check_cancelled()`` now and then, and ends when it raises.
        - Stores and deletes have threads apart from those of lookups and loads: writes that are stuck keep no reader
          waiting.
        """
        lane = current_lane.get()
        limiter = self._limiters.get(lane)
        if limiter is None:  # made here because it belongs to the running loop
            limiter = self._limiters[lane] = anyio.CapacityLimiter(self.config.max_concurrency)
        return await anyio.to_thread.run_sync(function, abandon_on_cancel=False, limiter=limiter)

    def run_in_background(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work`` beside the batches until it returns or the adapter closes; call it in :meth:`open` or later.

        When it raises, that is logged, the adapter is in :attr:`trouble`, and ``work`` is started again after a pause
        that doubles up to half a minute.
        """
        self._supervisor.start(name, work)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to the counter ``name``, e.g. ``"reconnects"``; only on the event loop. See :attr:`counters`."""
        self._counters[name] += amount

    async def for_each(self, items: Sequence[ItemT], work: Callable[[ItemT], Awaitable[None]]) -> None:
        """Run ``work`` for each item, ``config.max_concurrency`` at once, without a task per item."""
        await for_each(items, work, max_concurrency=self.config.max_concurrency)

    async def _store_item(self, item: StoreItem) -> StoreStatus:
        data = item.data() if item.nbytes <= INLINE_CPU_BYTES else await self.run_in_thread(item.data)
        return await self.store_one(item.key, data)

    # --- the public contract ----------------------------------------------------------------------

    def submit_store_task(
        self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj], *, deadline: float | None = None
    ) -> L2Task[StoreOutcome]:
        """Store objects from buffers that the caller owns and does not change until the task has ended.

        - Returns at once; must be called on the adapter's event loop. ``deadline`` is absolute, in
          ``anyio.current_time()`` seconds; by default ``config.timeout_s`` from now.
        - Outcomes come in key order. One failed key does not fail the others. A key given twice is stored once.
        - An object is visible as a whole or not at all.

        Raises:
            ClosedError: outside ``async with``, or in a forked child.
            ConfigError: lengths differ, or the codec chain does not take an object's element type.
        """
        batches = self._check_batch(keys, objects)
        for obj in objects:
            self.codecs.check_layout(obj.layout)
        keys, objects = tuple(keys), tuple(objects)
        return batches.submit(
            len(keys), StoreOutcome, lambda task: batches.store(task, keys, objects), deadline, lane="write"
        )

    def submit_lookup_and_lock_task(
        self, keys: Sequence[ObjectKey], *, deadline: float | None = None
    ) -> L2Task[LookupOutcome]:
        """Ask which keys are there and take a lease on each that is, as strong as ``capabilities.lock`` says.

        - Every hit must be released once with :meth:`submit_unlock_task`; closing the adapter releases all.
        - A lookup proves presence, not health: only a load verifies.

        Raises:
            ClosedError: outside ``async with``, or in a forked child.
        """
        batches = self._check_batch(keys)
        keys = tuple(keys)
        return batches.submit(len(keys), LookupOutcome, lambda task: batches.lookup(task, keys), deadline)

    def submit_load_task(
        self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj], *, deadline: float | None = None
    ) -> L2Task[LoadOutcome]:
        """Load objects into buffers that the caller owns.

        - ``objects[i]`` says by its layout what must arrive; for ``raw`` it may be larger than the object.
        - LOADED means that every byte was verified against key, layout and checksum. CORRUPT objects are deleted,
          so that the next store heals them; intact ones that are merely not readable here, or not in this layout,
          stay. In all other cases the buffer's content is undefined.
        - When the task has ended, cancelled ones included, no buffer is touched any more.

        Raises:
            ClosedError: outside ``async with``, or in a forked child.
            ConfigError: lengths differ, or a buffer is read-only.
        """
        batches = self._check_batch(keys, objects)
        for index, obj in enumerate(objects):
            if obj.read_only:
                raise ConfigError(f"objects[{index}]: a read-only buffer cannot be loaded into")
        keys, objects = tuple(keys), tuple(objects)
        return batches.submit(len(keys), LoadOutcome, lambda task: batches.load(task, keys, objects), deadline)

    def submit_unlock_task(self, keys: Sequence[ObjectKey]) -> L2Task[DeleteOutcome]:
        """Release one lease per key. Outcomes say DELETED for a released lease and MISS where there was none.

        Cancelling it does not keep it from releasing.
        """
        batches = self._check_batch(keys)
        keys = tuple(keys)
        return batches.submit(len(keys), DeleteOutcome, lambda task: batches.unlock(task, keys), math.inf, certain=True)

    def submit_delete_task(self, keys: Sequence[ObjectKey]) -> L2Task[DeleteOutcome]:
        """Delete objects. A locked one stays loadable for its holders where ``capabilities.lock`` is ``owned``."""
        batches = self._check_batch(keys)
        keys = tuple(keys)
        return batches.submit(len(keys), DeleteOutcome, lambda task: batches.delete(task, keys), None, lane="write")

    async def probe(self) -> Probe:
        """Write, read, compare and delete one small object; never raises for a backend that fails."""
        started = anyio.current_time()
        key = ObjectKey("l2kit-probe", os.urandom(16))
        pattern = os.urandom(4096)
        layout = Layout.raw(len(pattern))
        target = MemoryObj.allocate(layout)
        error: L2Error | None = None
        try:
            stored = (await self.submit_store_task([key], [MemoryObj.wrap(pattern, layout)]))[0]
            if not stored.present:
                error = stored.error or BackendError(f"{self.name}: the probe object was {stored.status}")
            else:
                loaded = (await self.submit_load_task([key], [target]))[0]
                if not loaded.loaded or target.tobytes() != pattern:
                    error = loaded.error or BackendError(f"{self.name}: the probe object came back as {loaded.status}")
                deleted = (await self.submit_delete_task([key]))[0]
                error = error or deleted.error
        except L2Error as caught:
            error = caught
        return Probe(error is None, anyio.current_time() - started, error)

    @property
    def held_leases(self) -> int:
        """Lookup leases that were not released yet."""
        return self._opened.batches.leases.total() if self._opened else 0

    @property
    def counters(self) -> Counter[str]:
        """What happened so far, e.g. ``load.miss`` or ``corrupt.checksum``; a key that never happened counts 0."""
        return self._counters

    @property
    def trouble(self) -> L2Error | None:
        """Why this adapter does not do all of its work although no call fails; None when all is well. Any thread."""
        return self._supervisor.trouble

    def worked_again_at(self, lane: Lane) -> float:
        """When this adapter last found out by itself that its failing reads or writes work again.

        In seconds of `time.monotonic`, 0 for never; failures before that say nothing about now. Any thread.
        """
        return 0.0

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise ClosedError(f"{self.name}: an adapter opens once; make a new one")
        async with AsyncExitStack() as stack:
            try:
                with anyio.fail_after(self.config.open_timeout_s):
                    await self.open()
            except Exception as caught:
                error = first_error(caught)
                if isinstance(error, L2Error):
                    raise error from error.__cause__
                if isinstance(error, TimeoutError):
                    late = f"{self.name}: did not open within {self.config.open_timeout_s} s"
                    raise BackendTimeoutError(late) from error
                raise self.translate_error(error) from error
            stack.push_async_callback(self._close_backend)
            group = await stack.enter_async_context(anyio.create_task_group())
            self._supervisor.run_in(group)
            batches = Batches(self, TaskRunner(group, f"l2kit {self.name}"), self._codec_source, self._counters)
            self._opened = _Opened(batches, stack.pop_all(), group.cancel_scope, os.getpid())
        self._state = "open"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._opened is not None
        self._state = "closed"
        self._opened.scope.cancel()  # the hooks await their in-flight I/O, then the workers are gone
        await self._opened.stack.__aexit__(None, None, None)

    async def _close_backend(self) -> None:
        """Give leases back, then close; each shielded with a bound of its own, so that neither keeps the other out."""
        if self._opened is not None:
            self._opened.batches.end_all()
            await self._within_grace(self._opened.batches.release_all, "give its leases back")
        await self._within_grace(self.close, "close")

    async def _within_grace(self, step: Callable[[], Awaitable[None]], what: str) -> None:
        with anyio.move_on_after(_CLOSE_GRACE_S, shield=True) as scope:
            try:
                await step()
            except Exception as error:  # nobody can act on it: the adapter is closed either way
                shown = error if isinstance(error, L2Error) else self.translate_error(error)
                _log.error("%s: failed to %s: %s", self.name, what, shown)
        if scope.cancelled_caught:
            _log.error("%s: the backend did not %s within %.0f s", self.name, what, _CLOSE_GRACE_S)

    def _check_batch(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj] | None = None) -> Batches:
        self.check_open()
        assert self._opened is not None
        if objects is not None and len(objects) != len(keys):
            raise ConfigError(f"objects: {len(objects)} given for {len(keys)} keys")
        return self._opened.batches


async def caught(call: Awaitable[ResultT]) -> ResultT | Exception:
    """The result, or the exception as a value."""
    try:
        return await call
    except Exception as error:
        return error


class _Opened(NamedTuple):
    """What an adapter has only while it is open."""

    batches: Batches
    stack: AsyncExitStack
    scope: anyio.CancelScope
    pid: int
