"""`TemplateAdapter`: complete, in memory. Your storage system goes where a docstring says "yours"."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from l2kit.adapter import Capabilities, KeyInfo, L2Adapter, Usage
from l2kit.errors import L2Error
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit_template.config import TemplateConfig


class TemplateAdapter(L2Adapter[TemplateConfig]):
    """Keeps each stored object as one `bytes`, under its canonical name.

    - An object is there when all of it is; a store that fails leaves the old one.
    - ``max_bytes`` is kept at every moment: what has no room is dropped, and what was there stays.
    """

    api_version = (1, 0)
    config_type = TemplateConfig
    # Yours: say what is true. The conformance suite tests all that is promised here, and skips the rest.
    capabilities = Capabilities(persistent=False, shared=False)

    async def open(self) -> None:
        """Start empty.

        Yours: connect, and raise an `L2Error` that says what is wrong, where, and what to do about it.
        """
        self._objects: dict[str, bytes] = {}
        self._used_bytes = 0

    async def close(self) -> None:
        """Forget everything. Yours: disconnect; it runs shielded, for some seconds at most."""
        self._objects.clear()
        self._used_bytes = 0

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        """Copy the object in; DROPPED where there is no room.

        Yours: write ``data`` part by part and publish it when it is complete. What blocks goes through
        `run_in_thread`. No buffer may be in use any more when this returns or raises.
        """
        name = key.encode()
        used_bytes = self._used_bytes - len(self._objects.get(name, b"")) + sum(map(len, data))
        if self.config.max_bytes is not None and used_bytes > self.config.max_bytes:
            return StoreStatus.DROPPED
        self._objects[name] = b"".join(data)
        self._used_bytes = used_bytes
        return StoreStatus.STORED

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        """Copy the object out. Yours: receive straight into ``into``, as much as is stored and fits."""
        stored = self._objects.get(key.encode())
        if stored is None:
            return None
        position = 0
        for part in into:
            piece = stored[position : position + len(part)]
            part[: len(piece)] = piece
            position += len(piece)
        return len(stored)

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Sizes of the objects that are here. Yours: one round trip for all keys, or as few as can be."""
        found = [self._objects.get(key.encode()) for key in keys]
        return [None if stored is None else len(stored) for stored in found]

    async def delete_one(self, key: ObjectKey) -> bool:
        """Delete one object. Yours: False when there was none, an error when nobody can know."""
        stored = self._objects.pop(key.encode(), None)
        self._used_bytes -= len(stored or b"")
        return stored is not None

    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        """Every object. Yours: page by page; leave this out where the system cannot list."""
        self.check_open()
        for name, stored in list(self._objects.items()):
            yield KeyInfo(ObjectKey.parse(name), len(stored))

    async def usage(self) -> Usage:
        """Exact. Yours: what the system says of itself; leave this out where it says nothing."""
        self.check_open()
        return Usage(self._used_bytes, self.config.max_bytes, len(self._objects))

    def translate_error(self, error: Exception) -> L2Error:
        """Yours: your client's exceptions, as errors of l2kit's tree; no secret may get into a message."""
        return super().translate_error(error)
