"""Transfers between pages on a CUDA device and objects in host memory, on a stream of their own.

Order is kept by events only: the side stream waits for the work that wrote (or still reads) the pages, copies, and
records the event of the `Transfer`. Object memory that is pinned is copied to and from directly, without the host
waiting; other memory goes through a bounded ring of pinned buffers, and then the calling thread does the host's half.
Device memory is taken for one layer of one object at a time; the caching allocator reuses it in the stream's order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from l2kit_vllm.device_pages import DevicePages
from l2kit_vllm.object_bytes import ObjectBytes, Span
from l2kit_vllm.page_geometry import LayerMap, PageShape
from l2kit_vllm.transfer import Transfer

_Array = npt.NDArray[Any]


class _Slot:
    """One pinned buffer. ``event`` is behind the last copy that uses it; ``drain`` then empties it into an object."""

    __slots__ = ("buffer", "drain", "event")

    def __init__(self, nbytes: int) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.drain: Callable[[], None] | None = None

    def settle(self) -> None:
        """Wait until the buffer is free again."""
        self.event.synchronize()
        drain, self.drain = self.drain, None
        if drain is not None:
            drain()


class CudaTransfers:
    """Gather, scatter and copy for the pages of one device. Any thread may call; a lock lets one at a time enqueue."""

    def __init__(
        self,
        shape: PageShape,
        maps: Sequence[LayerMap],
        tensors: Sequence[torch.Tensor],
        *,
        slot_bytes: int = 4 << 20,
        slots: int = 8,
    ) -> None:
        """Make the side stream. ``slots`` pinned buffers of ``slot_bytes`` are taken one by one, when needed."""
        self.device: Final = tensors[0].device
        self.pages: Final = DevicePages(shape, maps, tensors)
        self._shape = shape
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._ring: list[_Slot] = []
        self._slots, self._slot_bytes, self._turn = slots, slot_bytes, 0

    def gather(self, spans: Iterable[Span], ready: torch.cuda.Event | None, *, native: bool) -> Transfer:
        """Copy pages into objects. What goes to memory that is not pinned has arrived on return."""
        with self._enqueue(ready):
            for span in spans:
                self._gather(span, native=native)
            for slot in self._ring:
                slot.settle()
            return self._recorded()

    def scatter(self, spans: Iterable[Span], ready: torch.cuda.Event | None, *, native: bool) -> Transfer:
        """Copy objects into pages."""
        with self._enqueue(ready):
            for span in spans:
                (self._scatter_native if native else self._scatter_canonical)(span)
            return self._recorded()

    def copy_from(
        self, other: CudaTransfers, source: _Array, target: _Array, ready: torch.cuda.Event | None
    ) -> Transfer:
        """Copy pages of another set on the same device (or of this one) to ours, all read before one is written."""
        with self._enqueue(ready):
            theirs, ours = self._index(source), self._index(target)
            for layer in range(self.pages.layers):
                self.pages.write_pages(layer, ours, other.pages.read_pages(layer, theirs))
            return self._recorded()

    @contextmanager
    def _enqueue(self, ready: torch.cuda.Event | None) -> Iterator[None]:
        """Run the block's device work on the side stream, behind ``ready`` or all that the caller's stream has."""
        with self._lock, torch.cuda.device(self.device):
            if ready is None:
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
            else:
                self._stream.wait_event(ready)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            except BaseException:
                # The caller takes its buffers back: nothing of ours may still be on its way to them.
                self._stream.synchronize()
                for slot in self._ring:
                    slot.drain = None
                raise

    def _recorded(self) -> Transfer:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return Transfer(event)

    def _gather(self, span: Span, *, native: bool) -> None:
        data = ObjectBytes(span.obj)
        pages, tokens = (self._index(span.pages), None) if native else self._slots_of(span)
        for plane, layer, offset, size in self._regions(span, native=native):
            if tokens is None:
                found = self.pages.read_pages(layer, pages)
            else:
                found = self.pages.read_tokens(plane, layer, pages, tokens)
            at = 0
            for place in data.pieces(offset, size):
                self._to_host(found[at : at + len(place)], place)
                at += len(place)

    def _scatter_native(self, span: Span) -> None:
        data, pages, nbytes = ObjectBytes(span.obj), self._index(span.pages), self._shape.nbytes
        first, inside = divmod(span.skip, self._shape.tokens)
        for _, layer, offset, size in self._regions(span, native=True):
            found = self._to_device(data, offset + first * nbytes, size - first * nbytes)
            if inside:
                self.pages.write_part(layer, pages[first : first + 1], inside, found[:nbytes])
                found = found[nbytes:]
            if len(found):
                self.pages.write_pages(layer, pages[first + bool(inside) :], found)

    def _scatter_canonical(self, span: Span) -> None:
        data = ObjectBytes(span.obj)
        pages, tokens = self._slots_of(span)
        for plane, layer, offset, size in self._regions(span, native=False):
            skipped = size // span.tokens * span.skip
            found = self._to_device(data, offset + skipped, size - skipped)
            self.pages.write_tokens(plane, layer, pages, tokens, found)

    def _regions(self, span: Span, *, native: bool) -> Iterator[tuple[int, int, int, int]]:
        """Yield (plane, layer, offset, bytes) of each contiguous part of the object."""
        count = self.pages.layers * (1 if native else self._shape.planes)
        size = span.obj.nbytes // count
        for index in range(count):
            plane, layer = divmod(index, self.pages.layers)
            yield plane, layer, index * size, size

    def _slots_of(self, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        page, token = np.divmod(np.arange(span.first + span.skip, span.first + span.tokens), self._shape.tokens)
        return self._index(span.pages[page]), self._index(token)

    def _index(self, values: _Array) -> torch.Tensor:
        # Pinned memory that is dropped while a copy reads it is reused only after that copy: torch sees to it.
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).pin_memory().to(self.device, non_blocking=True)

    def _to_host(self, found: torch.Tensor, place: _Array) -> None:
        direct = _pinned(place)
        if direct is not None:
            direct.copy_(found, non_blocking=True)
            return
        for at in range(0, len(place), self._slot_bytes):
            part, slot = place[at : at + self._slot_bytes], self._next_slot()
            buffer = slot.buffer[: len(part)]
            buffer.copy_(found[at : at + len(part)], non_blocking=True)
            slot.event.record(self._stream)
            slot.drain = _copy_later(part, buffer.numpy())

    def _to_device(self, data: ObjectBytes, offset: int, nbytes: int) -> torch.Tensor:
        found = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        at = 0
        for place in data.pieces(offset, nbytes):
            direct = _pinned(place)
            if direct is not None:
                found[at : at + len(place)].copy_(direct, non_blocking=True)
            else:
                for start in range(0, len(place), self._slot_bytes):
                    part, slot = place[start : start + self._slot_bytes], self._next_slot()
                    buffer = slot.buffer[: len(part)]
                    np.copyto(buffer.numpy(), part)
                    found[at + start : at + start + len(part)].copy_(buffer, non_blocking=True)
                    slot.event.record(self._stream)
            at += len(place)
        return found

    def _next_slot(self) -> _Slot:
        if len(self._ring) < self._slots:
            self._ring.append(_Slot(self._slot_bytes))
            return self._ring[-1]
        self._turn = (self._turn + 1) % self._slots
        self._ring[self._turn].settle()
        return self._ring[self._turn]


def _pinned(place: _Array) -> torch.Tensor | None:
    """The same memory as a tensor, when the device can copy it directly; read-only memory cannot be a tensor."""
    if not place.flags.writeable:
        return None
    tensor = torch.from_numpy(place)
    return tensor if tensor.is_pinned() else None


def _copy_later(place: _Array, buffer: _Array) -> Callable[[], None]:
    return lambda: np.copyto(place, buffer)
