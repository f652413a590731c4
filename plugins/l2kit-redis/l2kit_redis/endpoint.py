"""`Endpoint`: where a server listens, as people and servers write it. Pure."""

from __future__ import annotations

from typing import NamedTuple

_MAX_PORT = 65_535


class Endpoint(NamedTuple):
    """A host (name or address) with a TCP port, or the path of a Unix socket in place of a host (port 0)."""

    host: str
    port: int

    def __str__(self) -> str:
        """``host:port``, ``[::1]:port`` or the path."""
        if not self.port:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str, default_port: int) -> Endpoint:
    """Read ``host``, ``host:port``, ``[::1]:port`` or ``::1``, as they stand in options.

    Raises:
        ValueError: it is none of these.
    """
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise ValueError("an address in brackets is written [ADDRESS]:PORT")
        port = rest[1:] if rest else None
    elif text.count(":") > 1:
        host, port = text, None
    else:
        host, colon, after = text.partition(":")
        port = after if colon else None
    if not host or any(char.isspace() or char in "/@?#," for char in host):
        raise ValueError("that is no host")
    return Endpoint(host, default_port if port is None else _port(port))


def announced_endpoint(text: str, default_host: str) -> Endpoint:
    """Read ``host:port`` as a server writes it in a redirection: IPv6 without brackets, no host for its own.

    Raises:
        ValueError: it is none of these.
    """
    host, _, port = text.rpartition(":")
    return Endpoint(host.strip("[]") or default_host, _port(port))


def _port(digits: str) -> int:
    if not (digits.isascii() and digits.isdigit()) or not 1 <= int(digits) <= _MAX_PORT:
        raise ValueError(f"a port is a number in 1..{_MAX_PORT}")
    return int(digits)
