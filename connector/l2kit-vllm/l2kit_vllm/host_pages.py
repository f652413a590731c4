"""Copies between pages in host memory and objects, with numpy on views of the tensors' own storage.

numpy and not torch: these copies run in I/O threads beside a busy engine, where torch's OpenMP kernels lose by a
factor of fifty to their own barrier. One call moves many pages where their bytes allow it; that call releases the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from l2kit_vllm.object_bytes import ObjectBytes, Span
from l2kit_vllm.page_geometry import LayerMap, PageShape, Strided, dense_plane, split_tokens

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]


class _Runs:
    """The contiguous runs of one layer's pages; read and written for many pages at a time."""

    __slots__ = ("_rows", "_steps", "_view", "length")

    def __init__(self, storage: _Array, runs: Strided) -> None:
        _, count, length = runs.shape
        page_step, run_step, _ = runs.strides
        self.length: Final = count * length
        self._view = np.ndarray(runs.shape, np.uint8, storage, runs.offset, runs.strides)
        self._rows: _Array | None = None
        self._steps = (page_step // length, np.arange(count, dtype=np.int64) * (run_step // length))
        if page_step % length == 0 and run_step % length == 0:
            # Equal rows from the first page on, as one contiguous array: np.take would copy a strided one whole.
            tail = storage[runs.offset :]
            self._rows = tail[: len(tail) // length * length].reshape(-1, length)

    def read(self, pages: _Ids, out: _Array) -> None:
        """Fill ``out``, ``len(pages) * length`` contiguous bytes."""
        if self._rows is not None:
            rows = out.reshape(-1, self._rows.shape[1])
            np.take(self._rows, self._indices(pages), axis=0, out=rows, mode="clip")  # "raise" copies out twice
            return
        for target, page in zip(out.reshape(len(pages), *self._view.shape[1:]), pages.tolist(), strict=True):
            target[...] = self._view[page]

    def write(self, pages: _Ids, data: _Array) -> None:
        """Store ``len(pages) * length`` contiguous bytes."""
        if self._rows is not None:
            self._rows[self._indices(pages)] = data.reshape(-1, self._rows.shape[1])
            return
        for source, page in zip(data.reshape(len(pages), *self._view.shape[1:]), pages.tolist(), strict=True):
            self._view[page] = source

    def _indices(self, pages: _Ids) -> _Ids:
        page_step, run_steps = self._steps
        return (pages[:, None] * page_step + run_steps).ravel()


class _Plane:
    """K, V or the latent of one layer, token by token."""

    __slots__ = ("_dense", "_tokens", "_view")

    def __init__(self, storage: _Array, plane: Strided, itemsize: int) -> None:
        dtype = np.dtype(f"u{itemsize}")
        self._view = np.ndarray(plane.shape, dtype, storage, plane.offset, plane.strides)
        self._tokens = plane.shape[1] * plane.shape[2]
        self._dense: _Runs | None = None
        if dense_plane(plane, itemsize):
            nbytes = self._tokens * plane.shape[3] * plane.shape[4] * plane.shape[5] * itemsize
            run = Strided(plane.offset, (plane.shape[0], 1, nbytes), (plane.strides[0], 0, 1))
            self._dense = _Runs(storage, run)

    def read(self, pages: _Ids, start: int, stop: int, out: _Array) -> None:
        """Fill ``out``, contiguous bytes, with tokens ``[start, stop)`` of a run of pages."""
        self._move(pages, start, stop, out, into_pages=False)

    def write(self, pages: _Ids, start: int, stop: int, data: _Array) -> None:
        """Store tokens ``[start, stop)`` of a run of pages; every other token keeps its bytes."""
        self._move(pages, start, stop, data, into_pages=True)

    def at(self, page: int, start: int, stop: int) -> tuple[_Array, tuple[_Ids, _Ids]]:
        """One page's view, and the index in it of tokens ``[start, stop)``."""
        tokens = np.arange(start, stop, dtype=np.int64)
        n1, n0 = np.divmod(tokens, self._view.shape[2])
        return self._view[page], (n1, n0)

    def _move(self, pages: _Ids, start: int, stop: int, data: _Array, *, into_pages: bool) -> None:
        inner = self._view.shape[1:]
        typed = data.reshape(stop - start, -1).view(self._view.dtype)
        for piece in split_tokens(start, stop, self._tokens):
            ids = pages[piece.page : piece.page + piece.count]
            whole = piece.stop - piece.start == self._tokens
            part = typed[piece.at : piece.at + piece.count * (piece.stop - piece.start)]
            if whole and self._dense is not None:
                flat = part.reshape(-1).view(np.uint8)
                (self._dense.write if into_pages else self._dense.read)(ids, flat)
            elif whole:
                for tokens, page in zip(part.reshape(piece.count, *inner), ids.tolist(), strict=True):
                    if into_pages:
                        self._view[page] = tokens
                    else:
                        tokens[...] = self._view[page]
            else:
                view, index = self.at(int(ids[0]), piece.start, piece.stop)
                tokens = part.reshape(-1, *inner[2:])
                if into_pages:
                    view[index] = tokens
                else:
                    tokens[...] = view[index]


class HostPages:
    """The pages of one layer set in host memory. Thread-safe as long as transfers touch different pages and objects."""

    def __init__(self, shape: PageShape, maps: Sequence[LayerMap], tensors: Sequence[torch.Tensor]) -> None:
        """``tensors[i]`` holds the storage of ``maps[i]``; their memory stays alive as long as this object."""
        storages = [storage_bytes(tensor).numpy() for tensor in tensors]
        self._shape = shape
        self.runs = [_Runs(data, layer.runs) for data, layer in zip(storages, maps, strict=True)]
        self._planes = [
            [_Plane(data, layer.planes[k], shape.itemsize) for data, layer in zip(storages, maps, strict=True)]
            for k in range(shape.planes)
        ]

    def gather_native(self, span: Span) -> None:
        """Copy whole pages into the object: ``[layer, page, byte]``."""
        data, size = ObjectBytes(span.obj), len(span.pages) * self._shape.nbytes
        for index, runs in enumerate(self.runs):
            with data.writing(index * size, size) as out:
                runs.read(span.pages, out)

    def scatter_native(self, span: Span) -> None:
        """Copy the object's pages into ours from token ``span.skip`` on; a page cut by it is written in part."""
        data, page_tokens, nbytes = ObjectBytes(span.obj), self._shape.tokens, self._shape.nbytes
        size = len(span.pages) * nbytes
        first, inside = divmod(span.skip, page_tokens)
        for index, runs in enumerate(self.runs):
            source = data.read(index * size + first * nbytes, size - first * nbytes)
            if inside:
                self._write_part(index, int(span.pages[first]), inside, source[:nbytes])
                source = source[nbytes:]
            if len(source):
                runs.write(span.pages[first + bool(inside) :], source)

    def gather_canonical(self, span: Span) -> None:
        """Copy tokens into the object: ``[plane, layer, token, head, element]``."""
        data, size = ObjectBytes(span.obj), span.obj.nbytes // (len(self._planes) * len(self.runs))
        for index, plane in enumerate(plane for planes in self._planes for plane in planes):
            with data.writing(index * size, size) as out:
                plane.read(span.pages, span.first, span.first + span.tokens, out)

    def scatter_canonical(self, span: Span) -> None:
        """Copy the object's tokens from ``span.skip`` on into their slots."""
        data, size = ObjectBytes(span.obj), span.obj.nbytes // (len(self._planes) * len(self.runs))
        skipped = size // span.tokens * span.skip
        for index, plane in enumerate(plane for planes in self._planes for plane in planes):
            source = data.read(index * size + skipped, size - skipped)
            plane.write(span.pages, span.first + span.skip, span.first + span.tokens, source)

    def copy_from(self, other: HostPages, source: _Ids, target: _Ids) -> None:
        """Copy pages of ``other`` (or of ourselves) to our pages, as if all of them were read before one is written."""
        for ours, theirs in zip(self.runs, other.runs, strict=True):
            pages = np.empty(len(source) * theirs.length, np.uint8)
            theirs.read(source, pages)
            ours.write(target, pages)

    def _write_part(self, layer: int, page: int, start: int, native: _Array) -> None:
        packed = self._shape.native_map(1)
        for k, plane in enumerate(packed.planes):
            source, index = _Plane(native, plane, self._shape.itemsize).at(0, start, self._shape.tokens)
            target, _ = self._planes[k][layer].at(page, start, self._shape.tokens)
            target[index] = source[index]


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage behind a tensor as flat uint8, without a copy."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())
