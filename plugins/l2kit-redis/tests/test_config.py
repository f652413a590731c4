"""From URLs and options to a configuration: what is wrong is named before anything is connected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import l2kit
from l2kit.errors import ConfigError
from l2kit_redis import RedisConfig

pytestmark = pytest.mark.anyio

SECRET = "xyzzy-open-sesame"


def config_of(url: str, **options: Any) -> RedisConfig:
    config = l2kit.open_adapter(url, **options).config
    assert isinstance(config, RedisConfig)
    return config


def error_of(url: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        l2kit.open_adapter(url, **options)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_a_tcp_url_fills_every_field() -> None:
    config = config_of(f"redis://ann:{SECRET}@cache.example:7000/3?key_prefix=kv:&ttl_s=60&max_concurrency=2")
    assert (config.host, config.port, config.db, config.username) == ("cache.example", 7000, 3, "ann")
    assert config.password is not None
    assert config.password.reveal() == SECRET
    assert (config.key_prefix, config.ttl_s, config.max_concurrency, config.tls) == ("kv:", 60.0, 2, False)
    assert config.where == "cache.example:7000"


def test_defaults() -> None:
    config = config_of("valkey://")
    assert (config.where, config.db, config.key_prefix, config.ttl_s) == ("localhost:6379", 0, "l2kit:", None)
    assert config.read_password() is None
    assert config_of("redis://[::1]:7000").where == "[::1]:7000"


def test_a_unix_url_has_a_path_and_no_host() -> None:
    config = config_of(f"redis+unix://ann:{SECRET}@/run/redis/redis.sock?db=2")
    assert (config.path, config.db, config.username, config.where) == (
        "/run/redis/redis.sock",
        2,
        "ann",
        "/run/redis/redis.sock",
    )


def test_tls_comes_from_the_scheme_or_an_option() -> None:
    assert config_of("rediss://h").tls
    assert config_of("valkey://h?tls=true&verify=false").tls


def test_a_cluster_url() -> None:
    config = config_of(f"redis+cluster://ann:{SECRET}@a.example:7000?hosts=b.example:7001,c.example")
    assert (config.mode, config.tls, config.db) == ("cluster", False, 0)
    assert config.where == "a.example:7000,b.example:7001,c.example:6379"
    assert config_of("rediss+cluster://h").tls
    assert config_of("valkey+cluster://h/0").endpoints == (("h", 6379),)
    assert config_of("redis://h?mode=cluster").mode == "cluster"
    assert config_of("redis+cluster://", hosts=["[::1]:7000", "b"]).where == "[::1]:7000,b:6379"
    assert config_of("redis+cluster://").where == "localhost:6379"


def test_a_sentinel_url() -> None:
    config = config_of(f"redis+sentinel://:{SECRET}@a/cache/3?hosts=b:7000&sentinel_password=s&read_from=replica")
    assert (config.mode, config.service_name, config.db) == ("sentinel", "cache", 3)
    assert config.where == "cache of a:26379,b:7000"
    assert config.sentinel_credentials.password is not None
    assert config_of("valkey+sentinel://h").service_name == "mymaster"
    assert config_of("rediss+sentinel://h?sentinel_tls=false").tls


async def test_options_for_sentinels_need_some() -> None:
    for option in ("sentinel_username", "sentinel_password", "sentinel_password_env"):
        options = {"sentinel_password": SECRET, option: SECRET}
        if option == "sentinel_password_env":
            del options["sentinel_password"]
        with pytest.raises(ConfigError, match=r"redis\+sentinel://") as caught:
            await l2kit.open_adapter("redis://h", **options).__aenter__()
        assert SECRET not in str(caught.value)


def test_the_secret_is_not_shown() -> None:
    for url in (f"redis://:{SECRET}@h", f"redis://h?password={SECRET}"):
        adapter = l2kit.open_adapter(url)
        assert SECRET not in f"{adapter!r} {adapter.config!r} {adapter.config} {adapter.name}"


@pytest.mark.parametrize(
    ("url", "field"),
    [
        ("redis://h:70000", "port"),
        ("redis://h:0", "port"),
        ("redis://h/one", "db"),
        ("redis://h/-1", "db"),
        ("redis://h?db=one", "db"),
        ("redis://h?db=-1", "db"),
        ("redis://h/1?db=1", "db"),
        ("redis://h?ttl_s=0", "ttl_s"),
        ("redis://h?connect_timeout_s=0", "connect_timeout_s"),
        ("redis://h?socket_timeout_s=10", "socket_timeout_s"),
        ("redis://h?timeout_s=1&connect_timeout_s=1", "connect_timeout_s"),
        ("redis+unix://", "path"),
        ("redis+unix://h/redis.sock", "host"),
        ("redis+unix:///redis.sock?port=1", "path"),
        ("redis+unix:///redis.sock?tls=true", "path"),
        ("redis+unix:///" + "x" * 120, "path"),
        ("redis://h?path=/redis.sock", "path"),
        ("redis://h?ca_file=/ca.pem", "ca_file"),
        ("redis://h?verify=false", "verify"),
        ("rediss://h?tls=false", "tls"),
        ("rediss://h?client_key_file=/key.pem", "client_key_file"),
        ("redis://ann@h", "username"),
        ("redis+cluster://h/3", "db"),
        ("redis+cluster://h?db=3", "db"),
        ("redis+cluster://h/name", "db"),
        ("redis+cluster://a,b:7000", "hosts"),
        ("redis+cluster://h?hosts=b:x", "hosts"),
        ("redis+cluster://h?hosts=u@b", "hosts"),
        ("redis+cluster://h?path=/redis.sock", "path"),
        ("redis+cluster://h?service=cache", "service"),
        ("redis://h?hosts=b", "hosts"),
        ("redis://h?service=cache", "service"),
        ("redis://h?read_from=replica", "read_from"),
        ("redis+cluster://h?read_from=any", "read_from"),
        ("redis://h?mode=clusters", "mode"),
        ("redis+cluster://h?mode=server", "mode"),
        ("redis+sentinel://h/cache/x", "db"),
        ("redis+sentinel://h/cache?service=other", "service"),
        ("redis+sentinel://h?sentinel_username=ann", "sentinel_username"),
        (f"redis+sentinel://h?sentinel_password={SECRET}&sentinel_password_env=X", "sentinel_password"),
        (f"redis://:{SECRET}@h?password_env=X", "password"),
        ("redis://h?password_env=X&password_file=/x", "password_env"),
        ("redis://h?key_prefix=" + "x" * 257, "key_prefix"),
    ],
)
def test_what_is_wrong_is_named(url: str, field: str) -> None:
    assert field in error_of(url)


def test_an_unknown_option_gets_the_nearest_name() -> None:
    assert "did you mean 'socket_timeout_s'" in error_of(f"redis://:{SECRET}@h?socket_timeout=3")


def test_time_outs_follow_the_batch_time_out() -> None:
    config = config_of("redis://h?timeout_s=1")
    assert config.connect_limit_s < config.timeout_s
    assert config.socket_limit_s < config.timeout_s
    assert config_of("redis://h?socket_timeout_s=0.25").socket_limit_s == 0.25


def test_the_password_is_read_anew_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "password"
    for text, wanted in ((f"{SECRET}\n", SECRET), ("rotated \n", "rotated ")):
        file.write_text(text)
        password = config_of("redis://h", password_file=str(file)).read_password()
        assert password is not None
        assert password.reveal() == wanted
    monkeypatch.setenv("L2KIT_TEST_PASSWORD", SECRET)
    password = config_of("redis://h?password_env=L2KIT_TEST_PASSWORD").read_password()
    assert password is not None
    assert password.reveal() == SECRET


def test_a_missing_password_source_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("L2KIT_TEST_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match="password_env"):
        config_of("redis://h?password_env=L2KIT_TEST_PASSWORD").read_password()
    with pytest.raises(ConfigError, match="password_file"):
        config_of("redis://h", password_file=str(tmp_path / "none")).read_password()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="password_file"):
        config_of("redis://h", password_file=str(tmp_path / "binary")).read_password()
