"""Bytes of objects in host memory: `MemoryObj`, and the arena of page-aligned slabs that L1 allocates from."""

from __future__ import annotations

import bisect
import contextlib
import mmap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, cast

from l2kit.errors import CapacityError, ConfigError
from l2kit.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Buffer

PAGE_BYTES: Final = 4096
_MAX_SLAB_BYTES: Final = 64 << 20
_MIN_SLABS: Final = 16  # of a small arena, so that one object that stays does not keep all of it for one size
_HUGE_PAGE_BYTES: Final = 2 << 20


class MemoryObj:
    """One object's bytes in memory: a layout and a scatter/gather list of the segments that hold them.

    A `MemoryObj` never owns or frees memory; whoever made it says how long the segments stay valid. Adapters read
    and fill the segments in place.
    """

    __slots__ = ("layout", "nbytes", "segments")

    def __init__(self, segments: Sequence[memoryview], layout: Layout) -> None:
        """Use :meth:`wrap` or :meth:`allocate`. ``segments`` are flat byte views in payload order."""
        self.segments: Final = tuple(segments)
        self.layout: Final = layout
        self.nbytes: Final = layout.nbytes
        held = sum(len(segment) for segment in self.segments)
        if held != self.nbytes:
            raise CapacityError(f"buffer: {held} bytes cannot hold exactly the {self.nbytes} bytes of {layout}")

    @classmethod
    def wrap(cls, buffer: Buffer | Sequence[Buffer], layout: Layout) -> MemoryObj:
        """Describe memory that the caller owns, without copying it.

        - ``buffer`` is one C-contiguous buffer, or a sequence of them that are taken one after the other.
        - More memory than the layout needs is left untouched; a read-only buffer can only be stored from.

        Raises:
            CapacityError: the buffers are smaller than ``layout.nbytes``.
            ConfigError: a buffer is not C-contiguous.
        """
        buffers: list[Buffer] = [*buffer] if isinstance(buffer, list | tuple) else [cast("Buffer", buffer)]
        segments: list[memoryview] = []
        missing = layout.nbytes
        for part in buffers:
            view = memoryview(part)
            if not view.c_contiguous:
                raise ConfigError(f"buffer: shape {view.shape} with strides {view.strides} is not C-contiguous")
            if view.nbytes == 0 or missing == 0:
                continue
            flat = view.cast("B")[:missing]
            segments.append(flat)
            missing -= len(flat)
        if missing:
            raise CapacityError(f"buffer: {layout.nbytes - missing} bytes given, {layout} needs {layout.nbytes}")
        return cls(segments, layout)

    @classmethod
    def allocate(cls, layout: Layout) -> MemoryObj:
        """Take fresh, zeroed, page-aligned memory outside any arena; it lives as long as the object."""
        if layout.nbytes == 0:
            return cls((), layout)
        return cls((memoryview(mmap.mmap(-1, layout.nbytes)),), layout)

    @property
    def read_only(self) -> bool:
        """True when any segment refuses writes."""
        return any(segment.readonly for segment in self.segments)

    def tobytes(self) -> bytes:
        """Copy the bytes out (tests and tools; the data path never does)."""
        return b"".join(self.segments)

    def __repr__(self) -> str:
        return f"MemoryObj({self.layout.kind} {self.layout.shape} {self.layout.dtype}, {len(self.segments)} segments)"


class Slot:
    """One slot of a slab: memory for one object, owned by whoever allocated it until it is freed."""

    __slots__ = ("offset", "slab", "slot_bytes")

    def __init__(self, slab: _Slab, offset: int, slot_bytes: int) -> None:
        self.slab: Final = slab
        self.offset: Final = offset
        self.slot_bytes: Final = slot_bytes


class _Slab:
    """A run of equal slots that was carved out of the arena."""

    __slots__ = ("free", "nbytes", "offset", "slot_bytes", "used")

    def __init__(self, offset: int, slot_bytes: int, slots: int) -> None:
        self.offset = offset
        self.nbytes = slot_bytes * slots
        self.slot_bytes = slot_bytes
        self.used: dict[int, Slot] = {}
        self.free = [offset + slot_bytes * i for i in reversed(range(slots))]


class Arena:
    """A fixed piece of host memory in slabs of equal slots: O(1) to allocate, no fragmentation within a size.

    - Slots start at page boundaries; huge pages are advised. The memory is committed by the kernel at first use.
    - A slab holds one slot size. When its last slot is freed, its memory serves any size again.
    - Not thread-safe: `L1Manager` holds its lock around every call.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Map ``capacity_bytes`` (rounded down to pages) of anonymous memory.

        Raises:
            ConfigError: less than one page was asked for, or more than this machine gives.
        """
        self.capacity_bytes: Final = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        if self.capacity_bytes < PAGE_BYTES:
            raise ConfigError(f"capacity_bytes: {capacity_bytes} is below one page of {PAGE_BYTES} bytes")
        try:
            # Private: shared anonymous memory takes no huge pages where shmem_enabled is "never", its default.
            mapped = mmap.mmap(-1, self.capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"capacity_bytes: this machine does not map {capacity_bytes} bytes: {error}") from error
        if self.capacity_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages serves small ones
                mapped.madvise(mmap.MADV_HUGEPAGE)
        # Only views refer to the map, so the last one unmaps it.
        self._memory = memoryview(mapped)
        self._slab_bytes = min(_MAX_SLAB_BYTES, self.capacity_bytes // _MIN_SLABS)
        self._extents: list[tuple[int, int]] = [(0, self.capacity_bytes)]  # free (offset, nbytes), by offset
        self._open_slabs: dict[int, list[_Slab]] = {}  # slot size -> slabs with a free slot
        self.used_bytes = 0

    @staticmethod
    def slot_bytes(nbytes: int) -> int:
        """Bytes of the slot that an object of ``nbytes`` takes."""
        return max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES

    def allocate(self, nbytes: int) -> Slot | None:
        """Take a slot for ``nbytes``, or return None when the arena has no room for it as it is."""
        size = self.slot_bytes(nbytes)
        slabs = self._open_slabs.setdefault(size, [])
        if not slabs:
            slab = self._carve(size)
            if slab is None:
                return None
            slabs.append(slab)
        slab = slabs[-1]
        slot = Slot(slab, slab.free.pop(), size)
        slab.used[slot.offset] = slot
        if not slab.free:
            slabs.pop()
        self.used_bytes += size
        return slot

    def free(self, slot: Slot) -> None:
        """Give a slot back.

        Raises:
            RuntimeError: it is not allocated (a double free is a bug of ours, and is never passed over).
        """
        slab = slot.slab
        if slab.used.pop(slot.offset, None) is not slot:
            raise RuntimeError(f"slot at {slot.offset} is freed twice")
        slabs = self._open_slabs[slot.slot_bytes]
        if not slab.free:
            slabs.append(slab)
        slab.free.append(slot.offset)
        self.used_bytes -= slot.slot_bytes
        if not slab.used:
            slabs.remove(slab)
            self._return(slab.offset, slab.nbytes)

    def view(self, slot: Slot, nbytes: int) -> memoryview:
        """Return the first ``nbytes`` of a slot, writable."""
        return self._memory[slot.offset : slot.offset + nbytes]

    def would_fit(self, nbytes: int, freed: Iterable[Slot]) -> bool:
        """True when ``nbytes`` could be allocated if the slots ``freed`` were free. Changes nothing."""
        size = self.slot_bytes(nbytes)
        slabs = Counter(slot.slab for slot in freed)
        if any(slab.slot_bytes == size for slab in slabs):
            return True
        runs = sorted([*self._extents, *((s.offset, s.nbytes) for s, count in slabs.items() if count == len(s.used))])
        start = end = 0
        for offset, length in runs:
            if offset != end:
                start = offset
            end = offset + length
            if end - start >= size:
                return True
        return False

    def close(self) -> None:
        """Unmap the memory, or leave that to the last view of it that is still held by a reader."""
        self._memory.release()

    def _carve(self, size: int) -> _Slab | None:
        wanted = max(1, self._slab_bytes // size)
        best = max(self._extents, key=lambda extent: extent[1], default=(0, 0))
        for index, (offset, nbytes) in enumerate(self._extents):
            if nbytes >= wanted * size or ((offset, nbytes) == best and nbytes >= size):
                slots = min(wanted, nbytes // size)
                rest = (offset + slots * size, nbytes - slots * size)
                self._extents[index : index + 1] = [rest] if rest[1] else []
                return _Slab(offset, size, slots)
        return None

    def _return(self, offset: int, nbytes: int) -> None:
        index = bisect.bisect(self._extents, (offset, 0))
        if index < len(self._extents) and self._extents[index][0] == offset + nbytes:
            nbytes += self._extents.pop(index)[1]
        if index and sum(self._extents[index - 1]) == offset:
            index -= 1
            before = self._extents.pop(index)
            offset, nbytes = before[0], before[1] + nbytes
        self._extents.insert(index, (offset, nbytes))


def split(segments: Sequence[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """A scatter/gather list in two: its first ``nbytes``, and what is left."""
    front: list[memoryview] = []
    back: list[memoryview] = []
    for segment in segments:
        if nbytes > 0:
            front.append(segment[:nbytes])
        if nbytes < len(segment):
            back.append(segment[max(nbytes, 0) :])
        nbytes -= len(segment)
    return front, back


def first_bytes(segments: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first ``nbytes`` of a scatter/gather list; less when it is shorter."""
    kept: list[memoryview] = []
    for segment in segments:
        if nbytes <= 0:
            break
        kept.append(segment[:nbytes])
        nbytes -= len(segment)
    return kept
