"""Objects through obstore: everything for Google and Azure, and for S3 what is not a signed GET or PUT of our own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, UnauthenticatedError

from l2kit.outcomes import StoreStatus
from l2kit_s3.config import BucketConfig
from l2kit_s3.copies import CopyBudget
from l2kit_s3.failures import NO_PLACE, RefusalError, refusal_of
from l2kit_s3.objects import PAGE_OBJECTS, CheckWanted, Found, Listed, Objects, Requests
from l2kit_s3.stores import Store, build_store

ResultT = TypeVar("ResultT")

_STREAM_BYTES: Final = 1 << 20
_PARTS_AT_ONCE: Final = 2
#: For copies of what is being stored; one object's may take more.
_MAX_COPIED_BYTES: Final = 48 << 20
_NO_SUCH_RANGE: Final = 416


class ObstoreObjects(Objects):
    """A bucket, through obstore.

    - Its requests cannot be interrupted; the client's time-outs bound them. What is written is copied first: what a
      request that was given up may still send is never the caller's memory.
    - The client is made anew when its credentials are refused, so that rotated ones are found. Any thread: the lock
      guards the client.
    """

    def __init__(self, config: BucketConfig, requests: Requests, check_wanted: CheckWanted) -> None:
        """Makes the client, without a request.

        Raises:
            ConfigError: it does not take an option.
            AuthError: a profile was asked for and is not there.
        """
        self._config: Final = config
        self._requests: Final = requests
        self._check_wanted: Final = check_wanted
        self._copies: Final = CopyBudget(_MAX_COPIED_BYTES, check_wanted)
        self._lock = threading.Lock()
        self._store = build_store(config)

    def check(self) -> None:
        """See `Objects.check`."""

        def ask(store: Store) -> None:
            self._requests.add("get")
            obstore.get(store, self._name_of_nothing())

        try:
            self._with_store(ask)
        except FileNotFoundError as error:
            refusal = refusal_of(error)
            if refusal is not None and refusal.said in NO_PLACE:
                raise refusal from None

    def read(self, name: str, into: Sequence[memoryview], offset: int | None = None) -> Found | None:
        """See `Objects.read`."""
        room = sum(map(len, into))
        begin = offset or 0
        options: Any = {"range": (begin, begin + room)}

        def read(store: Store) -> Found | None:
            self._requests.add("get")
            result = obstore.get(store, name, options=options)
            meta = result.meta
            self._copy(result.stream(_STREAM_BYTES), into, result.range[1] - result.range[0])
            return Found(meta["size"], meta["e_tag"])

        try:
            return self._with_store(read)
        except FileNotFoundError:
            return None
        except RefusalError as error:
            if error.status != _NO_SUCH_RANGE:
                raise
            size = self.size(name)
            return None if size is None else Found(size, None)

    def write(self, name: str, data: Sequence[memoryview]) -> StoreStatus:
        """See `Objects.write`. What is there and has another size is replaced: a store that failed has left it."""
        nbytes = sum(map(len, data))
        if self._config.multipart and nbytes > self._config.multipart_bytes:
            return self._write_in_parts(name, data, nbytes)
        with self._copies.taken(nbytes):
            return self._write_copy(name, b"".join(data))

    def _write_copy(self, name: str, copied: bytes) -> StoreStatus:
        def write(store: Store, mode: Any) -> StoreStatus:
            self._requests.add("put")
            obstore.put(store, name, copied, mode=mode, use_multipart=False)
            return StoreStatus.STORED

        if self._config.if_absent:
            try:
                return self._with_store(lambda store: write(store, "create"))
            except AlreadyExistsError:
                if self.size(name) == len(copied):
                    return StoreStatus.ALREADY_PRESENT
        return self._with_store(lambda store: write(store, "overwrite"))

    def size(self, name: str) -> int | None:
        """See `Objects.size`."""

        def size(store: Store) -> int:
            self._requests.add("head")
            found: int = obstore.head(store, name)["size"]
            return found

        try:
            return self._with_store(size)
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> bool:
        """See `Objects.delete`; two requests, because a store does not say whether there was anything."""
        if self.size(name) is None:
            return False

        def delete(store: Store) -> None:
            self._requests.add("delete")
            obstore.delete(store, name)

        try:
            self._with_store(delete)
        except FileNotFoundError:
            return False
        return True

    def pages(self, folder: str) -> Iterator[list[Listed]]:
        """See `Objects.pages`."""
        store = self._client()
        try:
            first = self._first_page(store, folder)
        except RefusalError as error:
            if not error.stale or not self._renew(store):
                raise
            first = self._first_page(self._client(), folder)
        page, listing = first
        while page:
            yield [Listed(entry["path"], entry["size"]) for entry in page]
            if len(page) < PAGE_OBJECTS:
                return
            page = self._next_page(listing)

    def _first_page(self, store: Store, folder: str) -> tuple[Any, Iterator[Any]]:
        listing = iter(obstore.list(store, folder or None, chunk_size=PAGE_OBJECTS))
        return self._next_page(listing), listing

    def _next_page(self, listing: Iterator[Any]) -> Any:
        self._check_wanted()
        self._requests.add("list")
        try:
            return next(listing, None)
        except Exception as error:
            raise (refusal_of(error) or error) from None

    def close(self) -> None:
        """Drop the client, and with it its connections."""
        del self._store

    def _name_of_nothing(self) -> str:
        """A name that no object has."""
        return "/".join(part for part in (self._config.prefix, "l2kit-is-anybody-there") if part)

    def _client(self) -> Store:
        with self._lock:
            return self._store

    def _renew(self, refused: Store) -> bool:
        """Make a client with new credentials in place of ``refused``; False when that cannot help."""
        if self._config.anonymous:
            return False
        with self._lock:
            if self._store is refused:
                self._store = build_store(self._config)
        return True

    def _with_store(self, work: Callable[[Store], ResultT]) -> ResultT:
        """Do ``work``, once more with a new client when the credentials are refused."""
        store = self._client()
        try:
            return work(store)
        except (FileNotFoundError, AlreadyExistsError):
            raise
        except Exception as error:
            refusal = refusal_of(error)
            stale = refusal.stale if refusal is not None else isinstance(error, UnauthenticatedError)
            if stale and self._renew(store):
                return self._again(work)
            raise (refusal or error) from None  # what the client says may quote what it was given

    def _again(self, work: Callable[[Store], ResultT]) -> ResultT:
        try:
            return work(self._client())
        except (FileNotFoundError, AlreadyExistsError):
            raise
        except Exception as error:
            raise (refusal_of(error) or error) from None

    def _copy(self, stream: Any, into: Sequence[memoryview], expected: int) -> None:
        waiting = [segment for segment in reversed(into) if len(segment)]
        received = 0
        for chunk in stream:
            self._check_wanted()
            rest = memoryview(chunk)
            received += len(rest)
            while rest and waiting:
                segment = waiting.pop()
                part = rest[: len(segment)]
                segment[: len(part)] = part
                rest = rest[len(part) :]
                if len(part) < len(segment):
                    waiting.append(segment[len(part) :])
        if received != expected:
            raise ConnectionError(f"{received} bytes came of {expected}")

    def _write_in_parts(self, name: str, data: Sequence[memoryview], nbytes: int) -> StoreStatus:
        """A multipart upload, which knows no condition: the presence is asked first."""
        if self._config.if_absent and self.size(name) == nbytes:
            return StoreStatus.ALREADY_PRESENT
        part_bytes = self._config.part_bytes

        def parts() -> Iterator[bytes]:
            for segment in data:
                for begin in range(0, len(segment), part_bytes):
                    self._check_wanted()
                    yield bytes(segment[begin : begin + part_bytes])

        def write(store: Store) -> StoreStatus:
            self._requests.add("put", 2 + -(-nbytes // part_bytes))  # begin, parts, complete
            obstore.put(
                store,
                name,
                parts(),
                mode="overwrite",
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=_PARTS_AT_ONCE,
            )
            return StoreStatus.STORED

        with self._copies.taken((_PARTS_AT_ONCE + 1) * part_bytes):
            return self._with_store(write)
