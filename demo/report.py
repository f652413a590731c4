"""The demo's table and its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from demo.prompt import ANSWER_OPENING

MIN_SPEEDUP: Final = 5.0


@dataclass(frozen=True)
class Facts:
    """Everything that the three processes said.

    Attributes:
        prompt_tokens: length of the prompt.
        prefix_tokens: the prefix that a warm vLLM and a warm l2kit both serve.
        l2: kind of storage.
        damaged_objects: how many objects were damaged in between; None when that was not asked for.
        plain: answer of the vLLM without any cache.
        cold: first answer of the prefill process.
        again: its second answer, its prefix from vLLM's own cache: the exact reference.
        warm: answer of the decode process.
        prefill_status: l2kit's status in the prefill process, at its end.
        decode_status: the same of the decode process.
    """

    prompt_tokens: int
    prefix_tokens: int
    l2: str
    damaged_objects: int | None
    plain: dict[str, Any]
    cold: dict[str, Any]
    again: dict[str, Any]
    warm: dict[str, Any]
    prefill_status: dict[str, Any]
    decode_status: dict[str, Any]


def show(facts: Facts) -> int:
    """Print what happened and whether it is what must happen; return the exit code."""
    answers = (facts.plain, facts.cold, facts.again, facts.warm)
    (stored,) = facts.prefill_status["tiers"].values()
    (loaded,) = facts.decode_status["tiers"].values()
    (request,) = (r for r in facts.decode_status["requests"] if r["prompt_tokens"] == facts.prompt_tokens)
    speedup = facts.cold["ttft_s"] / facts.warm["ttft_s"]
    rows = [
        ("", "no cache", "cold, stores", "asked again", "warm, restores"),
        ("tokens in the prompt", *[f"{facts.prompt_tokens:,}"] * 4),
        (
            "local hits",
            "0",
            f"{facts.cold['cached_tokens']:,}",
            f"{facts.again['cached_tokens']:,}",
            f"{request['local_hit']:,}",
        ),
        ("external hits", "-", "0", "-", f"{request['external_hit']:,}"),
        ("tokens read from L2", "-", "0", "0", f"{request['read']:,}"),
        ("tokens written to the device", "-", "0", "0", f"{request['written']:,}"),
        (
            "time to first token",
            *(f"{answer['ttft_s']:.3f} s" for answer in answers),
        ),
        ("bytes to L2", "-", _mib(stored["stored_bytes"]), "-", _mib(loaded["stored_bytes"])),
        ("bytes from L2", "-", "0", "-", _mib(loaded["loaded_bytes"])),
        ("objects found corrupt", "-", "-", "-", f"{loaded['load_corrupt']}"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    print()
    for index, row in enumerate(rows):
        print(
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        )
        if index == 0:
            print("  ".join("─" * width for width in widths))
    print(f"\nanswer: {ANSWER_OPENING}{facts.warm['text']} …")
    print(f"speed-up: {speedup:.1f} x (cold / warm), storage {facts.l2}://\n")
    failed = False
    for claim, holds in _claims(facts, stored, loaded, request, speedup):
        print(f"  {'ok    ' if holds else 'FAILED'}  {claim}")
        failed |= not holds
    return 1 if failed else 0


def _claims(
    facts: Facts, stored: dict[str, Any], loaded: dict[str, Any], request: dict[str, Any], speedup: float
) -> list[tuple[str, bool]]:
    warm, errors = facts.warm, facts.decode_status["engine"]["hook_errors"]
    claims = [
        ("the tokens are those of the run without any cache", warm["token_ids"] == facts.plain["token_ids"]),
        ("nothing failed inside the engine", errors == 0 and facts.decode_status["l1"]["leases"] == 0),
    ]
    if facts.damaged_objects is not None:
        return [
            *claims,
            (f"there was something to damage ({facts.damaged_objects} objects)", facts.damaged_objects > 0),
            ("every damaged object that was read was found out", loaded["load_corrupt"] == facts.damaged_objects),
            ("nothing of them reached the pages: all tokens were recomputed", request["written"] == 0),
            ("the damaged objects were replaced by good ones", loaded["stored_objects"] == facts.damaged_objects),
        ]
    return [
        *claims,
        (
            "the log-probabilities are bit-equal to those of the prefill process asked again",
            warm["logprobs"] == facts.again["logprobs"] and warm["token_ids"] == facts.again["token_ids"],
        ),
        (
            f"both served the same prefix of {facts.prefix_tokens:,} tokens",
            request["written"] == facts.again["cached_tokens"] == facts.prefix_tokens,
        ),
        (
            "all of it came through the storage",
            request["read"] == facts.prefix_tokens and stored["store_failures"] == stored["store_drops"] == 0,
        ),
        (f"warm is at least {MIN_SPEEDUP:.0f} times sooner than cold", speedup >= MIN_SPEEDUP),
    ]


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
