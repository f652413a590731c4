"""What the bytes of one object mean: element type, shape, arrangement and exact size.

Arrangements (``kind``):

- ``kv_2ltd``: canonical multi-head KV, ``[2 (K, V), layer, token, kv_head * head_dim]``.
- ``mla``: canonical multi-head latent attention, ``[layer, token, latent]``.
- ``pages``: native; the engine's own pages in their own byte order, ``[layer, block, page byte]``.
- ``raw``: opaque bytes.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec

from l2kit.errors import ConfigError, nearest

Kind = Literal["kv_2ltd", "mla", "pages", "raw"]

KIND_CODES: Final[dict[Kind, int]] = {"raw": 0, "kv_2ltd": 1, "mla": 2, "pages": 3}

#: Element types by their full name: (wire code, bytes per element). Codes are part of the envelope: never reuse one.
DTYPES: Final[dict[str, tuple[int, int]]] = {
    "uint8": (1, 1),
    "int8": (2, 1),
    "float16": (3, 2),
    "bfloat16": (4, 2),
    "float32": (5, 4),
    "float8_e4m3fn": (6, 1),
    "float8_e4m3fnuz": (7, 1),
    "float8_e5m2": (8, 1),
    "float8_e5m2fnuz": (9, 1),
    "float64": (10, 8),
}


class Layout(msgspec.Struct, frozen=True):
    """Shape and element type of one object. Build it with :meth:`kv`, :meth:`mla`, :meth:`pages` or :meth:`raw`.

    ``tokens`` is the number of prompt tokens covered (0 for ``raw``). ``shape`` is C-contiguous, in elements.
    """

    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    tokens: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype: unknown element type {self.dtype!r}{nearest(self.dtype, DTYPES)}")
        if self.kind not in KIND_CODES:
            raise ConfigError(f"kind: unknown layout {self.kind!r}{nearest(self.kind, KIND_CODES)}")
        if not 1 <= len(self.shape) <= 6 or any(n < 0 for n in self.shape):
            raise ConfigError(f"shape: {self.shape} needs 1 to 6 dimensions, none of them negative")
        if self.kind != "raw" and (self.tokens < 1 or any(n < 1 for n in self.shape)):
            raise ConfigError(f"shape: {self.shape} with {self.tokens} tokens holds nothing; every size must be >= 1")

    @property
    def nbytes(self) -> int:
        """Exact size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]

    @property
    def layers(self) -> int:
        """Number of layers covered; 0 for ``raw``."""
        return {"kv_2ltd": self.shape[1] if len(self.shape) > 1 else 0, "raw": 0}.get(self.kind, self.shape[0])

    @classmethod
    def kv(cls, *, layers: int, tokens: int, kv_heads: int, head_dim: int, dtype: str) -> Layout:
        """Canonical ``KV_2LTD``: ``[2, layers, tokens, kv_heads * head_dim]``."""
        return cls("kv_2ltd", dtype, (2, layers, tokens, kv_heads * head_dim), tokens)

    @classmethod
    def mla(cls, *, layers: int, tokens: int, latent_dim: int, dtype: str) -> Layout:
        """Canonical MLA: ``[layers, tokens, latent_dim]`` (latent and rope parts side by side)."""
        return cls("mla", dtype, (layers, tokens, latent_dim), tokens)

    @classmethod
    def pages(cls, *, layers: int, blocks: int, page_bytes: int, tokens: int) -> Layout:
        """Native pages: ``[layers, blocks, page_bytes]`` bytes, exactly as they lie in the engine's memory."""
        return cls("pages", "uint8", (layers, blocks, page_bytes), tokens)

    @classmethod
    def raw(cls, nbytes: int) -> Layout:
        """``nbytes`` opaque bytes; 0 is allowed."""
        return cls("raw", "uint8", (nbytes,))
