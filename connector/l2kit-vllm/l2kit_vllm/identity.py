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
#: Rotary embeddings that depend on the longest context that the engine serves.
_CONTEXT_ROPES: Final = frozenset({"longrope", "su", "dynamic"})
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
    name, revision = _weights(vllm_config.model_config, model_revision)
    return Namespace(
        model=name,
        revision=revision,
        kv_dtype=kv_dtype,
        layout=layout,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        chunk_size=chunk_size,
        engine=_engine_digest(vllm_config, model_revision),
    )


def _weights(model: Any, model_revision: str | None) -> tuple[str, str]:
    """Name and revision of a model's weights."""
    path = Path(model.model)
    if model_revision is not None:
        return model.model, f"given:{model_revision}"
    if path.is_dir():
        return "local", f"local:{checkpoint_digest(path)}"
    commit = getattr(model.hf_config, "_commit_hash", None)
    if not commit:
        raise ConfigError(
            f"model_revision: the revision of {model.model!r} is unknown, and KV of unknown weights must not be "
            "cached; set model_revision in kv_connector_extra_config"
        )
    return model.model, f"hub:{commit}"


def _engine_digest(vllm_config: Any, model_revision: str | None) -> str:
    """What the engine adds to the weights: the effective model config, compute types, quantisation, a draft model."""
    model, cache, lora = vllm_config.model_config, vllm_config.cache_config, vllm_config.lora_config
    config = {k: v for k, v in model.hf_config.to_dict().items() if k not in _VOLATILE}
    multimodal = getattr(model, "multimodal_config", None)
    facts = {
        "hf_config": config,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "context": model.max_model_len if _rope_depends_on_context(config) else None,
        "mm_processor": None if multimodal is None else multimodal.mm_processor_kwargs,
        "lora_dtype": None if lora is None else str(lora.lora_dtype),
    }
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is not None:  # its layers lie in the same pages
        facts["draft"] = [vllm_config.speculative_config.method, *_weights(draft, model_revision)]
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _rope_depends_on_context(config: Any) -> bool:
    """True when vLLM may choose position embeddings by ``max_model_len`` (``longrope`` does)."""
    if not isinstance(config, dict):
        return False
    kinds = [config.get(name) for name in ("rope_type", "type")]
    return any(isinstance(kind, str) and kind in _CONTEXT_ROPES for kind in kinds) or any(
        map(_rope_depends_on_context, config.values())
    )


def checkpoint_digest(folder: Path) -> str:
    """Digest of a checkpoint: every JSON config whole, every weights file by name, size, header and samples.

    Samples are taken from each tensor of a safetensors file and evenly from other files, so that a fine-tune of the
    same shape differs, and hundreds of gigabytes need not be read.

    Raises:
        ConfigError: the folder has no weights.
    """
    return _digest_of(folder, _signature(folder))


def _signature(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes when files of a checkpoint change."""
    files = sorted(file for pattern in ("*config.json", *_WEIGHTS) for file in folder.glob(pattern))
    return tuple((file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files)


@lru_cache(maxsize=256)
def _digest_of(folder: Path, signature: tuple[tuple[str, int, int], ...]) -> str:
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


class RequestIdentities:
    """Tells requests with equal tokens apart, for one engine. Single-threaded."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._loras: dict[int, tuple[Any, ...] | None] = {}  # by vLLM's id: what was there when it was first used

    def of(self, request: Any) -> RequestIdentity | None:
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
            lora = self._lora(request.lora_request)
            if lora is None:
                return None
        return RequestIdentity(salt=request.cache_salt, lora=lora, mm_hashes=tuple(items))

    def _lora(self, lora: Any) -> str | None:
        """Name and content of a LoRA adapter.

        None when only a name is known, which may mean other weights on the next node, and when the files are not
        those that vLLM loaded: from then on nobody can say what this adapter computes.
        """
        path = Path(lora.lora_path) if lora.lora_path else None
        if path is None or not path.is_dir():
            return None
        try:
            now = (lora.lora_name, str(path), _signature(path))
            if lora.load_inplace or self._loras.setdefault(lora.lora_int_id, now) != now:
                self._loras[lora.lora_int_id] = None
                return None
            return f"{lora.lora_name}|{checkpoint_digest(path)}"
        except (ConfigError, OSError):
            return None
