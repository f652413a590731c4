"""Copies between pages in host memory and objects, with numpy on views of the tensors' own storage.

numpy and not torch: these copies run in I/O threads beside a busy engine, where torch's OpenMP kernels lose by a
factor of fifty to their own barrier. What is to be copied is planned as a list of moves, as few and as large as the
arrangement allows: a call by itself costs as much as the copy of a small model's layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import torch

from l2kit_vllm.object_bytes import ObjectBytes, Span
from l2kit_vllm.page_geometry import LayerMap, PageShape, Strided, dense_plane, split_tokens
from l2kit_vllm.page_moves import Ids, Move, PartMove, Plane, PlaneMove, RunMove, Runs, run_sets
from l2kit_vllm.transfer import Transfer

_ALL: Final = slice(None)


class HostPages:
    """The pages of one layer set in host memory. Thread-safe as long as transfers touch different pages and objects."""

    def __init__(self, shape: PageShape, maps: Sequence[LayerMap], tensors: Sequence[torch.Tensor]) -> None:
        """``tensors[i]`` holds the storage of ``maps[i]``; their memory stays alive as long as this object."""
        storages = [storage_bytes(tensor).numpy() for tensor in tensors]
        self._shape = shape
        self._layers = len(maps)
        self.runs: Final = run_sets(storages, [layer.runs for layer in maps])
        self._planes: list[list[Plane]] = []
        self._dense: list[list[Runs]] = []  # of each plane; empty where its pages are not in token order
        for k in range(shape.planes):
            planes = [layer.planes[k] for layer in maps]
            self._planes.append([Plane(data, p, shape.itemsize) for data, p in zip(storages, planes, strict=True)])
            size = math.prod(planes[0].shape[1:]) * shape.itemsize
            whole = [Strided(p.offset, (p.shape[0], 1, size), (p.strides[0], 0, 1)) for p in planes]
            self._dense.append(run_sets(storages, whole) if dense_plane(planes[0], shape.itemsize) else [])

    def gather(self, spans: Iterable[Span], ready: object = None, *, native: bool) -> Transfer:
        """Copy pages into objects; all has arrived on return. ``ready`` means something on CUDA only."""
        for span in spans:
            self._gather(span, native=native)
        return Transfer()

    def scatter(self, spans: Iterable[Span], ready: object = None, *, native: bool) -> Transfer:
        """Copy the objects' tokens from ``span.skip`` on into their slots; all has arrived on return."""
        for span in spans:
            data = ObjectBytes(span.obj)
            for offset, nbytes, move in self._native(span) if native else self._canonical(span):
                pieces = data.pieces(offset, nbytes)
                move.write(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
        return Transfer()

    def copy_from(self, other: HostPages, source: Ids, target: Ids, ready: object = None) -> Transfer:
        """Copy pages of ``other`` (or of ourselves) to our pages, as if all of them were read before one is written."""
        for layer in range(self._layers):
            ours, theirs = _of_layer(self.runs, layer), _of_layer(other.runs, layer)
            pages = np.empty(len(source) * theirs[0].nbytes, np.uint8)
            theirs[0].read(source, theirs[1], pages)
            ours[0].write(target, ours[1], pages)
        return Transfer()

    def _gather(self, span: Span, *, native: bool) -> None:
        data = ObjectBytes(span.obj)
        for offset, nbytes, move in self._native(span) if native else self._canonical(span):
            pieces = data.pieces(offset, nbytes)
            if len(pieces) == 1:
                move.read(pieces[0])
                continue
            whole, at = np.empty(nbytes, np.uint8), 0
            move.read(whole)
            for piece in pieces:
                piece[...] = whole[at : at + len(piece)]
                at += len(piece)

    def _native(self, span: Span) -> Iterator[tuple[int, int, Move]]:
        """Plan a native object, ``[layer, page, byte]``: (offset in it, bytes, move)."""
        nbytes = self._shape.nbytes
        size = len(span.pages) * nbytes
        if not span.skip:
            at = 0
            for runs in self.runs:
                yield at, runs.layers * size, RunMove(runs, span.pages, _ALL)
                at += runs.layers * size
            return
        first, inside = divmod(span.skip, self._shape.tokens)
        packed = self._shape.native_map(1).planes
        rest = span.pages[first + bool(inside) :]
        for layer in range(self._layers):
            at = layer * size + first * nbytes
            if inside:
                planes = [planes[layer] for planes in self._planes]
                yield at, nbytes, PartMove(planes, packed, int(span.pages[first]), inside)
                at += nbytes
            if len(rest):
                yield at, len(rest) * nbytes, _run_move(self.runs, layer, rest)

    def _canonical(self, span: Span) -> Iterator[tuple[int, int, Move]]:
        """Plan a canonical object, ``[plane, layer, token, head, element]``: (offset in it, bytes, move)."""
        size = span.obj.nbytes // (len(self._planes) * self._layers)
        row, page_tokens = size // span.tokens, self._shape.tokens
        pieces = list(split_tokens(span.first + span.skip, span.first + span.tokens, page_tokens))
        whole_pages = len(pieces) == 1 and pieces[0].stop - pieces[0].start == page_tokens and not span.skip
        for k, dense in enumerate(self._dense):
            if whole_pages and len(dense) == 1:
                yield k * self._layers * size, self._layers * size, RunMove(dense[0], span.pages, _ALL)
                continue
            for layer, plane in enumerate(self._planes[k]):
                start = (k * self._layers + layer) * size + span.skip * row
                for piece in pieces:
                    tokens = piece.stop - piece.start
                    pages = span.pages[piece.page : piece.page + piece.count]
                    move: Move = PlaneMove(plane, pages, piece.start, piece.stop)
                    if dense and tokens == page_tokens:
                        move = _run_move(dense, layer, pages)
                    yield start + piece.at * row, piece.count * tokens * row, move


def _of_layer(sets: Sequence[Runs], layer: int) -> tuple[Runs, slice]:
    return (sets[0], slice(layer, layer + 1)) if len(sets) == 1 else (sets[layer], _ALL)


def _run_move(sets: Sequence[Runs], layer: int, pages: Ids) -> RunMove:
    runs, layers = _of_layer(sets, layer)
    return RunMove(runs, pages, layers)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage behind a tensor as flat uint8, without a copy."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())
