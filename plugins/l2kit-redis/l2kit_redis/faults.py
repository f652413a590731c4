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
_CLUSTER: Final = "the server belongs to a cluster; use redis+cluster://, which asks the node that has the key"

#: What an error code means for a caller, and what people can do about it.
_MEANINGS: Final[dict[str, tuple[type[L2Error], str]]] = {
    "NOAUTH": (AuthError, "the server asks for a password; set password, password_env or password_file"),
    "WRONGPASS": (AuthError, "the server refused the credentials; check username and password"),
    "NOPERM": (AuthError, "the user may not do this; the README of l2kit-redis lists the commands needed"),
    "DENIED": (AuthError, "the server is in protected mode and refuses other hosts; give it a password"),
    "OOM": (CapacityError, "the server is full; raise maxmemory or choose an evicting maxmemory-policy"),
    "BUSY": (BackendBusyError, "the server runs a script and answers nobody"),
    "LOADING": (TransientBackendError, "the server is still loading its data; try again when it is done"),
    "MASTERDOWN": (TransientBackendError, "the server is a replica that lost its primary"),
    "NOREPLICAS": (TransientBackendError, "the server has too few replicas to take writes"),
    "READONLY": (
        BackendError,
        "the server is a read-only replica; give host and port of the primary, or use redis+sentinel://",
    ),
    "MISCONF": (BackendError, "the server takes no writes because it cannot save to disk; see its log"),
    "MOVED": (BackendError, _CLUSTER),
    "ASK": (BackendError, _CLUSTER),
    "CLUSTERDOWN": (
        TransientBackendError,
        "the cluster does not serve this key now: a primary is down or a slot has none; see CLUSTER INFO",
    ),
    "TRYAGAIN": (TransientBackendError, "the key is on its way from one server to another; try again"),
    "CROSSSLOT": (BackendError, "the server belongs to a cluster, and the command names keys of several nodes"),
}

#: Meanings that only the text tells, because the code is a plain ERR.
_TEXTS: Final[dict[str, tuple[type[L2Error], str]]] = {
    "max number of clients": (
        BackendBusyError,
        "the server has as many clients as it takes; raise maxclients",
    ),
    "invalid bulk length": (
        CapacityError,
        "the object is longer than the server's proto-max-bulk-len; raise it",
    ),
    "without any password configured": (
        AuthError,
        "a password is given, but the server has none; remove it or set requirepass",
    ),
}

#: After these the connection, or the server at its other end, is no longer what we took it for.
_RECONNECT_CODES: Final = frozenset({"NOAUTH", "WRONGPASS", "READONLY", "LOADING", "MASTERDOWN", "DENIED"})
_RECONNECT_TEXTS: Final = ("max number of clients", "Protocol error")


class ServerError(Exception):
    """A complete error reply.

    Attributes:
        code: its first word, ``ERR`` where that is no code.
        meaning: the error of l2kit's tree that it amounts to, and an explanation.
        reconnect: True when the connection should not be used again.
        node: which of several servers said it; None where there is only one.
    """

    def __init__(self, reply: str, *, secret: bool = False) -> None:
        """``reply`` is its text. With ``secret`` it may echo credentials: then no word of it is kept."""
        word = reply.partition(" ")[0]
        self.code: Final = word if _CODE.match(word) and (not secret or word in _MEANINGS) else "ERR"
        meanings = [meaning for text, meaning in _TEXTS.items() if text in reply]
        fallback = _MEANINGS["WRONGPASS"] if secret else (BackendError, "the server refused the command")
        self.meaning: Final = meanings[0] if meanings else _MEANINGS.get(self.code, fallback)
        self.reconnect: Final = self.code in _RECONNECT_CODES or any(text in reply for text in _RECONNECT_TEXTS)
        shown = "".join(char if char.isprintable() else "?" for char in reply[:_MAX_SHOWN_CHARS])
        self.node: str | None = None
        super().__init__(self.code if secret else shown)


class ProtocolError(Exception):
    """The peer sent something that is no answer to what it was asked."""


class ConnectionLostError(ConnectionError):
    """The peer closed the connection."""


class NotPrimaryError(ConnectionError):
    """The server is not, or no longer, the primary that it was taken for."""


class NodeError(Exception):
    """What went wrong at one of several servers.

    Attributes:
        node: which one.
        error: what went wrong.
    """

    def __init__(self, node: str, error: Exception) -> None:
        super().__init__(f"{node}: {type(error).__name__}")
        self.node: Final = node
        self.error: Final = error


def had_no_effect(error: Exception) -> bool:
    """True when what was asked has certainly not been done: the server refused it, or there was no connection."""
    unconnected = ConnectionRefusedError | FileNotFoundError | NotPrimaryError | socket.gaierror
    return isinstance(error, ServerError | unconnected)


def translate(error: Exception, where: str) -> L2Error:
    """Turn any exception of this package into the error tree.

    Args:
        error: what happened.
        where: tier and server, put in front of every message.
    """
    if isinstance(error, L2Error):
        return error
    if isinstance(error, NodeError):
        return translate(error.error, f"{where}, node {error.node}")
    if isinstance(error, ServerError):
        kind, explanation = error.meaning
        return kind(f"{where}{f', node {error.node}' if error.node else ''}: {explanation} ({error})")
    if isinstance(error, NotPrimaryError):
        return TransientBackendError(f"{where}: {error}; try again when the failover is over")
    if isinstance(error, ProtocolError):
        return BackendError(
            f"{where}: the answer is not the Redis protocol ({error}); check host and port, "
            "and use rediss:// for a TLS port"
        )
    if isinstance(error, TimeoutError):
        return BackendTimeoutError(f"{where}: {_plain(error)}; check host and port, and whether the server is alive")
    if isinstance(error, ssl.SSLError):
        return _tls_error(error, where)
    if isinstance(error, socket.gaierror):
        return TransientBackendError(f"{where}: the host name cannot be resolved ({error.strerror}); check host")
    if isinstance(error, ConnectionRefusedError):
        return TransientBackendError(f"{where}: nothing listens there; start the server or correct host and port")
    if isinstance(error, FileNotFoundError):
        return TransientBackendError(f"{where}: there is no such Unix socket; start the server or correct path")
    if isinstance(error, PermissionError):
        return AuthError(f"{where}: no permission to connect; check the rights of the Unix socket (path)")
    if isinstance(error, BlockingIOError):
        return BackendBusyError(f"{where}: the server's queue of new connections is full")
    if isinstance(error, ConnectionError):
        return TransientBackendError(f"{where}: the connection broke ({_plain(error)})")
    if isinstance(error, OSError):
        return TransientBackendError(f"{where}: cannot be reached ({_plain(error)}); check host and port")
    return BackendError(f"{where}: unexpected {type(error).__name__}")


def _tls_error(error: ssl.SSLError, where: str) -> L2Error:
    reason = str(error.reason or "TLS failure")
    if isinstance(error, ssl.SSLCertVerificationError):
        return BackendError(
            f"{where}: the server's certificate is not accepted ({error.verify_message}); check ca_file and server_name"
        )
    if "CERTIFICATE_REQUIRED" in reason or "HANDSHAKE_FAILURE" in reason:
        return AuthError(f"{where}: the server asks for a certificate of ours ({reason}); set client_cert_file")
    if "UNKNOWN_CA" in reason or "BAD_CERTIFICATE" in reason or "CERTIFICATE_UNKNOWN" in reason:
        return AuthError(f"{where}: the server does not accept our certificate ({reason}); check client_cert_file")
    return TransientBackendError(f"{where}: TLS failed ({reason}); is it a TLS port? Without TLS use redis://")


def _plain(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
