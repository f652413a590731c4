"""Functions that tests run inside a vLLM process with `VLLMProcess.run`: looking deeper, and breaking things."""

from __future__ import annotations

from typing import Any

from tests.e2e.vllm_worker import Worker


def object_names(worker: Worker, prompt: list[int], salt: str | None = None) -> list[str]:
    """Paths of the objects of a prompt's chunks in a ``file://`` tier, relative to its folder of objects."""
    from l2kit.engine import RequestIdentity
    from l2kit_posix.names import object_path

    chunks = worker.embedded.engine.chunks(prompt, RequestIdentity(salt=salt))
    return [object_path("objects", chunk.key) for chunk in chunks]


def fail_scatters(worker: Worker, times: int = 1) -> None:
    """Let the next scatters into pages raise."""
    pages: Any = worker.worker_side._pages
    scatter_many = pages.scatter_many
    left = [times]

    def broken(*arguments: Any, **options: Any) -> Any:
        if left[0] <= 0:
            return scatter_many(*arguments, **options)
        left[0] -= 1
        raise RuntimeError("a broken scatter")

    pages.scatter_many = broken
