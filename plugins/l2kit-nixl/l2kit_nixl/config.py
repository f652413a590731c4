"""Options of ``nixl+posix://``, ``nixl+gds://`` and ``nixl+ucx://``."""

from __future__ import annotations

from l2kit.config import AdapterConfig, Port, PositiveInt, PositiveSeconds, Secret
from l2kit.errors import ConfigError


class NixlFileConfig(AdapterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``nixl+posix:///DIRECTORY?option=value``, besides those that every adapter has.

    Attributes:
        path: absolute path of the directory that holds the objects; required. It and its parents are made when they are
            missing, for this user only. Processes that name the same directory share its objects.
        max_bytes: most bytes of objects, in bytes or as ``10GiB``. By default there is no limit and the objects grow
            until the file system is full. Before an object is written, the least recently used ones make room for it;
            one that is larger than the limit is dropped. Each process counts what it finds when it opens the directory,
            what it writes, and what it looks up or loads later.
        max_concurrency: transfers of one batch at once, each in a thread with an agent of its own; 2 by default. More
            is faster where the device answers slowly, and slower where all comes from the page cache.
    """

    path: str
    max_bytes: PositiveInt | None = None
    max_concurrency: PositiveInt = 2

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ConfigError(f"path: {self.path!r} is not absolute; write nixl+posix:///DIRECTORY with three slashes")
        if "\0" in self.path:
            raise ConfigError(f"path: {self.path!r} holds a zero byte, which no file name may")


class NixlGdsConfig(NixlFileConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``nixl+gds:///DIRECTORY?option=value``: those of ``nixl+posix://``, and one more.

    Attributes:
        multithreaded: use NIXL's plugin ``GDS_MT``, with threads of its own for each transfer, in place of ``GDS``,
            which hands batches to the driver.
    """

    multithreaded: bool = False


class NixlUcxConfig(AdapterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``nixl+ucx://HOST:PORT`` and ``nixl+ucx:///SOCKET``, besides those that every adapter has.

    Attributes:
        host: where the pool listens; ``127.0.0.1`` by default.
        port: its port, 7600 by default.
        path: the absolute path of the pool's Unix socket, in place of host and port. It is the better choice on one
            machine: the pool can tell then whether a client that it lost is dead.
        token: the secret that the pool wants from clients on other machines.
        answer_timeout_s: longest wait for a word of the pool, which takes microseconds; then the connection is dropped.
        transfer_timeout_s: longest time for one transfer of at most 33 MiB. Then it is aborted, with its agent. It is
            what a cancelled load or store can take, because a transfer that may still write is never abandoned.
        max_concurrency: transfers of one batch at once. Each has an agent and a connection of its own: some tens of
            file descriptors, and the registration of all memory that is used with it.
    """

    host: str = "127.0.0.1"
    port: Port = 7600
    path: str | None = None
    token: Secret | None = None
    answer_timeout_s: PositiveSeconds = 5.0
    transfer_timeout_s: PositiveSeconds = 5.0
    max_concurrency: PositiveInt = 2

    def __post_init__(self) -> None:
        if self.path is not None and not self.path.startswith("/"):
            raise ConfigError(f"path: {self.path!r} is not absolute; write nixl+ucx:///SOCKET with three slashes")
