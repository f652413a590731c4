"""Layouts: exact sizes, and codes that stand in envelopes for ever."""

from __future__ import annotations

import pytest

from l2kit.errors import ConfigError
from l2kit.layout import DTYPES, KIND_CODES, Layout

MODELS = [
    ("Llama-3-8B", 32, 8, 128, 33_554_432, 1_048_576),
    ("Llama-3-70B", 80, 8, 128, 83_886_080, 1_048_576),
    ("Llama-3-70B, one of 8 ranks", 80, 1, 128, 10_485_760, 131_072),
    ("Qwen3-8B", 36, 8, 128, 37_748_736, 1_048_576),
    ("Qwen3-32B", 64, 8, 128, 67_108_864, 1_048_576),
    ("Qwen3-30B-A3B", 48, 4, 128, 25_165_824, 524_288),
    ("SmolLM2-135M", 30, 3, 64, 5_898_240, 196_608),
]


@pytest.mark.parametrize(
    ("layers", "heads", "dim", "nbytes", "per_layer"), [m[1:] for m in MODELS], ids=[m[0] for m in MODELS]
)
def test_bytes_of_a_chunk_of_256_tokens(layers: int, heads: int, dim: int, nbytes: int, per_layer: int) -> None:
    chunk = Layout.kv(layers=layers, tokens=256, kv_heads=heads, head_dim=dim, dtype="bfloat16")
    assert chunk.nbytes == nbytes
    assert chunk.shape == (2, layers, 256, heads * dim)
    assert (chunk.layers, chunk.tokens) == (layers, 256)
    assert Layout.kv(layers=1, tokens=256, kv_heads=heads, head_dim=dim, dtype="bfloat16").nbytes == per_layer
    assert (
        Layout.kv(layers=layers, tokens=256, kv_heads=heads, head_dim=dim, dtype="float8_e4m3fn").nbytes == nbytes // 2
    )


def test_bytes_of_a_chunk_of_256_mla_tokens() -> None:
    deepseek_v3 = Layout.mla(layers=61, tokens=256, latent_dim=576, dtype="bfloat16")
    assert deepseek_v3.nbytes == 17_989_632
    assert deepseek_v3.shape == (61, 256, 576)
    assert deepseek_v3.layers == 61
    assert Layout.mla(layers=1, tokens=256, latent_dim=576, dtype="bfloat16").nbytes == 294_912


def test_native_pages() -> None:
    pages = Layout.pages(layers=30, blocks=8, page_bytes=24_576, tokens=256)
    assert pages.nbytes == 30 * 8 * 24_576
    assert (pages.layers, pages.tokens, pages.dtype) == (30, 256, "uint8")


def test_raw() -> None:
    assert Layout.raw(0).nbytes == 0
    assert Layout.raw(123).nbytes == 123
    assert (Layout.raw(123).layers, Layout.raw(123).tokens) == (0, 0)


def test_codes_never_change() -> None:
    assert KIND_CODES == {"raw": 0, "kv_2ltd": 1, "mla": 2, "pages": 3}
    assert DTYPES == {
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


def test_an_unknown_dtype_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'bfloat61'; did you mean 'bfloat16'\?"):
        Layout.kv(layers=1, tokens=1, kv_heads=1, head_dim=1, dtype="bfloat61")


@pytest.mark.parametrize(
    ("kind", "shape", "tokens"),
    [
        ("kv_2ltd", (2, 0, 16, 8), 16),
        ("kv_2ltd", (2, 1, 16, 8), 0),
        ("mla", (1, 16, -8), 16),
        ("pages", (1, 0, 8), 16),
        ("raw", (-1,), 0),
        ("raw", (), 0),
        ("raw", (1,) * 7, 0),
        ("tensor", (1,), 0),
    ],
)
def test_layouts_that_hold_nothing_are_refused(kind: str, shape: tuple[int, ...], tokens: int) -> None:
    with pytest.raises(ConfigError):
        Layout(kind, "uint8", shape, tokens)  # type: ignore[arg-type]
