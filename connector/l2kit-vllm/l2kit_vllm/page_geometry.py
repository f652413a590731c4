"""Where each token's bytes lie inside a page, for every arrangement that we know. Pure arithmetic: no tensors, no I/O.

A *page* here is what one index of a registered tensor selects: a vLLM block, or one of the equal kernel blocks that a
block is cut into. Everything is said in strides, so that one description serves numpy on the host and torch on a
device: a `Strided` is an n-dimensional view of the bytes of one storage.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt


class Arrangement(enum.StrEnum):
    """How K and V of one page lie in memory. B pages, N tokens, H heads, D elements per head, C = D of K + D of V.

    The shape is that of the registered tensor; "in memory" is the order of its bytes, which a shape alone never says.
    """

    HND_PACKED = "hnd_packed"
    """``[B, H, N, C]``, in memory H, N, C: each (head, token) row holds its K, then its V. GPU, vLLM's ``L*BHNC``."""
    NHD_PACKED = "nhd_packed"
    """``[B, H, N, C]``, in memory N, H, C: the same rows, token by token. GPU, vLLM's ``*BNHC``."""
    CPU_VEC = "cpu_vec"
    """``[B, H, N, C]``, but each head is K ``[D, N]`` (transposed), then V ``[N, D]``. vLLM on CPUs without AMX."""
    CPU_AMX = "cpu_amx"
    """``[B, H, N, C]``, but each head is K ``[N/16, D/2, 16, 2]``, then V ``[D/16, N/2, 16, 2]``. vLLM with AMX."""
    NHD_SPLIT = "nhd_split"
    """``[2, B, N, H, D]``: all K pages, then all V pages."""
    HND_SPLIT = "hnd_split"
    """``[2, B, N, H, D]``, in memory 2, B, H, N, D."""
    NHD_BLOCKS = "nhd_blocks"
    """``[B, 2, N, H, D]``: each page is its K, then its V."""
    HND_BLOCKS = "hnd_blocks"
    """``[B, 2, N, H, D]``, in memory B, 2, H, N, D."""
    MLA = "mla"
    """``[B, N, C]`` or ``[B, 1, N, C]``: one latent row per token, rope part included."""


#: Axes of the registered tensor, outermost first. "2" is the axis of K and V.
AXES: Final[Mapping[Arrangement, str]] = {
    Arrangement.HND_PACKED: "BHNC",
    Arrangement.NHD_PACKED: "BHNC",
    Arrangement.CPU_VEC: "BHNC",
    Arrangement.CPU_AMX: "BHNC",
    Arrangement.NHD_SPLIT: "2BNHD",
    Arrangement.HND_SPLIT: "2BNHD",
    Arrangement.NHD_BLOCKS: "B2NHD",
    Arrangement.HND_BLOCKS: "B2NHD",
    Arrangement.MLA: "BHNC",
}

_AMX_TOKENS: Final = 32  # an AMX page is a whole number of 32-token tiles
_AMX_DIMS: Final = 16


@dataclass(frozen=True, slots=True)
class Strided:
    """A view of one storage: ``offset`` and ``strides`` in bytes, ``shape`` in elements, first axis the page."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerMap:
    """One layer's pages, seen twice.

    Attributes:
        runs: ``[page, run, byte]``: the contiguous runs of a page. Laid end to end they are its native bytes.
        planes: K and V, or the one latent plane, each ``[page, n1, n0, head, d1, d0]`` in elements. Token ``n`` of a
            page is at ``n1, n0 = divmod(n, n0's size)``; element ``d`` of a head likewise.
    """

    runs: Strided
    planes: tuple[Strided, ...]


@dataclass(frozen=True, slots=True)
class PageShape:
    """The measures of one page of one layer: ``tokens`` x ``kv_heads`` x (``head_dim`` + ``head_dim_v``) elements."""

    arrangement: Arrangement
    tokens: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    itemsize: int

    @property
    def content(self) -> int:
        """Elements of one (head, token): C."""
        return self.head_dim + self.head_dim_v

    @property
    def nbytes(self) -> int:
        """Bytes of one page, without padding."""
        return self.tokens * self.kv_heads * self.content * self.itemsize

    @property
    def planes(self) -> int:
        """2 (K and V), or 1 for a latent."""
        return 1 if self.arrangement is Arrangement.MLA else 2

    def problem(self) -> str | None:
        """Say why no page of this arrangement can have these measures, or return None."""
        split = "D" in AXES[self.arrangement]
        cpu = self.arrangement in {Arrangement.CPU_VEC, Arrangement.CPU_AMX}
        if self.arrangement is Arrangement.MLA:
            if self.kv_heads != 1 or self.head_dim_v != 0:
                return f"needs 1 head without a V of its own, not {self.kv_heads} and V size {self.head_dim_v}"
        elif (split or cpu) and self.head_dim != self.head_dim_v:
            return f"needs equal K and V sizes, not {self.head_dim} and {self.head_dim_v}"
        tiles = self.itemsize <= 2 and self.tokens % _AMX_TOKENS == 0 and self.head_dim % _AMX_DIMS == 0
        if self.arrangement is Arrangement.CPU_AMX and not tiles:
            return (
                f"needs elements of 1 or 2 bytes, a multiple of {_AMX_TOKENS} tokens and of {_AMX_DIMS} elements"
                f" per head, not {self.itemsize} bytes, {self.tokens} tokens and {self.head_dim} elements"
            )
        return None

    def sizes(self, pages: int) -> dict[str, int]:
        """Size of each axis of a tensor of ``pages`` pages, by its letter."""
        return {
            "2": 2,
            "B": pages,
            "H": self.kv_heads,
            "N": self.tokens,
            "C": self.content,
            "D": self.head_dim,
        }

    def inner_strides(self) -> dict[str, int]:
        """Strides in elements that the arrangement fixes inside a page; the axes not named are the allocator's."""
        n, h, c, d = self.tokens, self.kv_heads, self.content, self.head_dim
        match self.arrangement:
            case Arrangement.HND_PACKED | Arrangement.MLA:
                return {"N": c, "C": 1}
            case Arrangement.NHD_PACKED:
                return {"N": h * c, "H": c, "C": 1}
            case Arrangement.CPU_VEC | Arrangement.CPU_AMX:
                return {"H": n * c, "N": c, "C": 1}
            case Arrangement.NHD_SPLIT | Arrangement.NHD_BLOCKS:
                return {"N": h * d, "H": d, "D": 1}
            case Arrangement.HND_SPLIT | Arrangement.HND_BLOCKS:
                return {"H": n * d, "N": d, "D": 1}

    def dense_strides(self) -> dict[str, int]:
        """Strides in elements of all axes when pages lie packed one after the other: the native bytes' own order."""
        n, h, c, d = self.tokens, self.kv_heads, self.content, self.head_dim
        return {"H": n * c, "2": n * h * d} | self.inner_strides() | {"B": n * h * c}

    def layer_map(self, offset: int, pages: int, strides: Mapping[str, int]) -> LayerMap:
        """Map ``pages`` pages that start ``offset`` bytes into a storage; ``strides`` in elements, by axis letter."""
        s = self.dense_strides() | dict(strides) | self.inner_strides()
        n, h, c, d = self.tokens, self.kv_heads, self.content, self.head_dim

        def view(shift: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> Strided:
            at = offset + shift * self.itemsize
            return Strided(at, (pages, *shape), tuple(step * self.itemsize for step in (s["B"], *steps)))

        def rows(shift: int, dim: int) -> Strided:  # each (token, head) has its elements side by side
            return view(shift, (n, 1, h, 1, dim), (s["N"], 0, s["H"], 0, 1))

        planes: tuple[Strided, ...]
        count, step, length = 1, 0, n * h * c
        match self.arrangement:
            case Arrangement.MLA:
                planes = (rows(0, c),)
            case Arrangement.HND_PACKED | Arrangement.NHD_PACKED:
                planes = (rows(0, d), rows(d, self.head_dim_v))
                if self.arrangement is Arrangement.HND_PACKED and s["H"] != n * c:
                    count, step, length = h, s["H"], n * c  # heads are the outer axis of the whole pool
            case Arrangement.CPU_VEC:
                k = view(0, (n, 1, h, 1, d), (1, 0, s["H"], 0, n))
                planes = (k, view(n * d, (n, 1, h, 1, d), (d, 0, s["H"], 0, 1)))
            case Arrangement.CPU_AMX:
                k = view(0, (n // 16, 16, h, d // 2, 2), (16 * d, 2, s["H"], 32, 1))
                planes = (k, view(n * d, (n // 2, 2, h, d // 16, 16), (32, 1, s["H"], 16 * n, 2)))
            case _:
                planes = (rows(0, d), rows(s["2"], d))
                if s["2"] != n * h * d:
                    count, step, length = 2, s["2"], n * h * d
        size = self.itemsize
        runs = Strided(offset, (pages, count, length * size), (s["B"] * size, step * size, 1))
        return LayerMap(runs, planes)

    def native_map(self, pages: int) -> LayerMap:
        """Map ``pages`` pages laid end to end, as they are in a native object."""
        return self.layer_map(0, pages, {})


def dense_plane(plane: Strided, itemsize: int) -> bool:
    """True when a page of the plane is one run of bytes in the order of the canonical layout: token, head, element."""
    wanted = itemsize
    for size, stride in zip(reversed(plane.shape[1:]), reversed(plane.strides[1:]), strict=True):
        if size > 1 and stride != wanted:
            return False
        wanted *= size
    return True


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens that one copy moves: ``count`` whole pages, or tokens ``[start, stop)`` of a single one.

    ``at`` is the first token's distance from the start of the range that was split.
    """

    page: int
    count: int
    start: int
    stop: int
    at: int


def split_tokens(start: int, stop: int, page_tokens: int) -> Iterator[Piece]:
    """Cut tokens ``[start, stop)`` of a run of pages at the page boundaries: at most three pieces."""
    at = start
    while at < stop:
        page, inside = divmod(at, page_tokens)
        whole = (stop - at) // page_tokens
        if inside == 0 and whole:
            yield Piece(page, whole, 0, page_tokens, at - start)
            at += whole * page_tokens
        else:
            end = min(page_tokens, inside + stop - at)
            yield Piece(page, 1, inside, end, at - start)
            at += end - inside


def byte_ranges(runs: Strided) -> tuple[npt.NDArray[np.int64], int]:
    """Start and common length in bytes of the ranges that all pages cover; pages that touch are merged into one."""
    pages, count, length = runs.shape
    page_step, run_step, _ = runs.strides
    starts = runs.offset + np.arange(count, dtype=np.int64) * run_step
    if page_step == length:
        return starts, pages * length
    return (starts[:, None] + np.arange(pages, dtype=np.int64) * page_step).ravel(), length
