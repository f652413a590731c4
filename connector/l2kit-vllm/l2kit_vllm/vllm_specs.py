"""From vLLM's declarations (cache spec, layout name, attention backend) to a `PagedLayout`; unknown means refused.

Read off vLLM 0.29 and 0.32. Nothing here imports vLLM when it is imported; specs and backends are known by the names
of their classes, because a backend's ``get_name()`` is shared by implementations that store different bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from l2kit.errors import ConfigError, nearest
from l2kit_vllm.page_geometry import Arrangement
from l2kit_vllm.paged_layout import PagedLayout

#: Token-paged specs. Others (Mamba, cross attention, ring buffers, sinks) keep state that is no function of a prefix.
SPECS: Final = (
    "FullAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowMLASpec",
)
#: Backends whose kernels read ``[B, H, N, K + V]`` rows as they are declared, in any layout.
PACKED_BACKENDS: Final = (
    "FlashAttentionBackend",
    "FlashAttentionDiffKVBackend",
    "FlashInferBackend",
    "TritonAttentionBackend",
    "TritonAttentionDiffKVBackend",
    "FlexAttentionBackend",
)
#: Backends that keep one latent row per token.
MLA_BACKENDS: Final = (
    "CPUMLABackend",
    "AMXMLABackend",
    "TritonMLABackend",
    "FlashMLABackend",
    "FlashAttnMLABackend",
    "CutlassMLABackend",
    "FlashInferMLABackend",
    "AiterMLABackend",
)
CPU_BACKEND: Final = "CPUAttentionBackend"
#: Order of the bytes that each instruction set's CPU kernels write; those of ARM, s390x, POWER and RISC-V are unread.
CPU_ISAS: Final[Mapping[str, Arrangement]] = {
    "vec": Arrangement.CPU_VEC,
    "vec16": Arrangement.CPU_VEC,
    "amx": Arrangement.CPU_AMX,
}
#: vLLM's layout names say the order of layer, block, head, token, content in memory.
LAYOUTS: Final[Mapping[str, Arrangement]] = {
    "LBHNC": Arrangement.HND_PACKED,
    "LHBNC": Arrangement.HND_PACKED,
    "BLHNC": Arrangement.HND_PACKED,
    "BHLNC": Arrangement.HND_PACKED,
    "HND": Arrangement.HND_PACKED,
    "LBNHC": Arrangement.NHD_PACKED,
    "BLNHC": Arrangement.NHD_PACKED,
    "NHD": Arrangement.NHD_PACKED,
}
_QUANT_MODES: Final = {0, 1}  # KVQuantMode.NONE and FP8_PER_TENSOR: the page holds elements and nothing else
_FP8_E4M3: Final = ("fp8", "fp8_e4m3", "fp8_inc")


def from_vllm(
    spec: Any,
    tensors: Mapping[str, torch.Tensor],
    *,
    layers: Sequence[str],
    num_blocks: int,
    backend: type | str,
    kv_cache_layout: str,
    cache_dtype: str = "auto",
    cpu_isa: str | None = None,
    fp8_dtype: torch.dtype | None = None,
) -> PagedLayout:
    """Declare one KV cache group as vLLM declares it, and check the registered tensors against it.

    Args:
        spec: the group's ``kv_cache_spec``; a ``UniformTypeKVCacheSpecs`` is taken when its layers are all alike.
        tensors: what ``register_kv_caches`` was given; layers of other groups are ignored.
        layers: the group's ``layer_names``, without layers that reuse another layer's KV.
        num_blocks: ``kv_cache_config.num_blocks``.
        backend: the layers' attention backend class, ``layer.get_attn_backend()``, or its class name.
        kv_cache_layout: ``kv_cache_config.kv_cache_layout``, e.g. ``LBHNC``.
        cache_dtype: ``layer.kv_cache_dtype`` or ``cache_config.cache_dtype``; ``auto`` for the model's own.
        cpu_isa: ``layer.isa``; needed with the CPU backend only, which packs pages for its instruction set.
        fp8_dtype: what this platform means by ``fp8``; None asks ``vllm.platforms.current_platform``.

    Raises:
        ConfigError: the spec, backend, layout, instruction set or dtype is not one that we know by name, or a tensor
            is not what was declared.
    """
    names = tuple(layers)
    spec = _single_spec(spec, names)
    backend_name = backend if isinstance(backend, str) else backend.__name__
    arrangement = _arrangement(spec, backend_name, kv_cache_layout, cpu_isa)
    mla = arrangement is Arrangement.MLA
    layout = PagedLayout(
        arrangement,
        names,
        num_blocks,
        block_size=spec.block_size,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        head_dim_v=0 if mla else spec.head_size_v,
        dtype=_dtype(spec.dtype, cache_dtype, fp8_dtype),
        kernel_block_size=_kernel_block_size(spec.block_size, names[0] if names else "", tensors, num_blocks),
        page_size_bytes=spec.page_size_bytes,
    )
    if layout.block_bytes != spec.unpadded_page_size_bytes:
        raise ConfigError(
            f"paged layout {arrangement}: {type(spec).__name__} declares pages of {spec.unpadded_page_size_bytes}"
            f" bytes, its heads and sizes make {layout.block_bytes}; layers {names[0]} ff. hold something unknown"
        )
    layout.map_layers(tensors)
    return layout


def _single_spec(spec: Any, layers: tuple[str, ...]) -> Any:
    by_layer = getattr(spec, "kv_cache_specs", None)
    if isinstance(by_layer, Mapping):
        specs = [by_layer[name] for name in layers if name in by_layer]
        if len(specs) != len(layers) or not specs:
            missing = [name for name in layers if name not in by_layer]
            raise ConfigError(f"paged layout: {type(spec).__name__} has no spec for layers {missing}")
        for name, other in zip(layers, specs, strict=True):
            if other != specs[0]:
                raise ConfigError(
                    f"paged layout: layers {layers[0]!r} and {name!r} of one group differ ({specs[0]} and {other});"
                    " declare them apart"
                )
        spec = specs[0]
    name = type(spec).__name__
    if name not in SPECS:
        raise ConfigError(f"paged layout: no arrangement is known for {name}{nearest(name, SPECS)}")
    odd = {
        "kv_quant_mode": getattr(spec, "kv_quant_mode", 0) not in _QUANT_MODES,
        "num_head_slots": getattr(spec, "num_head_slots", None) is not None,
        "state_content_bytes": getattr(spec, "state_content_bytes", None) is not None,
        "tokens_per_state": getattr(spec, "tokens_per_state", 1) != 1,
    }
    for field, refused in odd.items():
        if refused:
            value = getattr(spec, field)
            raise ConfigError(f"paged layout: {name}.{field} = {value!s} packs pages in a way that is not known")
    return spec


def _arrangement(spec: Any, backend: str, kv_cache_layout: str, cpu_isa: str | None) -> Arrangement:
    known = (CPU_BACKEND, *PACKED_BACKENDS, *MLA_BACKENDS)
    if backend not in known:
        raise ConfigError(f"paged layout: no arrangement is known for backend {backend!r}{nearest(backend, known)}")
    if (backend in MLA_BACKENDS) != type(spec).__name__.endswith(("MLASpec", "MLAAttentionSpec")):
        raise ConfigError(f"paged layout: backend {backend!r} does not go with {type(spec).__name__}")
    if kv_cache_layout not in LAYOUTS:
        hint = nearest(kv_cache_layout, LAYOUTS)
        raise ConfigError(f"paged layout: unknown KV cache layout {kv_cache_layout!r}{hint}")
    if backend in MLA_BACKENDS:
        return Arrangement.MLA
    if backend in PACKED_BACKENDS:
        return LAYOUTS[kv_cache_layout]
    if kv_cache_layout not in {"LBHNC", "HND"}:
        raise ConfigError(f"paged layout: {backend} with layout {kv_cache_layout!r}, only LBHNC is known")
    arrangement = CPU_ISAS.get(cpu_isa or "")
    if arrangement is None:
        raise ConfigError(
            f"paged layout: the CPU backend's pages for instruction set {cpu_isa!r} are not known"
            f"{nearest(cpu_isa or '', CPU_ISAS)}"
        )
    return arrangement


def _dtype(spec_dtype: torch.dtype, cache_dtype: str, fp8_dtype: torch.dtype | None) -> str:
    declared = str(spec_dtype).removeprefix("torch.")
    if cache_dtype in _FP8_E4M3:
        if fp8_dtype is None:
            from vllm.platforms import current_platform

            fp8_dtype = current_platform.fp8_dtype()
        return str(fp8_dtype).removeprefix("torch.")
    if cache_dtype == "fp8_e5m2":
        return "float8_e5m2"
    if cache_dtype not in {"auto", declared} or spec_dtype not in {torch.bfloat16, torch.float16, torch.float32}:
        raise ConfigError(f"paged layout: cache dtype {cache_dtype!r} stored as {declared} has no known element type")
    return declared


def _kernel_block_size(block_size: int, layer: str, tensors: Mapping[str, torch.Tensor], num_blocks: int) -> int:
    """Tokens per tensor index: vLLM cuts blocks for kernels that want smaller ones, and says so only in the tensors."""
    tensor = tensors.get(layer)
    if tensor is None or tensor.dim() == 0 or num_blocks < 1:
        return block_size  # refused with its reason when the tensors are checked
    ratio, rest = divmod(tensor.shape[0], num_blocks)
    return block_size // ratio if ratio > 1 and not rest and block_size % ratio == 0 else block_size
