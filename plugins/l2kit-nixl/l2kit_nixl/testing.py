"""Memory pools for tests of whoever uses ``nixl+ucx://``: real processes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class PoolProcess:
    """A pool that runs; ``where`` is what stands behind ``nixl+ucx://`` in its URL."""

    def __init__(self, process: subprocess.Popen[str], where: str) -> None:
        """Made by :func:`running_pool`."""
        self.process = process
        self.where = where

    @property
    def url(self) -> str:
        """What an adapter opens."""
        return f"nixl+ucx://{self.where}"

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.process.kill()
        self.process.wait()


@contextmanager
def running_pool(
    *arguments: str,
    listen: str = "127.0.0.1:0",
    max_bytes: str = "256MiB",
    variables: Mapping[str, str] = NO_VARIABLES,
) -> Iterator[PoolProcess]:
    """A pool of its own; it has ended when the block has. ``arguments`` are further ones of its command line."""
    command = [sys.executable, "-m", "l2kit_nixl.pool", "--listen", listen, "--max-bytes", max_bytes, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables})
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("listening on "), f"the pool said {line!r} and ended with {process.poll()}"
        yield PoolProcess(process, line.removeprefix("listening on ").strip())
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
