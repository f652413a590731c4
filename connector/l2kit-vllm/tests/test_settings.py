"""Options of the connector: every mistake has one message that names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from l2kit.config import L1Config
from l2kit.errors import ConfigError
from l2kit_vllm.settings import ConnectorSettings, check_block_size, parse_extra_config


def test_defaults() -> None:
    settings, storage = parse_extra_config({})
    assert settings == ConnectorSettings(config=None, representation="native", model_revision=None)
    assert (storage.chunk_size, storage.tiers) == (256, ())


def test_own_options_and_those_of_the_storage_stand_side_by_side() -> None:
    settings, storage = parse_extra_config(
        {
            "representation": "canonical",
            "model_revision": "v2",
            "chunk_size": 512,
            "l1": {"max_bytes": "1GiB"},
            "tiers": ["file:///var/cache/l2kit", {"url": "redis://localhost", "name": "near"}],
        }
    )
    assert settings == ConnectorSettings(representation="canonical", model_revision="v2")
    assert storage.chunk_size == 512
    assert storage.l1 == L1Config(max_bytes=1 << 30)
    assert storage.tiers == ("file:///var/cache/l2kit", {"url": "redis://localhost", "name": "near"})


def test_storage_options_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "l2kit.toml"
    path.write_text('chunk_size = 128\ntiers = ["file:///somewhere"]\n')
    settings, storage = parse_extra_config({"config": str(path), "representation": "canonical"})
    assert settings.representation == "canonical"
    assert (storage.chunk_size, storage.tiers) == (128, ("file:///somewhere",))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"tyers": []}, r"kv_connector_extra_config: unknown option 'tyers'.*'tiers'"),
        ({"representaton": "native"}, r"unknown option 'representaton'.*'representation'"),
        ({"representation": "raw"}, r"kv_connector_extra_config: representation: .*'raw'"),
        ({"chunk_size": "many"}, r"kv_connector_extra_config: chunk_size"),
        ({"chunk_size": 0}, r"kv_connector_extra_config: chunk_size"),
        ({"l1": {"max_byte": 1}}, r"kv_connector_extra_config: l1: unknown option 'max_byte'.*'max_bytes'"),
        ({"l1": {"max_bytes": "a lot"}}, r"l1: max_bytes: 'a lot' is no size"),
        ({"lookup_timeout_s": -1}, r"kv_connector_extra_config: lookup_timeout_s"),
        ({"config": "/nowhere/l2kit.toml"}, r"config: cannot read /nowhere/l2kit.toml"),
        ({"config": "/nowhere/l2kit.toml", "tiers": []}, r"'tiers' stands beside 'config'"),
    ],
)
def test_mistakes(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_extra_config(extra)


@pytest.mark.parametrize(("chunk_size", "block_size"), [(256, 32), (256, 16), (32, 32), (544, 544)])
def test_chunks_of_whole_blocks(chunk_size: int, block_size: int) -> None:
    check_block_size(chunk_size, block_size)


@pytest.mark.parametrize(
    ("chunk_size", "block_size", "advice"),
    [(100, 32, "use 96 or 128"), (256, 544, "use 544 or 1088"), (255, 16, "use 240 or 256")],
)
def test_chunks_that_are_no_number_of_blocks(chunk_size: int, block_size: int, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"chunk_size: {chunk_size} is no multiple .* {block_size}; {advice}"):
        check_block_size(chunk_size, block_size)
