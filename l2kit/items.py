"""`StoreItem` and `LoadItem`: one object of a group on its way, with the framework's own work on it.

Checksums, encoding and verification take about as long as the transfer of a small object. An adapter whose threads do
the transfer does them there as well, without another way to a thread and back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from l2kit.errors import CapacityError
from l2kit.framing import LoadFrame, seal
from l2kit.keys import ObjectKey
from l2kit.memory import MemoryObj

if TYPE_CHECKING:
    from l2kit.adapter import L2Adapter


class StoreItem:
    """One object to be stored. One thread at a time."""

    __slots__ = ("_adapter", "_obj", "_sealed", "key", "nbytes")

    def __init__(self, key: ObjectKey, obj: MemoryObj, adapter: L2Adapter[Any]) -> None:
        """Made by the framework for ``adapter``, which says how it is stored."""
        self.key: Final = key
        self.nbytes: Final = obj.nbytes
        self._obj = obj
        self._adapter = adapter
        self._sealed: list[memoryview] | None = None

    def data(self) -> list[memoryview]:
        """What to write: the concatenation of these, as in `L2Adapter.store_one`. Made at the first call. CPU-bound.

        Raises:
            CapacityError: it is larger than ``capabilities.max_object_bytes``.
        """
        if self._sealed is None:
            adapter, limit = self._adapter, self._adapter.capabilities.max_object_bytes
            sealed = seal(self.key, self._obj, adapter.codecs, adapter.capabilities.alignment)
            size = sum(map(len, sealed))
            if limit is not None and size > limit:
                raise CapacityError(f"{adapter.name}: {size} bytes exceed the largest object of {limit} bytes")
            self._sealed = sealed
        return self._sealed

    @property
    def stored_bytes(self) -> int:
        """Size of :meth:`data`; 0 before its first call."""
        return sum(map(len, self._sealed or ()))


class LoadItem:
    """One object to be loaded. One thread at a time.

    Attributes:
        key: its name.
        nbytes: size of the destination.
    """

    __slots__ = ("_frame", "_verdict", "key", "nbytes")

    def __init__(self, key: ObjectKey, target: MemoryObj, adapter: L2Adapter[Any]) -> None:
        """Made by the framework for ``adapter``, which says how it was stored."""
        self.key: Final = key
        self.nbytes: Final = target.nbytes
        self._frame = LoadFrame(key, target, adapter.codecs, adapter.capabilities.alignment)
        self._verdict: tuple[int, bool | Exception] | None = None

    @property
    def into(self) -> list[memoryview]:
        """The buffers to fill, as in `L2Adapter.load_one`. Take them for each attempt.

        Whoever takes them is about to change what is in them, so what :meth:`verify` has found before is forgotten.
        """
        self._verdict = None
        return self._frame.into

    @property
    def frame(self) -> LoadFrame:
        """The framework's side of it."""
        return self._frame

    def verify(self, size: int | None) -> None:
        """Check what was read into :attr:`into`, here and now, an object of ``size`` stored bytes. CPU-bound.

        It never raises: the framework learns of it. Who does not call this leaves it to the framework.
        """
        if size is None:
            return
        try:
            self._verdict = size, self._frame.finish(size)
        except Exception as error:
            self._verdict = size, error

    def finish(self, size: int) -> bool:
        """The framework's: the verdict on an object of ``size`` bytes, made now if it was not made before.

        Raises:
            L2Error: see `LoadFrame.finish`.
        """
        verdict = self._verdict
        if verdict is None or verdict[0] != size:
            return self._frame.finish(size)
        if isinstance(verdict[1], Exception):
            raise verdict[1]
        return verdict[1]

    @property
    def is_verified(self) -> bool:
        """Whether :meth:`verify` has done the work."""
        return self._verdict is not None
