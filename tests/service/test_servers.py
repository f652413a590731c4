"""The servers that other tests stand on: they start, stop, die, freeze and come back where they were."""

from __future__ import annotations

import pytest

from l2kit.testing.servers import Flavor, RespServer, ServerError, run_server

pytestmark = pytest.mark.service

FLAVORS: list[Flavor] = ["redis", "valkey"]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_it_answers(flavor: Flavor) -> None:
    with run_server(flavor) as server:
        assert server.ping()
        assert server.command("SET", "l2kit test\r\n", b"\r\n\0" * 100_000, "EX", 60) == b"OK"
        assert server.command("GET", "l2kit test\r\n") == b"\r\n\0" * 100_000
        assert server.command("EXISTS", "l2kit test\r\n", "nothing") == 1
        assert server.command("MGET", "nothing", "l2kit nothing") == [None, None]
        assert server.command("DEL", "l2kit test\r\n") == 1
        with pytest.raises(ServerError, match="unknown command"):
            server.command("NONSENSE")


@pytest.mark.parametrize("flavor", FLAVORS)
def test_it_comes_back_where_it_was(flavor: Flavor) -> None:
    with run_server(flavor, maxmemory="64mb") as server:
        assert server.command("CONFIG", "GET", "maxmemory") == [b"maxmemory", b"67108864"]
        before = (server.host, server.port, server.unix_socket, server.password)
        for end in (server.stop, server.kill):
            end()
            assert not server.ping()
            server.start()
            assert server.ping()
        assert (server.host, server.port, server.unix_socket, server.password) == before


@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_frozen_server_can_be_stopped(flavor: Flavor) -> None:
    with run_server(flavor, maxmemory="64mb") as server:
        server.pause()
        server.resume()
        assert server.ping()
        server.pause()
        server.stop()
        server.start()
        assert server.ping()


@pytest.mark.parametrize("flavor", FLAVORS)
def test_one_from_the_environment_is_used_and_left_alone(flavor: Flavor, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_server(flavor, maxmemory="64mb") as ours:
        monkeypatch.setenv(f"L2KIT_TEST_{flavor.upper()}_URL", ours.url())
        with run_server(flavor) as external:
            assert (external.port, external.password) == (ours.port, ours.password)
            assert external.ping()
            for action in (external.stop, external.kill, external.pause):
                with pytest.raises(pytest.skip.Exception, match="comes from the environment"):
                    action()
        assert ours.ping()


@pytest.mark.parametrize("flavor", FLAVORS)
def test_without_one_the_test_is_skipped_or_fails(flavor: Flavor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(f"L2KIT_TEST_{flavor.upper()}_URL", raising=False)
    monkeypatch.setattr("l2kit.testing.servers.find_binary", lambda flavor: None)
    monkeypatch.setattr("l2kit.testing.servers._IMAGES", {flavor: "127.0.0.1:1/l2kit/no-such-image"})
    monkeypatch.setenv("L2KIT_REQUIRE", "something, else")
    with pytest.raises(pytest.skip.Exception, match=f"needs {flavor}: no {flavor}-server on PATH"):
        _use(flavor)
    monkeypatch.setenv("L2KIT_REQUIRE", f"something, {flavor}")
    with pytest.raises(pytest.fail.Exception, match=f"{flavor}, named in L2KIT_REQUIRE, is not available"):
        _use(flavor)


@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_server_that_does_not_start_says_why(flavor: Flavor) -> None:
    with pytest.raises(OSError, match="no-such-option"):
        _use(flavor, no_such_option="1")


def _use(flavor: Flavor, **options: str) -> RespServer:
    with run_server(flavor, **options) as server:
        return server
