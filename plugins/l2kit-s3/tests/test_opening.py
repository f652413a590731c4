"""What is wrong shows when the adapter is opened, within seconds, and the error names it."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import anyio
import pytest

import l2kit
from l2kit import Layout, MemoryObj, ObjectKey
from l2kit.errors import AuthError, BackendError, ConfigError, L2Error, TransientBackendError
from l2kit.testing.object_stores import ObjectStore
from l2kit.testing.servers import free_port, unavailable

pytestmark = [pytest.mark.anyio, pytest.mark.service]

SECRET = "xyzzy-open-sesame"


async def error_of(url: str, **options: Any) -> L2Error:
    adapter = l2kit.open_adapter(url, **options)
    with anyio.fail_after(8), pytest.raises(L2Error) as caught:
        async with adapter:
            pass
    assert SECRET not in repr(caught.value)
    return caught.value


async def works(url: str, **options: Any) -> None:
    async with l2kit.open_adapter(url, **options) as adapter:
        probe = await adapter.probe()
        assert probe.ok, probe.error
        assert "PUT" in probe.details["cost"]


@pytest.mark.parametrize("direct", ["true", "false"])
async def test_wrong_credentials(place: Any, direct: str) -> None:
    error = await error_of(place.url(access_key_id="nobody", direct=direct))
    assert isinstance(error, AuthError)
    error = await error_of(place.url(secret_access_key=SECRET, direct=direct))
    assert isinstance(error, AuthError)
    assert "access key" in str(error)


@pytest.mark.parametrize("direct", ["true", "false"])
async def test_a_wrong_bucket(object_store: ObjectStore, direct: str) -> None:
    url = object_store.url("p", direct=direct).replace(object_store.bucket, "no-such-bucket", 1)
    error = await error_of(url)
    assert isinstance(error, BackendError)
    assert "no such bucket" in str(error)
    assert "no-such-bucket" in str(error)


async def test_a_wrong_endpoint(object_store: ObjectStore) -> None:
    error = await error_of(object_store.url("p"), endpoint=f"http://127.0.0.1:{free_port()}")
    assert isinstance(error, TransientBackendError)
    assert "nothing listens there" in str(error)
    error = await error_of(object_store.url("p"), endpoint="http://no-such-host.invalid")
    assert "cannot be resolved" in str(error)
    error = await error_of(object_store.url("p"), endpoint=object_store.endpoint.replace("http:", "https:"))
    assert "TLS failed" in str(error)


async def test_no_answer(place: Any) -> None:
    place.proxy.always("GET", silent=True)
    error = await error_of(place.url(timeout_s="2", socket_timeout_s="0.5", retries="1"))
    assert "nothing came" in str(error)


async def test_a_wrong_region(place: Any) -> None:
    place.proxy.always(
        "GET", status=400, code="AuthorizationQueryParametersError", headers={"x-amz-bucket-region": "x-1"}
    )
    assert "set region=x-1" in str(await error_of(place.url()))


async def test_a_wrong_clock(place: Any) -> None:
    past = {"date": formatdate(1_000_000_000, usegmt=True)}
    place.proxy.always("GET", status=403, code="AccessDenied", headers=past)
    error = await error_of(place.url())
    assert isinstance(error, AuthError)
    assert "ahead of the store's" in str(error)


async def test_credentials_of_a_profile_that_are_rotated(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    old, new = (
        "[cache]\naws_access_key_id=oldkey\naws_secret_access_key=x\n",
        (
            f"[cache]\naws_access_key_id={place.store.access_key_id}\n"
            f"aws_secret_access_key={place.store.secret_access_key}\n"
        ),
    )
    file.write_text(old)
    url = place.url(access_key_id="", secret_access_key="", profile="cache", credentials_file=str(file))
    place.proxy.always("GET", status=404, code="NoSuchKey")  # the old key is good, until it is not
    async with l2kit.open_adapter(url) as adapter:
        place.proxy.plan = lambda _: None
        file.write_text(new)
        assert (await adapter.probe()).ok
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", place.store.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", place.store.secret_access_key)
    await works(place.url(access_key_id="", secret_access_key=""))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "cache")
    await works(place.url(access_key_id="", secret_access_key=""))
    error = await error_of(place.url(access_key_id="", secret_access_key="", profile="other"))
    assert "'other'" in str(error)


async def test_no_credentials_anywhere(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    for direct in ("true", "false"):
        error = await error_of(f"s3://{object_store.bucket}?endpoint={object_store.endpoint}&direct={direct}")
        assert isinstance(error, AuthError)
        assert "no credentials" in str(error)


async def test_keys_given_are_not_mixed_with_a_token_of_the_environment(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://no-such-host.invalid")
    await works(place.url())
    assert not any(SECRET in asked.target for asked in place.proxy.asked)


@pytest.mark.parametrize("direct", ["true", "false"])
async def test_anonymous(place: Any, direct: str) -> None:
    """The store lets nobody in without a name; what is sent has none."""
    error = await error_of(place.url(access_key_id="", secret_access_key="", anonymous="true", direct=direct))
    assert isinstance(error, AuthError)
    assert place.proxy.asked
    assert all("X-Amz" not in asked.target for asked in place.proxy.asked)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        unavailable("openssl", "there is no openssl program to make certificates with")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(words: str) -> None:
        subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)

    (folder / "names.ext").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl(
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout authority_key.pem -out authority.pem"
    )
    openssl("req -newkey rsa:2048 -nodes -subj /CN=server -keyout key.pem -out server.csr")
    signed = "-CA authority.pem -CAkey authority_key.pem -CAcreateserial -days 2 -extfile names.ext"
    openssl(f"x509 -req -in server.csr {signed} -out server.pem")
    return folder


async def test_tls(behind_tls: Callable[[ssl.SSLContext], Any], certificates: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "key.pem")
    with behind_tls(context) as place:
        error = await error_of(place.url())
        assert "certificate is not accepted" in str(error)
        await works(place.url(verify="false"))
        data = os.urandom(3 << 20)
        key, layout = ObjectKey("tls", bytes(16)), Layout.raw(len(data))
        target = MemoryObj.allocate(layout)
        trusting = place.url(ca_file=str(certificates / "authority.pem"), unsigned_payload="")
        async with l2kit.open_adapter(trusting, piece_bytes=1 << 20) as adapter:
            assert not adapter.config.signs_payload
            [stored] = await adapter.submit_store_task([key], [MemoryObj.wrap(data, layout)])
            assert stored.present, stored
            [loaded] = await adapter.submit_load_task([key], [target])
            assert loaded.loaded, loaded
        assert target.tobytes() == data
    error = await error_of("s3://b?ca_file=/no/such/file&access_key_id=a&secret_access_key=b")
    assert isinstance(error, ConfigError)
