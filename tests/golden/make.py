"""Writes the golden envelopes of the current format version: ``python tests/golden/make.py``.

Each case is a pair of files: ``envelope-vN-CASE.bin``, a stored object, and ``.json``, what it must decode to. They
are made once, when a format version is released, and stay decodable for ever; so nothing here overwrites a file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import msgspec

from l2kit import envelope
from l2kit.keys import ObjectKey
from l2kit.layout import Layout

FOLDER = Path(__file__).parent
CHUNK_HASH = bytes(range(16))
CODECS = b'[{"id":"golden","version":3,"params":{"level":1}}]'


class Case(msgspec.Struct, frozen=True):
    """One golden object; ``payload`` defaults to bytes as long as the layout says."""

    name: str
    key: ObjectKey
    layout: Layout
    payload: bytes | None = None
    metadata: bytes = b""
    alignment: int = 1


CASES = [
    Case("raw-empty", ObjectKey("golden", CHUNK_HASH), Layout.raw(0)),
    Case("raw", ObjectKey("../../hostile namespace", CHUNK_HASH), Layout.raw(123)),
    Case(
        "kv-all-layers",
        ObjectKey("golden", CHUNK_HASH, shard=1, shards=2, group=3),
        Layout.kv(layers=2, tokens=4, kv_heads=2, head_dim=8, dtype="bfloat16"),
    ),
    Case(
        "kv-one-layer",
        ObjectKey("golden", CHUNK_HASH, layer=17),
        Layout.kv(layers=1, tokens=4, kv_heads=2, head_dim=8, dtype="float8_e4m3fnuz"),
    ),
    Case("mla", ObjectKey("golden", CHUNK_HASH), Layout.mla(layers=2, tokens=4, latent_dim=12, dtype="float16")),
    Case("pages", ObjectKey("golden", CHUNK_HASH), Layout.pages(layers=2, blocks=2, page_bytes=32, tokens=32)),
    Case("aligned", ObjectKey("golden", CHUNK_HASH), Layout.raw(100), alignment=512),
    Case("coded", ObjectKey("golden", CHUNK_HASH), Layout.raw(100), payload=b"shorter", metadata=CODECS, alignment=64),
]


def main() -> int:
    """Write what is not there yet."""
    for case in CASES:
        stem = FOLDER / f"envelope-v{envelope.FORMAT_VERSION}-{case.name}"
        binary, description = stem.with_suffix(".bin"), stem.with_suffix(".json")
        if binary.exists() or description.exists():
            print(f"{stem.name}: exists, and golden files never change")  # noqa: T201
            continue
        payload = Random(case.name).randbytes(case.layout.nbytes) if case.payload is None else case.payload
        head = envelope.seal(
            case.key, case.layout, [memoryview(payload)], metadata=case.metadata, alignment=case.alignment
        )
        binary.write_bytes(head + payload)
        facts = {
            "key": case.key.encode(),
            "layout": case.layout,
            "alignment": case.alignment,
            "metadata": case.metadata.decode(),
            "payload": payload.hex(),
        }
        description.write_bytes(msgspec.json.format(msgspec.json.encode(facts)) + b"\n")
        print(f"{stem.name}: written")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
