"""``fio`` as the limit: what a device does past the page cache, with requests of up to 1 MiB."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Final

from bench.objects import Batch, blocking
from bench.pairs import Side

NAME: Final = "fio O_DIRECT"
_REQUEST_BYTES: Final = 1 << 20


@functools.cache
def is_here() -> bool:
    """Whether it is installed; says so once when it is not."""
    if shutil.which("fio") is None:
        print("# no fio here: nothing to say what the device does with O_DIRECT")
        return False
    return True


def side(
    batch: Batch, operation: str, *, queue_depth: int, directory: Path | None = None, file: Path | None = None
) -> Side:
    """Move as many bytes as ``batch`` has, ``queue_depth`` requests in flight, in a folder or over a file.

    ``operation`` is ``read`` or ``write``.
    """
    command = [
        "fio",
        "--name=l2kit",
        f"--directory={directory}" if file is None else f"--filename={file}",
        f"--rw={operation}",
        "--direct=1",
        "--ioengine=libaio",
        f"--iodepth={queue_depth}",
        f"--bs={min(batch.nbytes, _REQUEST_BYTES)}",
        f"--size={len(batch.keys) * batch.nbytes}",
        "--loops=4",
        "--output-format=json",
    ]

    def run() -> float:
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        figures = json.loads(output[output.index("{") :])["jobs"][0][operation]
        return batch.gigabytes * 1e9 / float(figures["bw_bytes"])

    return Side(name=NAME, work=blocking(run), in_process=False)
