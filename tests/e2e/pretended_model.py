"""The model that the scheduler harness pretends to serve: a configuration and a KV cache layout, and no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYERS = 2
KV_HEADS = 2
HEAD_SIZE = 32
"""2 layers, 2 KV heads, head size 32, bfloat16: 512 bytes of KV per token."""

MAX_CONTEXT_TOKENS = 4096


def write_config(work_dir: Path) -> Path:
    """Write the model's ``config.json`` below ``work_dir`` and return its folder; there are no weights."""
    folder = work_dir / "pretended-model"
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2 * KV_HEADS * HEAD_SIZE,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2 * KV_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": 1024,
        "max_position_embeddings": MAX_CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def kv_cache_config(num_blocks: int, block_size: int, sliding_window: int | None = None) -> Any:
    """The ``KVCacheConfig`` that vLLM would make for this model on a CPU.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        sliding_window: add a second group of layers, with a window of so many tokens.
    """
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        SlidingWindowSpec,
    )

    shape = {
        "block_size": block_size,
        "num_kv_heads": KV_HEADS,
        "head_size": HEAD_SIZE,
        "dtype": torch.bfloat16,
    }
    specs: list[Any] = [FullAttentionSpec(**shape)]
    if sliding_window is not None:
        specs.append(SlidingWindowSpec(**shape, sliding_window=sliding_window))
    page_bytes = specs[0].page_size_bytes
    # Each group has its own layers; the groups lie over each other in one storage, as vLLM places them.
    groups = [
        KVCacheGroupSpec([f"model.layers.{group * LAYERS + i}.self_attn.attn" for i in range(LAYERS)], spec)
        for group, spec in enumerate(specs)
    ]
    tensors = [
        KVCacheTensor(
            size=LAYERS * num_blocks * page_bytes,
            layers=list(group.layer_names),
            layer_stride=num_blocks * page_bytes,
            block_stride=page_bytes,
        )
        for group in groups
    ]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        kv_cache_layout="LBHNC",
        hash_block_size=block_size,
        cache_hit_alignment_tokens=block_size,
    )
