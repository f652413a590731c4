"""The handle of one transfer between pages and objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Transfer:
    """A gather, scatter or copy that has been started. On the CPU it has also ended.

    - Until `done`, the caller keeps the objects' memory alive and does not touch it, and gives the blocks that are
      gathered to nobody else (or makes those who write to them wait on `event`).
    - Dropping the handle neither cancels the transfer nor waits for it.
    """

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        """``event`` is recorded behind the last copy; None says that every byte has arrived."""
        self.event = event

    def done(self) -> bool:
        """Say without waiting whether every byte has arrived."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Block the calling thread until every byte has arrived."""
        if self.event is not None:
            self.event.synchronize()

    def wait_on(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let ``stream`` (the calling thread's current one by default) run no later work before the transfer's end.

        A forward that reads scattered pages needs this on its stream. The calling thread does not wait.
        """
        if self.event is None:
            return
        import torch

        (stream or torch.cuda.current_stream()).wait_event(self.event)
