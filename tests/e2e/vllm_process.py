"""A real vLLM engine in a process of its own, driven step by step from a test.

```python
with VLLMProcess(model, storage={"tiers": ["file:///tmp/tier"]}, log_path=tmp_path / "first.log") as vllm:
    answer = vllm.ask(prompt)
    assert vllm.record(answer.request_id).external_hit == 512
    assert vllm.pages(answer.request_id).differences(source_pages) == []
```

The engine steps only while a command runs, so that a test can stop it between any two steps. Every wait is bounded;
what the process wrote is shown when something goes wrong.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import pytest

from tests.e2e.tiny_models import TinyModel

CHUNK_SIZE: Final = 256
BLOCK_SIZE: Final = 32
TIMEOUT_S: Final = 90.0
REPOSITORY: Final = Path(__file__).resolve().parents[2]


class VLLMError(Exception):
    """A command failed inside the process; the process is still there."""


@dataclass(frozen=True)
class Answer:
    """What vLLM answered.

    Attributes:
        request_id: the test's name of the request.
        tokens: the generated token ids.
        logprobs: for each token the log-probabilities of the likeliest ones, by token id.
        cached: prompt tokens that vLLM says came from caches.
        finish_reason: ``length``, ``stop``, ``abort`` or ``error``.
    """

    request_id: str
    tokens: list[int]
    logprobs: list[dict[str, float]]
    cached: int
    finish_reason: str


@dataclass(frozen=True)
class Record:
    """`l2kit_vllm.embedded.RequestRecord` of one request."""

    prompt_tokens: int
    local_hit: int
    external_hit: int
    read: int
    written: int


class Pages:
    """The bytes of the pages that hold the first tokens of a request: one row of blocks for each layer."""

    def __init__(self, layers: Sequence[bytes], blocks: int, block_size: int) -> None:
        """``layers[i]`` holds the bytes of ``blocks`` pages of layer ``i``, in the order of the tokens."""
        self._layers = list(layers)
        self._blocks = blocks
        self.block_size: Final = block_size

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self._layers)

    @property
    def tokens(self) -> int:
        """Number of tokens that the pages hold."""
        return self._blocks * self.block_size

    def page(self, layer: int, block: int) -> bytes:
        """One page."""
        size = len(self._layers[layer]) // self._blocks
        return self._layers[layer][block * size : (block + 1) * size]

    def chunk(self, layer: int, chunk: int) -> bytes:
        """One chunk's pages in one layer."""
        per_chunk = CHUNK_SIZE // self.block_size
        return b"".join(self.page(layer, chunk * per_chunk + index) for index in range(per_chunk))

    def swapped(self, one: int, other: int) -> Pages:
        """The same pages with two blocks in each other's place, in every layer."""
        order = list(range(self._blocks))
        order[one], order[other] = other, one
        layers = [b"".join(self.page(layer, block) for block in order) for layer in range(self.layers)]
        return Pages(layers, self._blocks, self.block_size)

    def differences(self, other: Pages, *, tokens: int | None = None) -> list[str]:
        """Where two dumps differ, for each layer and block; the first ``tokens`` tokens, by default all of both."""
        assert self.block_size == other.block_size
        assert self.layers == other.layers > 0
        if tokens is None:
            assert self.tokens == other.tokens
            tokens = self.tokens
        blocks, rest = divmod(tokens, self.block_size)
        assert rest == 0
        assert 0 < blocks <= min(self._blocks, other._blocks)
        per_chunk = CHUNK_SIZE // self.block_size
        return [
            f"chunk {block // per_chunk}, block {block}, layer {layer}"
            for block in range(blocks)
            for layer in range(self.layers)
            if self.page(layer, block) != other.page(layer, block)
        ]

    @property
    def is_blank(self) -> bool:
        """True when some page was never written: then a comparison would prove nothing."""
        pages = [self.page(layer, block) for layer in range(self.layers) for block in range(self._blocks)]
        return any(not any(page) for page in pages)


class Pending:
    """A command that is running; :meth:`result` waits for its end."""

    def __init__(self, process: VLLMProcess, command: str) -> None:
        """Made by `VLLMProcess.start`."""
        self._process = process
        self._command = command

    def result(self, *, timeout_s: float = TIMEOUT_S) -> Any:
        """Its result.

        Raises:
            VLLMError: it failed inside the process.
        """
        return self._process._reply(self._command, timeout_s)[0]


class VLLMProcess:
    """One vLLM engine in a child process. A context manager that ends the process, whatever happened."""

    def __init__(
        self,
        model: TinyModel,
        *,
        log_path: Path,
        storage: Mapping[str, Any] | None = None,
        connector: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        open_now: bool = True,
        **engine: Any,
    ) -> None:
        """Start the process and let it start its engine, without waiting for either.

        Args:
            model: what it serves.
            log_path: where its output goes.
            storage: ``kv_connector_extra_config``, merged over small defaults (a field that is None is left out);
                None runs vLLM without l2kit.
            connector: further fields of ``kv_transfer_config``.
            environment: further environment variables.
            open_now: False leaves opening the engine to :meth:`open`.
            engine: further engine arguments of vLLM.
        """
        self.model: Final = model
        self.name: Final = log_path.stem
        self.block_size: Final[int] = engine.get("block_size", model.block_size)
        self._log_path = log_path
        self._ids = (f"{log_path.stem}-{number}" for number in itertools.count())
        self._opening = False
        reply_read, reply_write = os.pipe()
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.vllm_worker", str(reply_write)],
                cwd=REPOSITORY,
                env={**os.environ, **_ENVIRONMENT, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[reply_write],
            )
        os.close(reply_write)
        self._replies = reply_read
        if open_now:
            self._start_opening(storage, connector, engine)

    # --- life -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def open(
        self, *, storage: Mapping[str, Any] | None = None, connector: Mapping[str, Any] | None = None, **engine: Any
    ) -> None:
        """Start an engine (again after one that could not start) and wait until it is there.

        What is given here counts for this engine in place of what the constructor was given.

        Raises:
            VLLMError: it did not start; the message is that of the exception.
        """
        self._start_opening(storage, connector, engine)
        self.wait_until_open()

    def wait_until_open(self) -> None:
        """Wait for the engine that was told to start.

        Raises:
            VLLMError: it did not start.
        """
        if self._opening:
            self._opening = False
            self._reply("open", TIMEOUT_S * 2)

    def exit(self, *, timeout_s: float = 30.0) -> float:
        """Let the process end as an ordinary Python program does; how long that took, in seconds."""
        self.wait_until_open()
        started = time.monotonic()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._fail(f"did not exit within {timeout_s:.0f} s")
        if code != 0:
            self._fail(f"exited with {code}")
        return time.monotonic() - started

    @property
    def is_alive(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """``kill -9``."""
        self._process.kill()
        self._process.wait(30)

    def end(self) -> None:
        """Be done with it: kill it if it still runs, and let go of its pipes."""
        if self._process.poll() is None:
            self.kill()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        if self._replies >= 0:
            os.close(self._replies)
            self._replies = -1

    @property
    def log(self) -> str:
        """All that the process has written so far."""
        return self._log_path.read_text(errors="replace")

    def tail(self, lines: int = 80) -> str:
        """The last lines of that."""
        return "\n".join(self.log.splitlines()[-lines:])

    # --- requests ---------------------------------------------------------------------------------

    def ask(self, prompt: Sequence[int], *, timeout_s: float = TIMEOUT_S, **options: Any) -> Answer:
        """Ask one prompt, greedily, and wait for the answer. Options as for :meth:`submit`."""
        return self.finish(self.submit(prompt, **options), timeout_s=timeout_s)[0]

    def ask_together(self, *prompts: Sequence[int], **options: Any) -> list[Answer]:
        """Ask several prompts at once."""
        return self.finish(*[self.submit(prompt, **options) for prompt in prompts])

    def submit(
        self, prompt: Sequence[int], *, max_tokens: int = 8, cache_salt: str | None = None, **sampling: Any
    ) -> str:
        """Queue a prompt, without a step; the request's name."""
        request_id = next(self._ids)
        self.call(
            "submit",
            request_id=request_id,
            prompt=list(prompt),
            cache_salt=cache_salt,
            sampling={"max_tokens": max_tokens, **sampling},
        )
        return request_id

    def step(self, count: int = 1) -> None:
        """Let the engine take some steps."""
        self.call("step", count=count)

    def step_until(self, condition: Callable[[], bool], *, limit: int = 2000) -> None:
        """Step until ``condition`` holds."""
        for _ in range(limit):
            if condition():
                return
            self.step()
        self._fail(f"what was waited for did not happen in {limit} steps")

    def finish(self, *request_ids: str, timeout_s: float = TIMEOUT_S) -> list[Answer]:
        """Step until these requests are finished; their answers."""
        return self.answers(self.start_finishing(*request_ids, timeout_s=timeout_s).result(timeout_s=timeout_s + 5))

    def start_finishing(self, *request_ids: str, timeout_s: float = TIMEOUT_S) -> Pending:
        """The same without waiting: something can be done to the world meanwhile."""
        return self.start("finish", request_ids=request_ids, timeout_s=timeout_s)

    @staticmethod
    def answers(results: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """What a finished ``start_finishing`` gives."""
        return [Answer(**result) for result in results]

    def abort(self, *request_ids: str) -> None:
        """Abort requests, as a client that hangs up does."""
        self.call("abort", request_ids=request_ids)

    # --- looking and touching ---------------------------------------------------------------------

    def record(self, request_id: str) -> Record:
        """What l2kit did for a request when it was last scheduled."""
        return Record(**self.records(request_id)[-1])

    def records(self, request_id: str) -> list[dict[str, int]]:
        """One record for each time that a request was scheduled."""
        found: list[dict[str, int]] = self.call("records", request_id=request_id)
        assert found, f"no record of {request_id}"
        return found

    def status(self) -> dict[str, Any]:
        """`EmbeddedEngine.status`."""
        result: dict[str, Any] = self.call("status")
        return result

    def counter(self, name: str) -> int:
        """One of the embedded engine's counters."""
        value: int = self.status()["engine"][name]
        return value

    def tier(self, name: str) -> dict[str, Any]:
        """Status of one tier."""
        result: dict[str, Any] = self.status()["tiers"][name]
        return result

    def drain(self, *, timeout_s: float = 60.0) -> None:
        """Wait until everything saved has been offered to every tier."""
        self.call("drain", timeout_s=timeout_s, wait_s=timeout_s + 5)

    def pages(self, request_id: str, tokens: int) -> Pages:
        """The bytes of the pages of a request's first ``tokens`` tokens, as they are now."""
        blocks = self.block_table(request_id)[: -(-tokens // self.block_size)]
        assert len(blocks) * self.block_size >= tokens
        _, layers = self._command("pages", {"block_ids": blocks}, TIMEOUT_S)
        return Pages(layers, len(blocks), self.block_size)

    def block_table(self, request_id: str) -> list[int]:
        """Block ids that a request had when it was last scheduled."""
        result: list[int] = self.call("block_table", request_id=request_id)
        return result

    def reset_prefix_cache(self, **options: bool) -> bool:
        """Empty vLLM's own prefix cache."""
        result: bool = self.call("reset_prefix_cache", **options)
        return result

    def forget(self) -> None:
        """Make the process as new: empty L1 and vLLM's own prefix cache. What the tiers have stays."""
        self.drain()
        self.call("clear_l1")
        assert self.reset_prefix_cache()

    def run(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Run a function of an importable module inside the process; its first argument is the `Worker`."""
        return self.call("run", module=function.__module__, name=function.__qualname__, arguments=arguments)

    def leftovers(self) -> dict[str, int]:
        """What requests have left behind; empty when nothing has."""
        result: dict[str, int] = self.call("leftovers")
        return result

    # --- the wire ---------------------------------------------------------------------------------

    def call(self, command: str, *, wait_s: float = TIMEOUT_S, **arguments: Any) -> Any:
        """Run one command of `tests.e2e.vllm_worker.Worker`.

        Raises:
            VLLMError: it failed inside the process.
        """
        return self._command(command, arguments, wait_s)[0]

    def start(self, command: str, **arguments: Any) -> Pending:
        """The same without waiting."""
        self.wait_until_open()
        self._send(command, arguments)
        return Pending(self, command)

    def _command(self, command: str, arguments: Mapping[str, Any], wait_s: float) -> tuple[Any, list[bytes]]:
        self.wait_until_open()
        self._send(command, arguments)
        return self._reply(command, wait_s)

    def _start_opening(
        self, storage: Mapping[str, Any] | None, connector: Mapping[str, Any] | None, engine: Mapping[str, Any]
    ) -> None:
        self._opening = True
        options: dict[str, Any] = {
            "model": str(self.model.path),
            "dtype": self.model.dtype,
            "block_size": self.block_size,
            **_ENGINE,
            **engine,
        }
        if storage is not None:
            extra = {name: value for name, value in {**_STORAGE, **storage}.items() if value is not None}
            options["kv_transfer_config"] = {**_CONNECTOR, **(connector or {}), "kv_connector_extra_config": extra}
        self._send("open", {"options": options})

    def _send(self, command: str, arguments: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        line = json.dumps({"command": command, "arguments": arguments})
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._fail(f"is gone before {command!r}")

    def _reply(self, command: str, timeout_s: float) -> tuple[Any, list[bytes]]:
        give_up = time.monotonic() + timeout_s
        head = self._read(int.from_bytes(self._read(4, command, give_up), "little"), command, give_up)
        reply = json.loads(head)
        attachments = [self._read(size, command, give_up) for size in reply["attachments"]]
        if reply["error"] is not None:
            raise VLLMError(reply["error"])
        return reply["result"], attachments

    def _read(self, size: int, command: str, give_up: float) -> bytes:
        parts: list[bytes] = []
        while size > 0:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, give_up - time.monotonic()))
            if not ready:
                self._process.send_signal(signal.SIGUSR1)  # makes it write where it is
                time.sleep(0.5)
                self._fail(f"has not answered {command!r} in time")
            part = os.read(self._replies, min(size, 1 << 20))
            if not part:
                self._process.wait(30)
                self._fail(f"died with {self._process.returncode} during {command!r}")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _fail(self, what: str) -> NoReturn:
        pytest.fail(f"vLLM process {self.name} {what}; the end of what it wrote:\n{self.tail()}")


_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
}
_CONNECTOR: Final[Mapping[str, Any]] = {
    "kv_connector": "L2KitConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
_STORAGE: Final[Mapping[str, Any]] = {"chunk_size": CHUNK_SIZE, "l1": {"max_bytes": "64MiB"}}
_ENGINE: Final[Mapping[str, Any]] = {
    "skip_tokenizer_init": True,
    "max_model_len": 4096,
    "enforce_eager": True,
    "num_gpu_blocks_override": 400,
    "disable_log_stats": True,
    "seed": 0,
}
