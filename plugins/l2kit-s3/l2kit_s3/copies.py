"""`CopyBudget`: how much memory copies of payloads may take at once, where a client has to be given copies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from l2kit_s3.objects import CheckWanted

_SLICE_S: Final = 0.05


class CopyBudget:
    """So many bytes for all threads together. Any thread: the condition guards what is in use."""

    def __init__(self, max_bytes: int, check_wanted: CheckWanted) -> None:
        """``check_wanted`` ends the wait of a thread that nobody waits for."""
        self._max_bytes: Final = max_bytes
        self._check_wanted: Final = check_wanted
        self._changed = threading.Condition()
        self._in_use = 0

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Wait until ``nbytes`` are free; what is larger than all waits until nothing is in use."""
        with self._changed:
            while self._in_use and self._in_use + nbytes > self._max_bytes:
                self._changed.wait(_SLICE_S)
                self._check_wanted()
            self._in_use += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._in_use -= nbytes
                self._changed.notify_all()
