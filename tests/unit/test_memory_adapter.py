"""``memory://``, the reference adapter, passes the whole conformance suite."""

from __future__ import annotations

from typing import Any

import pytest

from l2kit.adapter import L2Adapter
from l2kit.config import build
from l2kit.keys import ObjectKey
from l2kit.memory_adapter import MemoryAdapter, MemoryConfig
from l2kit.serde import CodecChain
from l2kit.testing import AdapterConformance
from tests.unit.small_codecs import Codecs, QuickZlibCodec


class TestMemoryAdapter(AdapterConformance):
    @pytest.fixture
    def adapter_url(self) -> str:
        return "memory://"

    def raw_read(self, adapter: L2Adapter[Any], key: ObjectKey) -> bytes | None:
        assert isinstance(adapter, MemoryAdapter)
        return adapter._objects.get(key)

    def raw_write(self, adapter: L2Adapter[Any], key: ObjectKey, data: bytes) -> None:
        assert isinstance(adapter, MemoryAdapter)
        adapter._objects[key] = data


@pytest.mark.slow
class TestMemoryAdapterWithACodec(TestMemoryAdapter):
    """The same with payloads whose length is not the object's."""

    def open_adapter(self, url: str, **options: Any) -> L2Adapter[Any]:
        config = build(MemoryConfig, options, where="memory")
        return MemoryAdapter(config, name="memory", codecs=CodecChain([QuickZlibCodec()]), codec_source=Codecs())
