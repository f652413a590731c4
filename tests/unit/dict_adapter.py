"""A small adapter over a dict whose hooks a test can replace, and short words for keys and objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

from l2kit.adapter import Capabilities, L2Adapter
from l2kit.config import AdapterConfig
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.outcomes import StoreStatus
from l2kit.serde import Codec, CodecChain
from tests.unit.small_codecs import Codecs

Hook = Callable[..., Awaitable[Any]]
AdapterT = TypeVar("AdapterT", bound="DictAdapter")


class DictAdapter(L2Adapter[AdapterConfig]):
    """Keeps objects in a dict; any hook can be replaced for a test by putting another into ``hooks``."""

    capabilities = Capabilities(persistent=False, shared=False)

    async def open(self) -> None:
        self.objects: dict[ObjectKey, bytes] = {}
        self.calls: Counter[str] = Counter()
        self.released: list[ObjectKey] = []
        self.hooks: dict[str, Hook] = {}

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        self.calls["store"] += 1
        if "store" in self.hooks:
            await self.hooks["store"](key, data)
        self.objects[key] = b"".join(data)
        return StoreStatus.STORED

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        self.calls["load"] += 1
        if "load" in self.hooks:
            return await self.hooks["load"](key, into)  # type: ignore[no-any-return]
        return self.fill(into, self.objects.get(key))

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> Sequence[int | None]:
        self.calls["lookup"] += 1
        if "lookup" in self.hooks:
            return await self.hooks["lookup"](keys)  # type: ignore[no-any-return]
        return [len(self.objects[key]) if key in self.objects else None for key in keys]

    async def delete_one(self, key: ObjectKey) -> bool:
        self.calls["delete"] += 1
        if "delete" in self.hooks:
            await self.hooks["delete"](key)
        return self.objects.pop(key, None) is not None

    async def release_many(self, keys: Sequence[ObjectKey]) -> None:
        self.released += keys
        if "release" in self.hooks:
            await self.hooks["release"](keys)

    def fill(self, into: Sequence[memoryview], data: bytes | None) -> int | None:
        if data is None:
            return None
        rest = memoryview(data)
        for segment in into:
            part = rest[: len(segment)]
            segment[: len(part)] = part
            rest = rest[len(part) :]
        return len(data)


class AlignedAdapter(DictAdapter):
    capabilities = Capabilities(persistent=False, shared=False, alignment=512)


class SmallAdapter(DictAdapter):
    capabilities = Capabilities(persistent=False, shared=False, max_object_bytes=300)


def make(kind: type[AdapterT], codecs: Sequence[Codec] = (), **options: Any) -> AdapterT:
    return kind(AdapterConfig(**options), name="tier", codecs=CodecChain(codecs), codec_source=Codecs())


def keys(count: int) -> list[ObjectKey]:
    return [ObjectKey("ns", number.to_bytes(16, "big")) for number in range(count)]


def wrap(data: bytes | bytearray) -> MemoryObj:
    return MemoryObj.wrap(data, Layout.raw(len(data)))


def blank(nbytes: int) -> MemoryObj:
    return MemoryObj.allocate(Layout.raw(nbytes))


def raising(error: BaseException) -> Hook:
    async def hook(*_: object) -> None:
        raise error

    return hook


async def hang(*_: object) -> None:
    await anyio.sleep_forever()


KEY = keys(1)[0]
DATA = b"payload " * 8
