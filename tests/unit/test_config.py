"""Configuration: from a URL, TOML, YAML or a mapping to typed values; whatever is wrong is named and never ignored."""

from __future__ import annotations

import datetime
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l2kit.config import (
    AdapterConfig,
    L1Config,
    PositiveInt,
    Secret,
    StorageConfig,
    build,
    load_storage_config,
    on_this_machine,
    parse_size_bytes,
    parse_url,
)
from l2kit.errors import ConfigError


class Example(AdapterConfig, frozen=True, kw_only=True):
    """One option of each kind."""

    path: str
    max_bytes: PositiveInt | None = None
    password: Secret | None = None
    verify: bool = True


def message(options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        build(Example, {"path": "/x", **options}, where="example")
    return str(caught.value)


class TestParseURL:
    def test_all_parts(self) -> None:
        url = parse_url("REDIS+unix://us%40er:p%2Fw%3A@Host:6380/a%20b/1?timeout_s=2&prefix=a%26b&empty=")
        assert (url.scheme, url.host, url.port, url.path) == ("redis+unix", "host", 6380, "/a b/1")
        assert (url.username, url.password) == ("us@er", Secret("p/w:"))
        assert url.query == {"timeout_s": "2", "prefix": "a&b", "empty": ""}

    def test_what_is_not_there_is_none(self) -> None:
        url = parse_url("file:///var/cache")
        assert (url.host, url.port, url.username, url.password, url.query) == (None, None, None, None, {})
        assert url.path == "/var/cache"
        assert parse_url("memory://").path == ""

    def test_ipv6(self) -> None:
        assert parse_url("redis://[::1]:6379").host == "::1"

    @pytest.mark.parametrize("url", ["", "/var/cache", "file:/var/cache", "redis", "://x", "1x://y", "a b://c"])
    def test_no_scheme(self, url: str) -> None:
        with pytest.raises(ConfigError, match="expected SCHEME://"):
            parse_url(url)

    @pytest.mark.parametrize("port", ["0", "65536", "99999999999", "-1", "http", "1.5"])
    def test_an_impossible_port(self, port: str) -> None:
        with pytest.raises(ConfigError, match="port"):
            parse_url(f"redis://host:{port}/0")

    def test_several_hosts(self) -> None:
        with pytest.raises(ConfigError, match="a URL names one host, further ones go into the option hosts"):
            parse_url("redis+cluster://h1:7000,h2:7001")

    def test_a_broken_host(self) -> None:
        with pytest.raises(ConfigError, match="host"):
            parse_url("redis://:hunter2@[::1/0")

    def test_an_option_given_twice(self) -> None:
        with pytest.raises(ConfigError, match="timeout_s: given twice"):
            parse_url("redis://h?timeout_s=1&timeout_s=2")

    @pytest.mark.parametrize("url", ["redis://:12#34@host", "file:///dir#1"])
    def test_a_fragment_is_not_cut_off_in_silence(self, url: str) -> None:
        with pytest.raises(ConfigError, match="%23"):
            parse_url(url)

    @pytest.mark.parametrize(
        "url", ["redis://:hunter2@host:99999", "redis://:hunter2@host?a=1&a=2", "://hunter2", "redis://:hunter2@[::1"]
    )
    def test_messages_show_no_credentials(self, url: str) -> None:
        with pytest.raises(ConfigError) as caught:
            parse_url(url)
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None

    def test_the_text_form_shows_no_credentials(self) -> None:
        url = parse_url("redis://user:hunter2@host:6379/0?password=hunter2")
        assert str(url) == "redis://host:6379/0"
        assert "hunter2" not in repr(url).replace(repr(url.query), "")

    @given(st.text())
    def test_any_text_parses_or_is_a_config_error(self, text: str) -> None:
        for url in (text, f"x://{text}"):
            with suppress(ConfigError):
                parse_url(url)


class TestOnThisMachine:
    @pytest.mark.parametrize("url", ["file:///var/cache", "file://localhost/var/cache"])
    def test_a_path_stays(self, url: str) -> None:
        assert str(on_this_machine(parse_url(url), "DIRECTORY")) == "file:///var/cache"

    @pytest.mark.parametrize(
        ("url", "words"),
        [("file://var/cache", "'var'.*file:///DIRECTORY with three slashes"), ("file:///a?path=/b", "given twice")],
    )
    def test_what_cannot_be_meant_is_refused(self, url: str, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            on_this_machine(parse_url(url), "DIRECTORY")


class TestBuild:
    def test_text_becomes_typed(self) -> None:
        options = {"path": "/x", "max_bytes": "10GiB", "verify": "false", "timeout_s": "2", "max_concurrency": "8"}
        config = build(Example, {**options, "password": "pw", "codecs": "int8,zstd"}, where="example")
        assert config == Example(
            path="/x",
            max_bytes=10 << 30,
            verify=False,
            timeout_s=2.0,
            max_concurrency=8,
            password=Secret("pw"),
            codecs=("int8", "zstd"),
        )

    def test_typed_stays_typed(self) -> None:
        config = build(Example, {"path": "/x", "max_bytes": 5, "codecs": ["zstd"], "password": Secret("pw")}, where="e")
        assert (config.max_bytes, config.codecs, config.password) == (5, ("zstd",), Secret("pw"))

    def test_an_unknown_option_names_the_nearest(self) -> None:
        assert message({"max_byte": 1}) == "example: unknown option 'max_byte'; did you mean 'max_bytes'?"

    def test_or_all_of_them_when_none_is_near(self) -> None:
        text = message({"zzz": 1})
        assert text.startswith("example: unknown option 'zzz'; known are: codecs, max_bytes,")

    def test_a_required_one_is_missing(self) -> None:
        with pytest.raises(ConfigError, match="example: option 'path' is required"):
            build(Example, {}, where="example")

    @pytest.mark.parametrize(
        ("options", "field"),
        [
            ({"timeout_s": "soon"}, "timeout_s"),
            ({"timeout_s": 0}, "timeout_s"),
            ({"timeout_s": -1.0}, "timeout_s"),
            ({"timeout_s": "inf"}, "timeout_s"),
            ({"timeout_s": "nan"}, "timeout_s"),
            ({"max_concurrency": 0}, "max_concurrency"),
            ({"max_concurrency": 2.5}, "max_concurrency"),
            ({"max_bytes": "10 parsecs"}, "max_bytes"),
            ({"max_bytes": "0"}, "max_bytes"),
            ({"max_bytes": []}, "max_bytes"),
            ({"verify": "perhaps"}, "verify"),
            ({"codecs": [1]}, "codecs"),
            ({"path": None}, "path"),
            ({"password": 7}, "password"),
        ],
        ids=str,
    )
    def test_a_wrong_value_names_its_field(self, options: dict[str, Any], field: str) -> None:
        assert message(options).startswith(f"example: {field}")

    def test_a_wrong_secret_is_not_shown(self) -> None:
        assert "hunter2" not in message({"password": ["hunter2"]})


class TestSecret:
    def test_it_shows_itself_to_nobody(self) -> None:
        secret = Secret("hunter2")
        config = Example(path="/x", password=secret)
        assert "hunter2" not in f"{secret} {secret!r} {[secret]} {config} {config!r}"
        assert secret.reveal() == "hunter2"

    def test_it_compares_by_value(self) -> None:
        assert Secret("a") == Secret("a") != Secret("b")
        assert Secret("a") != "a"
        assert len({Secret("a"), Secret("a")}) == 1


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "nbytes"),
        [
            ("4096", 4096),
            ("10GiB", 10 << 30),
            ("10 gib", 10 << 30),
            ("512MiB", 512 << 20),
            ("1.5 GB", 1_500_000_000),
            ("2TB", 2 * 10**12),
            ("1 TiB", 1 << 40),
            ("7b", 7),
            (" 8 kb ", 8000),
            ("0.5KiB", 512),
            ("9007199254740993", 9007199254740993),
        ],
    )
    def test_sizes(self, text: str, nbytes: int) -> None:
        assert parse_size_bytes(text, where="x") == nbytes

    @pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "10 parsecs", "1,5GB", "1 GiB GiB", "٣"])
    def test_no_sizes(self, text: str) -> None:
        with pytest.raises(ConfigError, match="x: "):
            parse_size_bytes(text, where="x")


TOML = """
chunk_size = 512
tiers = ["memory://", {url = "file:///var/cache", max_bytes = "10GiB"}]
[l1]
max_bytes = "2GiB"
"""
YAML = """
chunk_size: 512
tiers:
  - memory://
  - url: file:///var/cache
    max_bytes: 10GiB
l1:
  max_bytes: 2GiB
"""
EXPECTED = StorageConfig(
    chunk_size=512,
    l1=L1Config(max_bytes=2 << 30),
    tiers=("memory://", {"url": "file:///var/cache", "max_bytes": "10GiB"}),
)


class TestStorageConfig:
    @pytest.mark.parametrize(("name", "text"), [("c.toml", TOML), ("c.yaml", YAML), ("c.yml", YAML)])
    def test_a_file(self, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        assert load_storage_config(tmp_path / name) == EXPECTED
        assert load_storage_config(str(tmp_path / name)) == EXPECTED

    def test_a_mapping_and_itself(self) -> None:
        tiers = ["memory://", {"url": "file:///var/cache", "max_bytes": "10GiB"}]
        mapping = {"chunk_size": 512, "tiers": tiers, "l1": {"max_bytes": "2GiB"}}
        assert load_storage_config(mapping) == EXPECTED
        assert load_storage_config(EXPECTED) is EXPECTED
        assert load_storage_config({}) == StorageConfig()
        assert load_storage_config({"l1": L1Config(max_bytes=7)}).l1.max_bytes == 7

    @pytest.mark.parametrize(
        ("name", "text", "expected"),
        [
            ("c.toml", "chunk_sise = 1", "c.toml: unknown option 'chunk_sise'; did you mean 'chunk_size'?"),
            ("c.toml", "[l1]\nmax_byte = 1", "c.toml: l1: unknown option 'max_byte'; did you mean 'max_bytes'?"),
            ("c.toml", "chunk_size = 0", "c.toml: chunk_size: "),
            ("c.toml", "tiers = [7]", "c.toml: tiers"),
            ("c.toml", "l1 = 7", "c.toml: l1"),
            ("c.toml", "chunk_size = = 1", "c.toml cannot be parsed: "),
            ("c.yaml", "a: [1", "c.yaml cannot be parsed: "),
            ("c.yaml", "- a list", "c.yaml cannot be parsed: "),
            ("c.yaml", "1: one", "c.yaml"),
            ("c.json", "{}", "c.json has the suffix '.json'; known are .toml, .yaml and .yml"),
        ],
    )
    def test_what_is_wrong_in_a_file_is_named(self, tmp_path: Path, name: str, text: str, expected: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_storage_config(tmp_path / name)
        assert expected in str(caught.value)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"cannot read .*nothing\.toml: No such file"):
            load_storage_config(tmp_path / "nothing.toml")

    def test_a_file_that_is_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "c.toml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match=r"c\.toml"):
            load_storage_config(tmp_path / "c.toml")

    def test_a_value_of_a_type_that_we_have_no_use_for(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="chunk_size"):
            load_storage_config({"chunk_size": datetime.date(2026, 1, 1)})

    def test_a_repr_shows_no_credentials(self) -> None:
        config = StorageConfig(
            tiers=("redis://:hunter2@host:6379/0", {"url": "redis://h", "password": "hunter2"}, "redis://:hunter2@[")
        )
        assert "hunter2" not in repr(config)
        assert "redis://host:6379/0" in repr(config)
