"""Damage to what the demo has stored: for each object in turn a flipped payload bit, a flipped header bit, a cut."""

from __future__ import annotations

from pathlib import Path

from l2kit.envelope import MAGIC
from l2kit.testing.servers import RespServer


def damage(data: bytes, turn: int) -> bytes:
    """Return ``data`` with one bit flipped in its payload or header, or with its end cut off."""
    if turn % 3 == 2:
        return data[: len(data) // 2]
    broken = bytearray(data)
    broken[len(data) // 2 if turn % 3 == 0 else 40] ^= 1 << turn % 8
    return bytes(broken)


def damage_files(folder: Path) -> int:
    """Damage every object file under ``folder``; return how many there were."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.read_bytes()[:8] == MAGIC)
    for turn, path in enumerate(files):
        path.write_bytes(damage(path.read_bytes(), turn))
    return len(files)


def damage_server(server: RespServer) -> int:
    """Damage every object on ``server``, one that lies in stripes in its first; return how many there were."""
    keys = server.command("KEYS", "*")
    assert isinstance(keys, list)
    values = {key: server.command("GET", key) for key in sorted(key for key in keys if isinstance(key, bytes))}
    objects = {key: data for key, data in values.items() if isinstance(data, bytes) and data[:8] == MAGIC}
    for turn, (key, data) in enumerate(objects.items()):
        # A stripe that is cut counts as lost, a miss before anything is read: those get flipped bits only.
        in_stripes = b"#" in key
        server.command("SET", key, damage(data, 3 * turn + turn % 2 if in_stripes else turn))
    return len(objects)
