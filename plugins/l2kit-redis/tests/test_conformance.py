"""The whole conformance suite, on every server and every kind of connection."""

from __future__ import annotations

import struct
import zlib
from functools import partial
from typing import Any, ClassVar
from urllib.parse import quote

import pytest

from l2kit.adapter import L2Adapter
from l2kit.keys import ObjectKey
from l2kit.testing import AdapterConformance
from l2kit.testing.clusters import RespCluster
from l2kit.testing.sentinels import RespSentinels
from l2kit.testing.servers import RespServer

#: The head of an object in stripes, written down a second time; its CRC-32 follows.
HEAD = struct.Struct("<8sHxxIQ8s")
MAGIC = b"L2KITSTR"
STRIPE_BYTES = 1000


def stripe_names(name: str, value: bytes | None) -> list[str] | None:
    """Where the stripes lie, if ``value`` is a head."""
    if value is None or len(value) != HEAD.size + 4 or not value.startswith(MAGIC):
        return None
    _, _, stripe_bytes, size, token = HEAD.unpack(value[:-4])
    return [f"{name}#{token.hex()}#{number}" for number in range(-(-size // stripe_bytes))]


class OnServer(AdapterConformance):
    """The hooks that go around the adapter, with a plain client that finds the right server of several."""

    __test__ = False
    server: ClassVar[RespServer | RespCluster | RespSentinels]

    def name(self, adapter: L2Adapter[Any], key: ObjectKey) -> str:
        return f"{adapter.config.key_prefix}{key.encode()}"

    def raw_read(self, adapter: L2Adapter[Any], key: ObjectKey) -> bytes | None:
        command, name = type(self).server.command, self.name(adapter, key)
        value = command("GET", name)
        assert value is None or isinstance(value, bytes)
        stripes = stripe_names(name, value)
        if stripes is None:
            return value
        return b"".join(part for part in map(partial(command, "GET"), stripes) if isinstance(part, bytes))

    def raw_write(self, adapter: L2Adapter[Any], key: ObjectKey, data: bytes) -> None:
        command, name = type(self).server.command, self.name(adapter, key)
        value = command("GET", name)
        assert value is None or isinstance(value, bytes)
        if stripe_names(name, value) is None or len(data) <= STRIPE_BYTES:
            command("SET", name, data)
            return
        head = HEAD.pack(MAGIC, 1, STRIPE_BYTES, len(data), b"by hand!")
        head += zlib.crc32(head).to_bytes(4, "little")
        for number, stripe in enumerate(stripe_names(name, head) or ()):
            command("SET", stripe, data[number * STRIPE_BYTES :][:STRIPE_BYTES])
        command("SET", name, head)


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


@pytest.mark.service
class TestRedisInStripes(OnServer):
    """Nearly every object of the suite is large here."""

    __test__ = True

    @pytest.fixture
    def adapter_url(self, redis_server: RespServer, prefix: str) -> str:
        type(self).server = redis_server
        return f"{redis_server.url()}?key_prefix={prefix}&stripe_bytes=2048"


@pytest.mark.service
class TestValkeyInStripesWithLeases(OnServer):
    """Large objects that expire."""

    __test__ = True

    @pytest.fixture
    def adapter_url(self, valkey_server: RespServer, prefix: str) -> str:
        type(self).server = valkey_server
        return f"{valkey_server.url()}?key_prefix={prefix}&stripe_bytes=16384&ttl_s=30&lease_s=60"

    def raw_time_to_live_s(self, adapter: L2Adapter[Any], key: ObjectKey) -> float:
        left_ms = type(self).server.command("PTTL", self.name(adapter, key))
        assert isinstance(left_ms, int)
        return left_ms / 1000


@pytest.mark.service
class TestRedisCluster(OnServer):
    __test__ = True

    @pytest.fixture
    def adapter_url(self, redis_cluster: RespCluster, prefix: str) -> str:
        type(self).server = redis_cluster
        return f"{redis_cluster.url()}?key_prefix={prefix}"


@pytest.mark.service
class TestRedisClusterInStripes(OnServer):
    """The parts of nearly every object are on all nodes."""

    __test__ = True

    @pytest.fixture
    def adapter_url(self, redis_cluster: RespCluster, prefix: str) -> str:
        type(self).server = redis_cluster
        return f"{redis_cluster.url()}?key_prefix={prefix}&stripe_bytes=2048&ttl_s=30&lease_s=60"

    def raw_time_to_live_s(self, adapter: L2Adapter[Any], key: ObjectKey) -> float:
        left_ms = type(self).server.command("PTTL", self.name(adapter, key))
        assert isinstance(left_ms, int)
        return left_ms / 1000


@pytest.mark.service
class TestValkeyCluster(OnServer):
    __test__ = True

    @pytest.fixture
    def adapter_url(self, valkey_cluster: RespCluster, prefix: str) -> str:
        type(self).server = valkey_cluster
        return f"{valkey_cluster.url()}?key_prefix={prefix}"


@pytest.mark.service
class TestRedisBehindSentinels(OnServer):
    __test__ = True

    @pytest.fixture
    def adapter_url(self, redis_sentinels: RespSentinels, prefix: str) -> str:
        type(self).server = redis_sentinels
        return redis_sentinels.url(key_prefix=prefix)


@pytest.mark.service
class TestValkeyBehindSentinels(OnServer):
    __test__ = True

    @pytest.fixture
    def adapter_url(self, valkey_sentinels: RespSentinels, prefix: str) -> str:
        type(self).server = valkey_sentinels
        return valkey_sentinels.url(key_prefix=prefix)
