"""Tiny random language models for end-to-end tests with real vLLM.

A checkpoint is written once per test session in well under a second, starts in vLLM in a few seconds, and needs no
tokenizer: pass ``skip_tokenizer_init=True`` to ``vllm.LLM`` and prompts of token ids.

Why not vLLM's own ``load_format="dummy"``: its weights are so small that the logits come out almost uniform, and then
an answer does not change even when the KV cache is zeroed. A test on such a model proves nothing. The weights here
are drawn with a standard deviation that keeps the activations of every layer near one, so that attention has
something to say: one zeroed block changes the answer's tokens, one per cent more KV changes its log-probabilities.

The models:

===============  =========================================================================================
``llama``        4 layers, 4 KV heads (8 query heads), head size 32; one KV group; ``[blocks, 4, block, 64]``
``mla``          DeepSeek-V2 shape: 3 layers, latent 512 + rope 64 (the only size that vLLM's CPU kernel has);
                 one KV group; ``[blocks, 1, block, 576]``
``gemma3``       6 layers, two of three with a sliding window; vLLM makes three KV groups of two layers, and the
                 layers of different groups lie in the same storage
===============  =========================================================================================
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DtypeName = Literal["bfloat16", "float32"]
Family = Literal["llama", "mla", "gemma3"]

VOCAB_SIZE = 1024
"""Token ids of every tiny model are in ``range(VOCAB_SIZE)``."""

FIRST_PROMPT_TOKEN_ID = 8
"""Ids below this one are reserved for special tokens and never appear in :func:`random_prompt`."""

MAX_CONTEXT_TOKENS = 4096
"""Longest prompt plus answer, in tokens."""

_SEED = 20_240_229
_RECIPE_VERSION = 1  # part of the folder's name: raise it whenever the weights or a config change


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint on disk and the facts about it that a test needs to know.

    Attributes:
        path: folder with ``config.json`` and ``model.safetensors``; what ``LLM(model=…)`` takes.
        family: which architecture.
        dtype: the dtype of weights and KV cache; pass it on as ``LLM(dtype=…)``.
        layers: attention layers with a KV cache.
        kv_heads: KV heads per layer in the paged tensor (1 for MLA).
        state_bytes: bytes of KV per token and layer, all heads, K and V together.
        block_size: tokens per block that vLLM's CPU backend accepts for this model.
        sliding_window: tokens of the window in the sliding-window layers; ``None`` if there are none.
    """

    path: Path
    family: Family
    dtype: DtypeName
    layers: int
    kv_heads: int
    state_bytes: int
    block_size: int
    sliding_window: int | None = None

    def chunk_bytes(self, tokens: int) -> int:
        """Bytes of KV of ``tokens`` tokens over all layers."""
        return tokens * self.layers * self.state_bytes


def make_llama(root: Path, *, dtype: DtypeName = "bfloat16") -> TinyModel:
    """Write (or find) the tiny Llama below ``root``: grouped-query attention, one KV group."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        **_SPECIAL_TOKENS,
    )
    path = _write(root, f"llama-{dtype}", config, dtype)
    state_bytes = 4 * 2 * 32 * _ITEM_BYTES[dtype]
    return TinyModel(path, "llama", dtype, layers=4, kv_heads=4, state_bytes=state_bytes, block_size=32)


def _mla_block_size() -> int:
    """Which MLA backend vLLM takes depends on the processor: that for AMX wants multiples of 32, the other one 16."""
    return 32 if "amx_tile" in Path("/proc/cpuinfo").read_text() else 16


def make_mla(root: Path, *, dtype: DtypeName = "bfloat16") -> TinyModel:
    """Write (or find) the tiny DeepSeek-V2: multi-head latent attention, dense MLPs only.

    No expert layers: they are slow to start on a CPU and have nothing to do with KV.
    """
    from transformers import DeepseekV2Config

    config = DeepseekV2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        first_k_dense_replace=3,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        tie_word_embeddings=False,
        **_SPECIAL_TOKENS,
    )
    path = _write(root, f"mla-{dtype}", config, dtype)
    state_bytes = (512 + 64) * _ITEM_BYTES[dtype]
    return TinyModel(path, "mla", dtype, layers=3, kv_heads=1, state_bytes=state_bytes, block_size=_mla_block_size())


def make_gemma3(root: Path, *, dtype: DtypeName = "bfloat16", sliding_window: int = 128) -> TinyModel:
    """Write (or find) the tiny Gemma-3: four sliding-window layers and two global ones.

    vLLM puts as many layers into each KV group as the rarest kind has, so this makes three groups of two layers.
    """
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=sliding_window,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        tie_word_embeddings=False,
        **_SPECIAL_TOKENS,
    )
    path = _write(root, f"gemma3-w{sliding_window}-{dtype}", config, dtype)
    return TinyModel(
        path,
        "gemma3",
        dtype,
        layers=6,
        kv_heads=2,
        state_bytes=2 * 2 * 32 * _ITEM_BYTES[dtype],
        block_size=32,
        sliding_window=sliding_window,
    )


def make(root: Path, family: Family, *, dtype: DtypeName = "bfloat16") -> TinyModel:
    """Write (or find) the tiny model of ``family`` below ``root``."""
    makers = {"llama": make_llama, "mla": make_mla, "gemma3": make_gemma3}
    return makers[family](root, dtype=dtype)


def random_prompt(tokens: int, *, seed: int = 0) -> list[int]:
    """``tokens`` token ids, the same ones for the same ``seed`` in every process and Python version.

    A longer prompt of the same seed starts with the shorter one, so a test can grow a prompt.
    """
    draw = random.Random(seed)
    return [draw.randrange(FIRST_PROMPT_TOKEN_ID, VOCAB_SIZE) for _ in range(tokens)]


_ITEM_BYTES: dict[DtypeName, int] = {"bfloat16": 2, "float32": 4}
_SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _write(root: Path, name: str, config: Any, dtype: DtypeName) -> Path:
    """Initialise ``config``'s model and publish it as ``root/name`` by one rename."""
    target = root / f"{name}-v{_RECIPE_VERSION}"
    if (target / "config.json").exists():
        return target
    root.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        _save_random_model(staging, config, dtype)
        try:
            staging.rename(target)
        except OSError:
            # Another test process was faster; its copy is the same, bit for bit.
            if not (target / "config.json").exists():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _save_random_model(folder: Path, config: Any, dtype: DtypeName) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config.dtype = dtype
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _initialise(parameter_name, parameter, gemma=config.model_type.startswith("gemma"))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    if stored.get("dtype") != dtype:
        raise RuntimeError(f"transformers stored dtype {stored.get('dtype')!r} instead of {dtype!r} in {folder}")


def _initialise(name: str, parameter: Any, *, gemma: bool) -> None:
    """Draw one parameter from its own stream, so that no weight depends on the order of the others."""
    import torch

    seed = int.from_bytes(hashlib.blake2b(f"{_SEED}/{name}".encode(), digest_size=6).digest(), "little")
    stream = torch.Generator().manual_seed(seed)
    if parameter.dim() < 2:
        # Norm weights: one, a little off it so that each channel differs. Gemma stores them minus one.
        parameter.normal_(0.0 if gemma else 1.0, 0.05, generator=stream)
    elif "embed_tokens" in name:
        parameter.normal_(0.0, 1.0, generator=stream)
    elif name.endswith(("q_proj.weight", "k_proj.weight", "kv_a_proj_with_mqa.weight")):
        # Twice the variance-preserving width: attention that prefers some tokens clearly to others.
        parameter.normal_(0.0, 2.0 / math.sqrt(parameter.shape[1]), generator=stream)
    else:
        parameter.normal_(0.0, 1.0 / math.sqrt(parameter.shape[1]), generator=stream)
