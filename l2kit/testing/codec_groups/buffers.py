"""Memory belongs to the caller: what is read, what is written, and what is let go."""

# ruff: noqa: D102 - the names of the tests say what they test

from __future__ import annotations

import pytest

from l2kit.serde import Codec
from l2kit.testing.codec_groups.base import GUARD, CodecSuite, is_kept
from l2kit.testing.codec_groups.values import awkward, ordinary
from l2kit.testing.groups.base import same


class BufferTests(CodecSuite):
    """Buffers."""

    def test_the_estimate_is_an_upper_bound(self, codec: Codec) -> None:
        for layout in self.layouts(codec):
            bound = codec.estimate_serialized_size(layout)
            assert isinstance(bound, int)
            assert bound >= 0
            assert codec.estimate_serialized_size(layout) == bound, "two estimates for one layout"
            for data in [*awkward(layout).values(), ordinary(layout)]:
                self.encode(codec, data, layout)  # into exactly that many bytes

    def test_more_room_than_the_estimate_changes_nothing(self, codec: Codec) -> None:
        for layout in self.layouts(codec):
            data = ordinary(layout)
            bound = codec.estimate_serialized_size(layout)
            buffer = bytearray(GUARD + bytes(2 * bound + 100) + GUARD)
            room = memoryview(buffer)[len(GUARD) : -len(GUARD)]
            nbytes = codec.serialize([memoryview(data)], room, self.key(), layout)
            self.check_guards(buffer)
            assert nbytes <= bound, f"{nbytes} bytes, its estimate for {layout} was {bound}"
            self.check(codec, data, self.decode(codec, bytes(room[:nbytes]), layout), layout)

    def test_serialize_returns_what_it_wrote(self, codec: Codec) -> None:
        """What lies in the buffer before makes no difference to the payload, nor does what lies behind it."""
        for layout in self.layouts(codec):
            data = ordinary(layout)
            decoded = []
            for before in (b"\x00", b"\xff"):
                room = bytearray(before * codec.estimate_serialized_size(layout))
                nbytes = codec.serialize([memoryview(data)], memoryview(room), self.key(), layout)
                decoded.append(self.decode(codec, bytes(room[:nbytes]), layout))
            assert same(decoded[0], decoded[1]), f"a part of the payload of {layout} was not written"

    @pytest.mark.parametrize("cuts", [(1,), (0, 3, 0), (7, 1, 1, 13), (2,) * 40], ids=str)
    def test_scatter_gather_lists(self, codec: Codec, cuts: tuple[int, ...]) -> None:
        for layout in self.layouts(codec):
            data = ordinary(layout)
            whole = self.decode(codec, self.encode(codec, data, layout), layout)
            payload = self.encode(codec, data, layout, *cuts)
            for into in ((), cuts, (5, 1)):
                assert same(self.decode(codec, payload, layout, *into), whole), (
                    f"{layout} in segments of {cuts}, {into}"
                )

    def test_a_source_is_only_read(self, codec: Codec) -> None:
        for layout in self.layouts(codec):
            data = ordinary(layout)
            source, room = bytearray(data), bytearray(codec.estimate_serialized_size(layout))
            middle = len(data) // 3
            segments = [memoryview(source)[:middle], memoryview(source)[middle:]]
            nbytes = codec.serialize(segments, memoryview(room), self.key(), layout)
            assert same(source, data), "serialize changed its source"
            payload = bytearray(room[:nbytes])
            target = bytearray(layout.nbytes)
            codec.deserialize(memoryview(payload), [memoryview(target)], self.key(), layout)
            assert same(payload, room[:nbytes]), "deserialize changed its source"

    def test_no_buffer_is_kept(self, codec: Codec) -> None:
        layout = self.layouts(codec)[0]
        data = ordinary(layout)
        source, room = bytearray(data), bytearray(codec.estimate_serialized_size(layout))
        target = bytearray(layout.nbytes)
        nbytes = codec.serialize([memoryview(source)], memoryview(room), self.key(), layout)
        payload = bytearray(room[:nbytes])
        assert [is_kept(source), is_kept(room)] == [False, False], "serialize kept a view of the caller's memory"
        codec.deserialize(memoryview(payload), [memoryview(target)], self.key(), layout)
        received = bytes(target)
        assert [is_kept(payload), is_kept(target)] == [False, False], "deserialize kept a view of the caller's memory"
        # The caller reuses its memory; what comes next does not depend on it.
        for buffer in (source, room, payload, target):
            buffer[:] = bytes(len(buffer))
        assert same(self.decode(codec, self.encode(codec, data, layout), layout), received)

    def test_deserialize_fills_the_whole_object(self, codec: Codec) -> None:
        for layout in self.layouts(codec):
            for data in (ordinary(layout), bytes(layout.nbytes)):
                payload = self.encode(codec, data, layout)
                received = []
                for before in (b"\x00", b"\xff"):
                    target = bytearray(before * layout.nbytes)
                    codec.deserialize(memoryview(payload), [memoryview(target)], self.key(), layout)
                    received.append(bytes(target))
                assert same(received[0], received[1]), f"a part of {layout} was left as it was before"
