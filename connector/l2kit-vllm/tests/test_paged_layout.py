"""What a declaration accepts, and that everything else is refused by name."""

from __future__ import annotations

import enum
import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from l2kit import ConfigError
from l2kit_vllm.page_geometry import AXES, Arrangement
from l2kit_vllm.paged_layout import PagedLayout
from l2kit_vllm.vllm_specs import from_vllm

BLOCKS, TOKENS, HEADS, DIM = 6, 4, 3, 8


def declared(arrangement: Arrangement = Arrangement.NHD_SPLIT, **changes: Any) -> PagedLayout:
    amx, mla = arrangement is Arrangement.CPU_AMX, arrangement is Arrangement.MLA
    values: dict[str, Any] = {
        "layers": ("a", "b"),
        "num_blocks": BLOCKS,
        "block_size": 32 if amx else TOKENS,
        "kv_heads": 1 if mla else HEADS,
        "head_dim": 16 if amx else DIM,
        "dtype": "bfloat16",
    }
    return PagedLayout(arrangement, **(values | changes))


def dense(layout: PagedLayout, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """One layer's tensor in memory of its own, in the arrangement's order."""
    sizes, strides = layout.page.sizes(layout.num_pages), layout.page.dense_strides()
    if layout.arrangement.endswith("split"):
        strides |= {"B": layout.page.nbytes // layout.page.itemsize // 2}
        strides |= {"2": strides["B"] * layout.num_pages}
    axes = AXES[layout.arrangement]
    flat = torch.zeros(layout.num_pages * layout.page.nbytes // layout.page.itemsize, dtype=dtype)
    return torch.as_strided(flat, [sizes[a] for a in axes], [strides[a] for a in axes])


@pytest.mark.parametrize("arrangement", list(Arrangement), ids=str)
def test_what_is_declared_is_accepted(arrangement: Arrangement) -> None:
    layout = declared(arrangement)
    maps = layout.map_layers({name: dense(layout) for name in (*layout.layers, "of another group")})
    assert len(maps) == 2
    assert len(maps[0].planes) == (1 if layout.is_mla else 2)


@pytest.mark.parametrize("arrangement", list(Arrangement), ids=str)
def test_another_shape_is_refused(arrangement: Arrangement) -> None:
    layout = declared(arrangement)
    good, wide = dense(layout), dense(declared(arrangement, head_dim=layout.head_dim * 2))
    with pytest.raises(ConfigError, match=rf"{arrangement}: layer 'b': shape is .*expected \("):
        layout.map_layers({"a": good, "b": wide})
    with pytest.raises(ConfigError, match="layer 'b': no tensor is registered"):
        layout.map_layers({"a": good})


@pytest.mark.parametrize(
    ("arrangement", "other"),
    [
        (Arrangement.HND_PACKED, Arrangement.NHD_PACKED),
        (Arrangement.NHD_PACKED, Arrangement.HND_PACKED),
        (Arrangement.CPU_VEC, Arrangement.NHD_PACKED),
        (Arrangement.NHD_SPLIT, Arrangement.HND_SPLIT),
        (Arrangement.HND_BLOCKS, Arrangement.NHD_BLOCKS),
    ],
)
def test_the_same_shape_in_another_order_is_refused(arrangement: Arrangement, other: Arrangement) -> None:
    layout = declared(arrangement)
    tensor = dense(declared(other))
    assert tensor.shape == dense(layout).shape
    with pytest.raises(ConfigError, match=rf"{arrangement}: layer 'a': stride is .*expected"):
        layout.map_layers({"a": tensor, "b": tensor})


def test_strides_of_axes_of_one_element_say_nothing() -> None:
    layout = declared(Arrangement.HND_PACKED, kv_heads=1, layers=("a",), num_blocks=1)
    odd = torch.as_strided(torch.zeros(64, dtype=torch.bfloat16), (1, 1, TOKENS, 16), (3, 5, 16, 1))
    assert layout.map_layers({"a": odd})[0].runs.shape == (1, 1, TOKENS * 16 * 2)


@pytest.mark.parametrize(
    ("name", "dtype", "accepted"),
    [
        ("bfloat16", torch.float16, False),
        ("bfloat16", torch.uint8, False),
        ("float8_e4m3fn", torch.uint8, True),
        ("float8_e4m3fn", torch.int8, True),
        ("float8_e4m3fn", torch.float8_e4m3fn, True),
        ("float8_e4m3fn", torch.float8_e5m2, False),
        ("float8_e4m3fnuz", torch.float8_e4m3fn, False),
        ("float32", torch.bfloat16, False),
    ],
)
def test_the_element_type_is_exact_and_bytes_stand_for_fp8(name: str, dtype: torch.dtype, accepted: bool) -> None:
    layout = declared(dtype=name)
    tensors = {layer: dense(layout, dtype) for layer in layout.layers}
    if accepted:
        layout.map_layers(tensors)
    else:
        with pytest.raises(ConfigError, match=rf"layer 'a': dtype is {dtype}, expected .*{name}"):
            layout.map_layers(tensors)


def test_layers_of_one_group_share_no_bytes() -> None:
    layout = declared(Arrangement.MLA)
    pool = torch.zeros(2 * BLOCKS * TOKENS * DIM, dtype=torch.bfloat16)
    first, second = pool.view(2, BLOCKS, TOKENS, DIM)
    layout.map_layers({"a": first, "b": second})
    interleaved = pool.view(BLOCKS, 2, TOKENS, DIM)
    layout.map_layers({"a": interleaved[:, 0], "b": interleaved[:, 1]})
    with pytest.raises(ConfigError, match="layer 'b': shares bytes with layer 'a'"):
        layout.map_layers({"a": first, "b": first})
    shifted = pool[DIM:][: BLOCKS * TOKENS * DIM].view(BLOCKS, TOKENS, DIM)
    with pytest.raises(ConfigError, match="shares bytes"):
        layout.map_layers({"a": first, "b": shifted})
    once = first[:1].expand(BLOCKS, TOKENS, DIM)
    with pytest.raises(ConfigError, match="blocks are 0 bytes apart"):
        layout.only("a").map_layers({"a": once})


def test_padding_is_declared() -> None:
    size = TOKENS * DIM * 2
    layout = declared(Arrangement.MLA, layers=("a",), page_size_bytes=size + 16)
    padded = torch.zeros(BLOCKS, TOKENS + 1, DIM, dtype=torch.bfloat16)[:, :-1]
    assert layout.map_layers({"a": padded})[0].runs.strides[0] == size + 16
    assert layout.block_bytes == size
    with pytest.raises(ConfigError, match=rf"layer 'a': blocks are {size} bytes apart, expected .* {size + 16}"):
        layout.map_layers({"a": dense(layout)})
    with pytest.raises(ConfigError, match=rf"page_size_bytes: {size - 1} declared, {size} needed"):
        replace(layout, page_size_bytes=size - 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bfloat61"}, "did you mean 'bfloat16'"),
        ({"num_blocks": 0}, "num_blocks: 0"),
        ({"kv_heads": -1}, "kv_heads: -1"),
        ({"layers": ()}, "at least one name"),
        ({"layers": ("a", "a")}, "none of them twice"),
        ({"kernel_block_size": 3}, "kernel_block_size: 3 does not divide block_size 4"),
        ({"head_dim_v": 4}, "equal K and V sizes, not 8 and 4"),
        ({"arrangement": Arrangement.MLA}, "needs 1 head"),
        ({"arrangement": Arrangement.CPU_AMX}, "a multiple of 32 tokens"),
    ],
)
def test_declarations_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(declared(), **changes)


def test_fingerprints_differ_wherever_native_bytes_do() -> None:
    base = declared(Arrangement.HND_PACKED, block_size=8)
    others = [
        replace(base, arrangement=Arrangement.NHD_PACKED),
        replace(base, arrangement=Arrangement.CPU_VEC),
        replace(base, layers=("b", "a")),
        replace(base, layers=("a",), page_size_bytes=None),
        replace(base, block_size=16, kernel_block_size=None, page_size_bytes=None),
        replace(base, kernel_block_size=4),
        replace(base, kv_heads=1, page_size_bytes=None),
        replace(base, head_dim=4, head_dim_v=12),
        replace(base, dtype="float16"),
    ]
    assert len({layout.fingerprint for layout in (base, *others)}) == len(others) + 1
    assert replace(base, num_blocks=99).fingerprint == base.fingerprint
    assert replace(base, page_size_bytes=1 << 20).fingerprint == base.fingerprint
    assert base.fingerprint == "1:hnd_packed:bfloat16:b8.8:h3.8.8:l2.ffc151170352baa3"


def test_a_layout_can_be_narrowed_to_single_layers() -> None:
    assert declared().only("b").layers == ("b",)
    with pytest.raises(ConfigError, match=r"did you mean 'layer\.1'"):
        declared(layers=("layer.0", "layer.1")).only("layer.11")


# -- from vLLM's declarations. The spec classes stand for vLLM's: known by name, read by attribute. --


class QuantMode(enum.IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2


@dataclass
class FullAttentionSpec:
    block_size: int = 32
    num_kv_heads: int = 2
    head_size: int = 32
    head_size_v: int = 32
    dtype: torch.dtype = torch.bfloat16
    kv_quant_mode: QuantMode = QuantMode.NONE
    page_size_padded: int | None = None
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int = 1

    @property
    def unpadded_page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * (self.head_size + self.head_size_v) * self.dtype.itemsize

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.unpadded_page_size_bytes


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    pass


@dataclass
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, FullAttentionSpec]


def tensor_of(spec: FullAttentionSpec, order: str = "HN", blocks: int = 5, ratio: int = 1) -> torch.Tensor:
    tokens, content = spec.block_size // ratio, spec.head_size + spec.head_size_v
    if order == "HN":
        return torch.zeros(blocks * ratio, spec.num_kv_heads, tokens, content, dtype=spec.dtype)
    return torch.zeros(blocks * ratio, tokens, spec.num_kv_heads, content, dtype=spec.dtype).transpose(1, 2)


def declare(spec: Any, tensor: torch.Tensor, **changes: Any) -> PagedLayout:
    options: dict[str, Any] = {
        "layers": ["m.0.attn"],
        "num_blocks": 5,
        "backend": "CPUAttentionBackend",
        "kv_cache_layout": "LBHNC",
        "cpu_isa": "vec",
        "fp8_dtype": torch.float8_e4m3fn,
    }
    options |= changes
    return from_vllm(spec, dict.fromkeys(options["layers"], tensor), **options)


def test_the_cpu_backend_is_declared_by_its_instruction_set() -> None:
    spec = FullAttentionSpec()
    layout = declare(spec, tensor_of(spec))
    assert layout == PagedLayout(Arrangement.CPU_VEC, ("m.0.attn",), 5, 32, 2, 32, "bfloat16")
    assert declare(spec, tensor_of(spec), cpu_isa="vec16").arrangement is Arrangement.CPU_VEC
    assert declare(spec, tensor_of(spec), cpu_isa="amx").arrangement is Arrangement.CPU_AMX
    for isa in ("neon", None):
        with pytest.raises(ConfigError, match=f"instruction set {isa!r} are not known"):
            declare(spec, tensor_of(spec), cpu_isa=isa)


@pytest.mark.parametrize(("name", "order"), [("LBNHC", "NH"), ("NHD", "NH"), ("LBHNC", "HN"), ("HND", "HN")])
def test_gpu_backends_are_declared_by_the_layout_name(name: str, order: str) -> None:
    class FlashAttentionBackend:
        pass

    spec = SlidingWindowSpec(block_size=16)
    layout = declare(spec, tensor_of(spec, order), backend=FlashAttentionBackend, kv_cache_layout=name)
    assert layout.arrangement is (Arrangement.HND_PACKED if order == "HN" else Arrangement.NHD_PACKED)
    with pytest.raises(ConfigError, match="stride is"):
        declare(spec, tensor_of(spec, order[::-1]), backend=FlashAttentionBackend, kv_cache_layout=name)


def test_kernel_blocks_cut_a_block() -> None:
    spec = FullAttentionSpec(block_size=64)
    layout = declare(spec, tensor_of(spec, ratio=4), backend="FlashInferBackend")
    assert (layout.block_size, layout.page.tokens, layout.num_pages) == (64, 16, 20)


def test_mla_is_a_latent_row() -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, head_size_v=0)
    layout = declare(spec, tensor_of(spec), backend="CPUMLABackend", cpu_isa=None)
    assert layout == PagedLayout(Arrangement.MLA, ("m.0.attn",), 5, 16, 1, 576, "bfloat16")
    squeezed = tensor_of(spec).squeeze(1)
    assert declare(spec, squeezed, backend="CPUMLABackend") == layout


@pytest.mark.parametrize(
    ("cache_dtype", "expected"),
    [("fp8", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")],
)
def test_fp8_is_named_by_the_cache_config(cache_dtype: str, expected: str) -> None:
    spec = FullAttentionSpec(dtype=torch.uint8, kv_quant_mode=QuantMode.FP8_PER_TENSOR)
    assert declare(spec, tensor_of(spec), cache_dtype=cache_dtype).dtype == expected
    rocm = declare(spec, tensor_of(spec), cache_dtype="fp8", fp8_dtype=torch.float8_e4m3fnuz)
    assert rocm.dtype == "float8_e4m3fnuz"
    with pytest.raises(ConfigError, match="cache dtype 'auto' stored as uint8"):
        declare(spec, tensor_of(spec))


@pytest.mark.parametrize(
    ("spec", "changes", "message"),
    [
        (MambaSpec(), {}, "no arrangement is known for MambaSpec"),
        (FullAttentionSpec(), {"backend": "RocmAttentionBackend"}, "backend 'RocmAttentionBackend'"),
        (FullAttentionSpec(), {"backend": "CPUMLABackend"}, "does not go with FullAttentionSpec"),
        (MLAAttentionSpec(), {}, "'CPUAttentionBackend' does not go with MLAAttentionSpec"),
        (FullAttentionSpec(), {"kv_cache_layout": "LBNHX"}, "did you mean 'LBNHC'"),
        (FullAttentionSpec(), {"kv_cache_layout": "BLHNC"}, "only LBHNC is known"),
        (FullAttentionSpec(), {"cache_dtype": "nvfp4"}, "cache dtype 'nvfp4'"),
        (FullAttentionSpec(num_head_slots=2), {}, "num_head_slots = 2"),
        (FullAttentionSpec(state_content_bytes=656), {}, "state_content_bytes = 656"),
        (FullAttentionSpec(tokens_per_state=4), {}, "tokens_per_state = 4"),
        (FullAttentionSpec(kv_quant_mode=QuantMode.INT8_PER_TOKEN_HEAD), {}, "kv_quant_mode = 2"),
    ],
)
def test_what_vllm_declares_and_we_do_not_know_is_refused_by_name(
    spec: FullAttentionSpec, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        declare(spec, tensor_of(spec), **changes)


def test_a_group_of_unlike_layers_is_refused() -> None:
    one, other = FullAttentionSpec(), FullAttentionSpec(num_kv_heads=4)
    alike = UniformTypeKVCacheSpecs({"a": one, "b": FullAttentionSpec()})
    with pytest.raises(ConfigError, match="shares bytes"):
        declare(alike, tensor_of(one), layers=["a", "b"])
    assert declare(alike, tensor_of(one), layers=["b"]).layers == ("b",)
    with pytest.raises(ConfigError, match="layers 'a' and 'b' of one group differ"):
        declare(UniformTypeKVCacheSpecs({"a": one, "b": other}), tensor_of(one), layers=["a", "b"])
    with pytest.raises(ConfigError, match=r"no spec for layers \['c'\]"):
        declare(alike, tensor_of(one), layers=["a", "c"])


@pytest.mark.e2e
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
def test_vllm_writes_cpu_pages_as_we_declare_them(isa: str) -> None:
    """The declared order against the operation that writes it (which needs no AMX to pack for AMX)."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    from l2kit import MemoryObj
    from l2kit_vllm.gpu_connector import GPUConnector

    current_platform.import_kernels()
    spec = FullAttentionSpec()
    cache = tensor_of(spec)
    layout = declare(spec, cache, cpu_isa=isa)
    key, value = torch.randn(2, 5 * 32, 2, 32).to(torch.bfloat16)
    halves = cache.view(5, 2, 64, 32).chunk(2, dim=2)
    slots = torch.randperm(5 * 32)
    ops.cpu_attn_reshape_and_cache(key[slots], value[slots], *halves, slots, isa)
    pages = GPUConnector(layout, {"m.0.attn": cache}, "canonical")
    obj = MemoryObj.allocate(pages.object_layout(5 * 32))
    pages.gather(range(5), 0, 5 * 32, obj).wait()
    assert obj.tobytes() == torch.stack([key, value]).view(torch.uint8).numpy().tobytes()
