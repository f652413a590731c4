"""Where an object lies below the objects folder, and which object a file there is. Pure.

``NAMESPACE/FF/CHUNK-PART``: the three parts of the canonical key, and ``FF``, two hexadecimal digits that spread the
chunks of a namespace over 256 folders. All shards, groups and layers of a chunk lie in one folder. Nothing else of a
caller's ever enters a path, and the canonical key has neither dots nor slashes of its own, so no key leads out of the
folder. The longest name has 112 bytes.
"""

from __future__ import annotations

import re
import zlib
from typing import Final

from l2kit.errors import ConfigError
from l2kit.keys import ObjectKey

#: What a folder between the objects folder and the objects may be called; all others are strangers.
NAMESPACE: Final = re.compile(r"[a-z0-9_-]{1,64}")
FAN_OUT: Final = re.compile(r"[0-9a-f]{2}")


def object_path(objects: str, key: ObjectKey) -> str:
    """The path of ``key``'s file below the folder ``objects``."""
    namespace, chunk, part = key.encode().split("/")
    return f"{objects}/{namespace}/{_fan_out(chunk)}/{chunk}-{part}"


def parse_names(namespace: str, fan_out: str, name: str) -> ObjectKey | None:
    """The object that the file ``namespace/fan_out/name`` is; None for a file that is no object of ours."""
    chunk, dash, part = name.partition("-")
    if not dash or fan_out != _fan_out(chunk):
        return None
    try:
        return ObjectKey.parse(f"{namespace}/{chunk}/{part}")
    except ConfigError:
        return None


def _fan_out(chunk: str) -> str:
    # Not the chunk hash's own first digits: hashes that other hosts bring may all begin alike.
    return f"{zlib.crc32(chunk.encode()) & 0xFF:02x}"
