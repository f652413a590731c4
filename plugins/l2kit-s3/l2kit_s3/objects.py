"""What an object store does for us, as blocking calls: the interface between the adapters and the clients.

All calls run in the adapter's threads. A call that has returned or raised touches no buffer any more; those that move
bytes look now and then whether they are still wanted.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from l2kit.outcomes import StoreStatus

#: Objects in one page of a listing; the last page has fewer.
PAGE_OBJECTS: Final = 1000

#: Raises when the batch that a thread works for was cancelled or is out of time.
CheckWanted = Callable[[], None]


class Found(NamedTuple):
    """An object as a read has found it: its size in bytes, and what tells it from other versions of itself."""

    size: int
    version: str | None


def is_one_version(found: Sequence[Found]) -> bool:
    """Whether all parts are of the same object, as far as they say."""
    versions = {each.version for each in found if each.version is not None}
    return len({each.size for each in found}) == 1 and len(versions) <= 1


class Listed(NamedTuple):
    """An object in a listing; ``size`` in bytes."""

    name: str
    size: int


class Requests:
    """Counts requests by kind, because they cost money. Any thread: the lock guards the counter."""

    def __init__(self) -> None:
        """None so far."""
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, kind: str, amount: int = 1) -> None:
        """Count ``amount`` requests of ``kind``: ``get``, ``put``, ``head``, ``list`` or ``delete``, or ``retry``."""
        with self._lock:
            self._counts[f"requests.{kind}"] += amount

    def snapshot(self) -> Counter[str]:
        """All counts so far."""
        with self._lock:
            return Counter(self._counts)

    def total(self) -> int:
        """Requests of all kinds; a repeated one counts each time."""
        return sum(amount for kind, amount in self.snapshot().items() if kind != "requests.retry")


class Objects(ABC):
    """One place for objects. Names are paths below the bucket, in characters that no store treats specially."""

    @abstractmethod
    def check(self) -> None:
        """Ask one question that shows a wrong endpoint, bucket, region, clock or credential.

        Raises:
            Exception: one that `failures.translate` knows.
        """

    @abstractmethod
    def read(self, name: str, into: Sequence[memoryview], offset: int | None = None) -> Found | None:
        """Fill ``into`` with the object's bytes, as far as there are any; None for no object.

        With ``offset`` it is a part of the object that is wanted, from there on.
        """

    @abstractmethod
    def write(self, name: str, data: Sequence[memoryview]) -> StoreStatus:
        """Store the concatenation of ``data``, visible as a whole or not at all."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """The object's size in bytes; None for no object."""

    @abstractmethod
    def delete(self, name: str) -> bool:
        """Delete the object; False when there was none."""

    @abstractmethod
    def pages(self, folder: str) -> Iterator[list[Listed]]:
        """Everything below ``folder`` (whole path segments; ``""`` is all), one request to the store for each page."""

    @abstractmethod
    def close(self) -> None:
        """Close connections; nothing is in progress any more."""


class Piece(NamedTuple):
    """A part of an object: where it begins and where it goes."""

    offset: int
    into: list[memoryview]


def cut(into: Sequence[memoryview], piece_bytes: int) -> list[Piece]:
    """Cut the memory for an object into pieces of ``piece_bytes`` and a rest. Pure; nothing is copied."""
    pieces = [Piece(0, [])]
    offset, room = 0, piece_bytes
    for segment in into:
        while len(segment):
            if room == 0:
                pieces.append(Piece(offset, []))
                room = piece_bytes
            part = segment[:room]
            pieces[-1].into.append(part)
            segment = segment[len(part) :]
            offset += len(part)
            room -= len(part)
    return pieces
