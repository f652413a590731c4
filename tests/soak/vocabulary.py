"""What engines of the soak ask for, and what every byte must be.

Prompts are nodes of one tree, so all engines share prefixes. The bytes of a chunk follow from who owns it and from all
tokens up to its end, and are computed here without any of l2kit's own hashes: a chunk of another prompt, position,
model, tenant or shard has other bytes, often of the same size.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import product
from random import Random
from typing import Final, NamedTuple

from l2kit.engine import RequestIdentity
from l2kit.keys import Namespace, ObjectKey, TokenDatabase
from l2kit.layout import Layout

CHUNK_TOKENS: Final = 16
SEGMENT_TOKENS: Final = 24  # no multiple of a chunk: prompts part ways in the middle of one
_BRANCHES: Final = (4, 3, 3, 2, 2, 2)
_POPULARITY: Final = (0.6, 0.25, 0.1, 0.05)  # of the branches of one node

Path = tuple[int, ...]


class Model(NamedTuple):
    """One model whose KV is cached; those of equal sizes differ by nothing but their name."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    shards: int = 1
    save_unfull_chunk: bool = False

    @property
    def namespace(self) -> Namespace:
        return Namespace(
            model=self.name,
            revision="1",
            kv_dtype="bfloat16",
            layout="canonical:kv_2ltd:1",
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            chunk_size=CHUNK_TOKENS,
        )

    def layout(self, tokens: int) -> Layout:
        return Layout.kv(
            layers=self.layers,
            tokens=tokens,
            kv_heads=self.kv_heads // self.shards,
            head_dim=self.head_dim,
            dtype="bfloat16",
        )


#: Chunks of 4, 16 and 64 KiB, and two shards of 8 KiB each.
MODELS: Final = (
    Model("small", layers=2, kv_heads=1, head_dim=32, save_unfull_chunk=True),
    Model("middle", layers=2, kv_heads=1, head_dim=128),
    Model("twin", layers=2, kv_heads=1, head_dim=128, save_unfull_chunk=True),
    Model("large", layers=4, kv_heads=2, head_dim=128),
    Model("sharded", layers=2, kv_heads=2, head_dim=64, shards=2),
)

#: The same text as a tenant and as an adapter: a key that mixes the two up is found out.
IDENTITIES: Final = (RequestIdentity(), RequestIdentity(salt="one"), RequestIdentity(lora="one"))


class Prompt(NamedTuple):
    """One prompt of one owner."""

    model: Model
    identity: RequestIdentity
    path: Path

    @property
    def tokens(self) -> tuple[int, ...]:
        return _tokens(self.path)

    def content(self, start: int, end: int, shard: int = 0) -> bytes:
        """What the KV of tokens ``start <= i < end`` is."""
        covering = self.path[: -(-end // SEGMENT_TOKENS)]
        return _content(self.model, self.identity, covering, start, end, shard)


def random_prompt(random: Random) -> Prompt:
    """Popular prompts more often than others."""
    depth = random.randint(1, len(_BRANCHES))
    path = tuple(random.choices(range(branches), _POPULARITY[:branches])[0] for branches in _BRANCHES[:depth])
    return Prompt(random.choice(MODELS), random.choices(IDENTITIES, (8, 1, 1))[0], path)


class Expected(NamedTuple):
    """What the object of one key must hold."""

    prompt: Prompt
    start: int
    end: int
    shard: int

    @property
    def layout(self) -> Layout:
        return self.prompt.model.layout(self.end - self.start)

    def content(self) -> bytes:
        return self.prompt.content(self.start, self.end, self.shard)


def universe() -> dict[ObjectKey, Expected]:
    """Every object that an engine can ever store, by its key. Some seconds."""
    known: dict[ObjectKey, Expected] = {}
    for model, identity, path in product(MODELS, IDENTITIES, _paths()):
        prompt = Prompt(model, identity, path)
        database = TokenDatabase(model.namespace, CHUNK_TOKENS, save_unfull_chunk=model.save_unfull_chunk)
        for start, end, digest in database.chunks(prompt.tokens, salt=identity.salt, lora=identity.lora):
            for shard in range(model.shards):
                key = ObjectKey(model.namespace.digest, digest, shard, model.shards)
                known[key] = Expected(prompt, start, end, shard)
    return known


def _paths() -> Iterator[Path]:
    for depth in range(1, len(_BRANCHES) + 1):
        yield from product(*(range(branches) for branches in _BRANCHES[:depth]))


@cache
def _tokens(path: Path) -> tuple[int, ...]:
    if not path:
        return ()
    return (*_tokens(path[:-1]), *Random(repr(path)).choices(range(32_000), k=SEGMENT_TOKENS))


@lru_cache(maxsize=2000)
def _content(model: Model, identity: RequestIdentity, path: Path, start: int, end: int, shard: int) -> bytes:
    owner = f"{model.name}/{identity.salt!r}/{identity.lora!r}/{shard}of{model.shards}/{start}-{end}/".encode()
    tokens = array("I", _tokens(path)[:end]).tobytes()
    return hashlib.shake_128(owner + tokens).digest(model.layout(end - start).nbytes)
