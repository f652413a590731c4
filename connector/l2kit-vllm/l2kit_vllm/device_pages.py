"""Pages as torch sees them: index operations on strided views, for tensors on any device, enqueued on its stream.

No transfers between host and device here, and no waiting: `cuda_transfers` does both. The operations are the same on
CPU tensors, where the tests compare them with `host_pages`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from l2kit_vllm.host_pages import storage_bytes
from l2kit_vllm.page_geometry import LayerMap, PageShape, Strided

#: Integers stand for elements: torch has no index kernels for every fp8 type, and bytes are all that is moved.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def strided_view(flat: torch.Tensor, view: Strided, itemsize: int) -> torch.Tensor:
    """View a flat uint8 tensor as ``view``, in integers of ``itemsize`` bytes."""
    typed = flat[: flat.numel() // itemsize * itemsize].view(_INTEGERS[itemsize])
    steps = [step // itemsize for step in view.strides]
    return torch.as_strided(typed, view.shape, steps, typed.storage_offset() + view.offset // itemsize)


def _run_view(flat: torch.Tensor, runs: Strided) -> torch.Tensor:
    pages, count, length = runs.shape
    page_step, run_step, _ = runs.strides
    wide = 8 if all(n % 8 == 0 for n in (runs.offset, length, page_step, run_step)) else 1
    return strided_view(flat, Strided(runs.offset, (pages, count, length // wide), (page_step, run_step, wide)), wide)


class DevicePages:
    """The pages of one layer set on one device. Data goes in and out as flat, contiguous uint8 tensors there."""

    def __init__(self, shape: PageShape, maps: Sequence[LayerMap], tensors: Sequence[torch.Tensor]) -> None:
        """``tensors[i]`` holds the storage of ``maps[i]``; its memory stays alive as long as this object."""
        flats = [storage_bytes(tensor) for tensor in tensors]
        self.layers = len(flats)
        self._shape = shape
        self._runs = [_run_view(flat, layer.runs) for flat, layer in zip(flats, maps, strict=True)]
        self._planes = [
            [strided_view(flat, layer.planes[k], shape.itemsize) for flat, layer in zip(flats, maps, strict=True)]
            for k in range(shape.planes)
        ]

    def read_pages(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Native bytes of ``pages`` (int64), one page after the other."""
        return self._runs[layer].index_select(0, pages).view(torch.uint8).reshape(-1)

    def write_pages(self, layer: int, pages: torch.Tensor, data: torch.Tensor) -> None:
        """Store native bytes into ``pages``; no page may be named twice."""
        view = self._runs[layer]
        view.index_copy_(0, pages, data.view(view.dtype).view(len(pages), *view.shape[1:]))

    def write_part(self, layer: int, page: torch.Tensor, start: int, data: torch.Tensor) -> None:
        """Store the tokens from ``start`` on of one native page; the tokens before it keep their bytes."""
        tokens = torch.arange(start, self._shape.tokens, device=data.device)
        for k, packed in enumerate(self._shape.native_map(1).planes):
            source, target = strided_view(data, packed, self._shape.itemsize), self._planes[k][layer]
            n1, n0 = _split(tokens, target.shape[2])
            target[page.expand(len(tokens)), n1, n0] = source[0, n1, n0]

    def read_tokens(self, plane: int, layer: int, pages: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Canonical bytes of the slots ``(pages[i], tokens[i])`` of K, V or the latent."""
        view = self._planes[plane][layer]
        n1, n0 = _split(tokens, view.shape[2])
        return view[pages, n1, n0].reshape(-1).view(torch.uint8)

    def write_tokens(
        self, plane: int, layer: int, pages: torch.Tensor, tokens: torch.Tensor, data: torch.Tensor
    ) -> None:
        """Store canonical bytes into the slots ``(pages[i], tokens[i])``; no slot may be named twice."""
        view = self._planes[plane][layer]
        n1, n0 = _split(tokens, view.shape[2])
        view[pages, n1, n0] = data.view(view.dtype).view(len(pages), *view.shape[3:])


def _split(tokens: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.div(tokens, size, rounding_mode="floor"), tokens.remainder(size)
