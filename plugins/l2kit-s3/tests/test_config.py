"""From URLs and options to a client: what is wrong is named before anything is connected."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import obstore
import pytest
from obstore.store import AzureStore, GCSStore, S3Store

import l2kit
from l2kit.errors import AdapterImportError, ConfigError
from l2kit_s3 import AzConfig, FsspecConfig, GsConfig, S3Config
from l2kit_s3.stores import build_store

SECRET = "xyzzy-open-sesame"


def config_of(url: str, **options: Any) -> Any:
    return l2kit.open_adapter(url, **options).config


def error_of(url: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        l2kit.open_adapter(url, **options)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_a_url_says_bucket_and_prefix() -> None:
    config = config_of(f"s3://bucket/kv/one?access_key_id=a&secret_access_key={SECRET}&piece_bytes=1MiB")
    assert isinstance(config, S3Config)
    assert (config.bucket, config.prefix, config.piece_bytes) == ("bucket", "kv/one", 1 << 20)
    assert SECRET not in repr(config)
    assert config.where == "bucket 'bucket' at AWS"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://", "bucket"),
        ("s3://b:9000", "endpoint"),
        (f"s3://a:{SECRET}@b", "credentials"),
        ("s3://b?bucket=c", "bucket"),
        ("s3://b/p?prefix=q", "prefix"),
        ("s3://b/a//b", "prefix"),
        ("s3://b/a/../b", "prefix"),
        ("s3://b/a%20b", "prefix"),
        ("s3://b?endpoint=host:9000", "endpoint"),
        ("s3://b?endpoint=http://u:p@host", "endpoint"),
        ("s3://b?access_key_id=a", "secret_access_key"),
        (f"s3://b?session_token={SECRET}", "session_token"),
        ("s3://b?anonymous=true&profile=p", "anonymous"),
        (f"s3://b?profile=p&access_key_id=a&secret_access_key={SECRET}", "profile"),
        ("s3://b?ca_file=f&verify=false", "ca_file"),
        ("s3://b?addressing=host", "addressing"),
        ("s3://b?regoin=x", "'region'"),
        ("s3://b?retries=11", "retries"),
        ("s3://b?connect_timeout_s=20", "connect_timeout_s"),
        ("s3://b?account=a", "account"),
        ("gs://b?region=x", "region"),
        ("gs://b?anonymous=true&service_account_file=f", "anonymous"),
        ("az://c?access_key_id=a", "access_key_id"),
        (f"az://c?account_key={SECRET}", "account"),
        (f"az://c?account=a&account_key=k&sas_token={SECRET}", "sas_token"),
        ("fsspec+memory://", "path"),
        ("fsspec+memory:///p?protocol=file", "protocol"),
        ("fsspec:///p", "protocol"),
        (f"fsspec+sftp://u:{SECRET}@h/p", "storage_options"),
    ],
)
def test_what_is_wrong_is_named(url: str, says: str) -> None:
    assert says in error_of(url)


def signed(url: str) -> str:
    store = build_store(config_of(url))
    assert isinstance(store, S3Store)
    return str(obstore.sign(store, "GET", "k", timedelta(seconds=60))).partition("?")[0]


KEYS = "access_key_id=a&secret_access_key=b"


def test_addressing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    assert signed(f"s3://b?{KEYS}") == "https://b.s3.eu-north-1.amazonaws.com/k"
    assert signed(f"s3://b?{KEYS}&region=us-west-2") == "https://b.s3.us-west-2.amazonaws.com/k"
    assert signed(f"s3://b?{KEYS}&region=cn-north-1") == "https://b.s3.cn-north-1.amazonaws.com.cn/k"
    assert signed(f"s3://b.c?{KEYS}") == "https://s3.eu-north-1.amazonaws.com/b.c/k"
    assert signed(f"s3://b?{KEYS}&addressing=path") == "https://s3.eu-north-1.amazonaws.com/b/k"
    assert signed(f"s3://b?{KEYS}&endpoint=http://h:9000") == "http://h:9000/b/k"
    assert signed(f"s3://b?{KEYS}&endpoint=http://h:9000/&addressing=virtual") == "http://b.h:9000/k"


def test_payloads_are_signed_where_others_could_change_them() -> None:
    assert not config_of("s3://b").signs_payload
    assert config_of("s3://b?endpoint=http://h").signs_payload
    assert not config_of("s3://b?endpoint=http://h&unsigned_payload=true").signs_payload
    assert config_of("s3://b?unsigned_payload=false").signs_payload


def test_google_and_azure_get_their_own_clients() -> None:
    config = config_of("gs://bucket/p?anonymous=true&endpoint=http://127.0.0.1:4443")
    assert isinstance(config, GsConfig)
    assert isinstance(build_store(config), GCSStore)
    config = config_of("az://container/p?account=acc&account_key=a2V5")
    assert isinstance(config, AzConfig)
    assert isinstance(build_store(config), AzureStore)
    assert isinstance(build_store(config_of("az://container?account=acc&sas_token=sv%3D2020%26sig%3Dabc")), AzureStore)
    with pytest.raises(ConfigError, match="does not take"):
        build_store(config_of("gs://bucket?service_account_file=/no/such/file"))


def test_fsspec() -> None:
    config = config_of("fsspec+sftp://host:22/a/b")
    assert isinstance(config, FsspecConfig)
    assert (config.protocol, config.path) == ("sftp", "sftp://host:22/a/b")
    assert config_of("fsspec+oss://bucket/a").path == "bucket/a"
    assert config_of("fsspec:///a?protocol=memory").protocol == "memory"
    assert SECRET not in repr(config_of("fsspec+memory:///a", storage_options=f'{{"password": "{SECRET}"}}'))


@pytest.mark.anyio
async def test_fsspec_says_what_it_cannot_make() -> None:
    for url, kind in (
        ("fsspec:///a?protocol=nonsense", ConfigError),
        ("fsspec+memory:///a?storage_options=[]", ConfigError),
        ("fsspec+sftp://host/a", AdapterImportError),
    ):
        with pytest.raises(kind):
            async with l2kit.open_adapter(url):
                pass
