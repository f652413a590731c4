"""Stored bytes that are damaged, cut, swapped or foreign: reported as corrupt, never delivered, and healed."""

# ruff: noqa: D102 - the names of the tests say what they test

from __future__ import annotations

from collections.abc import Callable

import pytest

from l2kit.envelope import CORRUPTION_REASONS, HEADER_BYTES
from l2kit.errors import CorruptObjectError
from l2kit.testing.groups.base import Adapter, Conformance, content, destination, same

_NBYTES = 9000


def _flip(position: int) -> Callable[[bytes], bytes]:
    def flip(stored: bytes) -> bytes:
        damaged = bytearray(stored)
        damaged[position] ^= 0x10
        return bytes(damaged)

    return flip


_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "flip in the magic": _flip(0),
    "flip in the header": _flip(60),
    "flip in the header's checksum": _flip(HEADER_BYTES - 1),
    "flip in the payload": _flip(HEADER_BYTES + _NBYTES // 2),
    "flip in the last byte": _flip(-1),
    "cut to nothing": lambda stored: b"",
    "cut inside the header": lambda stored: stored[: HEADER_BYTES - 1],
    "cut after the header": lambda stored: stored[:HEADER_BYTES],
    "cut by half": lambda stored: stored[: len(stored) // 2],
    "cut by one byte": lambda stored: stored[:-1],
    "one byte too long": lambda stored: stored + b"\0",
    "twice": lambda stored: stored + stored,
    "zeros": lambda stored: bytes(len(stored)),
    "foreign": lambda stored: b"<html>504 Gateway Time-out</html>" * 40,
    "foreign and short": lambda stored: b"OK",
    "payload alone": lambda stored: stored[HEADER_BYTES:],
}


class CorruptionTests(Conformance):
    """Corruption and healing; needs the hooks ``raw_read`` and ``raw_write``."""

    async def test_the_raw_hooks_see_what_is_stored(self, adapter: Adapter) -> None:
        data = content("raw", _NBYTES)
        [outcome] = await self.store(adapter, {self.key(): data})
        stored = await self.raw(adapter, self.key())
        assert len(stored) == outcome.nbytes
        await self.raw(adapter, self.key(), stored)
        await self.expect(adapter, {self.key(): data})

    @pytest.mark.parametrize("damage", _DAMAGE)
    async def test_damaged_bytes_are_corrupt_and_healed(self, adapter: Adapter, damage: str) -> None:
        key, data = self.key(), content("damaged", _NBYTES)
        await self.store(adapter, {key: data, self.key(1): data})
        await self.raw(adapter, key, _DAMAGE[damage](await self.raw(adapter, key)))
        await self._expect_corrupt_then_healed(adapter)
        await self.expect(adapter, {self.key(1): data})

    async def test_another_objects_bytes_are_corrupt(self, adapter: Adapter) -> None:
        key, data = self.key(), content("swapped", _NBYTES)
        await self.store(adapter, {key: data, self.key(1): data})
        await self.raw(adapter, key, await self.raw(adapter, self.key(1)))
        await self._expect_corrupt_then_healed(adapter)

    async def test_a_damaged_object_does_not_fail_its_batch(self, adapter: Adapter) -> None:
        objects = {key: content(key, _NBYTES) for key in self.keys(9)}
        await self.store(adapter, objects)
        await self.raw(adapter, self.key(4), _flip(-1)(await self.raw(adapter, self.key(4))))
        targets = [destination(_NBYTES) for _ in objects]
        outcomes = await adapter.submit_load_task(list(objects), targets)
        assert [outcome.status for outcome in outcomes] == ["loaded"] * 4 + ["corrupt"] + ["loaded"] * 4
        for key, outcome, target in zip(objects, outcomes, targets, strict=True):
            assert not outcome.loaded or same(target.tobytes(), objects[key])
        await self.expect(adapter, {**objects, self.key(4): None})

    async def test_an_older_version_put_back_is_a_version(self, adapter: Adapter) -> None:
        """A whole, valid object under its own key is no damage, whenever it was written."""
        key = self.key()
        await self.store(adapter, {key: content("older", _NBYTES)})
        older = await self.raw(adapter, key)
        await adapter.submit_delete_task([key])
        await self.store(adapter, {key: content("newer", _NBYTES)})
        await self.raw(adapter, key, older)
        await self.expect(adapter, {key: content("older", _NBYTES)})

    async def _expect_corrupt_then_healed(self, adapter: Adapter) -> None:
        key = self.key()
        corrupt = adapter.counters["load.corrupt"]
        outcome, _ = await self.load(adapter, key, _NBYTES)
        assert outcome.status == "corrupt", outcome
        assert isinstance(outcome.error, CorruptObjectError)
        assert outcome.error.reason in CORRUPTION_REASONS
        assert adapter.counters["load.corrupt"] == corrupt + 1
        assert adapter.counters[f"corrupt.{outcome.error.reason}"] >= 1
        await self.expect(adapter, {key: None})  # nobody tries the same damaged object twice
        [stored] = await self.store(adapter, {key: content("healed", _NBYTES)})
        assert stored.status == "stored", "the damaged object hinders the next store"
        await self.expect(adapter, {key: content("healed", _NBYTES)})
