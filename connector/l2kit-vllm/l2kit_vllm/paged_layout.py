"""What a paged KV layer set is declared to be, and the refusal of every tensor that is something else.

A `PagedLayout` is made from declarations (vLLM's cache specs and layout name, see `vllm_specs`), never from the
shapes of tensors: the CPU backend registers ``[blocks, heads, tokens, 2 * head_dim]`` and stores something else in
it. The tensors are only checked against the declaration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from l2kit.errors import ConfigError, nearest
from l2kit.layout import DTYPES
from l2kit_vllm.page_geometry import AXES, Arrangement, LayerMap, PageShape, byte_ranges

#: Version of the native byte order; a change of what the same fingerprint fields mean raises it.
NATIVE_VERSION: Final = 1

_TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {name: getattr(torch, name) for name in DTYPES}
#: vLLM registers fp8 caches as raw bytes; the exact type is only in the cache config.
_RAW_BYTES: Final = (torch.uint8, torch.int8)


@dataclass(frozen=True)
class PagedLayout:
    """The paged KV of one cache group: layers of equal shape that share a block table.

    Attributes:
        arrangement: how K and V of a page lie in memory.
        layers: names of the layers, in the order that objects hold them.
        num_blocks: blocks in the pool.
        block_size: tokens per block, as the scheduler counts them.
        kv_heads: KV heads on this rank; 1 for MLA.
        head_dim: elements of K per head; of the whole latent row for MLA.
        dtype: exact element type by its l2kit name: ``float8_e4m3fn`` even where the tensor is ``uint8``.
        head_dim_v: elements of V per head; None for ``head_dim`` (0 for MLA).
        kernel_block_size: tokens per index of the tensors, where a block is cut into equal kernel blocks; None for
            ``block_size``.
        page_size_bytes: declared bytes of one block of one layer, padding included; None for no padding.
    """

    arrangement: Arrangement
    layers: tuple[str, ...]
    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: str
    head_dim_v: int | None = None
    kernel_block_size: int | None = None
    page_size_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", 0 if self.is_mla else self.head_dim)
        if self.kernel_block_size is None:
            object.__setattr__(self, "kernel_block_size", self.block_size)
        if self.dtype not in DTYPES:
            raise self._error(f"dtype: unknown element type {self.dtype!r}{nearest(self.dtype, DTYPES)}")
        for name in ("num_blocks", "block_size", "kv_heads", "head_dim", "kernel_block_size"):
            if getattr(self, name) < 1:
                raise self._error(f"{name}: {getattr(self, name)} must be at least 1")
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise self._error(f"layers: {list(self.layers)} must be at least one name, none of them twice")
        if self.block_size % self.page.tokens:
            raise self._error(f"kernel_block_size: {self.page.tokens} does not divide block_size {self.block_size}")
        if problem := self.page.problem():
            raise self._error(f"a page {problem}")
        if self.page_size_bytes is None:
            object.__setattr__(self, "page_size_bytes", self.block_bytes)
        if self.padded_bytes < self.block_bytes:
            raise self._error(
                f"page_size_bytes: {self.page_size_bytes} declared, {self.block_bytes} needed for {self.block_size}"
                f" tokens x {self.kv_heads} heads x {self.page.content} elements of {self.dtype}"
            )

    @property
    def is_mla(self) -> bool:
        """True when a token has one latent row instead of K and V."""
        return self.arrangement is Arrangement.MLA

    @property
    def page(self) -> PageShape:
        """The measures of what one tensor index selects."""
        return PageShape(
            self.arrangement,
            self.kernel_block_size or self.block_size,
            self.kv_heads,
            self.head_dim,
            self.head_dim_v or 0,
            DTYPES[self.dtype][1],
        )

    @property
    def pages_per_block(self) -> int:
        """Tensor indices that make up one block; 1 without kernel blocks."""
        return self.block_size // self.page.tokens

    @property
    def num_pages(self) -> int:
        """Size of the page axis of the tensors."""
        return self.num_blocks * self.pages_per_block

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer without padding: what a native object holds of it."""
        return self.page.nbytes * self.pages_per_block

    @property
    def padded_bytes(self) -> int:
        """Declared bytes of one block of one layer with padding."""
        return self.page_size_bytes or 0

    @property
    def fingerprint(self) -> str:
        """Everything that decides what the bytes of a native object mean; belongs into its key's namespace.

        Strides, padding and the number of blocks are not in it: a page's own bytes do not depend on them.
        """
        names = hashlib.blake2b("\0".join(self.layers).encode(), digest_size=8).hexdigest()
        blocks = f"b{self.block_size}.{self.page.tokens}"
        heads = f"h{self.kv_heads}.{self.head_dim}.{self.head_dim_v}"
        layers = f"l{len(self.layers)}.{names}"
        return f"{NATIVE_VERSION}:{self.arrangement}:{self.dtype}:{blocks}:{heads}:{layers}"

    def page_indices(self, block_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Indices on the tensors' page axis of blocks, in their order.

        Raises:
            ConfigError: an id is not within the pool.
        """
        blocks = np.asarray(block_ids, np.int64)
        bad = blocks[(blocks < 0) | (blocks >= self.num_blocks)]
        if len(bad):
            raise self._error(f"block_ids: {bad.tolist()[:8]} are not within the {self.num_blocks} blocks")
        if self.pages_per_block == 1:
            return blocks
        return (blocks[:, None] * self.pages_per_block + np.arange(self.pages_per_block, dtype=np.int64)).ravel()

    def only(self, *layers: str) -> PagedLayout:
        """Return the same layout for some of its layers (layerwise objects hold one).

        Raises:
            ConfigError: a name is not one of ``layers``.
        """
        for name in layers:
            if name not in self.layers:
                raise self._error(f"layers: {name!r} is not declared{nearest(name, self.layers)}")
        return replace(self, layers=layers)

    def map_layers(self, tensors: Mapping[str, torch.Tensor]) -> tuple[LayerMap, ...]:
        """Check the registered tensors against the declaration and say where their pages lie.

        - ``tensors`` may hold layers of other groups: they are not looked at, and may share storage with ours (a
          hybrid model's groups do). Layers of this layout must not overlap.
        - The maps come in the order of ``layers``; offsets are bytes into each tensor's own storage.

        Raises:
            ConfigError: a tensor is missing, or differs from the declaration; the message names the arrangement,
                the layer, what was found and what was expected.
        """
        maps = tuple(self._map_layer(name, self._tensor(name, tensors)) for name in self.layers)
        self._refuse_overlap(tensors, maps)
        return maps

    def _tensor(self, name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensor = tensors.get(name)
        if not isinstance(tensor, torch.Tensor):
            raise self._error(f"layer {name!r}: no tensor is registered; there are {sorted(tensors)}")
        return tensor

    def _map_layer(self, name: str, tensor: torch.Tensor) -> LayerMap:
        page, axes = self.page, AXES[self.arrangement]
        shape, stride = tuple(tensor.shape), tuple(int(step) for step in tensor.stride())
        if self.is_mla and len(shape) == 3:
            axes = axes.replace("H", "")
        sizes = page.sizes(self.num_pages)
        expected = tuple(sizes[axis] for axis in axes)
        if shape != expected:
            raise self._error(f"layer {name!r}: shape is {shape}, expected {expected} = [{', '.join(axes)}]")
        allowed = (_TORCH_DTYPES[self.dtype], *(_RAW_BYTES if page.itemsize == 1 else ()))
        if tensor.dtype not in allowed:
            raise self._error(f"layer {name!r}: dtype is {tensor.dtype}, expected {allowed[0]} for {self.dtype}")
        # The stride of an axis of size 1 is never used, and torch leaves anything in it.
        inner = page.inner_strides()
        wrong = [i for i, a in enumerate(axes) if a in inner and shape[i] > 1 and stride[i] != inner[a]]
        if wrong:
            wanted = tuple(inner.get(axis, "any") for axis in axes)
            raise self._error(f"layer {name!r}: stride is {stride}, expected {wanted} elements on [{', '.join(axes)}]")
        loose = {axis: stride[i] for i, axis in enumerate(axes) if shape[i] > 1}
        layer = page.layer_map(int(tensor.storage_offset()) * page.itemsize, self.num_pages, loose)
        step, block = layer.runs.strides[0] * self.pages_per_block, self.padded_bytes
        if self.num_blocks > 1 and layer.runs.shape[1] == 1 and step < block:
            raise self._error(f"layer {name!r}: blocks are {step} bytes apart, expected page_size_bytes {block}")
        return layer

    def _refuse_overlap(self, tensors: Mapping[str, torch.Tensor], maps: tuple[LayerMap, ...]) -> None:
        by_storage: dict[int, list[int]] = {}
        for index, name in enumerate(self.layers):
            by_storage.setdefault(tensors[name].untyped_storage().data_ptr(), []).append(index)
        for indices in by_storage.values():
            ranges = [byte_ranges(maps[index].runs) for index in indices]
            starts = np.concatenate([start for start, _ in ranges])
            stops = np.concatenate([start + length for start, length in ranges])
            owner = np.repeat(indices, [len(start) for start, _ in ranges])
            order = np.argsort(starts, kind="stable")
            clash = np.flatnonzero(starts[order][1:] < stops[order][:-1])
            if len(clash):
                first, second = (self.layers[owner[order[clash[0] + i]]] for i in (0, 1))
                raise self._error(
                    f"layer {second!r}: shares bytes with layer {first!r} of the same group; a layer that reuses"
                    " another one's KV has no pages of its own and must not be declared"
                )

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"paged layout {self.arrangement}: {problem}")
