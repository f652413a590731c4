"""What can go wrong between us and a server, and the one table that turns it into l2kit's error tree."""

from __future__ import annotations

import re
import socket
import ssl
from typing import Final

from l2kit.errors import (
    AuthError,
    BackendBusyError,
    BackendError,
    BackendTimeoutError,
    CapacityError,
    L2Error,
    TransientBackendError,
)

_CODE: Final = re.compile(r"[A-Z][A-Z0-9]{1,31}\Z")
_MAX_SHOWN_CHARS: Final = 200

#: After these the connection, or the server at its other end, is no longer what we took it for.
_RECONNECT_CODES: Final = frozenset({"NOAUTH", "WRONGPASS", "READONLY", "LOADING", "MASTERDOWN", "DENIED"})
_RECONNECT_TEXTS: Final = ("protocol error", "max number of clients")

_CLUSTER_CODES: Final = frozenset({"MOVED", "ASK", "CLUSTERDOWN", "CROSSSLOT", "TRYAGAIN"})


class ServerError(Exception):
    """A complete error reply.

    Attributes:
        code: its first word, ``ERR`` where that is no code.
        reconnect: True when the connection should not be used again.
    """

    def __init__(self, reply: str, *, secret: bool = False) -> None:
        """``reply`` is its text. With ``secret`` it may echo credentials, and only its code is kept."""
        word = reply.partition(" ")[0]
        self.code: Final = word if _CODE.match(word) else "ERR"
        self.no_password_set: Final = "without any password configured" in reply
        lowered = reply.lower()
        self.reconnect: Final = self.code in _RECONNECT_CODES or any(
            text in lowered for text in _RECONNECT_TEXTS
        )
        self.about_login: Final = secret
        shown = "".join(char if char.isprintable() else "?" for char in reply[:_MAX_SHOWN_CHARS])
        super().__init__(f"{self.code} (text withheld)" if secret else shown)


class ProtocolError(Exception):
    """The peer sent something that is no answer to what it was asked."""


class ConnectionLostError(ConnectionError):
    """The peer closed the connection."""


def translate(error: Exception, where: str) -> L2Error:
    """Turn any exception of this package into the error tree.

    Args:
        error: what happened.
        where: tier and server, put in front of every message.
    """
    if isinstance(error, L2Error):
        return error
    if isinstance(error, ServerError):
        return _server_error(error, where)
    if isinstance(error, ProtocolError):
        return BackendError(
            f"{where}: the answer is not the Redis protocol ({error}); check host and port, "
            "and use rediss:// for a TLS port"
        )
    if isinstance(error, TimeoutError):
        return BackendTimeoutError(
            f"{where}: {_plain(error)}; check host and port, and whether the server is alive"
        )
    if isinstance(error, ssl.SSLError):
        return _tls_error(error, where)
    if isinstance(error, socket.gaierror):
        return TransientBackendError(
            f"{where}: the host name cannot be resolved ({error.strerror}); check host"
        )
    if isinstance(error, ConnectionRefusedError):
        return TransientBackendError(
            f"{where}: nothing listens there; start the server or correct host and port"
        )
    if isinstance(error, FileNotFoundError):
        return TransientBackendError(
            f"{where}: there is no such Unix socket; start the server or correct path"
        )
    if isinstance(error, PermissionError):
        return AuthError(f"{where}: no permission to connect; check the rights of the Unix socket (path)")
    if isinstance(error, BlockingIOError):
        return BackendBusyError(f"{where}: the server's queue of new connections is full")
    if isinstance(error, ConnectionError):
        return TransientBackendError(f"{where}: the connection broke ({_plain(error)})")
    if isinstance(error, OSError):
        return TransientBackendError(f"{where}: cannot be reached ({_plain(error)}); check host and port")
    return BackendError(f"{where}: unexpected {type(error).__name__}")


def _server_error(error: ServerError, where: str) -> L2Error:
    code = error.code
    text = str(error).lower()
    if error.no_password_set:
        return AuthError(f"{where}: password is given, but the server has none; remove it or set requirepass")
    if error.about_login or code == "WRONGPASS":
        return AuthError(f"{where}: the server refused the credentials ({code}); check username and password")
    if code == "NOAUTH":
        return AuthError(
            f"{where}: the server asks for a password; set password, password_env or password_file"
        )
    if code == "NOPERM":
        return AuthError(
            f"{where}: the user may not do this: {error}; the README lists the commands that are needed"
        )
    if code == "DENIED":
        return AuthError(
            f"{where}: the server is in protected mode and refuses other hosts; give it a password"
        )
    if code == "OOM":
        return CapacityError(
            f"{where}: the server is full; raise maxmemory or choose an evicting maxmemory-policy"
        )
    if "invalid bulk length" in text:
        return CapacityError(f"{where}: the object is longer than the server's proto-max-bulk-len; raise it")
    if code == "BUSY" or "max number of clients" in text:
        return BackendBusyError(f"{where}: {error}")
    if code == "LOADING":
        return TransientBackendError(
            f"{where}: the server is still loading its data; try again when it is done"
        )
    if code == "MASTERDOWN":
        return TransientBackendError(f"{where}: the server is a replica that lost its primary")
    if code == "NOREPLICAS":
        return TransientBackendError(f"{where}: {error}")
    if code == "READONLY":
        return BackendError(f"{where}: the server is a read-only replica; give host and port of the primary")
    if code in _CLUSTER_CODES:
        return BackendError(
            f"{where}: {code}: the server belongs to a cluster, which l2kit-redis does not support yet"
        )
    return BackendError(f"{where}: the server answered {str(error)!r}")


def _tls_error(error: ssl.SSLError, where: str) -> L2Error:
    reason = str(error.reason or "TLS failure")
    if isinstance(error, ssl.SSLCertVerificationError):
        return BackendError(
            f"{where}: the server's certificate is not accepted ({error.verify_message}); "
            "check ca_file and server_name"
        )
    if "CERTIFICATE_REQUIRED" in reason or "HANDSHAKE_FAILURE" in reason:
        return AuthError(
            f"{where}: the server asks for a certificate of ours ({reason}); set client_cert_file"
        )
    if "UNKNOWN_CA" in reason or "BAD_CERTIFICATE" in reason or "CERTIFICATE_UNKNOWN" in reason:
        return AuthError(
            f"{where}: the server does not accept our certificate ({reason}); check client_cert_file"
        )
    return TransientBackendError(
        f"{where}: TLS failed ({reason}); is it a TLS port? Without TLS use redis://"
    )


def _plain(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
