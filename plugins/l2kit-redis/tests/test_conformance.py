"""The whole conformance suite, on every server and every kind of connection."""

from __future__ import annotations

from typing import Any, ClassVar
from urllib.parse import quote

import pytest

from l2kit.adapter import L2Adapter
from l2kit.keys import ObjectKey
from l2kit.testing import AdapterConformance
from l2kit.testing.servers import RespServer


class OnServer(AdapterConformance):
    """The hooks that go around the adapter, with the server's own plain client."""

    __test__ = False
    server: ClassVar[RespServer]

    def name(self, adapter: L2Adapter[Any], key: ObjectKey) -> str:
        return f"{adapter.config.key_prefix}{key.encode()}"

    def raw_read(self, adapter: L2Adapter[Any], key: ObjectKey) -> bytes | None:
        stored = type(self).server.command("GET", self.name(adapter, key))
        assert stored is None or isinstance(stored, bytes)
        return stored

    def raw_write(self, adapter: L2Adapter[Any], key: ObjectKey, data: bytes) -> None:
        type(self).server.command("SET", self.name(adapter, key), data)


@pytest.mark.service
class TestRedisOverTCP(OnServer):
    __test__ = True

    @pytest.fixture
    def adapter_url(self, redis_server: RespServer, prefix: str) -> str:
        type(self).server = redis_server
        return f"{redis_server.url()}?key_prefix={prefix}"


@pytest.mark.service
class TestValkeyOverTCP(OnServer):
    __test__ = True

    @pytest.fixture
    def adapter_url(self, valkey_server: RespServer, prefix: str) -> str:
        type(self).server = valkey_server
        return f"{valkey_server.url()}?key_prefix={prefix}"


@pytest.mark.service
class TestRedisOverUnixSocket(OnServer):
    __test__ = True

    @pytest.fixture
    def adapter_url(self, redis_server: RespServer, prefix: str) -> str:
        if redis_server.unix_socket is None:
            pytest.skip("needs a server with a Unix socket on this machine")
        type(self).server = redis_server
        password = quote(redis_server.password or "", safe="")
        return f"redis+unix://:{password}@{redis_server.unix_socket}?key_prefix={prefix}"
