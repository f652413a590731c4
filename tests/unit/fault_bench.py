"""A faulty memory adapter, and what the tests of fault injection share around it."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import EntryPoint
from typing import Any

import l2kit
from l2kit.adapter import L2Adapter
from l2kit.errors import L2Error
from l2kit.faults import FaultOptions, FaultyAdapter
from l2kit.faults.plan import Operation
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.memory_adapter import MemoryAdapter
from l2kit.outcomes import LoadOutcome, LookupOutcome, StoreOutcome
from l2kit.registry import ADAPTERS, CODECS, POLICIES, WRAPPERS, Registry
from tests.unit.odd_tiers import content

SIZE = 1000


def key(number: int = 0) -> ObjectKey:
    return ObjectKey("faults", number.to_bytes(8, "big"))


def raw(data: bytes | bytearray) -> MemoryObj:
    return MemoryObj.wrap(data, Layout.raw(len(data)))


def memory(**options: Any) -> MemoryAdapter:
    adapter = l2kit.open_adapter("memory://", **options)
    assert isinstance(adapter, MemoryAdapter)
    return adapter


class Bench:
    """A faulty memory adapter and short words for what tests do with it."""

    def __init__(self, inner: L2Adapter[Any] | None = None, **options: Any) -> None:
        self.inner = inner or memory()
        self.adapter = FaultyAdapter(self.inner, FaultOptions(**options))

    async def __aenter__(self) -> Bench:
        await self.adapter.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.adapter.__aexit__(*exc)

    @property
    def stored(self) -> dict[ObjectKey, bytes]:
        assert isinstance(self.inner, MemoryAdapter)
        return self.inner._objects

    @property
    def locks(self) -> Counter[ObjectKey]:
        assert isinstance(self.inner, MemoryAdapter)
        return self.inner._locks

    def faults(self) -> dict[str, int]:
        return {name[6:]: n for name, n in self.adapter.counters.items() if name.startswith("fault.")}

    async def store(self, number: int = 0, nbytes: int = SIZE) -> StoreOutcome:
        data = bytearray(content(key(number), nbytes))
        [outcome] = await self.adapter.submit_store_task([key(number)], [raw(data)])
        assert data == content(key(number), nbytes), "the caller's memory was written to"
        return outcome

    async def prepare(self, *numbers: int, nbytes: int = SIZE) -> None:
        """Store around the plan."""
        self.adapter.calm()
        for number in numbers:
            assert (await self.store(number, nbytes)).present
        self.adapter.resume()

    async def load(self, number: int = 0, nbytes: int = SIZE) -> LoadOutcome:
        target = raw(bytearray(b"\xa5" * nbytes))
        [outcome] = await self.adapter.submit_load_task([key(number)], [target])
        if outcome.loaded:
            assert target.tobytes()[: outcome.nbytes] == content(key(number), outcome.nbytes)
        return outcome

    async def lookup(self, *numbers: int) -> list[LookupOutcome]:
        return await self.adapter.submit_lookup_and_lock_task([key(number) for number in numbers])

    async def unlock(self, *numbers: int) -> None:
        await self.adapter.submit_unlock_task([key(number) for number in numbers])

    async def delete(self, number: int = 0) -> Any:
        [outcome] = await self.adapter.submit_delete_task([key(number)])
        return outcome

    async def do(self, operation: Operation) -> L2Error | None:
        """One call of an operation on object 0; the error that came of it."""
        try:
            if operation in ("lookup", "release"):
                [found] = await self.lookup(0)
                if found.hit:
                    await self.unlock(0)
                return found.error
            call: Any = {"load": self.load, "store": self.store, "delete": self.delete}[operation]
            return (await call()).error  # type: ignore[no-any-return]
        except L2Error as error:
            return error


def bench_for(operation: str, rule: str, *, seed: int = 0, timeout_s: float = 10.0) -> Bench:
    """A bench with one rule."""
    rules: dict[str, Any] = {operation: (rule,)}
    return Bench(memory(timeout_s=timeout_s), seed=seed, **rules)


def registry() -> Registry:
    """What is installed here, as far as these tests need it."""

    def point(group: str, name: str, value: str) -> dict[str, list[EntryPoint]]:
        return {group: [EntryPoint(name=name, value=value, group=group)]}

    return Registry(
        point(ADAPTERS, "memory", "l2kit.memory_adapter:MemoryAdapter")
        | point(POLICIES, "lru", "l2kit.policy:LRUPolicy")
        | point(WRAPPERS, "fault", "l2kit.faults:FaultyAdapter")
        | {CODECS: []}
    )


def adapter_of(tier: Any, **options: Any) -> FaultyAdapter:
    adapter = registry().adapter(tier, **options)
    assert isinstance(adapter, FaultyAdapter)
    return adapter
