"""Identity of what vLLM computes: the model's namespace, and what sets one request apart from another.

Everything that changes the bytes of the KV cache or their meaning must be in here. What cannot be identified is not
cached: `unidentified` answers say so.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from l2kit.engine import RequestIdentity
from l2kit.errors import ConfigError
from l2kit.keys import MultimodalHash, Namespace

_SAMPLE_BYTES: Final = 4096
_SAMPLES_PER_FILE: Final = 64
#: Fields of a Hugging Face config that say nothing about what the model computes.
_VOLATILE: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "architectures_source"})
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def model_namespace(
    vllm_config: Any,
    *,
    layout: str,
    kv_dtype: str,
    layers: int,
    kv_heads: int,
    head_dim: int,
    chunk_size: int,
    model_revision: str | None,
) -> Namespace:
    """The namespace of the model that this vLLM serves.

    Args:
        vllm_config: vLLM's configuration.
        layout: representation and arrangement of the objects.
        kv_dtype: exact element type of the KV cache.
        layers: attention layers in one object.
        kv_heads: KV heads of the whole model.
        head_dim: elements per head.
        chunk_size: tokens per chunk.
        model_revision: the operator's word for the weights; else they are looked at.

    Raises:
        ConfigError: the weights cannot be identified.
    """
    model = vllm_config.model_config
    path = Path(model.model)
    if model_revision is not None:
        name, revision = model.model, f"given:{model_revision}"
    elif path.is_dir():
        name, revision = "local", f"local:{checkpoint_digest(path)}"
    else:
        commit = getattr(model.hf_config, "_commit_hash", None)
        if not commit:
            raise ConfigError(
                f"model_revision: the revision of {model.model!r} is unknown, and KV of unknown weights must not be "
                "cached; set model_revision in kv_connector_extra_config"
            )
        name, revision = model.model, f"hub:{commit}"
    return Namespace(
        model=name,
        revision=revision,
        kv_dtype=kv_dtype,
        layout=layout,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        chunk_size=chunk_size,
        engine=_engine_digest(vllm_config),
    )


def _engine_digest(vllm_config: Any) -> str:
    """What the engine adds to the weights: the effective model config, compute type, quantisation."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts = {
        "hf_config": {k: v for k, v in model.hf_config.to_dict().items() if k not in _VOLATILE},
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=256)
def checkpoint_digest(folder: Path) -> str:
    """Digest of a checkpoint: every JSON config whole, every weights file by name, size, header and samples.

    Samples are taken from each tensor of a safetensors file and evenly from other files, so that a fine-tune of the
    same shape differs, and hundreds of gigabytes need not be read.

    Raises:
        ConfigError: the folder has no weights.
    """
    digest = hashlib.blake2b(digest_size=16)
    weights = sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern))
    if not weights:
        raise ConfigError(f"model_revision: no weights in {folder}; set model_revision in kv_connector_extra_config")
    for file in sorted(folder.glob("*config.json")):
        text = json.loads(file.read_text(encoding="utf-8"))
        stable = {k: v for k, v in text.items() if k not in _VOLATILE} if isinstance(text, dict) else text
        digest.update(f"{file.name}\0{json.dumps(stable, sort_keys=True)}\0".encode())
    for file in weights:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for offset in _sample_offsets(stream, file, size):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _sample_offsets(stream: Any, file: Path, size: int) -> Iterator[int]:
    if file.suffix == ".safetensors" and size > 8:
        (header_bytes,) = struct.unpack("<Q", stream.read(8))
        if header_bytes <= min(size - 8, 100 << 20):
            header = json.loads(stream.read(header_bytes))
            yield from range(0, 8 + header_bytes, _SAMPLE_BYTES)
            for name in sorted(header):
                if name != "__metadata__":
                    start, end = header[name]["data_offsets"]
                    base = 8 + header_bytes
                    yield base + start
                    yield base + (start + end) // 2
                    yield base + max(start, end - _SAMPLE_BYTES)
            return
    yield from range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES_PER_FILE))


def request_identity(request: Any) -> RequestIdentity | None:
    """What sets this vLLM request apart from others with the same tokens; None when that cannot be told."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return None  # the tokens do not say what was computed
    items: list[MultimodalHash] = []
    for feature in request.mm_features or ():
        if not feature.identifier:
            return None
        position = feature.mm_position
        items.append(MultimodalHash(f"{feature.modality}:{feature.identifier}", position.offset, position.length))
    lora = None
    if request.lora_request is not None:
        lora = _lora_identity(request.lora_request)
        if lora is None:
            return None
    return RequestIdentity(salt=request.cache_salt, lora=lora, mm_hashes=tuple(items))


def _lora_identity(lora: Any) -> str | None:
    path = Path(lora.lora_path) if lora.lora_path else None
    if path is None or not path.is_dir():
        return None  # a name alone may mean other weights on the next node
    try:
        return f"{lora.lora_name}|{checkpoint_digest(path)}"
    except (ConfigError, OSError):
        return None
