"""`WrappingAdapter`: an adapter around another one, for concerns that every backend shares.

A wrapper changes single hooks and leaves the rest as it is. The envelope is made and checked by the outermost adapter,
so a wrapper sees stored bytes, and whatever it does to them is found out like damage in the backend itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

import msgspec

from l2kit.adapter import KeyInfo, L2Adapter, Usage
from l2kit.batches import Lane
from l2kit.config import AdapterConfig, build
from l2kit.errors import L2Error
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus


class NoOptions(msgspec.Struct, frozen=True):
    """Of a wrapper without options."""


OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)


class WrappingAdapter(L2Adapter[AdapterConfig], Generic[OptionsT]):
    """All hooks of ``inner``, one to one; subclasses override those that they are about.

    - It has the name, configuration and capabilities of ``inner``, and enters and closes it.
    - Registered under the entry-point group ``l2kit.wrappers``, a wrapper can be named in a URL in front of the scheme:
      ``fault+redis://…?fault.seed=7``; its options carry its name.

    Attributes:
        inner: the adapter underneath; its hooks may be called, its tasks are nobody else's.
        options: an instance of :attr:`options_type`.
    """

    options_type: ClassVar[type[msgspec.Struct]] = NoOptions

    def __init__(self, inner: L2Adapter[Any], options: OptionsT | None = None) -> None:
        """Stand around ``inner``, which is not entered yet; ``options`` by default those without any value given."""
        super().__init__(inner.config, name=inner.name, codecs=inner.codecs, codec_source=inner._codec_source)  # noqa: SLF001
        self.inner = inner
        self.options: OptionsT = cast(OptionsT, self.options_type()) if options is None else options
        self.capabilities = inner.capabilities

    @classmethod
    def around(cls, inner: L2Adapter[Any], options: Mapping[str, Any], *, where: str) -> Self:
        """Make one from raw options; the registry does.

        Raises:
            ConfigError: names the wrong option and the nearest valid choice.
        """
        return cls(inner, cast(OptionsT, build(cls.options_type, options, where=where)))

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """See `L2Adapter.store_one`."""
        return await self.inner.store_one(key, data)

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """See `L2Adapter.load_one`."""
        return await self.inner.load_one(key, into)

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> Sequence[int | None]:
        """See `L2Adapter.lookup_many`."""
        return await self.inner.lookup_many(keys)

    async def delete_one(self, key: ObjectKey) -> bool:
        """See `L2Adapter.delete_one`."""
        return await self.inner.delete_one(key)

    async def acquire_many(self, keys: Sequence[ObjectKey]) -> Sequence[int | None]:
        """See `L2Adapter.acquire_many`."""
        return await self.inner.acquire_many(keys)

    async def release_many(self, keys: Sequence[ObjectKey]) -> None:
        """See `L2Adapter.release_many`."""
        await self.inner.release_many(keys)

    def iter_keys(self) -> AsyncIterator[KeyInfo]:
        """See `L2Adapter.iter_keys`."""
        return self.inner.iter_keys()

    async def usage(self) -> Usage:
        """See `L2Adapter.usage`."""
        self.check_open()
        return await self.inner.usage()

    def translate_error(self, error: Exception) -> L2Error:
        """See `L2Adapter.translate_error`."""
        return self.inner.translate_error(error)

    @property
    def counters(self) -> Counter[str]:
        """Its own, which count keys, and what the adapters underneath count besides."""
        return self._counters + self.inner.counters

    @property
    def trouble(self) -> L2Error | None:
        """Its own, else that of the adapter underneath."""
        return super().trouble or self.inner.trouble

    def worked_again_at(self, lane: Lane) -> float:
        """What the adapter underneath says."""
        return self.inner.worked_again_at(lane)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.inner)
            await super().__aenter__()
            self._inner_stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Our batches end first, while what they use is still open.
        async with self._inner_stack:
            await super().__aexit__(kind, error, traceback)


def innermost(adapter: L2Adapter[Any]) -> L2Adapter[Any]:
    """The adapter inside all wrappers."""
    while isinstance(adapter, WrappingAdapter):
        adapter = adapter.inner
    return adapter


def failure_of(adapter: L2Adapter[Any], error: Exception) -> L2Error:
    """``error`` of a hook of ``adapter`` as an error of the tree."""
    return error if isinstance(error, L2Error) else adapter.translate_error(error)
