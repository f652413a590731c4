"""A backend for the tests of the command line: one file for each object, and failures on request."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from l2kit.adapter import Capabilities, KeyInfo, L2Adapter
from l2kit.config import AdapterConfig, Secret
from l2kit.errors import AuthError
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.outcomes import StoreStatus
from l2kit.serde import Codec


class Config(AdapterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    password: Secret | None = None
    fails: str = ""


class Shelf(L2Adapter[Config]):
    api_version = (1, 0)
    config_type = Config
    capabilities = Capabilities(persistent=True, shared=True)

    async def open(self) -> None:
        if self.config.fails == "open":
            raise AuthError("shelf: wrong password")

    async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
        if self.config.fails == "store":
            raise OSError(28, "No space left on device")
        self._file(key).write_bytes(b"".join(data))
        return StoreStatus.STORED

    async def load_one(self, key: ObjectKey, into: Sequence[memoryview]) -> int | None:
        if not self._file(key).exists():
            return None
        if self.config.fails == "load":
            raise OSError(5, "Input/output error")
        payload = self._file(key).read_bytes()
        position = 0
        for segment in into:
            part = payload[position : position + len(segment)]
            segment[: len(part)] = part
            position += len(part)
        return len(payload)

    async def lookup_many(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        return [self._file(key).stat().st_size if self._file(key).exists() else None for key in keys]

    async def delete_one(self, key: ObjectKey) -> bool:
        found = self._file(key).exists()
        self._file(key).unlink(missing_ok=True)
        return found

    async def iter_keys(self) -> AsyncIterator[KeyInfo]:
        self.check_open()
        if self.config.fails == "list":
            raise PermissionError(13, "Permission denied")
        for path in sorted(Path(self.config.path).iterdir()):
            yield KeyInfo(ObjectKey.parse(path.name.replace("~", "/")), path.stat().st_size)

    def _file(self, key: ObjectKey) -> Path:
        return Path(self.config.path) / key.encode().replace("/", "~")


class Zlib(Codec):
    codec_id = "zlib"

    def estimate_serialized_size(self, layout: Layout) -> int:
        return layout.nbytes + 1024

    def serialize(self, src: Sequence[memoryview], dst: memoryview, key: ObjectKey, layout: Layout) -> int:
        packed = zlib.compress(b"".join(src))
        dst[: len(packed)] = packed
        return len(packed)

    def deserialize(self, src: memoryview, dst: Sequence[memoryview], key: ObjectKey, layout: Layout) -> None:
        plain = zlib.decompress(src)
        for segment in dst:
            segment[:] = plain[: len(segment)]
            plain = plain[len(segment) :]
