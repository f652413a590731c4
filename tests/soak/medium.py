"""The shared backends from outside: damage done to what is stored, and what lies there in the end."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import anyio

from l2kit import open_adapter
from l2kit.adapter import KeyInfo, L2Adapter
from l2kit.errors import CorruptObjectError
from l2kit.memory import MemoryObj
from l2kit.testing.servers import RespServer, ServerError
from l2kit_posix.names import parse_names
from tests.soak.hostility import FILE_TIER_BYTES
from tests.soak.pages import differing
from tests.soak.vocabulary import Expected, universe

#: The default of ``key_prefix``.
_PREFIX: Final = b"l2kit:"
#: What circuit breakers and probes write and delete; one that was killed in between leaves it.
_PROBE: Final = "l2kit-probe"
_SURELY_DAMAGED: Final = 8
_BATCH: Final = 32
_PATIENCE_S: Final = 3.0


class Medium:
    """One directory and one server, and a record of what was done to them."""

    def __init__(self, directory: Path, server: RespServer, random: Random) -> None:
        self.directory: Final = directory
        self.server: Final = server
        self.damage: Final[Counter[str]] = Counter()
        self._random = random
        self._files: list[Path] = []

    def look(self) -> None:
        """Find out which files there are; :meth:`hurt_file` chooses among them."""
        self._files = list((self.directory / "objects").glob("*/*/*"))

    def hurt_file(self) -> None:
        """Flip a bit of an object's file, cut it, or give two files each other's content."""
        if len(self._files) < 2:
            return
        how: Callable[[], None] = self._random.choice((self._flip_file, self._cut_file, self._swap_files))
        with suppress(FileNotFoundError):  # evicted since
            how()

    def hurt_server(self) -> None:
        """Overwrite a piece of a value, cut it, or give two keys each other's value. The server must be up."""
        how: Callable[[], None] = self._random.choice((self._overwrite_value, self._cut_value, self._swap_values))
        with suppress(OSError, ServerError):  # it has just been killed, or the key is gone
            how()

    def damage_surely(self) -> int:
        """Flip the last bit of some objects in each tier, so that there is something to be found; returns how many."""
        damaged = 0
        self.look()
        for path in self._random.sample(self._files, min(_SURELY_DAMAGED, len(self._files))):
            flip(path, 8 * path.stat().st_size - 1)
            damaged += 1
        keys = {key for _ in range(4 * _SURELY_DAMAGED) if (key := self._random_key()) is not None}
        for key in sorted(keys)[:_SURELY_DAMAGED]:
            last = self._size(key) - 1
            value = self.server.command("GETRANGE", key, last, last)
            assert isinstance(value, bytes)
            self.server.command("SETRANGE", key, last, bytes([value[0] ^ 1]))
            damaged += 1
        return damaged

    def connections(self) -> int:
        """How many clients the server has besides this one, when those of the dead are gone."""
        give_up = time.monotonic() + _PATIENCE_S
        while True:
            listing = self.server.command("CLIENT", "LIST")
            assert isinstance(listing, bytes)
            others = len(listing.splitlines()) - 1
            if not others or time.monotonic() > give_up:
                return others
            time.sleep(0.01)

    # --- files ------------------------------------------------------------------------------------------

    def _flip_file(self) -> None:
        path = self._random.choice(self._files)
        flip(path, self._random.randrange(8 * path.stat().st_size))
        self.damage["file flipped"] += 1

    def _cut_file(self) -> None:
        path = self._random.choice(self._files)
        os.truncate(path, self._random.randrange(path.stat().st_size))
        self.damage["file cut"] += 1

    def _swap_files(self) -> None:
        one, other = self._random.sample(self._files, 2)
        aside = self.directory.parent / "aside"
        one.rename(aside)
        try:
            other.rename(one)
            aside.rename(other)
        finally:
            aside.unlink(missing_ok=True)
        self.damage["files swapped"] += 1

    # --- values -----------------------------------------------------------------------------------------

    def _random_key(self) -> bytes | None:
        key = self.server.command("RANDOMKEY")
        return key if isinstance(key, bytes) and key.startswith(_PREFIX) else None

    def _size(self, key: bytes) -> int:
        size = self.server.command("STRLEN", key)
        return size if isinstance(size, int) else 0

    def _overwrite_value(self) -> None:
        key = self._random_key()
        if key is not None and (size := self._size(key)):
            self.server.command("SETRANGE", key, self._random.randrange(size), self._random.randbytes(8))
            self.damage["value overwritten"] += 1

    def _cut_value(self) -> None:
        key = self._random_key()
        if key is not None and (size := self._size(key)):
            rest = self.server.command("GETRANGE", key, 0, self._random.randrange(size))
            assert isinstance(rest, bytes)
            self.server.command("SET", key, rest[:-1] or b"?")
            self.damage["value cut"] += 1

    def _swap_values(self) -> None:
        one, other = self._random_key(), self._random_key()
        if one is not None and other is not None and one != other:
            self.server.command("RENAME", one, "aside")
            self.server.command("RENAME", other, one)
            self.server.command("RENAME", "aside", other)
            self.damage["values swapped"] += 1


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        [byte] = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


@dataclass
class LastLook:
    """What lies in the backends when every engine is gone."""

    intact: int = 0
    found_damaged: int = 0
    surely_damaged: int = 0
    wrong_bytes: int = 0
    probes_left: int = 0
    file_bytes_before: int = 0
    file_bytes: int = 0
    strays: list[str] = field(default_factory=list)
    connections: int = 0
    failures: list[str] = field(default_factory=list)


async def last_look(medium: Medium) -> LastLook:
    """Open each tier once more, read every object of it, and compare every byte of those that are said to be well."""
    look = LastLook()
    look.connections = medium.connections()
    medium.server.command("CONFIG", "SET", "maxmemory", 0)  # from now on nothing goes away by itself
    look.surely_damaged = medium.damage_surely()
    known = universe()
    objects = medium.directory / "objects"
    look.file_bytes_before = sum(path.stat().st_size for path in objects.glob("*/*/*"))
    async with open_adapter(f"file://{medium.directory}?max_bytes={FILE_TIER_BYTES}") as adapter:
        look.file_bytes = (await adapter.usage()).used_bytes
        await _verify(adapter, known, look)
    async with open_adapter(medium.server.url()) as adapter:
        await _verify(adapter, known, look)
    if look.file_bytes > FILE_TIER_BYTES:
        look.failures.append(f"{look.file_bytes} bytes of files after the last open, {FILE_TIER_BYTES} are allowed")
    if look.found_damaged < look.surely_damaged:
        look.failures.append(f"{look.surely_damaged} objects were damaged, {look.found_damaged} were found")
    look.strays = [str(path) for path in _strays(medium.directory)]
    return look


async def _verify(adapter: L2Adapter[Any], known: dict[Any, Expected], look: LastLook) -> None:
    adapter.deletes_damaged = False
    batch: list[KeyInfo] = []
    async for info in adapter.iter_keys():
        if info.key in known:
            batch.append(info)
        elif info.key.namespace == _PROBE:
            look.probes_left += 1
        else:
            look.strays.append(f"{adapter.name}: {info.key}")
        if len(batch) == _BATCH:
            await _verify_batch(adapter, batch, known, look)
            batch.clear()
    await _verify_batch(adapter, batch, known, look)


async def _verify_batch(
    adapter: L2Adapter[Any], batch: list[KeyInfo], known: dict[Any, Expected], look: LastLook
) -> None:
    expected = [known[info.key] for info in batch]
    targets = [MemoryObj.allocate(item.layout) for item in expected]
    outcomes = await adapter.submit_load_task([info.key for info in batch], targets)
    for info, item, target, outcome in zip(batch, expected, targets, outcomes, strict=True):
        if outcome.loaded:
            look.intact += 1
            wrong = differing(target.tobytes(), item.content()) if target.tobytes() != item.content() else ()
            look.wrong_bytes += len(wrong)
            if wrong:
                look.failures.append(f"{adapter.name}: {info.key} was loaded with {len(wrong)} wrong bytes")
        elif isinstance(outcome.error, CorruptObjectError):
            look.found_damaged += 1
        else:
            look.failures.append(f"{adapter.name}: {info.key} is {outcome.status}: {outcome.error}")


def _strays(directory: Path) -> list[Path]:
    """Files of nobody, and unfinished ones: all but objects, after everybody has closed."""
    strays = [*(directory / "staging").iterdir()]
    for path in directory.rglob("*"):
        in_place = path.is_relative_to(directory / "objects")
        is_object = in_place and parse_names(path.parent.parent.name, path.parent.name, path.name) is not None
        if path.is_file() and not is_object and path.parent not in strays:
            strays.append(path)
    return strays


def look_once_more(medium: Medium) -> LastLook:
    """`last_look` for callers without a loop."""
    return anyio.run(last_look, medium)
