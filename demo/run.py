"""The demo: a prefill process computes a document's KV once, a decode process restores it from storage.

    make demo                # through file://, no server needed
    make demo L2=valkey      # through a Valkey that the demo starts itself
    make demo CORRUPT=1      # bits are flipped in storage in between: the answer must not change

Three vLLM processes, one after the other, answer the same question about the same document with SmolLM2-135M-Instruct
on the CPU: plain vLLM, a vLLM that stores (asked twice: its own prefix cache gives the exact reference), and a new
vLLM that restores. Ends with 0 only if the answers are those of the references.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from demo import corruption, report
from demo.checkpoint import ensure_checkpoint
from demo.prompt import ANSWER_TOKENS, BLOCK_SIZE_TOKENS, CHUNK_SIZE_TOKENS, build_prompt, load_tokenizer

ROOT: Final = Path(__file__).resolve().parent.parent


@dataclass
class Run:
    """What one vLLM process said."""

    answers: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)


def main() -> int:
    """Run the demo; the exit code says whether it proved what it claims."""
    parser = argparse.ArgumentParser(prog="make demo", description="Two vLLM processes share one prompt's KV cache.")
    parser.add_argument("--l2", choices=("file", "valkey"), default="file", help="where the KV cache is stored")
    parser.add_argument("--corrupt", action="store_true", help="flip bits in the stored objects between the processes")
    arguments = parser.parse_args()

    checkpoint = ensure_checkpoint()
    prompt = build_prompt(load_tokenizer(checkpoint))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="l2kit-demo-")))
        server = stack.enter_context(_valkey()) if arguments.l2 == "valkey" else None
        url = server.url("valkey") if server is not None else f"file://{folder / 'store'}"
        spec = {
            "checkpoint": str(checkpoint),
            "token_ids": prompt.token_ids,
            "block_size": BLOCK_SIZE_TOKENS,
            "max_tokens": ANSWER_TOKENS,
            "questions": 1,
            "storage": None,
        }
        storage = {"chunk_size": CHUNK_SIZE_TOKENS, "l1": {"max_bytes": "512MiB"}, "tiers": [url]}
        log = folder / "vllm.log"
        plain = _run("1/3 plain vLLM, no cache ", spec, log)
        prefill = _run("2/3 prefill, stores      ", {**spec, "storage": storage, "questions": 2}, log)
        damaged = 0
        if arguments.corrupt:
            damaged = corruption.damage_server(server) if server else corruption.damage_files(folder / "store")
            print(f"     damaged {damaged} stored objects")
        decode = _run("3/3 decode, restores     ", {**spec, "storage": storage}, log)
        facts = report.Facts(
            prompt_tokens=len(prompt.token_ids),
            prefix_tokens=prompt.prefix_tokens,
            l2=arguments.l2,
            damaged_objects=damaged if arguments.corrupt else None,
            plain=plain.answers[0],
            cold=prefill.answers[0],
            again=prefill.answers[1],
            warm=decode.answers[0],
            prefill_status=prefill.status,
            decode_status=decode.status,
        )
    return report.show(facts)


@contextmanager
def _valkey() -> Iterator[Any]:
    from l2kit.testing.servers import run_server

    with run_server("valkey") as server:
        yield server


def _run(title: str, spec: dict[str, Any], log: Path) -> Run:
    """Start one vLLM process, show its progress, and collect what it report."""
    result = Run()
    read_end, write_end = os.pipe()
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    with log.open("a", encoding="utf-8") as sink:
        child = subprocess.Popen(
            [sys.executable, "-m", "demo.engine_process", json.dumps(spec), str(write_end)],
            stdout=sink,
            stderr=sink,
            env=environment,
            pass_fds=(write_end,),
        )
    os.close(write_end)
    total = len(spec["token_ids"]) * spec["questions"]
    line = "{desc} {percentage:3.0f}%|{bar:30}| {n_fmt}/{total_fmt} prompt tokens [{elapsed}]{postfix}"
    with (
        os.fdopen(read_end, encoding="utf-8") as pipe,
        tqdm(total=total, desc=title, bar_format=line, file=sys.stdout, mininterval=0, postfix="starting vLLM") as bar,
    ):
        done = 0
        for text in pipe:
            message = json.loads(text)
            event = message.pop("event")
            if event == "progress":
                bar.n = done + message["done"]
            elif event == "answer":
                done += len(spec["token_ids"])
                bar.n = done
                result.answers.append(message)
            elif event == "status":
                result.status = message
            bar.set_postfix_str("" if event != "ready" else "reading", refresh=True)
    if child.wait() != 0:
        print(log.read_text(encoding="utf-8")[-6000:], file=sys.stderr)
        raise SystemExit(f"{title.strip()}: vLLM ended with exit code {child.returncode}; its log is above")
    return result


if __name__ == "__main__":
    raise SystemExit(main())
