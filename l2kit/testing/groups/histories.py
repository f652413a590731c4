"""Any history of batches: hypothesis makes them up, a dict says what they must answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

from l2kit.testing.groups.base import Adapter, Conformance
from l2kit.testing.state_machine import check_histories

#: Room for two or three of the objects that the histories store.
_LIMIT_BYTES = 12 << 10


class HistoryTests(Conformance):
    """Histories against a model, in `l2kit.testing.state_machine`."""

    #: How many histories of each length, and batches in the longest ones.
    history_examples: ClassVar[int] = 15
    history_steps: ClassVar[int] = 40

    async def test_any_history_agrees_with_a_dict(self, adapter: Adapter, adapter_url: str | None) -> None:
        """Where objects persist, a history closes and reopens the adapter as well."""
        if adapter_url is None:
            await check_histories(lambda: _entered(adapter), examples=self.history_examples, steps=self.history_steps)
        else:
            await check_histories(
                lambda: self.open_adapter(adapter_url),
                reconnect=lambda: self.open_adapter(self.reopen_url(adapter_url)),
                examples=self.history_examples,
                steps=self.history_steps,
            )

    async def test_any_history_under_a_limit_gives_no_other_bytes(self, url: str) -> None:
        """Objects may be missing then, except those that an owned lock keeps."""
        await self.tiny(url, _LIMIT_BYTES)
        await check_histories(
            lambda: self.open_adapter(url, max_bytes=_LIMIT_BYTES),
            reconnect=lambda: self.open_adapter(self.reopen_url(url), max_bytes=_LIMIT_BYTES),
            examples=self.history_examples,
            steps=self.history_steps,
        )


@asynccontextmanager
async def _entered(adapter: Adapter) -> AsyncIterator[Adapter]:
    yield adapter
