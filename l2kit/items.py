"""`StoreItem` and `LoadItem`: one object of a group on its way, with the framework's own work on it.

Checksums, encoding and verification take about as long as the transfer of a small object. An adapter whose threads do
the transfer does them there as well, without another way to a thread and back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from l2kit.envelope import RunningChecksum
from l2kit.errors import CapacityError
from l2kit.framing import LoadFrame, Sealing, seal
from l2kit.keys import ObjectKey
from l2kit.memory import MemoryObj

if TYPE_CHECKING:
    from l2kit.adapter import L2Adapter


class StoreItem:
    """One object to be stored. One thread at a time.

    Attributes:
        key: its name.
        nbytes: its size in memory.
        stored_bytes: how many bytes there are to be written; 0 before the first call of :meth:`data` or :meth:`begin`.
    """

    __slots__ = ("_adapter", "_obj", "_sealed", "key", "nbytes", "stored_bytes")

    def __init__(self, key: ObjectKey, obj: MemoryObj, adapter: L2Adapter[Any]) -> None:
        """Made by the framework for ``adapter``, which says how it is stored."""
        self.key: Final = key
        self.nbytes: Final = obj.nbytes
        self._obj = obj
        self._adapter = adapter
        self._sealed: list[memoryview] | None = None
        self.stored_bytes = 0

    def data(self) -> list[memoryview]:
        """What to write: the concatenation of these, as in `L2Adapter.store_one`. Made at the first call. CPU-bound.

        Raises:
            CapacityError: it is larger than ``capabilities.max_object_bytes``.
        """
        if self._sealed is None:
            adapter = self._adapter
            sealed = seal(self.key, self._obj, adapter.codecs, adapter.capabilities.alignment)
            self._check(sum(map(len, sealed)))
            self._sealed = sealed
        return self._sealed

    def begin(self) -> Sealing | None:
        """For who writes a large object piece by piece: its checksum is made on the way, not before. Cheap.

        None where the object is to be encoded first, or was sealed already: :meth:`data` has it.

        Raises:
            CapacityError: it is larger than ``capabilities.max_object_bytes``.
        """
        if self._sealed is not None or not self._adapter.codecs.is_raw:
            return None
        sealing = Sealing(self.key, self._obj, self._adapter.capabilities.alignment)
        self._check(sum(map(len, sealing.data)))
        return sealing

    def _check(self, stored_bytes: int) -> None:
        limit = self._adapter.capabilities.max_object_bytes
        if limit is not None and stored_bytes > limit:
            what = f"{stored_bytes} bytes exceed the largest object of {limit} bytes"
            raise CapacityError(f"{self._adapter.name}: {what}")
        self.stored_bytes = stored_bytes


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
        if size is not None:
            self._judge(size, None)

    def receive(self) -> Receiving:
        """A new attempt that is verified on the way, while what arrives is in the processor's cache."""
        self._verdict = None
        return Receiving(self._frame, self._judge)

    def _judge(self, size: int, running: RunningChecksum | None) -> None:
        try:
            self._verdict = size, self._frame.finish(size, running)
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

    def is_intact(self, size: int) -> bool:
        """Whether :meth:`verify` has found an object of ``size`` bytes to be the one that was asked for."""
        verdict = self._verdict
        return verdict is not None and verdict[0] == size and verdict[1] is True

    @property
    def is_verified(self) -> bool:
        """Whether :meth:`verify` has done the work."""
        return self._verdict is not None


class Receiving:
    """One attempt to load one object, in order. One thread at a time; a repetition is an attempt of its own.

    Attributes:
        into: the buffers to fill, as in `L2Adapter.load_one`.
    """

    __slots__ = ("_checksum", "_frame", "_judge", "into")

    def __init__(self, frame: LoadFrame, judge: Callable[[int, RunningChecksum | None], None]) -> None:
        """Made by `LoadItem.receive`."""
        self._frame = frame
        self._judge = judge
        self._checksum: RunningChecksum | None = None
        self.into: Final = frame.into

    def advance(self, nbytes: int) -> None:
        """The first ``nbytes`` of the object have arrived in :attr:`into`, for good. CPU-bound."""
        head_bytes = self._frame.head_bytes
        if self._checksum is None:
            if nbytes < head_bytes:
                return
            self._checksum = self._frame.running_checksum()
        self._checksum.advance(nbytes - head_bytes)

    def finish(self, size: int) -> None:
        """The whole object of ``size`` stored bytes has arrived. See `LoadItem.verify`."""
        self._judge(size, self._checksum)
