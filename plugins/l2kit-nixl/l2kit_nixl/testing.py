"""For tests: memory pools, which are real processes on this machine, and the way around an adapter to its files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from l2kit.adapter import L2Adapter
from l2kit.keys import ObjectKey

NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class FilesUnderneath:
    """The hooks by which `AdapterConformance` goes around ``nixl+posix://`` and ``nixl+gds://``."""

    def raw_read(self, adapter: L2Adapter[Any], key: ObjectKey) -> bytes | None:
        """The file's bytes."""
        path = self._path(adapter, key)
        return path.read_bytes() if path.exists() else None

    def raw_write(self, adapter: L2Adapter[Any], key: ObjectKey, data: bytes) -> None:
        """Put others in their place."""
        self._path(adapter, key).write_bytes(data)

    def raw_unfinished(self, adapter: L2Adapter[Any]) -> list[str]:
        """Files that have no object's name yet."""
        return [str(path) for path in Path(adapter.config.path, "unfinished").iterdir()]

    def _path(self, adapter: L2Adapter[Any], key: ObjectKey) -> Path:
        return Path(adapter._files._path(key))  # type: ignore[attr-defined]  # noqa: SLF001


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
