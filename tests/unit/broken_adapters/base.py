"""What the broken adapters have in common."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from typing import ClassVar, Final

from l2kit.adapter import Capabilities
from l2kit.keys import ObjectKey
from l2kit.memory_adapter import MemoryAdapter
from l2kit.outcomes import StoreStatus

#: One module each, in the order of the suite.
GROUPS: Final = (
    "round_trip",
    "batches",
    "agreement",
    "locks",
    "concurrency",
    "lifecycle",
    "hostile_keys",
    "corruption",
    "inventory",
    "histories",
)

#: What the leaking ones leave behind, for the tests to clear away.
leaked: list[int] = []
stop = threading.Event()


class BrokenAdapter(MemoryAdapter):
    """No fault yet."""

    caught_by: ClassVar[str]


class PersistentMemory(MemoryAdapter):
    """No fault: what one instance stored, the next one of the same class finds."""

    capabilities = Capabilities(persistent=True, shared=False, lock="owned", evicts=True)
    disk: ClassVar[dict[ObjectKey, bytes]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.disk = {}

    async def open(self) -> None:
        await super().open()
        self._objects.update(self.disk)
        self._used_bytes = sum(map(len, self.disk.values()))

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        status = await super().store_one(key, data)
        if key in self._objects:
            self.disk[key] = self._objects[key]
        return status

    async def delete_one(self, key: ObjectKey) -> bool:
        self.disk.pop(key, None)
        return await super().delete_one(key)


def every_broken_adapter() -> list[type[BrokenAdapter]]:
    """All that have a fault, group by group."""
    modules = [importlib.import_module(f"tests.unit.broken_adapters.{group}") for group in GROUPS]
    return [
        found
        for module in modules
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, BrokenAdapter) and found.__module__ == module.__name__
    ]
