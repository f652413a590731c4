"""The three ways in which numpy moves tokens between pages and contiguous bytes.

- `RunMove`: whole pages whose bytes are already in the wanted order: one call for all layers where it can be.
- `PlaneMove`: K, V or the latent of one layer in an order of its own, whole pages or part of one.
- `PartMove`: the end of one page out of its native bytes.

A move knows its pages; ``read`` fills flat contiguous bytes from them, ``write`` stores such bytes in them. What is
not among its tokens keeps its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from l2kit_vllm.page_geometry import Strided

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]


class Move(Protocol):
    """Tokens to be copied, in one direction or the other."""

    def read(self, out: Array) -> None:
        """Fill ``out`` from the pages."""

    def write(self, data: Array) -> None:
        """Store ``data`` in the pages."""


class Runs:
    """Contiguous runs of the pages of one or more layers that are views of one storage.

    Their data is ``[layer, page, run, byte]``. ``nbytes`` is the size of one layer's part of a page.
    """

    __slots__ = ("_first", "_rows", "_steps", "_views", "layers", "nbytes")

    def __init__(self, storage: Array, views: Sequence[Strided]) -> None:
        """``views`` differ in their offset only."""
        _, count, length = views[0].shape
        page_step, run_step, _ = views[0].strides
        start = min(view.offset for view in views)
        first = np.array([view.offset - start for view in views], np.int64)
        self.layers: Final = len(views)
        self.nbytes: Final = count * length
        self._views = [np.ndarray(view.shape, np.uint8, storage, view.offset, view.strides) for view in views]
        self._rows: Array | None = None
        if not (page_step % length or run_step % length or (first % length).any()):
            # Equal rows as one contiguous array: np.take would first copy a strided one, the whole pool.
            tail = storage[start:]
            self._rows = tail[: len(tail) // length * length].reshape(-1, length)
        self._first = first // length
        self._steps = (page_step // length, np.arange(count, dtype=np.int64) * (run_step // length))

    @property
    def equal_rows(self) -> bool:
        """True when one call moves any pages of all layers."""
        return self._rows is not None

    def read(self, pages: Ids, layers: slice, out: Array) -> None:
        """Fill ``out`` from ``pages`` of ``layers``."""
        if self._rows is not None:
            rows = out.reshape(-1, self._rows.shape[1])
            # Ids are checked before they come here; mode "raise" would copy by way of a buffer.
            np.take(self._rows, self._indices(pages, layers), axis=0, out=rows, mode="clip")
            return
        for place, page in self._each(pages, layers, out):
            place[...] = page

    def write(self, pages: Ids, layers: slice, data: Array) -> None:
        """Store ``data`` in ``pages`` of ``layers``."""
        if self._rows is not None:
            self._rows[self._indices(pages, layers)] = data.reshape(-1, self._rows.shape[1])
            return
        for place, page in self._each(pages, layers, data):
            page[...] = place

    def _indices(self, pages: Ids, layers: slice) -> Ids:
        page_step, run_steps = self._steps
        return (self._first[layers, None, None] + (pages * page_step)[:, None] + run_steps).ravel()

    def _each(self, pages: Ids, layers: slice, data: Array) -> Iterator[tuple[Array, Array]]:
        parts = iter(data.reshape(-1, *self._views[0].shape[1:]))
        for view in self._views[layers]:
            for page in pages.tolist():
                yield next(parts), view[page]


def run_sets(storages: Sequence[Array], views: Sequence[Strided]) -> list[Runs]:
    """All layers together where they are equal views of one storage, as vLLM's are; each by itself otherwise."""
    alike = len({storage.ctypes.data for storage in storages}) == 1 and len({view.strides for view in views}) == 1
    together = Runs(storages[0], views) if alike else None
    if together is not None and together.equal_rows:
        return [together]
    return [Runs(storage, [view]) for storage, view in zip(storages, views, strict=True)]


class Plane:
    """K, V or the latent of one layer, element by element, whatever the order in memory."""

    __slots__ = ("order", "tokens", "view")

    def __init__(self, storage: Array, plane: Strided, itemsize: int) -> None:
        """View the plane's elements as unsigned integers of ``itemsize`` bytes."""
        self.view: Final = np.ndarray(plane.shape, np.dtype(f"u{itemsize}"), storage, plane.offset, plane.strides)
        self.tokens: Final = plane.shape[1] * plane.shape[2]
        # numpy walks the axes of an index operation as they come: let them come in the order of the memory.
        self.order: Final = (0, *sorted(range(1, 6), key=lambda axis: -plane.strides[axis]))

    def part(self, page: int, start: int, stop: int) -> tuple[Array, tuple[Ids, Ids]]:
        """One page's view, and the index in it of tokens ``[start, stop)``."""
        n1, n0 = np.divmod(np.arange(start, stop, dtype=np.int64), self.view.shape[2])
        return self.view[page], (n1, n0)


@dataclass(frozen=True, slots=True)
class RunMove:
    """Whole pages of some layers of a run set."""

    runs: Runs
    pages: Ids
    layers: slice

    def read(self, out: Array) -> None:
        """See `Move`."""
        self.runs.read(self.pages, self.layers, out)

    def write(self, data: Array) -> None:
        """See `Move`."""
        self.runs.write(self.pages, self.layers, data)


@dataclass(frozen=True, slots=True)
class PlaneMove:
    """Tokens ``[start, stop)`` of one page of a plane, or several whole pages."""

    plane: Plane
    pages: Ids
    start: int
    stop: int

    def read(self, out: Array) -> None:
        """See `Move`."""
        view, order = self.plane.view, self.plane.order
        if self.stop - self.start == self.plane.tokens:
            tokens = out.view(view.dtype).reshape(len(self.pages), *view.shape[1:])
            tokens.transpose(order)[...] = view.transpose(order)[self.pages]
        else:
            page, index = self.plane.part(int(self.pages[0]), self.start, self.stop)
            out[...] = page[index].reshape(-1).view(np.uint8)

    def write(self, data: Array) -> None:
        """See `Move`."""
        view, order = self.plane.view, self.plane.order
        typed = data.view(view.dtype)
        if self.stop - self.start == self.plane.tokens:
            tokens = typed.reshape(len(self.pages), *view.shape[1:])
            view.transpose(order)[self.pages] = tokens.transpose(order)
        else:
            page, index = self.plane.part(int(self.pages[0]), self.start, self.stop)
            page[index] = typed.reshape(-1, *view.shape[3:])


@dataclass(frozen=True, slots=True)
class PartMove:
    """Tokens from ``start`` on of one layer's page, out of that page's native bytes."""

    planes: Sequence[Plane]
    native: Sequence[Strided]
    page: int
    start: int

    def read(self, out: Array) -> None:
        """Native objects hold whole pages: never read in part."""
        raise NotImplementedError

    def write(self, data: Array) -> None:
        """See `Move`; ``data`` is the whole page."""
        for plane, packed in zip(self.planes, self.native, strict=True):
            source, index = Plane(data, packed, plane.view.itemsize).part(0, self.start, plane.tokens)
            target, _ = plane.part(self.page, self.start, plane.tokens)
            target[index] = source[index]
