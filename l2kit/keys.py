"""Names of objects: the namespace digest, the chained token hashes and the one canonical key encoding.

Everything here is deterministic across processes, machines and versions: fixed little-endian encodings under
BLAKE2b (RFC 7693), never Python's ``hash()``, never pickle, nothing that depends on PYTHONHASHSEED.
"""

from __future__ import annotations

import hashlib
import re
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final

import msgspec

from l2kit.errors import ConfigError

FORMAT_VERSION: Final = 1
HASH_ALGORITHM: Final = "blake2b-128"
MAX_KEY_CHARS: Final = 200

_HASH_BYTES: Final = 16
_VERBATIM: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}\Z")
_HASHED: Final = re.compile(r"x-[0-9a-f]{40}\Z")
_ENCODED: Final = re.compile(
    r"(?P<namespace>[a-z0-9_-]+)/(?P<chunk>(?:[0-9a-f]{2})+)/"
    r"s(?P<shard>[0-9]{1,10})of(?P<shards>[0-9]{1,10})\.g(?P<group>[0-9]{1,10})\.(?:l(?P<layer>[0-9]{1,10})|all)\Z"
)


def _frame(*parts: bytes) -> bytes:
    """Join parts so that no two different lists of parts give the same bytes (each is length-prefixed)."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def _text(text: str) -> bytes:
    """UTF-8 for any string; those of requests may hold lone surrogates, which JSON can express."""
    return text.encode("utf-8", "surrogatepass")


def _digest(purpose: bytes, *parts: bytes, size: int = _HASH_BYTES) -> bytes:
    return hashlib.blake2b(_frame(*parts), digest_size=size, person=purpose).digest()


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that changes the bytes of a KV cache, or their meaning, apart from the tokens themselves.

    Two engines share objects exactly when every field is equal. An unknown (empty) field is refused: whoever does
    not know what its bytes mean must not cache them.

    Attributes:
        model: model id or a digest of its weights.
        revision: model revision; ``"local:<digest>"`` for a checkpoint on disk.
        kv_dtype: exact element type of the cache, e.g. ``bfloat16`` or ``float8_e4m3fn``.
        layout: representation with its version, e.g. ``canonical:kv_2ltd:1`` or ``native:<fingerprint>``.
        layers: number of attention layers in one object.
        kv_heads: KV heads of the whole model (1 for MLA).
        head_dim: elements per head (latent + rope for MLA).
        chunk_size: tokens per chunk.
        engine: fingerprint of what else the engine does to KV (attention scales, rope overrides); ``"-"`` for none.
    """

    model: str
    revision: str
    kv_dtype: str
    layout: str
    layers: int
    kv_heads: int
    head_dim: int
    chunk_size: int
    engine: str = "-"
    hash_algorithm: str = HASH_ALGORITHM
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value in ("", None) or (isinstance(value, int) and value < 1):
                raise ConfigError(f"namespace.{name}: {value!r} says nothing; an unknown identity must not be cached")

    @property
    def digest(self) -> str:
        """32 hexadecimal digits that name this namespace in every key."""
        parts = [_text(f"{name}={getattr(self, name)}") for name in self.__struct_fields__]
        return _digest(b"l2kit-namespace", *parts).hex()


class ObjectKey(msgspec.Struct, frozen=True, dict=True):
    """The name of one object. Keys sort by their encoding.

    Attributes:
        namespace: a :attr:`Namespace.digest`, or any other label. Labels that are not 1 to 64 characters of
            ``[a-z0-9_-]`` are replaced by their hash when the key is made, so they compare equal to their encoding.
        chunk_hash: 8 to 32 bytes that identify the token prefix.
        shard, shards: which part of the KV heads this is, of how many.
        group: KV cache group of a hybrid model.
        layer: one layer, or None when the object holds all of them.
    """

    namespace: str
    chunk_hash: bytes
    shard: int = 0
    shards: int = 1
    group: int = 0
    layer: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.namespace, str) or not self.namespace:
            raise ConfigError(f"namespace: {self.namespace!r} must be a non-empty string")
        if not isinstance(self.chunk_hash, bytes) or not 8 <= len(self.chunk_hash) <= 32:
            raise ConfigError("chunk_hash: must be 8 to 32 bytes")
        numbers = (self.shard, self.shards, self.group, 0 if self.layer is None else self.layer)
        if not all(type(n) is int and 0 <= n < 1 << 32 for n in numbers) or self.shard >= self.shards:
            raise ConfigError(f"shard: {self.shard} of {self.shards}, group {self.group}, layer {self.layer} is no key")
        # "x-" starts only hashed labels, so a verbatim label can never collide with one.
        verbatim = _VERBATIM.match(self.namespace) and not self.namespace.startswith("x-")
        if not verbatim and not _HASHED.match(self.namespace):
            hashed = _digest(b"l2kit-label", _text(self.namespace), size=20).hex()
            msgspec.structs.force_setattr(self, "namespace", f"x-{hashed}")

    def encode(self) -> str:
        """The canonical text: injective, at most 200 characters of ``[A-Za-z0-9._-/]``, no component over 120.

        It has no upper-case letters, so it stays injective on file systems that fold case.
        """
        return self._encoded

    @cached_property
    def _encoded(self) -> str:
        part = "all" if self.layer is None else f"l{self.layer}"
        return f"{self.namespace}/{self.chunk_hash.hex()}/s{self.shard}of{self.shards}.g{self.group}.{part}"

    @classmethod
    def parse(cls, text: str) -> ObjectKey:
        """Invert :meth:`encode`.

        Raises:
            ConfigError: ``text`` is not an encoded key.
        """
        match = _ENCODED.match(text)
        if match is None:
            raise ConfigError(f"key: {text[:MAX_KEY_CHARS]!r} is not an encoded object key")
        layer = match["layer"]
        key = cls(
            match["namespace"],
            bytes.fromhex(match["chunk"]),
            int(match["shard"]),
            int(match["shards"]),
            int(match["group"]),
            None if layer is None else int(layer),
        )
        if key.encode() != text:  # leading zeros and the like: a second spelling of a key is no key
            raise ConfigError(f"key: {text!r} is not in canonical form")
        return key

    @cached_property
    def digest(self) -> bytes:
        """16 bytes over the canonical text; the envelope echoes them."""
        return _digest(b"l2kit-key", self.encode().encode())

    def __str__(self) -> str:
        return self.encode()

    def __lt__(self, other: ObjectKey) -> bool:
        return self.encode() < other.encode()


class MultimodalHash(msgspec.Struct, frozen=True):
    """One multimodal item of a prompt: its whole content hash and the placeholder tokens that it fills."""

    digest: str
    start: int
    length: int


class TokenDatabase:
    """Turns token ids into chained chunk hashes: equal hash means equal tokens, extras and namespace from token 0."""

    def __init__(self, namespace: Namespace | str, chunk_size: int, *, save_unfull_chunk: bool = False) -> None:
        """Hash chunks of ``chunk_size`` tokens; the rest of a prompt is a chunk only with ``save_unfull_chunk``."""
        if chunk_size < 1:
            raise ConfigError(f"chunk_size: {chunk_size} must be at least 1 token")
        if isinstance(namespace, Namespace) and namespace.chunk_size != chunk_size:
            raise ConfigError(f"chunk_size: {chunk_size} differs from the namespace's {namespace.chunk_size}")
        self.namespace = namespace.digest if isinstance(namespace, Namespace) else namespace
        self.chunk_size = chunk_size
        self.save_unfull_chunk = save_unfull_chunk

    def chunks(
        self,
        token_ids: Sequence[int],
        *,
        start: int = 0,
        salt: str | None = None,
        lora: str | None = None,
        mm_hashes: Sequence[MultimodalHash | str] = (),
    ) -> Iterator[tuple[int, int, bytes]]:
        """Yield ``(start, end, chunk_hash)`` for every chunk that ends after token ``start``.

        - Each hash covers all tokens from 0 to ``end``, so a chunk is only equal when its whole prefix is.
        - ``salt`` and ``lora`` enter the root. A ``MultimodalHash`` enters the chunks whose placeholders it fills;
          a plain string (position unknown) enters the root.
        - ``start`` skips yielding, not hashing: ranges stay aligned to ``chunk_size``.

        Raises:
            ConfigError: a token id is not in ``0 <= id < 2**32``.
        """
        if start < 0:
            raise ConfigError(f"start: {start} is negative")
        spans = [item for item in mm_hashes if isinstance(item, MultimodalHash)]
        unplaced = [_text(item) for item in mm_hashes if isinstance(item, str)]
        parent = _digest(
            b"l2kit-root",
            _text(self.namespace),
            self.chunk_size.to_bytes(8, "little"),
            *(b"\0" if extra is None else b"\1" + _text(extra) for extra in (salt, lora)),
            *unplaced,
        )
        total = len(token_ids)
        for begin in range(0, total, self.chunk_size):
            end = min(begin + self.chunk_size, total)
            if end - begin < self.chunk_size and not self.save_unfull_chunk:
                return
            touched = [
                _frame(_text(span.digest), struct.pack("<qq", span.start - begin, span.length))
                for span in spans
                if span.start < end and span.start + span.length > begin
            ]
            parent = _digest(b"l2kit-chunk", parent, _token_bytes(token_ids[begin:end], begin), *touched)
            if end > start:
                yield begin, end, parent


def _token_bytes(token_ids: Sequence[int], offset: int) -> bytes:
    try:
        words = array("I", [*token_ids])  # a list: bytes would be read as raw machine words
    except (OverflowError, TypeError) as error:
        bad = next((t for t in token_ids if not isinstance(t, int) or not 0 <= t < 1 << 32), "?")
        raise ConfigError(f"token_ids: {bad!r} in tokens {offset}.. is no id in 0 <= id < 2**32") from error
    if words.itemsize != 4:  # pragma: no cover - no supported platform has another size
        raise ConfigError("token_ids: this platform's unsigned int is not 4 bytes")
    if sys.byteorder == "big":  # pragma: no cover
        words.byteswap()
    return words.tobytes()
