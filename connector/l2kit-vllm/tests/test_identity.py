"""What sets models and requests apart: every field counts, and what cannot be told is not cached."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from l2kit.errors import ConfigError
from l2kit.keys import Namespace, TokenDatabase
from l2kit_vllm.identity import RequestIdentities, checkpoint_digest, model_namespace

TOKENS = list(range(1000, 1096))


def write_checkpoint(folder: Path, *, weights: bytes = b"w" * 100_000, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"hidden_size": 64}))
    header = json.dumps(
        {"weight": {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}}
    ).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights)
    return folder


class HfConfig:
    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self._commit_hash = fields.get("_commit_hash")

    def to_dict(self) -> dict[str, Any]:
        return self.fields


@pytest.fixture
def vllm_config(tmp_path: Path) -> Any:
    """Stands for vLLM's configuration."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(write_checkpoint(tmp_path / "model")),
            hf_config=HfConfig(hidden_size=64, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
            dtype="bfloat16",
            quantization=None,
            max_model_len=4096,
            multimodal_config=None,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        lora_config=None,
        speculative_config=None,
    )


def namespace(vllm_config: Any, **changes: Any) -> Namespace:
    options: dict[str, Any] = {
        "layout": "native:1",
        "kv_dtype": "bfloat16",
        "layers": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "chunk_size": 32,
        "model_revision": None,
        **changes,
    }
    return model_namespace(vllm_config, **options)


def test_the_same_model_in_two_folders_is_the_same(vllm_config: Any, tmp_path: Path) -> None:
    other = deepcopy(vllm_config)
    other.model_config.model = str(write_checkpoint(tmp_path / "elsewhere"))
    other.model_config.hf_config.fields |= {"_name_or_path": "elsewhere", "transformers_version": "5"}
    assert namespace(vllm_config).digest == namespace(other).digest


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            config = getattr(config, parent)
        setattr(config, name, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("model_config.hf_config", HfConfig(hidden_size=128)),
        _set("model_config.hf_config", HfConfig(hidden_size=64, rope_parameters={"rope_theta": 500000.0})),
        _set("model_config.dtype", "float16"),
        _set("model_config.quantization", "fp8"),
        _set("model_config.multimodal_config", SimpleNamespace(mm_processor_kwargs={"num_crops": 4})),
        _set("cache_config.cache_dtype", "fp8"),
        _set("lora_config", SimpleNamespace(lora_dtype="float16")),
    ],
)
def test_what_the_engine_adds_counts(vllm_config: Any, change: Callable[[Any], None]) -> None:
    before = namespace(vllm_config).digest
    change(vllm_config)
    assert namespace(vllm_config).digest != before


@pytest.mark.parametrize(
    ("field", "value"),
    [("layout", "native:2"), ("kv_dtype", "float8_e4m3fn"), ("layers", 5), ("kv_heads", 4), ("head_dim", 128)],
)
def test_what_the_pages_hold_counts(vllm_config: Any, field: str, value: Any) -> None:
    assert namespace(vllm_config, **{field: value}).digest != namespace(vllm_config).digest


def test_the_longest_context_counts_where_it_chooses_the_embeddings(vllm_config: Any) -> None:
    """VLLM's longrope uses its long factors for *every* position when ``max_model_len`` is large."""
    longer = deepcopy(vllm_config)
    longer.model_config.max_model_len = 131072
    assert namespace(longer).digest == namespace(vllm_config).digest
    for config in (vllm_config, longer):
        config.model_config.hf_config = HfConfig(rope_scaling={"type": "longrope", "long_factor": [2.0]})
    assert namespace(longer).digest != namespace(vllm_config).digest


def test_a_draft_model_counts(vllm_config: Any, tmp_path: Path) -> None:
    """Its layers lie in the same pages."""
    digests = {namespace(vllm_config).digest}
    for weights in (b"a" * 1000, b"b" * 1000):
        draft = SimpleNamespace(model=str(write_checkpoint(tmp_path / weights[:1].decode(), weights=weights)))
        vllm_config.speculative_config = SimpleNamespace(method="eagle3", draft_model_config=draft)
        digests.add(namespace(vllm_config).digest)
    assert len(digests) == 3


class TestWeights:
    def test_other_bytes_are_other_weights(self, tmp_path: Path) -> None:
        one = checkpoint_digest(write_checkpoint(tmp_path / "one"))
        weights = bytearray(b"w" * 100_000)
        weights[50_000] = 0  # in the middle of the tensor
        assert checkpoint_digest(write_checkpoint(tmp_path / "two", weights=bytes(weights))) != one

    def test_files_that_change_are_looked_at_again(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path / "one")
        before = checkpoint_digest(folder)
        write_checkpoint(folder, weights=b"v" * 100_000)
        os.utime(folder / "model.safetensors", ns=(1, 1))
        assert checkpoint_digest(folder) != before

    def test_from_a_hub_by_commit(self, vllm_config: Any) -> None:
        vllm_config.model_config.model = "somebody/model"
        vllm_config.model_config.hf_config = HfConfig(_commit_hash="0123abc")
        assert namespace(vllm_config).revision == "hub:0123abc"

    def test_unknown_weights_are_refused(self, vllm_config: Any) -> None:
        vllm_config.model_config.model = "somebody/model"
        with pytest.raises(ConfigError, match="model_revision: the revision of 'somebody/model' is unknown"):
            namespace(vllm_config)
        assert namespace(vllm_config, model_revision="mine").revision == "given:mine"

    def test_a_folder_without_weights_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="model_revision: no weights in"):
            checkpoint_digest(tmp_path)


# --- requests ---------------------------------------------------------------------------------------


def image(identifier: str | None, *, offset: int = 40, length: int = 10, modality: str = "image") -> Any:
    return SimpleNamespace(
        modality=modality, identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length)
    )


def lora(path: Path, name: str = "sql", number: int = 1, *, load_inplace: bool = False) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), load_inplace=load_inplace)


def request(**changes: Any) -> Any:
    """Stands for vLLM's ``Request``."""
    return SimpleNamespace(
        **{
            "prompt_token_ids": TOKENS,
            "prompt_embeds": None,
            "cache_salt": None,
            "lora_request": None,
            "mm_features": [],
            **changes,
        }
    )


def keys(asked: Any, identities: RequestIdentities | None = None) -> list[bytes] | None:
    """The chunk hashes of a request's prompt; None when it is not to be cached."""
    identity = (identities or RequestIdentities()).of(asked)
    if identity is None:
        return None
    database = TokenDatabase("a-model", 32)
    chunks = database.chunks(
        asked.prompt_token_ids, salt=identity.salt, lora=identity.lora, mm_hashes=identity.mm_hashes
    )
    return [digest for _, _, digest in chunks]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "adapter")


def test_equal_requests_share(adapter: Path) -> None:
    def asked() -> Any:
        return request(cache_salt="tenant", lora_request=lora(adapter), mm_features=[image("a1")])

    assert keys(asked()) == keys(asked()) is not None


def test_everything_sets_requests_apart(adapter: Path, tmp_path: Path) -> None:
    tuned = write_checkpoint(tmp_path / "tuned", weights=b"x" * 100_000)
    variants = [
        request(),
        request(cache_salt=""),
        request(cache_salt="tenant"),
        request(cache_salt="other tenant"),
        request(lora_request=lora(adapter)),
        request(lora_request=lora(adapter, name="poems")),
        request(lora_request=lora(tuned)),
        request(mm_features=[image("a1", offset=10)]),
        request(mm_features=[image("a2", offset=10)]),
        request(mm_features=[image("a1", offset=10, length=11)]),
        request(mm_features=[image("a1", offset=11)]),
        request(mm_features=[image("a1", offset=10, modality="audio")]),
        request(mm_features=[image("a1", offset=10), image("a3", offset=20)]),
    ]
    found = [keys(variant) for variant in variants]
    assert None not in found
    for chunk in range(3):
        hashes = {hashes[chunk] for hashes in found if hashes is not None}
        assert len(hashes) == len(variants)


def test_an_image_counts_from_its_chunk_on() -> None:
    """Conversations that differ in the last image share all that comes before it."""
    one, other = keys(request(mm_features=[image("a1")])), keys(request(mm_features=[image("a2")]))
    assert one is not None
    assert other is not None
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert one[2] != other[2]


def test_an_image_over_a_chunk_boundary_counts_in_both(adapter: Path) -> None:
    """Its tokens may attend to each other in both directions."""
    plain, with_image = keys(request()), keys(request(mm_features=[image("a1", offset=30, length=5)]))
    assert plain is not None
    assert with_image is not None
    assert plain[0] != with_image[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_embeds": object()},
        {"prompt_token_ids": None},
        {"mm_features": [image("")]},
        {"mm_features": [image("a1"), image(None)]},
    ],
)
def test_what_cannot_be_told_is_not_cached(changes: dict[str, Any]) -> None:
    assert keys(request(**changes)) is None


class TestLora:
    def test_known_by_name_only(self, tmp_path: Path) -> None:
        assert keys(request(lora_request=lora(tmp_path / "missing"))) is None
        (tmp_path / "empty").mkdir()
        assert keys(request(lora_request=lora(tmp_path / "empty"))) is None

    def test_the_same_adapter_under_another_number(self, adapter: Path) -> None:
        """VLLM's numbers are each process's own."""
        one, other = (keys(request(lora_request=lora(adapter, number=number))) for number in (1, 2))
        assert one == other is not None

    def test_files_that_change_under_a_loaded_adapter(self, adapter: Path) -> None:
        identities = RequestIdentities()
        before = keys(request(lora_request=lora(adapter)), identities)
        assert before is not None
        write_checkpoint(adapter, weights=b"x" * 100_000)
        os.utime(adapter / "model.safetensors", ns=(1, 1))
        assert keys(request(lora_request=lora(adapter)), identities) is None  # vLLM may have loaded either
        loaded_anew = keys(request(lora_request=lora(adapter, number=2)), identities)
        assert loaded_anew is not None
        assert loaded_anew != before

    def test_loaded_in_place(self, adapter: Path) -> None:
        identities = RequestIdentities()
        assert keys(request(lora_request=lora(adapter)), identities) is not None
        assert keys(request(lora_request=lora(adapter, load_inplace=True)), identities) is None
        assert keys(request(lora_request=lora(adapter)), identities) is None
