"""`MemoryObj` over any buffer, and the arena against a model of it."""

from __future__ import annotations

import ctypes
import gc
from array import array
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from l2kit.errors import CapacityError, ConfigError
from l2kit.layout import Layout
from l2kit.memory import PAGE_BYTES, Arena, MemoryObj, Slot

MIB = 1 << 20


class TestWrap:
    @pytest.mark.parametrize(
        "buffer",
        [
            bytearray(b"12345678"),
            b"12345678",
            memoryview(b"012345678")[1:],
            memoryview(b"12345678").cast("B", (2, 4)),
            array("I", [0x34333231, 0x38373635]),
            (ctypes.c_char * 8).from_buffer_copy(b"12345678"),
            (ctypes.c_uint16 * 4)(0x3231, 0x3433, 0x3635, 0x3837),
        ],
        ids=["bytearray", "bytes", "slice", "two-dimensional", "array", "ctypes char", "ctypes uint16"],
    )
    def test_any_buffer(self, buffer: Any) -> None:
        obj = MemoryObj.wrap(buffer, Layout.raw(8))
        assert obj.tobytes() == b"12345678"
        assert obj.nbytes == 8
        assert obj.read_only == memoryview(buffer).readonly
        assert all(segment.format == "B" and segment.ndim == 1 for segment in obj.segments)

    def test_nothing_is_copied(self) -> None:
        buffer = bytearray(8)
        MemoryObj.wrap(buffer, Layout.raw(8)).segments[0][3] = 7
        assert buffer[3] == 7

    def test_segments_are_taken_one_after_the_other(self) -> None:
        parts: list[bytearray | bytes] = [bytearray(b"ab"), bytearray(), b"cde", bytearray(b"fghij")]
        obj = MemoryObj.wrap(parts, Layout.raw(7))
        assert [bytes(segment) for segment in obj.segments] == [b"ab", b"cde", b"fg"]
        assert obj.read_only

    def test_more_memory_than_needed_stays_outside(self) -> None:
        buffer = bytearray(b"........")
        obj = MemoryObj.wrap([buffer], Layout.raw(5))
        obj.segments[0][:] = b"12345"
        assert buffer == b"12345..."

    def test_an_empty_object_has_no_segments(self) -> None:
        assert MemoryObj.wrap(bytearray(4), Layout.raw(0)).segments == ()
        assert MemoryObj.allocate(Layout.raw(0)).tobytes() == b""

    def test_too_little_memory(self) -> None:
        with pytest.raises(CapacityError, match="7 bytes given"):
            MemoryObj.wrap([bytearray(3), bytearray(4)], Layout.raw(8))

    def test_holes_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="C-contiguous"):
            MemoryObj.wrap(memoryview(bytearray(16))[::2], Layout.raw(8))

    def test_the_constructor_takes_exactly_the_layouts_size(self) -> None:
        with pytest.raises(CapacityError):
            MemoryObj([memoryview(bytearray(9))], Layout.raw(8))

    def test_a_repr_shows_no_content(self) -> None:
        assert "secret" not in repr(MemoryObj.wrap(b"secret", Layout.raw(6)))

    def test_allocated_memory_is_aligned_zeroed_and_the_objects_own(self) -> None:
        one, other = (MemoryObj.allocate(Layout.raw(10_000)) for _ in range(2))
        address = ctypes.addressof(ctypes.c_char.from_buffer(one.segments[0]))
        assert address % PAGE_BYTES == 0
        assert one.tobytes() == bytes(10_000)
        one.segments[0][:] = b"x" * 10_000
        assert other.tobytes() == bytes(10_000)


class TestArena:
    def test_below_a_page_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="capacity_bytes"):
            Arena(PAGE_BYTES - 1)

    def test_a_slot_is_whole_pages(self) -> None:
        assert [Arena.slot_bytes(n) for n in (0, 1, 4096, 4097)] == [4096, 4096, 4096, 8192]

    def test_a_full_arena_says_none(self) -> None:
        arena = Arena(3 * PAGE_BYTES + 17)
        assert arena.capacity_bytes == 3 * PAGE_BYTES
        slots = [arena.allocate(1) for _ in range(4)]
        assert slots.pop() is None
        assert arena.allocate(arena.capacity_bytes + 1) is None
        assert arena.used_bytes == arena.capacity_bytes
        arena.close()

    def test_a_double_free_raises_and_changes_nothing(self) -> None:
        arena = Arena(MIB)
        slot, other = arena.allocate(100), arena.allocate(100)
        assert slot is not None
        assert other is not None
        arena.free(slot)
        with pytest.raises(RuntimeError, match="freed twice"):
            arena.free(slot)
        again = arena.allocate(100)
        assert again is not None
        assert again.offset == slot.offset
        with pytest.raises(RuntimeError, match="freed twice"):
            arena.free(slot)  # its memory is another owner's by now
        assert arena.used_bytes == 2 * PAGE_BYTES
        arena.close()

    def test_a_freed_slab_serves_another_size(self) -> None:
        arena = Arena(8 * PAGE_BYTES)
        small = [arena.allocate(1) for _ in range(8)]
        assert arena.allocate(8 * PAGE_BYTES) is None
        for slot in small:
            assert slot is not None
            arena.free(slot)
        assert arena.allocate(8 * PAGE_BYTES) is not None
        arena.close()

    def test_closing_leaves_a_readers_view_valid(self) -> None:
        arena = Arena(MIB)
        slot = arena.allocate(4)
        assert slot is not None
        view = arena.view(slot, 4)
        view[:] = b"KEPT"
        arena.close()
        del arena, slot
        gc.collect()
        assert bytes(view) == b"KEPT"
        view.release()


class ArenaMachine(RuleBasedStateMachine):
    """An arena against a plain list of what it gave out; every slot holds its owner's mark at both ends."""

    SIZES = (1, 4096, 4097, 70_000, MIB, 7 * MIB, 30 * MIB, 64 * MIB, 65 * MIB, 200 * MIB)

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(300 * MIB)
        self.owned: list[tuple[Slot, int, bytes]] = []
        self.marks = 0

    @rule(nbytes=st.sampled_from(SIZES), count=st.integers(1, 40))
    def allocate(self, nbytes: int, count: int) -> None:
        for _ in range(count if nbytes < MIB else 1):
            slot = self.arena.allocate(nbytes)
            if slot is None:
                assert self.owned, "an empty arena has room for everything below its size"
                return
            self.marks += 1
            mark = self.marks.to_bytes(8, "little")
            view = self.arena.view(slot, slot.slot_bytes)
            view[:8] = view[-8:] = mark
            self.owned.append((slot, nbytes, mark))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, len(self.owned)))):
            index = data.draw(st.integers(0, len(self.owned) - 1)) if len(self.owned) < 9 else -1
            self._free(index)

    @precondition(lambda self: self.owned)
    @rule()
    def free_all(self) -> None:
        while self.owned:
            self._free(0)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        slot = self._free(data.draw(st.integers(0, len(self.owned) - 1)))
        with pytest.raises(RuntimeError):
            self.arena.free(slot)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), nbytes=st.sampled_from(SIZES))
    def foretell(self, data: st.DataObject, nbytes: int) -> None:
        """`would_fit` says what freeing some slots would do, when there is no room without."""
        slot = self.arena.allocate(nbytes)
        if slot is None:
            count = data.draw(st.integers(1, len(self.owned)))
            foretold = self.arena.would_fit(nbytes, [owned[0] for owned in self.owned[:count]])
            for _ in range(count):
                self._free(0)
            slot = self.arena.allocate(nbytes)
            assert (slot is not None) == foretold
        if slot is not None:
            self.arena.free(slot)

    def _free(self, index: int) -> Slot:
        slot, _, mark = self.owned.pop(index)
        view = self.arena.view(slot, slot.slot_bytes)
        assert bytes(view[:8]) == bytes(view[-8:]) == mark, "somebody else wrote into this slot"
        self.arena.free(slot)
        return slot

    @invariant()
    def slots_do_not_overlap(self) -> None:
        end = 0
        for slot, nbytes, _ in sorted(self.owned, key=lambda owned: owned[0].offset):
            assert slot.offset >= end
            assert slot.offset % PAGE_BYTES == 0
            assert slot.slot_bytes >= nbytes
            end = slot.offset + slot.slot_bytes
        assert end <= self.arena.capacity_bytes

    @invariant()
    def used_bytes_is_exact(self) -> None:
        assert self.arena.used_bytes == sum(slot.slot_bytes for slot, _, _ in self.owned)

    @invariant()
    def an_empty_arena_is_one_extent(self) -> None:
        if not self.owned:
            assert self.arena._extents == [(0, self.arena.capacity_bytes)]

    def teardown(self) -> None:
        self.arena.close()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
