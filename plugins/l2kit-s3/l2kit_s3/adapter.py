"""The adapters: l2kit's storage contract on object stores. What a store is asked, and how, is in `Objects`."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel
import msgspec

from l2kit.adapter import Capabilities, KeyInfo, L2Adapter, Probe, Usage
from l2kit.config import ParsedURL
from l2kit.errors import ClosedError, ConfigError, L2Error, first_error
from l2kit.items import LoadItem, StoreItem
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit_s3.config import (
    AzConfig,
    FsspecConfig,
    GsConfig,
    ObjectStoreConfig,
    S3Config,
    bucket_options_from_url,
    fsspec_options_from_url,
)
from l2kit_s3.failures import translate
from l2kit_s3.lookups import Lookups
from l2kit_s3.objects import Found, Objects, Piece, Requests, cut, is_one_version

ConfigT = TypeVar("ConfigT", bound=ObjectStoreConfig)
ItemT = TypeVar("ItemT")
Lane = Literal["read", "write"]
ResultT = TypeVar("ResultT")

#: S3's limit of one PUT; what is larger goes in parts, but no KV object is.
_MAX_OBJECT_BYTES: Final = 5 << 30

#: With fewer threads for each object, cutting it costs more requests than it gains.
_WORTH_CUTTING: Final = 3

_log = logging.getLogger(__name__)


class ObjectStoreAdapter(L2Adapter[ConfigT]):
    """Objects under ``<prefix>/<namespace>/<chunk>.<shard>`` in a bucket; see `name_of`.

    - A store is visible as a whole or not at all: it is one PUT, or an upload in parts that ends with its completion.
    - Large objects are read in pieces, side by side, straight into the caller's memory. Pieces of two versions are
      never put together: they carry the same ETag, or the object is read again in one.
    - No listing is kept, and with ``hit_cache_s`` at 0 no lookup's answer either.
    """

    api_version = (1, 1)
    capabilities = Capabilities(persistent=True, shared=True, max_object_bytes=_MAX_OBJECT_BYTES, group_keys=64)

    _objects: Objects | None = None
    _requests: Requests | None = None
    _lookups: Lookups

    @classmethod
    def options_from_url(cls, url: ParsedURL) -> dict[str, Any]:
        """``SCHEME://BUCKET/PREFIX?option=value``."""
        return bucket_options_from_url(url)

    @abstractmethod
    def make_objects(self, requests: Requests) -> Objects:
        """Make the client; in a thread, without a request."""

    async def open(self) -> None:
        """Make the client, and ask one question that shows what is wrong.

        Raises:
            ConfigError: an option is wrong, or a file that it names.
            AuthError: the credentials, or the clock that signatures depend on.
            BackendError: endpoint, bucket or region.
        """
        requests = Requests()

        def start() -> Objects:
            objects = self.make_objects(requests)
            try:
                objects.check()
            except BaseException:
                objects.close()
                raise
            return objects

        try:
            self._objects = await self.run_in_thread(start)
        except L2Error:
            raise
        except Exception as error:
            raise self.translate_error(error) from error
        self._requests = requests
        self._in_progress: Counter[str] = Counter()
        self._deleting: dict[str, anyio.Event] = {}
        self._lookups = Lookups(self._objects, self.config, run_in_thread=self.run_in_thread, for_each=self.for_each)

    async def close(self) -> None:
        """Close connections, and say what it has cost."""
        if self._objects is not None:
            await self.run_in_thread(self._objects.close)
        _log.info("%s: %s", self.name, self.cost)

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """One PUT, or a large object in parts. ALREADY_PRESENT where the store found the object there."""
        objects, name = self._client, self._name(key)
        self._lookups.hits.discard(name)
        status = await self.run_in_thread(lambda: objects.write(name, data))
        if status is StoreStatus.STORED:
            self._lookups.hits.add(name, sum(map(len, data)))
        return status

    async def store_many(self, items: Sequence[StoreItem]) -> list[StoreStatus | Exception]:
        """One PUT for each, shared out among the threads, checksums included."""
        objects = self._client

        def store(item: StoreItem) -> StoreStatus:
            return objects.write(self._name(item.key), item.data())

        for item in items:
            self._lookups.hits.discard(self._name(item.key))
        answers = await self._share_out("write", store, items)
        for item, answer in zip(items, answers, strict=True):
            if answer is StoreStatus.STORED:
                self._lookups.hits.add(self._name(item.key), item.stored_bytes)
        return answers

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """One GET, or one for each piece, side by side."""
        return await self._load(key, cut(into, self.config.piece_bytes))

    async def load_many(self, items: Sequence[LoadItem]) -> list[int | Exception | None]:
        """One GET for each, shared out among the threads, and verified there; in pieces where threads are left over."""
        objects = self._client

        def load(item: LoadItem) -> int | None:
            found = objects.read(self._name(item.key), item.into)
            if found is None:
                return None
            item.verify(found.size)
            return found.size

        if any(item.nbytes > self.config.piece_bytes for item in items):
            answers = await self._load_large(load, items)
        else:
            answers = await self._share_out("read", load, items)
        for item, answer in zip(items, answers, strict=True):
            if not isinstance(answer, int):
                self._lookups.hits.discard(self._name(item.key))
        return answers

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """See `Lookups`. What it costs is in the counters ``lookups``, ``lookup_keys`` and ``lookup_requests``."""
        requests = self._counted
        before = requests.total()
        sizes = await self._lookups.sizes([self._name(key) for key in keys])
        self.count("lookups")
        self.count("lookup_keys", len(keys))
        self.count("lookup_requests", requests.total() - before)
        return sizes

    async def delete_one(self, key: ObjectKey) -> bool:
        """Two requests, one after the other: a store does not say whether there was anything to delete."""
        objects, name = self._client, self._name(key)
        while name in self._deleting:  # or both would be told that they have deleted it
            await self._deleting[name].wait()
        self._deleting[name] = anyio.Event()
        self._lookups.hits.discard(name)
        try:
            return await self.run_in_thread(lambda: objects.delete(name))
        finally:
            self._deleting.pop(name).set()

    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        """List all below the prefix, a thousand in each request. What is not ours is left out.

        Raises:
            L2Error: the store failed; ClosedError outside ``async with``.
        """
        self.check_open()
        objects = self._client
        prefix = self.config.prefix
        try:
            pages = objects.pages(prefix)
            while page := await self.run_in_thread(lambda: next(pages, None)):
                for name, size in page:
                    key = parse_name(name[len(prefix) :].lstrip("/"))
                    if key is not None:
                        yield KeyInfo(key, size)
                self.check_open()
        except L2Error:
            raise
        except Exception as error:
            raise self.translate_error(error) from error

    async def usage(self) -> Usage:
        """Counted by listing everything: a request for each thousand objects.

        Raises:
            L2Error: as for `iter_keys`.
        """
        self.check_open()
        used_bytes = objects = 0
        async for info in self.iter_keys():
            used_bytes += info.size
            objects += 1
        return Usage(used_bytes, None, objects)

    async def probe(self) -> Probe:
        """See `L2Adapter.probe`; the details say where, and what all has cost so far."""
        probe = await super().probe()
        return msgspec.structs.replace(probe, details={"place": self.config.where, "cost": self.cost})

    @property
    def counters(self) -> Counter[str]:
        """The base's counters, and ``requests.get``, ``.put``, ``.head``, ``.list``, ``.delete`` and ``.retry``."""
        merged = Counter(super().counters)
        if self._requests is not None:
            merged.update(self._requests.snapshot())
        return merged

    @property
    def cost(self) -> str:
        """How many requests were made, for people: they cost money."""
        counts = self.counters
        kinds = ", ".join(f"{counts[f'requests.{kind}']} {kind.upper()}" for kind in ("get", "put", "head", "list"))
        each = counts["lookup_requests"] / max(1, counts["lookups"])
        return f"requests: {kinds}; {counts['lookups']} lookups of {counts['lookup_keys']} keys, {each:.1f} for each"

    def translate_error(self, error: Exception) -> L2Error:
        """See `l2kit_s3.failures.translate`."""
        return translate(error, f"{self.name}: {self.config.where}")

    async def _load_large(
        self, load: Callable[[LoadItem], int | None], items: Sequence[LoadItem]
    ) -> list[int | Exception | None]:
        """Load each in one, or in pieces where there are several threads for each."""
        async with self._counted_in("read", items) as share:
            ways = share() // len(items)
            if ways < _WORTH_CUTTING:
                return await self._attempt_all(load, items, share())
            answers: dict[ObjectKey, int | Exception | None] = {}

            async def load_in_pieces(item: LoadItem) -> None:
                piece_bytes = max(self.config.piece_bytes, -(-item.nbytes // ways))
                try:
                    answers[item.key] = await self._load(item.key, cut(item.into, piece_bytes))
                except Exception as error:
                    answers[item.key] = self.translate_error(first_error(error))

            await self.for_each(items, load_in_pieces)
            return [answers[item.key] for item in items]

    async def _load(self, key: ObjectKey, pieces: Sequence[Piece]) -> int | None:
        """Read an object in ``pieces``; None for a miss."""
        name = self._name(key)
        try:
            found = await self._read(name, pieces)
            if found is not None and not is_one_version(found):  # replaced meanwhile: one answer has one version
                self.count("changed_while_read")
                whole = [segment for piece in pieces for segment in piece.into]
                found = await self._read(name, [Piece(0, whole)])
        except BaseException:
            self._lookups.hits.discard(name)
            raise
        if found is None:
            self._lookups.hits.discard(name)
            return None
        return found[0].size

    async def _read(self, name: str, pieces: Sequence[Piece]) -> list[Found] | None:
        """Read all pieces; what each has found, or None when the object is not there."""
        objects = self._client
        found: dict[int, Found | None] = {}
        in_part = len(pieces) > 1

        async def read(piece: Piece) -> None:
            offset = piece.offset if in_part else None
            found[piece.offset] = await self.run_in_thread(lambda: objects.read(name, piece.into, offset))

        await self.for_each(pieces, read)
        whole = [each for each in found.values() if each is not None]
        if not whole:
            return None
        if len(whole) < len(found):  # it came or went in between
            whole.append(Found(-1, None))
        return whole

    async def _share_out(
        self, lane: Lane, work: Callable[[ItemT], ResultT], items: Sequence[ItemT]
    ) -> list[ResultT | Exception]:
        """Do ``work`` for each in the adapter's threads; errors are values."""
        async with self._counted_in(lane, items) as share:
            return await self._attempt_all(work, items, share())

    @asynccontextmanager
    async def _counted_in(self, lane: Lane, items: Sequence[object]) -> AsyncIterator[Callable[[], int]]:
        """Count ``items`` as in progress; gives what says how many threads are theirs, among all that are."""
        self._in_progress[lane] += len(items)
        try:
            await anyio.lowlevel.checkpoint()  # now all that begins together with these is counted
            yield lambda: -(-self.config.max_concurrency * len(items) // self._in_progress[lane])
        finally:
            self._in_progress[lane] -= len(items)

    async def _attempt_all(
        self, work: Callable[[ItemT], ResultT], items: Sequence[ItemT], threads: int
    ) -> list[ResultT | Exception]:
        """Do ``work`` for each in so many threads, one after the other in each."""
        answers: dict[int, ResultT | Exception] = {}
        shares = min(len(items), threads)

        def attempt(number: int) -> None:
            for index in range(number, len(items), shares):
                try:
                    answers[index] = work(items[index])
                except Exception as error:
                    answers[index] = self.translate_error(error)

        async def run(number: int) -> None:
            await self.run_in_thread(lambda: attempt(number))

        await self.for_each(range(shares), run)
        return [answers[index] for index in range(len(items))]

    @property
    def _client(self) -> Objects:
        if self._objects is None:
            raise ClosedError(f"{self.name}: the adapter is not open; use it inside 'async with'")
        return self._objects

    @property
    def _counted(self) -> Requests:
        assert self._requests is not None
        return self._requests

    def _name(self, key: ObjectKey) -> str:
        return f"{self.config.prefix}/{name_of(key)}" if self.config.prefix else name_of(key)


class S3Adapter(ObjectStoreAdapter[S3Config]):
    """``s3://``: Amazon's S3, and everything that speaks its protocol. See `ObjectStoreAdapter`."""

    config_type = S3Config

    def make_objects(self, requests: Requests) -> Objects:
        """Our own connections, or obstore alone; see `S3Config`."""
        if self.config.direct:
            from l2kit_s3.signed_objects import SignedObjects

            return SignedObjects(self.config, requests, anyio.from_thread.check_cancelled)
        from l2kit_s3.obstore_objects import ObstoreObjects

        return ObstoreObjects(self.config, requests, anyio.from_thread.check_cancelled)


class GsAdapter(ObjectStoreAdapter[GsConfig]):
    """``gs://``: Google Cloud Storage, through obstore. See `ObjectStoreAdapter`."""

    config_type = GsConfig

    def make_objects(self, requests: Requests) -> Objects:
        """Obstore's client."""
        from l2kit_s3.obstore_objects import ObstoreObjects

        return ObstoreObjects(self.config, requests, anyio.from_thread.check_cancelled)


class AzAdapter(ObjectStoreAdapter[AzConfig]):
    """``az://``: Azure Blob Storage, through obstore. See `ObjectStoreAdapter`."""

    config_type = AzConfig

    def make_objects(self, requests: Requests) -> Objects:
        """Obstore's client."""
        from l2kit_s3.obstore_objects import ObstoreObjects

        return ObstoreObjects(self.config, requests, anyio.from_thread.check_cancelled)


class FsspecAdapter(ObjectStoreAdapter[FsspecConfig]):
    """``fsspec+PROTOCOL://``: whatever fsspec has a file system for. See `ObjectStoreAdapter`."""

    config_type = FsspecConfig

    @classmethod
    def options_from_url(cls, url: ParsedURL) -> dict[str, Any]:
        """``fsspec+PROTOCOL://[HOST]/PATH?option=value``."""
        return fsspec_options_from_url(url)

    def make_objects(self, requests: Requests) -> Objects:
        """Fsspec's file system."""
        from l2kit_s3.fsspec_objects import FsspecObjects

        return FsspecObjects(self.config, requests, anyio.from_thread.check_cancelled)


def name_of(key: ObjectKey) -> str:
    """The object's name below the prefix: the encoded key, with a dot in place of its last slash.

    So all objects of a namespace lie in one folder, and a store that keeps folders lists them in one go.
    """
    folder, _, rest = key.encode().rpartition("/")
    return f"{folder}.{rest}"


def parse_name(name: str) -> ObjectKey | None:
    """The key of `name_of`; None for what is no object of ours."""
    folder, _, rest = name.rpartition("/")
    chunk, _, shard = rest.partition(".")
    try:
        return ObjectKey.parse(f"{folder}/{chunk}/{shard}")
    except ConfigError:
        return None
