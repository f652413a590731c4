"""Gather and scatter between paged KV tensors and objects: the one door through which KV bytes enter and leave pages.

```python
layout = from_vllm(group.kv_cache_spec, kv_caches, layers=group.layer_names, ...)
pages = GPUConnector(layout, kv_caches, "native")
obj = MemoryObj.allocate(pages.object_layout(256))
pages.gather(block_ids, 0, 256, obj).wait()  # pages to object
pages.scatter(other_block_ids, 0, 256, obj).wait()  # object to other pages
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch

from l2kit.errors import ConfigError, nearest
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit_vllm.cuda_transfers import CudaTransfers
from l2kit_vllm.host_pages import HostPages
from l2kit_vllm.object_bytes import Span
from l2kit_vllm.paged_layout import PagedLayout
from l2kit_vllm.transfer import Transfer

Representation = Literal["native", "canonical"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One object and the tokens of a request that it holds.

    Attributes:
        block_ids: the request's block table: token ``t`` lies in block ``block_ids[t // block_size]``.
        start_token, end_token: the tokens ``[start, end)`` of the request.
        obj: memory of the connector's ``object_layout(end - start)``.
        skip_prefix_n_tokens: tokens from ``start`` on that a scatter leaves as they are in the pages.
    """

    block_ids: Sequence[int]
    start_token: int
    end_token: int
    obj: MemoryObj
    skip_prefix_n_tokens: int = 0


class GPUConnector:
    """Moves the KV of one cache group between its pages and objects, on the CPU or on one CUDA device.

    - ``native`` objects hold whole pages in their own byte order: the fastest, for an equal `PagedLayout.fingerprint`
      on both sides. They start and end at block boundaries; only ``skip_prefix_n_tokens`` may be anywhere.
    - ``canonical`` objects hold tokens (``KV_2LTD`` or MLA), whatever the arrangement and block size; they start and
      end anywhere.
    - Only the slots of the tokens named are read or written: no other token, block, layer or group, though they may
      share the storage.
    - On the CPU a call copies in the calling thread and has ended when it returns; calls from several threads are safe
      where they write to different blocks and objects. On CUDA a call enqueues copies on a side stream, see `Transfer`.
    - CUDA calls take ``ready``: an event behind the work that wrote the pages to be gathered, or that still reads the
      pages to be overwritten. Without it, the calling thread's current stream is waited for: right in the thread
      that runs the forward, and nowhere else.
    """

    def __init__(
        self,
        layout: PagedLayout,
        tensors: Mapping[str, torch.Tensor],
        representation: Representation = "native",
    ) -> None:
        """Take the registered tensors; they are kept alive and must stay where they are.

        Raises:
            ConfigError: a tensor is not what ``layout`` declares, the representation cannot hold it, or the device is
                neither a CPU nor CUDA.
        """
        if representation not in {"native", "canonical"}:
            known = nearest(representation, ("native", "canonical"))
            raise ConfigError(f"representation: unknown {representation!r}{known}")
        if representation == "canonical" and not layout.is_mla and layout.head_dim_v != layout.head_dim:
            raise ConfigError(
                f"representation: canonical KV needs equal K and V sizes, {layout.arrangement} has {layout.head_dim}"
                f" and {layout.head_dim_v}; use native"
            )
        maps = layout.map_layers(tensors)
        ours = [tensors[name] for name in layout.layers]
        devices = {str(tensor.device) for tensor in ours}
        kind = ours[0].device.type
        if len(devices) > 1 or kind not in {"cpu", "cuda"}:
            found = ", ".join(sorted(devices))
            raise ConfigError(f"paged layout {layout.arrangement}: layers on {found}; expected one CPU or CUDA device")
        self.layout: Final = layout
        self.representation: Final = representation
        self.device: Final = ours[0].device
        self.engine: Final = (HostPages if kind == "cpu" else CudaTransfers)(layout.page, maps, ours)

    def object_layout(self, tokens: int) -> Layout:
        """Layout of the object that holds ``tokens`` tokens of all layers.

        Raises:
            ConfigError: ``tokens`` is below 1, or, natively, not a whole number of blocks.
        """
        layout, layers = self.layout, len(self.layout.layers)
        if self.representation == "native":
            blocks, rest = divmod(tokens, layout.block_size)
            if rest:
                raise ConfigError(f"tokens: {tokens} is no whole number of blocks of {layout.block_size} (native)")
            return Layout.pages(layers=layers, blocks=blocks, page_bytes=layout.block_bytes, tokens=tokens)
        if layout.is_mla:
            return Layout.mla(layers=layers, tokens=tokens, latent_dim=layout.head_dim, dtype=layout.dtype)
        return Layout.kv(
            layers=layers, tokens=tokens, kv_heads=layout.kv_heads, head_dim=layout.head_dim, dtype=layout.dtype
        )

    def gather(
        self,
        block_ids: Sequence[int],
        start_token: int,
        end_token: int,
        obj: MemoryObj,
        *,
        ready: torch.cuda.Event | None = None,
    ) -> Transfer:
        """Copy tokens ``[start_token, end_token)`` out of their pages into ``obj``; the same as one `gather_many`."""
        return self.gather_many([Chunk(block_ids, start_token, end_token, obj)], ready=ready)

    def scatter(
        self,
        block_ids: Sequence[int],
        start_token: int,
        end_token: int,
        obj: MemoryObj,
        *,
        skip_prefix_n_tokens: int = 0,
        ready: torch.cuda.Event | None = None,
    ) -> Transfer:
        """Copy ``obj`` into the pages of its tokens; the same as one `scatter_many`.

        The first ``skip_prefix_n_tokens`` tokens keep the bytes that their slots have, in a block that is partly
        skipped, too.
        """
        chunk = Chunk(block_ids, start_token, end_token, obj, skip_prefix_n_tokens)
        return self.scatter_many([chunk], ready=ready)

    def gather_many(self, chunks: Sequence[Chunk], *, ready: torch.cuda.Event | None = None) -> Transfer:
        """Copy many chunks out of their pages; one `Transfer` for all. ``skip_prefix_n_tokens`` is not looked at.

        Nothing is copied unless every chunk is valid.

        Raises:
            ConfigError: a range, block id or object that does not fit; the message says which.
        """
        spans = [self._span(chunk, 0) for chunk in chunks]
        for chunk in chunks:
            if chunk.obj.read_only:
                raise ConfigError(f"obj: {chunk.obj!r} is read-only and cannot be gathered into")
        return self.engine.gather(spans, ready, native=self.representation == "native")

    def scatter_many(self, chunks: Sequence[Chunk], *, ready: torch.cuda.Event | None = None) -> Transfer:
        """Copy many chunks into their pages; one `Transfer` for all. No slot may be written twice.

        Nothing is copied unless every chunk is valid.

        Raises:
            ConfigError: a range, block id or object that does not fit; the message says which.
        """
        spans = [self._span(chunk, chunk.skip_prefix_n_tokens) for chunk in chunks]
        spans = [span for span in spans if span.skip < span.tokens]
        return self.engine.scatter(spans, ready, native=self.representation == "native")

    def copy_pages(
        self,
        src_ids: Sequence[int],
        dst_ids: Sequence[int],
        *,
        target: GPUConnector | None = None,
        ready: torch.cuda.Event | None = None,
    ) -> Transfer:
        """Copy whole blocks on the device: our block ``src_ids[i]`` becomes ``target``'s block ``dst_ids[i]``.

        ``target`` is this connector by default, or another one of an equal page format on the same device. The result
        is as if all blocks were read before the first is written.

        Raises:
            ConfigError: ids out of range, a destination named twice, lists of different length, or another page format
                or device.
        """
        other = target or self
        if other.layout.fingerprint != self.layout.fingerprint or other.device != self.device:
            raise ConfigError(
                f"target: {other.layout.fingerprint} on {other.device} cannot take pages of"
                f" {self.layout.fingerprint} on {self.device}; go through an object"
            )
        if len(src_ids) != len(dst_ids):
            raise ConfigError(f"dst_ids: {len(dst_ids)} blocks for {len(src_ids)} source blocks")
        source, destination = self.layout.page_indices(src_ids), other.layout.page_indices(dst_ids)
        if len(np.unique(destination)) != len(destination):
            raise ConfigError("dst_ids: a block is named twice")
        match other.engine, self.engine:
            case HostPages() as ours, HostPages() as theirs:
                return ours.copy_from(theirs, source, destination, ready)
            case CudaTransfers() as ours, CudaTransfers() as theirs:
                return ours.copy_from(theirs, source, destination, ready)
        raise ConfigError(f"target: no copies between {self.device} and {other.device}")  # pragma: no cover

    def _span(self, chunk: Chunk, skip: int) -> Span:
        start, end, size = chunk.start_token, chunk.end_token, self.layout.block_size
        if not 0 <= start < end <= len(chunk.block_ids) * size:
            raise ConfigError(f"tokens: [{start}, {end}) is no range within {len(chunk.block_ids)} blocks of {size}")
        if self.representation == "native" and (start % size or end % size):
            raise ConfigError(f"tokens: [{start}, {end}) does not start and end at a block of {size} (native)")
        if not 0 <= skip <= end - start:
            raise ConfigError(f"skip_prefix_n_tokens: {skip} is not within the {end - start} tokens of the chunk")
        expected = self.object_layout(end - start)
        if chunk.obj.layout != expected:
            raise ConfigError(f"obj: layout is {chunk.obj.layout}, expected {expected}")
        pages = self.layout.page_indices(chunk.block_ids[start // size : -(-end // size)])
        first, inside = divmod(start % size, self.layout.page.tokens)
        count = -(-(inside + end - start) // self.layout.page.tokens)
        return Span(chunk.obj, pages[first : first + count], inside, end - start, skip)
