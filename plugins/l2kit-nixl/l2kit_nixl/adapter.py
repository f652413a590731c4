"""The three adapters: files by NIXL's plugins POSIX and GDS, and the memory of a pool by its plugin UCX."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import anyio
import anyio.from_thread

from l2kit.adapter import Capabilities, KeyInfo, L2Adapter, Usage
from l2kit.config import ParsedURL
from l2kit.errors import BackendTimeoutError, ClosedError, ConfigError, L2Error, TransientBackendError
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit_nixl import pool_protocol as say
from l2kit_nixl.config import NixlFileConfig, NixlGdsConfig, NixlUcxConfig
from l2kit_nixl.file_adapter import NixlFileAdapter
from l2kit_nixl.pool_client import PoolLink, PoolTarget
from l2kit_nixl.spares import Spares

ResultT = TypeVar("ResultT")
AnswerT = TypeVar("AnswerT", bound=say.Message)


class NixlPosixAdapter(NixlFileAdapter[NixlFileConfig]):
    """Keeps each stored object as one file, written and read by NIXL's plugin POSIX.

    - An object is written under another name and renamed when it is complete: no reader in any process ever sees a part
      of one. Nothing is forced to the device; damaged objects are found by their checksum.
    - ``max_bytes`` is kept over the objects that this process knows, unfinished ones included; the least recently used
      go first, after a restart those that were written first.
    - One descriptor for each piece of an object, one transfer for a group of small ones.
    - A cancelled store or load stops at the next 33 MiB; then the unfinished file is gone and no buffer is in use.
    """

    config_type = NixlFileConfig
    # Of the plugin's three ways this is the one that has ended all I/O when its agent is taken down after an error; the
    # threads of use_posix_aio go on writing into the caller's memory.
    parameters = {"use_aio": "true"}  # noqa: RUF012 - ClassVar in the base

    @property
    def plugin(self) -> str:
        """POSIX."""
        return "POSIX"


class NixlGdsAdapter(NixlFileAdapter[NixlGdsConfig]):
    """The same through NVIDIA's GPUDirect Storage (cuFile), where the machine has it; see `NixlPosixAdapter`."""

    config_type = NixlGdsConfig

    @property
    def plugin(self) -> str:
        """GDS, or GDS_MT as configured."""
        return "GDS_MT" if self.config.multithreaded else "GDS"


class NixlUcxAdapter(L2Adapter[NixlUcxConfig]):
    """Keeps each stored object in the memory of another process, a pool (``l2kit nixl-pool``).

    - Bytes go between the caller's memory and the pool's in one step, by NIXL's plugin UCX: shared memory on one
      machine, RDMA or TCP between two. Words go over a connection: three short round trips for a group of objects.
    - A store writes to memory that nobody else knows of, and becomes visible when the pool hears that all is written.
    - A load holds a lease, so nothing moves under it. That the lease held is confirmed after the transfer.
    - A lock holds the object in the pool until it is unlocked, or until the adapter has no connection left.
    - The pool evicts what was used longest ago. Its objects are gone when it ends; the adapter finds a new one by
      itself, and never takes what it knew of the old one to be true of the new.
    """

    api_version = (1, 1)
    config_type = NixlUcxConfig
    capabilities = Capabilities(persistent=True, shared=True, lock="owned", evicts=True, alignment=4096, group_keys=128)

    #: Connections with an agent, and those that only talk: a lookup waits for no transfer, and needs no agent.
    _movers: Spares[PoolLink] | None = None
    _words: Spares[PoolLink] | None = None

    @classmethod
    def options_from_url(cls, url: ParsedURL) -> dict[str, Any]:
        """``nixl+ucx://HOST:PORT`` or ``nixl+ucx:///SOCKET``.

        Raises:
            ConfigError: both; credentials in the URL.
        """
        options = super().options_from_url(url)
        if "path" in options and ("host" in options or "port" in options):
            raise ConfigError(f"{url.scheme}: path: a pool has a host and a port, or a socket's path, not both")
        return options

    async def open(self) -> None:
        """Connect to the pool once.

        Raises:
            AdapterImportError: nixl, or its plugin UCX, is missing.
            AuthError: the token is missing or wrong.
            BackendError: there is no pool, or it refuses.
        """
        config = self.config
        target = PoolTarget(
            name=self.name,
            host=config.host,
            port=config.port,
            path=config.path,
            token=config.token.reveal() if config.token is not None else None,
            session=secrets.token_bytes(16),
            answer_timeout_s=config.answer_timeout_s,
            transfer_timeout_s=config.transfer_timeout_s,
        )
        movers, words = Spares(lambda: PoolLink(target)), Spares(lambda: PoolLink(target))

        def start() -> None:
            with movers.borrowed() as link:
                try:
                    link.start_agent()
                except BaseException:
                    link.close()
                    raise

        await self.run_in_thread(start)
        self._movers, self._words = movers, words

    async def close(self) -> None:
        """End all agents and connections; the pool takes back what they held."""

        def end() -> None:
            for spares in (self._movers, self._words):
                if spares is not None:
                    spares.discard()

        await self.run_in_thread(end)

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """Store one object; ALREADY_PRESENT when the key is there, DROPPED when all that could make room is in use."""
        [answer] = await self._in(
            self._movers, lambda link: link.store([(key, data)], anyio.from_thread.check_cancelled)
        )
        return _result(answer)

    async def store_many(self, items: Sequence[StoreItem]) -> Sequence[StoreStatus | Exception]:
        """Store several objects in one thread job and one transfer, checksums included."""

        def store(link: PoolLink) -> list[StoreStatus | L2Error]:
            objects = [(item.key, item.data()) for item in items]
            return link.store(objects, anyio.from_thread.check_cancelled)

        return await self._in(self._movers, store)

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """Load one object."""
        [answer] = await self._in(
            self._movers, lambda link: link.load([(key, into)], anyio.from_thread.check_cancelled)
        )
        return _result(answer)

    async def load_many(self, items: Sequence[LoadItem]) -> Sequence[int | Exception | None]:
        """Load and verify several objects in one thread job and one transfer."""

        def load(link: PoolLink) -> list[int | L2Error | None]:
            objects = [(item.key, item.into) for item in items]
            return link.load(objects, anyio.from_thread.check_cancelled, lambda index, size: items[index].verify(size))

        return await self._in(self._movers, load)

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Ask for all keys in one round trip, or one for some thousand."""
        return await self._in(self._words, lambda link: _look(link, keys, hold=False))

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """The same, and hold what is found. Not tried again on another connection: it could be held twice."""
        return await self._in(self._words, lambda link: _look(link, keys, hold=True), again=False)

    async def release_many(self, keys: Sequence[ObjectKey]) -> None:
        """Let go of what was held, in one round trip."""

        def let_go(link: PoolLink) -> None:
            for some in _parts(keys):
                link.ask(say.LetGo([key.encode() for key in some]), say.Flags)

        with anyio.CancelScope(shield=True):  # off the books here, so the pool must hear of it; bounded by the socket
            await self._in(self._words, let_go, again=False)

    async def delete_one(self, key: ObjectKey) -> bool:
        """Delete one object; holders of a lock can still load it."""
        answer = await self._in(self._words, lambda link: link.ask(say.Delete([key.encode()]), say.Flags))
        return answer.flags[0]

    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        """Every object in the pool, whoever stored it, page by page.

        Raises:
            BackendError: the pool does not answer.
        """
        after = ""
        while True:
            page = await self._ask(say.List(after), say.Page)
            for key, size in zip(page.keys, page.sizes, strict=True):
                yield KeyInfo(ObjectKey.parse(key), size)
            if not page.keys:
                return
            after = page.keys[-1]

    async def usage(self) -> Usage:
        """What the pool holds; its pages, and what is being written, are not counted.

        Raises:
            BackendError: the pool does not answer.
        """
        holding = await self._ask(say.Report(), say.Holding)
        return Usage(holding.used_bytes, holding.max_bytes, holding.objects)

    async def _ask(self, request: say.Request, kind: type[AnswerT]) -> AnswerT:
        self.check_open()
        return await self._in(self._words, lambda link: link.ask(request, kind))

    async def _in(
        self, spares: Spares[PoolLink] | None, work: Callable[[PoolLink], ResultT], *, again: bool = True
    ) -> ResultT:
        """Do ``work`` in a thread with a connection; once more when the pool turns out to have been started anew."""
        if spares is None:
            raise ClosedError(f"{self.name}: the adapter is not open; use it inside 'async with'")

        def attempt() -> ResultT:
            with spares.borrowed() as link:
                try:
                    return work(link)
                except TransientBackendError as error:
                    if not again or not link.proven or isinstance(error, BackendTimeoutError):
                        raise
            spares.discard()  # what ended one connection has ended those that waited beside it
            with spares.borrowed() as link:
                return work(link)

        return await self.run_in_thread(attempt)


def _look(link: PoolLink, keys: Sequence[ObjectKey], *, hold: bool) -> list[int | None]:
    sizes: list[int | None] = []
    for some in _parts(keys):
        sizes += link.ask(say.Look([key.encode() for key in some], hold), say.Found).sizes
    return sizes


def _parts(keys: Sequence[ObjectKey]) -> list[Sequence[ObjectKey]]:
    return [keys[start : start + say.MAX_KEYS] for start in range(0, len(keys), say.MAX_KEYS)]


def _result(answer: ResultT | Exception) -> ResultT:
    if isinstance(answer, Exception):
        raise answer
    return answer
