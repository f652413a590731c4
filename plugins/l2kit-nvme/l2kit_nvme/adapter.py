"""`NvmeAdapter`: the asynchronous face of one `Slab`. Orders work, never blocks the event loop itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, ClassVar, Final

import anyio
import anyio.from_thread
import anyio.lowlevel

from l2kit.adapter import Capabilities, KeyInfo, L2Adapter, Usage
from l2kit.config import ParsedURL, on_this_machine
from l2kit.errors import ClosedError, L2Error
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit_nvme.batch import Loading, ObjectT, Storing, one_by_one
from l2kit_nvme.catalog import Place
from l2kit_nvme.config import NvmeConfig
from l2kit_nvme.failures import translate, translate_at_open
from l2kit_nvme.medium import Medium
from l2kit_nvme.records import RegionShape
from l2kit_nvme.slab import Slab
from l2kit_nvme.transfers import SharedWork, Transfer

_TRIM_INTERVAL_S: Final = 30.0
_LISTED_AT_ONCE: Final = 2000


class NvmeAdapter(L2Adapter[NvmeConfig]):
    """Keeps objects in slots of one slab, a preallocated file or block device, or several of them striped.

    - An object is written into a free slot straight from the caller's memory where that is page-aligned, through a
      buffer otherwise; then one sector commits it. A process that is killed at any instant, and with
      ``durability=data`` a loss of power, leaves every acknowledged object and no torn one.
    - A lock holds the slot: a locked object stays loadable when it is evicted, deleted or replaced.
    - A key whose object is there with the same size is not written again.
    - The least recently used objects make room; the order is that of storing after a restart.
    - One process has a slab open at a time; the next one is refused and told whose it is.
    - A cancelled store or load stops at the next transfer, about 1 MiB; then no buffer is in use.
    """

    api_version = (1, 1)
    config_type = NvmeConfig
    capabilities = Capabilities(persistent=True, shared=False, lock="owned", evicts=True, alignment=4096, group_keys=64)
    #: What the slab lies on; a test may put another one there.
    medium_type: ClassVar[type[Medium]] = Medium

    _slab: Slab | None = None

    @classmethod
    def options_from_url(cls, url: ParsedURL) -> dict[str, Any]:
        """``nvme:///file-or-device``; the path is the slab.

        Raises:
            ConfigError: another host, which mostly means that a slash is missing; a port or credentials; two paths.
        """
        return super().options_from_url(on_this_machine(url, "FILE_OR_DEVICE"))

    async def open(self) -> None:
        """Open the slab, or make it, and rebuild the index from its table: some seconds for a million objects.

        Raises:
            ConfigError: it does not fit the options, or something else lies there; nothing is overwritten.
            TransientBackendError: another process, or this one, has it open.
            CapacityError: there is no space for it.
        """
        slab = Slab(self.config, self.medium_type(self.config.members), anyio.from_thread.check_cancelled)
        try:
            await self.run_in_thread(slab.open)
        except OSError as error:
            raise translate_at_open(error, name=self.name, path=self.config.path) from error
        self._slab = slab
        self._active = 0
        self._room = anyio.Event()
        members = slab.medium.members
        if self.config.trim or (self.config.trim is None and all(member.is_device for member in members)):
            self.run_in_background("trim", self._trim)

    async def close(self) -> None:
        """Flush the records and give the slab up."""
        await self.run_in_thread(self._opened_slab.close)

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """Write one object; a large one by several threads at once.

        - ALREADY_PRESENT if an object of the same size is there; one of another size is replaced.
        - DROPPED if everything that could make room is locked.
        """
        [answer] = await self._store_all([Storing(key, sum(map(len, data)), lambda: data)])
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """Read one object; a large one by several threads at once."""
        [answer] = await self._load_all([Loading(key, into, lambda size: None)])
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def store_many(self, items: Sequence[StoreItem]) -> list[StoreStatus | Exception]:
        """Write objects, checksums included: small ones in one thread job, neighbours in one system call."""
        return await self._store_all([Storing(item.key, item.nbytes, item.data) for item in items])

    async def load_many(self, items: Sequence[LoadItem]) -> list[int | Exception | None]:
        """Read and verify objects: small ones in one thread job, neighbours in one system call."""
        return await self._load_all([Loading(item.key, item.into, item.verify) for item in items])

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """From memory."""
        return self._opened_slab.catalog.lookup(keys)

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """From memory; holds the slots of what it finds."""
        return self._opened_slab.catalog.lookup(keys, lease=True)

    async def release_many(self, keys: Sequence[ObjectKey]) -> None:
        """In memory; slots of what was deleted meanwhile are free then."""
        self._opened_slab.catalog.release(keys)
        self._make_room()

    async def delete_one(self, key: ObjectKey) -> bool:
        """Revoke one object's record; holders of a lock can still load it."""
        slab = self._opened_slab
        try:
            return await self.run_in_thread(lambda: slab.delete(key))
        finally:
            self._make_room()

    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        """Every object, from memory."""
        self.check_open()
        slab, after = self._opened_slab, 0
        while True:
            found, after = slab.catalog.listing(after, _LISTED_AT_ONCE)
            for info in found:
                yield info
            if not after:
                return
            await anyio.lowlevel.checkpoint()

    async def usage(self) -> Usage:
        """Bytes of all slots that are not free, envelopes and rounding included; exact."""
        self.check_open()
        catalog = self._opened_slab.catalog
        return Usage(catalog.used_bytes, catalog.max_bytes, catalog.objects)

    @property
    def counters(self) -> Counter[str]:
        """The base's counters, those of `Slab.events`, and ``written_bytes``: all that went to the medium."""
        merged = Counter(super().counters)
        if self._slab is not None:
            merged.update(self._slab.events)
            merged["written_bytes"] = self._slab.medium.written_bytes
        return merged

    @property
    def wear(self) -> float:
        """Bytes written to the medium for each byte stored since the slab was opened; 0 before the first store."""
        counters = self.counters
        return counters["written_bytes"] / counters["stored_bytes"] if counters["stored_bytes"] else 0.0

    @property
    def direct(self) -> bool:
        """Whether payloads really go around the page cache."""
        return self._slab is not None and self._slab.medium.direct

    def translate_error(self, error: Exception) -> L2Error:
        """Errnos to the error tree, with the path and what to do."""
        if isinstance(error, OSError):
            return translate(error, name=self.name, path=self.config.path)
        return super().translate_error(error)

    @property
    def _opened_slab(self) -> Slab:
        if self._slab is None:
            raise ClosedError(f"{self.name}: the adapter is not open; use it inside 'async with'")
        return self._slab

    async def _store_all(self, objects: Sequence[Storing]) -> list[StoreStatus | Exception]:
        slab = self._opened_slab
        answers: dict[ObjectKey, StoreStatus | Exception] = {}
        left = list(objects)
        while left:
            room = self._room
            done = await self._store(left)
            answers.update(done)
            left = [one for one in left if one.key not in done]
            # Other stores hold the room, and give it up, or can be evicted, when they end.
            if left and not done and slab.catalog.busy and room is self._room:
                await room.wait()
        return [answers[one.key] for one in objects]

    async def _store(self, left: Sequence[Storing]) -> dict[ObjectKey, StoreStatus | Exception]:
        """Store what there is room for; what is not in the answer may find some later."""
        slab = self._opened_slab
        answers: dict[ObjectKey, StoreStatus | Exception] = {}
        places: dict[ObjectKey, Place] = {}

        def reserve(some: Sequence[Storing]) -> list[Transfer]:
            written: dict[Place, Sequence[memoryview]] = {}
            for one in some:
                try:
                    parts = one.data()
                    size = sum(map(len, parts))
                    found = StoreStatus.ALREADY_PRESENT if slab.catalog.has(one.key, size) else slab.reserve(size)
                except Exception as error:  # one object of a group: its error is its own
                    answers[one.key] = error
                else:
                    if isinstance(found, Place):
                        places[one.key] = found
                        written[found] = parts
                    elif found is not None:
                        answers[one.key] = found
            return slab.plan_write(list(written), list(written.values()))

        def commit() -> None:
            if places:
                slab.commit(list(places.values()), list(places))
                answers.update(dict.fromkeys(places, StoreStatus.STORED))

        try:
            await self._move(left, [one.nbytes for one in left], reserve, slab.write, commit)
        finally:
            for place in places.values():
                slab.abandon(place)
            if places or answers:  # also who was dropped: what was evicted for it is room for a smaller one
                self._make_room()
        return answers

    async def _load_all(self, objects: Sequence[Loading]) -> list[int | Exception | None]:
        slab = self._opened_slab
        places = [slab.catalog.pin(one.key) for one in objects]
        pinned = [(place, one) for place, one in zip(places, objects, strict=True) if place is not None]
        failures: dict[Place, OSError] = {}
        try:
            if pinned:
                try:
                    await self._read(pinned)
                except OSError:
                    for place, one in pinned:  # one bad sector costs its own object only
                        try:
                            await self._read([(place, one)])
                        except OSError as error:
                            failures[place] = error
        finally:
            for place, _ in pinned:
                slab.catalog.unpin(place)
            self._make_room()
        return [None if place is None else failures.get(place, place.size) for place in places]

    async def _read(self, pinned: Sequence[tuple[Place, Loading]]) -> None:
        slab = self._opened_slab

        def plan(some: Sequence[tuple[Place, Loading]]) -> list[Transfer]:
            return slab.plan_read([place for place, _ in some], [one.into for _, one in some])

        def verify(some: Sequence[tuple[Place, Loading]]) -> None:
            for place, one in some:
                one.verify(place.size)

        sizes = [place.size for place, _ in pinned]
        await self._move(pinned, sizes, plan, slab.read, lambda: None, verify)

    async def _move(
        self,
        objects: Sequence[ObjectT],
        sizes: Sequence[int],
        plan: Callable[[Sequence[ObjectT]], list[Transfer]],
        move: Callable[[Transfer], None],
        finish: Callable[[], None],
        check: Callable[[Sequence[ObjectT]], None] = lambda some: None,
    ) -> None:
        """Plan, move and check ``objects``, then finish: small ones in one thread job, a transfer's worth at a time.

        So one job works on checksums while others wait for the device. Where this batch has threads idle, large objects
        are moved by several: each takes the next transfer when it is ready, and the last one does the rest.
        """
        self._active += 1
        try:
            threads = max(1, min(self.config.max_concurrency // self._active, max(sizes) >> 20))
            if threads == 1:
                await self.run_in_thread(lambda: one_by_one(objects, sizes, plan, move, finish, check))
                return

            def check_and_finish() -> None:
                check(objects)
                finish()

            work = SharedWork(await self.run_in_thread(lambda: plan(objects)), move, check_and_finish, threads)
            async with anyio.create_task_group() as group:
                for _ in range(threads):
                    group.start_soon(self.run_in_thread, work.run)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            self._active -= 1

    def _make_room(self) -> None:
        """Wake the stores that wait for room."""
        self._room.set()
        self._room = anyio.Event()

    async def _trim(self) -> None:
        """Now and then, discard what has held nothing for a while."""
        slab, idle = self._opened_slab, set[RegionShape]()
        while True:
            await anyio.sleep(_TRIM_INTERVAL_S)
            before = idle

            def trim(before: set[RegionShape] = before) -> set[RegionShape]:
                return slab.trim(before)

            idle = await self.run_in_thread(trim)
