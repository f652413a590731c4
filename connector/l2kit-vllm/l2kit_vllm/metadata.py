"""What the scheduler side tells the worker side in one step. Plain data: it crosses processes by pickle."""

from __future__ import annotations

from dataclasses import dataclass, field

from l2kit.keys import ObjectKey


@dataclass(frozen=True)
class LoadOrder:
    """Scatter the staged objects of one request into its pages before this step's forward pass.

    Attributes:
        request_id: whose staged objects to use.
        block_ids: the request's block table from token 0 on.
        chunks: ``(start, end)`` tokens of each staged chunk, in order.
        write_from: first token to write; what lies before it is in the pages already.
        write_to: end of the tokens to write.
    """

    request_id: str
    block_ids: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    write_from: int
    write_to: int


@dataclass(frozen=True)
class SaveOrder:
    """Gather chunks of one request that are complete once this step's forward pass has run.

    Attributes:
        request_id: whose pages.
        block_ids: the request's block table from token 0 on, at least up to the last chunk's end.
        chunks: ``(start, end, key)`` of each chunk.
    """

    request_id: str
    block_ids: tuple[int, ...]
    chunks: tuple[tuple[int, int, ObjectKey], ...]


@dataclass
class StepOrders:
    """All orders of one step.

    Attributes:
        loads: to do before the forward pass.
        saves: to do after it.
        overwritten_block_ids: pages that this step allocates: a save still reading one of them comes first. None when
            they are not known: then every save comes first.
        heard_of_block_ids: pages that were reported as not filled, and of which vLLM has learned since the last step:
            from this step on nobody builds on what is in them.
    """

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    overwritten_block_ids: set[int] | None = field(default_factory=set)
    heard_of_block_ids: set[int] = field(default_factory=set)
