"""What l2kit refuses, it refuses at start-up, in one sentence that names the field; and how processes end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from l2kit.testing.servers import RespServer
from tests.e2e import tiny_models
from tests.e2e.conftest import Start
from tests.e2e.tiny_models import TinyModel
from tests.e2e.vllm_process import VLLMError, VLLMProcess


@pytest.fixture(scope="module")
def vllm(start: Start, llama: TinyModel) -> VLLMProcess:
    """A process whose engine does not start; the next test tries again in the same process."""
    return start("badly-configured", llama, open_now=False)


@pytest.fixture(scope="module")
def refused(start: Start, llama: TinyModel) -> VLLMProcess:
    """A process whose engine is refused when it has opened its tiers already; starts beside the others."""
    return start("refused", llama, storage={"tiers": ["memory://"], "l1": {"max_bytes": "64KiB"}})


@pytest.fixture(scope="module")
def two_ranks(start: Start, llama: TinyModel) -> VLLMProcess:
    """A process whose engine wants a worker process for each of two ranks; starts beside the others."""
    unbound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return start("two-ranks", llama, storage={}, environment=unbound, tensor_parallel_size=2)


@pytest.fixture
def one_process(vllm: VLLMProcess, refused: VLLMProcess, two_ranks: VLLMProcess) -> Iterator[VLLMProcess]:
    yield vllm
    assert vllm.call("open_engines") == 0


BAD: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "a chunk that is no number of blocks": (
        {"chunk_size": 100},
        "chunk_size: 100 is no multiple of vLLM's block size 32; use 96 or 128",
    ),
    "an unknown option": (
        {"tyers": []},
        "kv_connector_extra_config: unknown option 'tyers'.*tiers",
    ),
    "an unknown scheme": (
        {"tiers": ["flie:///tmp"]},
        "no installed distribution offers 'flie'.*file",
    ),
    "a misspelt option of a tier": (
        {"tiers": ["file:///tmp?max_byte=1"]},
        "unknown option 'max_byte'.*max_bytes",
    ),
    "a port out of range": (
        {"tiers": ["redis://127.0.0.1:77777"]},
        "port",
    ),
    "a folder that cannot be written": (
        {"tiers": ["file:///proc/l2kit"]},
        "/proc/l2kit",
    ),
    "too little L1 for one chunk": (
        {"l1": {"max_bytes": "64KiB"}},
        "l1.max_bytes: 65536 is less than one chunk of this model, 524288 bytes",
    ),
    "an unknown representation": (
        {"representation": "nativ"},
        "kv_connector_extra_config: representation: .*nativ",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str, one_process: VLLMProcess) -> None:
    storage, message = BAD[name]
    with pytest.raises(VLLMError, match=message):
        one_process.open(storage=storage)


def test_wrong_password(one_process: VLLMProcess, redis_server: RespServer) -> None:
    url = f"redis://:not-the-password@{redis_server.host}:{redis_server.port}"
    with pytest.raises(VLLMError, match="password") as refusal:
        one_process.open(storage={"tiers": [url]})
    assert "not-the-password" not in str(refusal.value)
    assert "not-the-password" not in one_process.log


def test_hybrid_model_is_refused(one_process: VLLMProcess, models: Path) -> None:
    gemma = tiny_models.make_gemma3(models)
    with pytest.raises(VLLMError, match=r"3 KV cache groups \(.*SlidingWindowSpec.*\); l2kit serves one"):
        one_process.open(storage={}, model=str(gemma.path), num_gpu_blocks_override=2000)


def test_sliding_window_is_refused(one_process: VLLMProcess, llama: TinyModel, tmp_path: Path) -> None:
    """VLLM takes blocks that have left the window away from a running request, and writes null blocks for them."""
    folder = tmp_path / "mistral"
    shutil.copytree(llama.path, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 128}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(VLLMError, match="KV cache is of the kind SlidingWindowSpec; l2kit serves full attention"):
        one_process.open(storage={}, model=str(folder))


def test_starts_at_last_and_exits_in_time(vllm: VLLMProcess, tmp_path: Path) -> None:
    vllm.open(storage={"tiers": [f"file://{tmp_path}"]}, connector={"kv_load_failure_policy": "fail"})
    assert "kv_load_failure_policy is 'fail'" in vllm.log
    vllm.ask(tiny_models.random_prompt(300))

    assert vllm.exit() < 20

    assert [path for path in tmp_path.rglob("*.all") if path.is_file()]  # stored on the way out at the latest


def test_exits_in_time_after_a_refusal(refused: VLLMProcess) -> None:
    with pytest.raises(VLLMError, match="max_bytes"):
        refused.wait_until_open()
    assert refused.call("open_engines") == 0
    assert refused.exit() < 20


def test_tensor_parallelism_is_refused(two_ranks: VLLMProcess) -> None:
    with pytest.raises(VLLMError):
        two_ranks.wait_until_open()
    assert "tensor_parallel_size x pipeline_parallel_size is 2; the embedded engine serves 1" in two_ranks.log
