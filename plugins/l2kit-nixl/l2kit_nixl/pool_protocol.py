"""What clients and a memory pool say to each other: msgspec structs as MessagePack, each behind its length.

Only words go this way, never an object's bytes: those are read and written by NIXL, straight in the pool's memory. Each
request gets one answer, in order. Every list and every message has a bound, and whoever breaks one is cut off.

``Challenge -> Hello -> Welcome`` opens a connection. A store is ``Reserve``, a transfer, ``Commit`` (or ``Abandon``); a
load is ``Lease``, a transfer, ``Return``.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Annotated, Final

import msgspec

VERSION: Final = 1
#: Largest message, in bytes: some thousand keys.
MAX_MESSAGE_BYTES: Final = 1 << 20
#: Most keys in one request.
MAX_KEYS: Final = 4096
LENGTH: Final = struct.Struct("<I")

Key = Annotated[str, msgspec.Meta(max_length=200)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=MAX_KEYS)]
#: A number that the pool gives to one reservation or one lease, and to no other, ever.
Generation = Annotated[int, msgspec.Meta(ge=0)]
Generations = Annotated[list[Generation], msgspec.Meta(max_length=MAX_KEYS)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Sizes = Annotated[list[Size], msgspec.Meta(max_length=MAX_KEYS)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Any of the messages below."""


# --- from the pool, before anything else ----------------------------------------------------------


class Challenge(Message, frozen=True):
    """``nonce`` goes into the proof."""

    version: int
    nonce: bytes


# --- requests -------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """``session`` is the same for all connections of one adapter: 16 random bytes, known to nobody else."""

    version: int
    session: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    proof: Annotated[bytes, msgspec.Meta(max_length=32)]


class Reserve(Message, frozen=True):
    """Memory for new objects, ``sizes`` in bytes."""

    keys: Keys
    sizes: Sizes


class Commit(Message, frozen=True):
    """Everything is written: make these objects readable."""

    generations: Generations


class Abandon(Message, frozen=True):
    """Nothing is written there any more, nor will be: free the memory."""

    generations: Generations


class Lease(Message, frozen=True):
    """Keep these objects where they are, to be read."""

    keys: Keys


class Return(Message, frozen=True):
    """What was leased has been read."""

    generations: Generations


class Look(Message, frozen=True):
    """Sizes of objects; with ``hold`` they stay loadable for this session until `LetGo`."""

    keys: Keys
    hold: bool


class LetGo(Message, frozen=True):
    """Undo one hold for each key."""

    keys: Keys


class Delete(Message, frozen=True):
    """Delete objects."""

    keys: Keys


class List(Message, frozen=True):
    """Keys and sizes in the order of keys, those behind ``after``."""

    after: Key


class Report(Message, frozen=True):
    """What the pool holds."""


# --- answers --------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """``metadata`` is what NIXL needs to reach the pool's memory, ``max_bytes`` how much that is."""

    metadata: bytes
    max_bytes: int


class Refused(Message, frozen=True):
    """No; and the connection is closed."""

    reason: str


class Place(Message, frozen=True):
    """Where an object lies in the pool's memory, or will lie."""

    generation: int
    address: int
    size: int


class Places(Message, frozen=True):
    """For `Reserve` and `Lease`: a place, or why there is none (``present``, ``full``, ``absent``)."""

    places: list[Place | str]


class Flags(Message, frozen=True):
    """Yes or no for each key or generation. For generations, no says that it is stale: the memory is not yours."""

    flags: list[bool]


class Found(Message, frozen=True):
    """Sizes in bytes, None for a miss."""

    sizes: list[int | None]


class Page(Message, frozen=True):
    """A part of the list; an empty one ends it."""

    keys: list[str]
    sizes: list[int]


class Holding(Message, frozen=True):
    """What the pool holds; ``writing`` are reservations, ``quarantined`` those of clients that went away."""

    used_bytes: int
    max_bytes: int
    objects: int
    writing: int
    quarantined: int
    evicted: int


Request = Hello | Reserve | Commit | Abandon | Lease | Return | Look | LetGo | Delete | List | Report
Answer = Challenge | Welcome | Refused | Places | Flags | Found | Page | Holding

_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(Request)
_answers: Final = msgspec.msgpack.Decoder(Answer)


def pack(message: Request | Answer) -> bytes:
    """A message with its length in front."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def body_bytes(prefix: bytes | bytearray) -> int:
    """How long the message behind ``prefix`` is.

    Raises:
        ValueError: longer than any may be.
    """
    (nbytes,) = LENGTH.unpack(prefix)
    if nbytes > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {nbytes} bytes; {MAX_MESSAGE_BYTES} is the most")
    return int(nbytes)


def request(body: bytes) -> Request:
    """What a client said.

    Raises:
        ValueError: nothing that a client may say.
    """
    return _requests.decode(body)


def answer(body: bytes | bytearray) -> Answer:
    """What the pool said.

    Raises:
        ValueError: nothing that a pool may say.
    """
    return _answers.decode(body)


def proof(token: str, nonce: bytes, session: bytes) -> bytes:
    """What only somebody who knows ``token`` can say in this connection; the token itself never travels."""
    return hmac.digest(token.encode(), nonce + session, hashlib.blake2b)[:32]
