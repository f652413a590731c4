"""Where an object lies below the objects folder, and which object a file there is. No I/O.

``NAMESPACE/FF/CHUNK-PART``: the three parts of the canonical key, and ``FF``, two hexadecimal digits that spread the
chunks of a namespace over 256 folders. All shards, groups and layers of a chunk lie in one folder. Nothing else of a
caller's ever enters a path, and the canonical key has neither dots nor slashes of its own, so no key leads out of the
folder. The longest name has 112 bytes.

Within the process an object goes by its short key: the chunk hash and the number of the object's family, which is all
else in a key. A million of them take a third of the memory that a million `ObjectKey` s take.
"""

from __future__ import annotations

import re
import threading
import zlib
from typing import Final, NamedTuple

from l2kit.errors import ConfigError
from l2kit.keys import ObjectKey

#: What a folder between the objects folder and the objects may be called; all others are strangers.
NAMESPACE: Final = re.compile(r"[a-z0-9_-]{1,64}")
FAN_OUT: Final = re.compile(r"[0-9a-f]{2}")

_FOLDERS: Final = tuple(f"{number:02x}" for number in range(256))
_FAMILY_BYTES: Final = 4

#: Namespace, shard, shards, group, layer.
_Identity = tuple[str, int, int, int, int | None]


class _Family(NamedTuple):
    """What the keys of one family have in common: the end of the short key, and both ends of the path."""

    number: bytes
    identity: _Identity
    before: str
    after: str


class Names:
    """Keys, short keys and paths of the objects below one folder. Thread-safe; one lock, for families not seen yet."""

    def __init__(self, objects: str) -> None:
        """``objects`` is the path of the folder."""
        self._objects: Final = objects
        self._making: Final = threading.Lock()
        self._by_identity: Final[dict[_Identity, _Family]] = {}
        self._by_names: Final[dict[tuple[str, str], _Family]] = {}
        self._by_number: Final[list[_Family]] = []

    def place(self, key: ObjectKey) -> tuple[bytes, str]:
        """The short key and the path of ``key``'s file."""
        identity = (key.namespace, key.shard, key.shards, key.group, key.layer)
        family = self._by_identity.get(identity) or self._family(key)
        chunk_hash = key.chunk_hash
        chunk = chunk_hash.hex()
        # Not the chunk hash's own first digits: hashes that other hosts bring may all begin alike.
        folder = _FOLDERS[zlib.crc32(chunk.encode()) & 0xFF]
        return chunk_hash + family.number, f"{family.before}{folder}/{chunk}{family.after}"

    def short(self, key: ObjectKey) -> bytes:
        """The short key of ``key`` alone."""
        family = self._by_identity.get((key.namespace, key.shard, key.shards, key.group, key.layer))
        return key.chunk_hash + (family or self._family(key)).number

    def path(self, short: bytes) -> str:
        """The path of the file that a short key stands for."""
        family, chunk = self._family_of(short), short[:-_FAMILY_BYTES].hex()
        return f"{family.before}{_FOLDERS[zlib.crc32(chunk.encode()) & 0xFF]}/{chunk}{family.after}"

    def key(self, short: bytes) -> ObjectKey:
        """The key that a short key stands for."""
        namespace, shard, shards, group, layer = self._family_of(short).identity
        return ObjectKey(namespace, short[:-_FAMILY_BYTES], shard, shards, group, layer)

    def parse(self, namespace: str, fan_out: str, name: str) -> bytes | None:
        """The short key of the file ``namespace/fan_out/name``; None for a file that is no object of ours."""
        chunk, _, part = name.partition("-")
        if fan_out != _FOLDERS[zlib.crc32(chunk.encode()) & 0xFF]:
            return None
        family = self._by_names.get((namespace, part))
        try:
            if family is None:
                family = self._family(ObjectKey.parse(f"{namespace}/{chunk}/{part}"))
            chunk_hash = bytes.fromhex(chunk)
        except (ConfigError, ValueError):
            return None
        # A second spelling of a chunk hash is none, and one of another length is no key's.
        if chunk_hash.hex() != chunk or not 8 <= len(chunk_hash) <= 32:
            return None
        return chunk_hash + family.number

    def _family_of(self, short: bytes) -> _Family:
        return self._by_number[int.from_bytes(short[-_FAMILY_BYTES:], "little")]

    def _family(self, key: ObjectKey) -> _Family:
        identity = (key.namespace, key.shard, key.shards, key.group, key.layer)
        namespace, _, part = key.encode().split("/")
        with self._making:
            family = self._by_identity.get(identity)
            if family is None:
                number = len(self._by_number).to_bytes(_FAMILY_BYTES, "little")
                family = _Family(number, identity, f"{self._objects}/{namespace}/", f"-{part}")
                self._by_number.append(family)
                self._by_identity[identity] = self._by_names[namespace, part] = family
            return family


def object_path(objects: str, key: ObjectKey) -> str:
    """The path of ``key``'s file below the folder ``objects``."""
    return Names(objects).place(key)[1]


def parse_names(namespace: str, fan_out: str, name: str) -> ObjectKey | None:
    """The object that the file ``namespace/fan_out/name`` is; None for a file that is no object of ours."""
    names = Names("")
    short = names.parse(namespace, fan_out, name)
    return None if short is None else names.key(short)
