"""The demo's prompt: a long document, a question about it, and a length on which two caches agree.

The demo compares log-probabilities bit by bit: those of a process that restored its prefix from storage with those of a
process whose prefix came from vLLM's own prefix cache. Both must then compute exactly the same rest of the prompt,
because bf16 arithmetic depends a little on how a prompt is split. Two rules decide where the rest begins:

- vLLM's prefix cache serves whole blocks, and always leaves at least one token to compute;
- l2kit serves whole chunks, and for a synchronous load leaves at least one token as well.

They end at the same token exactly when the prompt is 1 to ``block_size`` tokens longer than a whole number of chunks.
The document is cut, always at the same place, so that this is so.

    python -m demo.prompt CHECKPOINT     # show what the prompt looks like
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

DOCUMENT_PATH = Path(__file__).with_name("document.md")
"""The document: an essay written for this demo, about 3,700 tokens long, of which 14 chunks are used."""

QUESTION = "Quote the sentence about rules such as LRU."
"""What the demo asks about the document."""

ANSWER_OPENING = "Rules such as LRU, for which the contents of a small"
"""How the answer begins. The model continues it, and can do so only from the document, which is in the KV cache."""

ANSWER_TOKENS = 13
"""How many tokens of the answer the demo takes.

For so long, the model is sure of its words: each is at least three times as probable as the next best one. Other
arithmetic (another CPU, another split of the prompt) moves a log-probability by up to 0.2, so it does not change the
words. A small model asked for an opinion wavers, and its greedy answer depends on the last bit.
"""

CHUNK_SIZE_TOKENS = 256
"""Tokens per chunk that l2kit is configured with in the demo."""

BLOCK_SIZE_TOKENS = 32
"""Tokens per block of vLLM's paged KV cache in the demo (its CPU backend wants a multiple of 32)."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that a prompt needs."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Turn text into token ids."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Turn token ids back into text."""
        ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """Render a conversation the way that the model was trained on."""
        ...


@dataclass(frozen=True)
class Prompt:
    """A prompt that is ready for ``LLM.generate([{"prompt_token_ids": …}])``.

    Attributes:
        token_ids: the prompt: chat template, document, question.
        document_tokens: how many of them are the document.
        prefix_tokens: the prefix that both a warm vLLM and a warm l2kit serve; the rest is always computed.
    """

    token_ids: list[int]
    document_tokens: int
    prefix_tokens: int


def load_tokenizer(checkpoint: Path) -> Tokenizer:
    """Load the tokenizer from a checkpoint folder, without asking any hub."""
    from transformers import AutoTokenizer

    return cast(Tokenizer, AutoTokenizer.from_pretrained(checkpoint, local_files_only=True))


def build_prompt(
    tokenizer: Tokenizer,
    *,
    document: str | None = None,
    question: str = QUESTION,
    opening: str = ANSWER_OPENING,
    chunk_size: int = CHUNK_SIZE_TOKENS,
    block_size: int = BLOCK_SIZE_TOKENS,
) -> Prompt:
    """Build the demo's prompt from as much of the document as the rule about lengths allows.

    The same arguments give the same token ids in every process.

    Args:
        tokenizer: see :func:`load_tokenizer`.
        document: another text than the demo's own.
        question: asked after the document; its length moves the cut in the document, not the length of the prompt.
        opening: the first words of the answer, put into the model's mouth; may be empty.
        chunk_size: tokens per chunk of l2kit.
        block_size: tokens per block of vLLM.

    Raises:
        ValueError: the document is shorter than one chunk.
    """
    text = DOCUMENT_PATH.read_text(encoding="utf-8") if document is None else document
    mark = "\x00"  # stands for the document while the template is rendered; no text contains it
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{mark}\n\n{question}"}], tokenize=False, add_generation_prompt=True
    )
    before, after = rendered.split(mark)
    # The three parts become tokens one by one: the cut is then a matter of counting, and the document's tokens are
    # the same whatever is asked about it.
    head = tokenizer.encode(before, add_special_tokens=False)
    body = tokenizer.encode(text.strip(), add_special_tokens=False)
    tail = tokenizer.encode(after + opening, add_special_tokens=False)
    shortest, longest = cut_range(len(body), len(head) + len(tail), chunk_size=chunk_size, block_size=block_size)
    kept = _last_sentence_end(tokenizer, body, shortest, longest)
    token_ids = head + body[:kept] + tail
    return Prompt(token_ids, kept, shared_prefix_tokens(len(token_ids), chunk_size, block_size))


def cut_range(document_tokens: int, other_tokens: int, *, chunk_size: int, block_size: int) -> tuple[int, int]:
    """The smallest and the largest number of document tokens that make a prompt of a good length.

    Of all ranges that the document can fill, the last one is taken.

    Args:
        document_tokens: tokens that the document has.
        other_tokens: tokens of the prompt that are not the document.
        chunk_size: tokens per chunk.
        block_size: tokens per block; divides ``chunk_size``.

    Raises:
        ValueError: the sizes do not fit each other, or the document is too short for a single chunk.
    """
    if block_size < 1 or chunk_size % block_size:
        raise ValueError(f"chunk_size {chunk_size} is not a multiple of block_size {block_size}")
    chunks = (document_tokens + other_tokens - 1) // chunk_size
    shortest = max(chunks * chunk_size + 1 - other_tokens, 0)
    longest = min(chunks * chunk_size + block_size - other_tokens, document_tokens)
    if chunks < 1 or longest < shortest:
        raise ValueError(
            f"a prompt of {document_tokens + other_tokens} tokens holds no whole chunk of {chunk_size} tokens"
        )
    return shortest, longest


def shared_prefix_tokens(prompt_tokens: int, chunk_size: int, block_size: int) -> int:
    """The prefix, in tokens, that vLLM's prefix cache and l2kit both serve for a prompt of this length.

    Raises:
        ValueError: they would serve prefixes of different lengths.
    """
    by_blocks = (prompt_tokens - 1) // block_size * block_size
    by_chunks = (prompt_tokens - 1) // chunk_size * chunk_size
    if by_blocks != by_chunks:
        raise ValueError(
            f"{prompt_tokens} tokens: vLLM would serve {by_blocks} of them and l2kit {by_chunks}; "
            f"take 1 to {block_size} tokens more than a multiple of {chunk_size}"
        )
    return by_chunks


def _last_sentence_end(tokenizer: Tokenizer, body: list[int], shortest: int, longest: int) -> int:
    """Where to cut within the range: after a full stop if there is one, or else as late as possible."""
    for length in range(longest, shortest - 1, -1):
        if re.search(r"[a-z)\"][.?!]$", tokenizer.decode(body[max(length - 8, 0) : length])):
            return length
    return longest


def main() -> int:
    """Show the prompt's measures, its beginning and its end."""
    parser = argparse.ArgumentParser(prog="python -m demo.prompt", description=main.__doc__)
    parser.add_argument("checkpoint", type=Path, help="folder that has the tokenizer; see python -m demo.checkpoint")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.checkpoint)
    prompt = build_prompt(tokenizer)
    total = len(prompt.token_ids)
    print(f"{total} tokens: {prompt.document_tokens} of the document, {total - prompt.document_tokens} around it")
    print(f"{prompt.prefix_tokens} tokens of shared prefix, {total - prompt.prefix_tokens} to compute")
    print("begins:", repr(tokenizer.decode(prompt.token_ids[:60])))
    print("ends:  ", repr(tokenizer.decode(prompt.token_ids[-60:])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
