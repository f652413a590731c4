"""Opening: what is wrong shows there, once and clearly; who may do what."""

from __future__ import annotations

import os
import socket
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

import l2kit
from l2kit import Layout, MemoryObj, ObjectKey
from l2kit.errors import (
    AuthError,
    BackendError,
    BackendTimeoutError,
    ConfigError,
    TransientBackendError,
)
from l2kit.testing.servers import RespServer, free_port

pytestmark = [pytest.mark.anyio, pytest.mark.service]

SECRET = "xyzzy-open-sesame"
SLACK_S = 1.0


def key(number: int) -> ObjectKey:
    return ObjectKey("server", number.to_bytes(8, "little") * 2)


def source(data: bytes) -> MemoryObj:
    return MemoryObj.wrap(data, Layout.raw(len(data)))


def blank(nbytes: int) -> MemoryObj:
    return MemoryObj.wrap(bytearray(nbytes), Layout.raw(nbytes))


async def opening_error(url: str, **options: Any) -> BaseException:
    """What opening raises; it holds no secret, neither itself nor what it was raised from."""
    with pytest.raises(l2kit.L2Error) as caught:
        async with l2kit.open_adapter(url, **options):
            pass
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return caught.value


# --- opening --------------------------------------------------------------------------------------


async def test_a_wrong_password_is_an_error_at_start_up(redis_server: RespServer) -> None:
    error = await opening_error(f"redis://:{SECRET}@{redis_server.host}:{redis_server.port}")
    assert isinstance(error, AuthError)
    assert "password" in str(error)


async def test_a_missing_password_is_an_error_at_start_up(redis_server: RespServer) -> None:
    error = await opening_error(f"redis://{redis_server.host}:{redis_server.port}")
    assert isinstance(error, AuthError)
    assert "password_file" in str(error)


async def test_a_password_for_a_server_without_one(own_server: RespServer) -> None:
    own_server.command("CONFIG", "SET", "requirepass", "")
    error = await opening_error(f"redis://:{SECRET}@{own_server.host}:{own_server.port}")
    assert isinstance(error, AuthError)
    assert "requirepass" in str(error)


async def test_a_dead_server_is_an_error_at_start_up() -> None:
    port = free_port()
    error = await opening_error(f"redis://:{SECRET}@127.0.0.1:{port}")
    assert isinstance(error, TransientBackendError)
    assert f"127.0.0.1:{port}" in str(error)
    assert "host and port" in str(error)


async def test_a_missing_socket_is_an_error_at_start_up(tmp_path: Path) -> None:
    error = await opening_error(f"redis+unix://{tmp_path}/none.sock")
    assert isinstance(error, BackendError)
    assert f"{tmp_path}/none.sock" in str(error)


async def test_a_host_that_does_not_exist_is_an_error_at_start_up() -> None:
    error = await opening_error("redis://no-such-host.invalid", connect_timeout_s=2)
    assert isinstance(error, TransientBackendError)
    assert "no-such-host.invalid" in str(error)


async def test_a_frozen_server_is_an_error_at_start_up(own_server: RespServer) -> None:
    own_server.pause()
    started = time.monotonic()
    error = await opening_error(own_server.url(), socket_timeout_s=0.3)
    assert isinstance(error, BackendTimeoutError)
    assert time.monotonic() - started < 0.3 + SLACK_S


async def test_a_database_that_the_server_does_not_have(redis_server: RespServer) -> None:
    error = await opening_error(f"{redis_server.url()}/99999")
    assert isinstance(error, ConfigError)
    assert "db" in str(error)


async def test_a_host_name_is_resolved(redis_server: RespServer, prefix: str) -> None:
    url = redis_server.url().replace("127.0.0.1", "localhost")
    async with l2kit.open_adapter(f"{url}?key_prefix={prefix}") as adapter:
        assert (await adapter.probe()).ok


async def test_the_password_may_come_from_elsewhere(
    redis_server: RespServer, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = f"redis://{redis_server.host}:{redis_server.port}?key_prefix={prefix}"
    (tmp_path / "password").write_text(f"{redis_server.password}\n")
    async with l2kit.open_adapter(where, password_file=str(tmp_path / "password")) as adapter:
        assert (await adapter.probe()).ok
    monkeypatch.setenv("L2KIT_TEST_PASSWORD", redis_server.password or "")
    async with l2kit.open_adapter(where, password_env="L2KIT_TEST_PASSWORD") as adapter:
        assert (await adapter.probe()).ok


# --- permissions ----------------------------------------------------------------------------------


async def test_an_acl_user_with_the_documented_rights_can_do_everything(redis_server: RespServer, prefix: str) -> None:
    name = f"user-{os.urandom(4).hex()}"
    commands = "+ping +select +get +set +strlen +getrange +unlink +multi +exec +watch +unwatch +persist +pexpire +pttl"
    redis_server.command(
        "ACL", "SETUSER", name, "on", f">{SECRET}", f"~{prefix}*", "-@all", *commands.split(), "+scan", "+info"
    )
    try:
        where = f"redis://{name}:{SECRET}@{redis_server.host}:{redis_server.port}/0?key_prefix={prefix}"
        async with l2kit.open_adapter(where, db=1) as adapter:
            assert (await adapter.probe()).ok
            assert [info async for info in adapter.iter_keys()] == []
            assert (await adapter.usage()).used_bytes > 0
    finally:
        redis_server.command("ACL", "DELUSER", name)


async def test_what_a_user_may_not_do_is_an_error_and_no_miss(redis_server: RespServer, prefix: str) -> None:
    name = f"user-{os.urandom(4).hex()}"
    redis_server.command("ACL", "SETUSER", name, "on", f">{SECRET}", "~elsewhere:*", "+@all")
    try:
        where = f"redis://{name}:{SECRET}@{redis_server.host}:{redis_server.port}?key_prefix={prefix}"
        async with l2kit.open_adapter(where) as adapter:
            with pytest.raises(AuthError):
                await adapter.submit_lookup_and_lock_task([key(1), key(2)])
            [stored] = await adapter.submit_store_task([key(1)], [source(b"x" * 1000)])
            [loaded] = await adapter.submit_load_task([key(1)], [blank(1000)])
            [deleted] = await adapter.submit_delete_task([key(1)])
            for outcome in (stored, loaded, deleted):
                assert outcome.status == "failed"
                assert isinstance(outcome.error, AuthError)
                assert SECRET not in repr(outcome)
    finally:
        redis_server.command("ACL", "DELUSER", name)


async def test_a_rotated_password_needs_no_restart(own_server: RespServer, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(own_server.password or "")
    where = f"redis://{own_server.host}:{own_server.port}"
    async with l2kit.open_adapter(where, password_file=str(file)) as adapter:
        assert (await adapter.probe()).ok
        own_server.command("CONFIG", "SET", "requirepass", SECRET)
        file.write_text(SECRET)
        # A server lets those in who are in: throw them out.
        with socket.create_connection((own_server.host, own_server.port)) as client:
            client.sendall(f"AUTH {SECRET}\r\nCLIENT KILL TYPE normal\r\n".encode())
            assert client.recv(1000)
        assert (await adapter.probe()).ok
        with socket.create_connection((own_server.host, own_server.port)) as client:
            client.sendall(f"AUTH {SECRET}\r\nCONFIG SET requirepass {own_server.password}\r\n".encode())
            assert client.recv(1000)
