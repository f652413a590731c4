"""TLS with Redis: whom we trust, whom the server trusts, and every byte over it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

import l2kit
from l2kit import Layout, MemoryObj, ObjectKey
from l2kit.errors import AuthError, BackendError, ConfigError
from l2kit.testing import AdapterConformance
from l2kit.testing.servers import RespServer, free_port, run_server, unavailable

pytestmark = pytest.mark.service


class Certificates(NamedTuple):
    """PEM files: an authority, what it signed for a server and a client, and an authority nobody knows."""

    folder: Path

    def __getattr__(self, name: str) -> str:
        return str(self.folder / f"{name}.pem")


class TLSServer(NamedTuple):
    server: RespServer
    port: int
    certificates: Certificates

    def url(self, host: str = "127.0.0.1", **options: str) -> str:
        password = quote(self.server.password or "", safe="")
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in options.items())
        return f"rediss://:{password}@{host}:{self.port}?{query}"


def _openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        unavailable("openssl", "there is no openssl program to make certificates with")
    folder = tmp_path_factory.mktemp("certificates")
    for authority in ("authority", "stranger"):
        _openssl(
            folder,
            *f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={authority}".split(),
            *f"-keyout {authority}_key.pem -out {authority}.pem".split(),
        )
    (folder / "names.ext").write_text("subjectAltName=IP:127.0.0.1,DNS:cache.example\n")
    for name, signer in (("server", "authority"), ("client", "authority"), ("impostor", "stranger")):
        _openssl(
            folder,
            *f"req -newkey rsa:2048 -nodes -subj /CN={name} -keyout {name}_key.pem -out {name}.csr".split(),
        )
        _openssl(
            folder,
            *f"x509 -req -in {name}.csr -CA {signer}.pem -CAkey {signer}_key.pem -CAcreateserial".split(),
            *f"-days 2 -extfile names.ext -out {name}.pem".split(),
        )
    _openssl(
        folder,
        *["rsa", "-aes256", "-passout", "pass:closed", "-in", "client_key.pem", "-out", "encrypted_key.pem"],
    )
    return Certificates(folder)


@contextmanager
def _tls_server(certificates: Certificates, clients: str) -> Iterator[TLSServer]:
    port = free_port()
    with run_server(
        "redis",
        tls_port=str(port),
        tls_cert_file=certificates.server,
        tls_key_file=certificates.server_key,
        tls_ca_cert_file=certificates.authority,
        tls_auth_clients=clients,
    ) as server:
        yield TLSServer(server, port, certificates)


@pytest.fixture(scope="module")
def tls_server(certificates: Certificates) -> Iterator[TLSServer]:
    with _tls_server(certificates, "no") as server:
        yield server


@pytest.fixture(scope="module")
def mutual_server(certificates: Certificates) -> Iterator[TLSServer]:
    with _tls_server(certificates, "yes") as server:
        yield server


class TestRedisOverTLS(AdapterConformance):
    @pytest.fixture
    def adapter_url(self, tls_server: TLSServer) -> str:
        self.tls = tls_server
        return tls_server.url(ca_file=tls_server.certificates.authority)

    def raw_read(self, adapter: Any, key: ObjectKey) -> bytes | None:
        stored = self.tls.server.command("GET", adapter.config.key_prefix + key.encode())
        assert stored is None or isinstance(stored, bytes)
        return stored

    def raw_write(self, adapter: Any, key: ObjectKey, data: bytes) -> None:
        self.tls.server.command("SET", adapter.config.key_prefix + key.encode(), data)


async def opening_error(url: str, **options: Any) -> l2kit.L2Error:
    with pytest.raises(l2kit.L2Error) as caught:
        async with l2kit.open_adapter(url, socket_timeout_s=1, **options):
            pass
    return caught.value


@pytest.mark.anyio
async def test_a_certificate_that_nobody_vouches_for_is_refused(tls_server: TLSServer) -> None:
    for options in ({}, {"ca_file": tls_server.certificates.stranger}):
        error = await opening_error(tls_server.url(), **options)
        assert isinstance(error, BackendError)
        assert "certificate" in str(error)
        assert "ca_file" in str(error)


@pytest.mark.anyio
async def test_the_name_must_be_that_of_the_certificate(tls_server: TLSServer) -> None:
    authority = tls_server.certificates.authority
    error = await opening_error(tls_server.url(), ca_file=authority, server_name="other.example")
    assert "server_name" in str(error)
    async with l2kit.open_adapter(tls_server.url(), ca_file=authority, server_name="cache.example") as adapter:
        assert (await adapter.probe()).ok


@pytest.mark.anyio
async def test_without_verification_any_certificate_will_do(tls_server: TLSServer) -> None:
    async with l2kit.open_adapter(tls_server.url(verify="false")) as adapter:
        assert (await adapter.probe()).ok


@pytest.mark.anyio
async def test_a_server_that_asks_for_a_certificate(mutual_server: TLSServer) -> None:
    files = mutual_server.certificates
    error = await opening_error(mutual_server.url(ca_file=files.authority))
    assert isinstance(error, AuthError), error
    assert "client_cert_file" in str(error)
    error = await opening_error(
        mutual_server.url(ca_file=files.authority),
        client_cert_file=files.impostor,
        client_key_file=files.impostor_key,
    )
    assert isinstance(error, AuthError), error
    assert "client_cert_file" in str(error)
    async with l2kit.open_adapter(
        mutual_server.url(ca_file=files.authority),
        client_cert_file=files.client,
        client_key_file=files.client_key,
    ) as adapter:
        assert (await adapter.probe()).ok


@pytest.mark.anyio
async def test_files_that_cannot_be_used_are_named(tls_server: TLSServer, tmp_path: Path) -> None:
    files = tls_server.certificates
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    for options, field in (
        ({"ca_file": str(tmp_path / "none.pem")}, "ca_file"),
        ({"ca_file": str(junk)}, "ca_file"),
        ({"client_cert_file": str(junk)}, "client_cert_file"),
        ({"client_cert_file": files.client, "client_key_file": files.server_key}, "client_key_file"),
        ({"client_cert_file": files.client, "client_key_file": files.encrypted_key}, "client_key_file"),
    ):
        error = await opening_error(tls_server.url(), **options)
        assert isinstance(error, ConfigError)
        assert field in str(error)


@pytest.mark.anyio
async def test_tls_to_a_plain_port_and_the_other_way_round(tls_server: TLSServer) -> None:
    plain = tls_server._replace(port=tls_server.server.port)
    error = await opening_error(plain.url(verify="false"))
    assert isinstance(error, BackendError)
    error = await opening_error(tls_server.url(verify="false").replace("rediss://", "redis://").partition("?")[0])
    assert isinstance(error, BackendError)


@pytest.mark.anyio
async def test_connections_are_kept(tls_server: TLSServer) -> None:
    """What TLS says between two answers, such as session tickets, is no reason to throw a connection away."""
    async with l2kit.open_adapter(tls_server.url(ca_file=tls_server.certificates.authority)) as adapter:
        before = _connections(tls_server)
        for _ in range(20):
            await adapter.submit_lookup_and_lock_task([ObjectKey("tls", bytes(16))])
        assert _connections(tls_server) - before == 1, "only the one that counts them"


def _connections(tls_server: TLSServer) -> int:
    stats = tls_server.server.command("INFO", "stats")
    assert isinstance(stats, bytes)
    return int(stats.partition(b"total_connections_received:")[2].split()[0])


@pytest.mark.anyio
async def test_a_large_object_over_tls(tls_server: TLSServer) -> None:
    data = os.urandom(24 << 20)
    layout = Layout.raw(len(data))
    key = ObjectKey("tls", os.urandom(16))
    target = MemoryObj.allocate(layout)
    async with l2kit.open_adapter(tls_server.url(ca_file=tls_server.certificates.authority)) as adapter:
        [stored] = await adapter.submit_store_task([key], [MemoryObj.wrap(data, layout)])
        assert stored.present
        [loaded] = await adapter.submit_load_task([key], [target])
        assert loaded.loaded
        assert target.tobytes() == data
        late = adapter.submit_load_task([key], [target])
        late.cancel()
        await late.wait_ended()
        assert (await adapter.submit_load_task([key], [target]))[0].loaded
