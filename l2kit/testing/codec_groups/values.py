"""Bytes that KV caches hold, and bytes that codecs stumble over; made without numpy or torch."""

from __future__ import annotations

import math
import random
import struct
from typing import Final

from l2kit.layout import DTYPES, Layout

#: Exponent bits, mantissa bits, and the bit patterns (without sign) that are infinite or not a number.
_FLOATS: Final[dict[str, tuple[int, int]]] = {
    "float16": (5, 10),
    "bfloat16": (8, 7),
    "float32": (8, 23),
    "float64": (11, 52),
    "float8_e5m2": (5, 2),
    "float8_e4m3fn": (4, 3),
    "float8_e5m2fnuz": (5, 2),
    "float8_e4m3fnuz": (4, 3),
}


def layouts_of(dtype: str) -> list[Layout]:
    """Small layouts of every arrangement that this element type has, odd sizes among them."""
    found = [
        Layout.kv(layers=2, tokens=16, kv_heads=2, head_dim=8, dtype=dtype),
        Layout.kv(layers=1, tokens=1, kv_heads=1, head_dim=1, dtype=dtype),
        Layout.kv(layers=3, tokens=5, kv_heads=3, head_dim=7, dtype=dtype),
        Layout.mla(layers=2, tokens=7, latent_dim=9, dtype=dtype),
    ]
    if dtype == "uint8":
        found += [
            Layout.pages(layers=2, blocks=3, page_bytes=96, tokens=48),
            *(Layout.raw(nbytes) for nbytes in (0, 1, 255, 4096, 4097)),
        ]
    return found


def ordinary(layout: Layout, seed: int = 0) -> bytes:
    """Finite values as a model makes them: around zero, with a few channels that are much larger."""
    generator = random.Random(f"{seed}/{layout}")
    size = DTYPES[layout.dtype][1]
    count = layout.nbytes // size
    if layout.dtype not in _FLOATS:
        return generator.randbytes(layout.nbytes)
    if size == 1:
        finite = [pattern for pattern in range(256) if _is_finite(layout.dtype, pattern)]
        return bytes(generator.choices(finite, k=count))
    width = layout.shape[-1]
    values = [generator.gauss(0, 30.0 if index % width == 3 else 1.0) for index in range(count)]
    if layout.dtype == "bfloat16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{count}{ {'float16': 'e', 'float32': 'f', 'float64': 'd'}[layout.dtype] }", *values)


def awkward(layout: Layout) -> dict[str, bytes]:
    """Contents that codecs get wrong: every byte, special numbers, all the same, all different."""
    nbytes, size = layout.nbytes, DTYPES[layout.dtype][1]
    return {
        "zeros": bytes(nbytes),
        "ones": b"\xff" * nbytes,
        "every byte": _fill(bytes(range(256)), nbytes),
        "every byte, backwards": _fill(bytes(range(255, -1, -1)), nbytes),
        "noise": random.Random(f"noise/{layout}").randbytes(nbytes),
        "one byte in many zeros": bytes(nbytes - 1) + b"\x01" if nbytes else b"",
        "special numbers": _fill(b"".join(specials(layout.dtype)), nbytes) if nbytes % size == 0 else bytes(nbytes),
    }


def specials(dtype: str) -> list[bytes]:
    """Bit patterns of an element type: both zeros, denormals, extremes, infinities, and NaNs with payloads."""
    size = DTYPES[dtype][1]
    bits = 8 * size
    if dtype not in _FLOATS:
        patterns = [0, 1, (1 << (bits - 1)) - 1, 1 << (bits - 1), (1 << bits) - 1]
    else:
        _, mantissa = _FLOATS[dtype]
        top = (1 << (bits - 1)) - 1
        infinity = top >> mantissa << mantissa
        positive = [0, 1, (1 << mantissa) - 1, 1 << mantissa, infinity - 1, infinity, infinity + 1, top - 1, top]
        patterns = [pattern | sign for pattern in positive for sign in (0, 1 << (bits - 1))]
    return [pattern.to_bytes(size, "little") for pattern in patterns]


def _is_finite(dtype: str, pattern: int) -> bool:
    if dtype.endswith("fnuz"):
        return pattern != 0x80
    if dtype == "float8_e4m3fn":
        return pattern & 0x7F != 0x7F
    return pattern & 0x7C != 0x7C


def _fill(pattern: bytes, nbytes: int) -> bytes:
    return (pattern * math.ceil(nbytes / len(pattern)))[:nbytes]
