"""What was stored comes back, byte for byte, whatever the shape of the memory on either side."""

# ruff: noqa: D102 - the names of the tests say what they test

from __future__ import annotations

import mmap

import pytest

from l2kit.errors import CapacityError, ConfigError
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.testing.groups.base import UNTOUCHED, Adapter, Conformance, content, destination, same, source, split

_KIB = 1 << 10
_MIB = 1 << 20


class RoundTripTests(Conformance):
    """Round trips."""

    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, _MIB + 3, 16 * _MIB])
    async def test_an_object_of_any_size_comes_back(self, adapter: Adapter, nbytes: int) -> None:
        self._needs_room(adapter, nbytes)
        data = content("size", nbytes)
        [outcome] = await self.store(adapter, {self.key(): data})
        assert outcome.status == "stored"
        assert outcome.nbytes >= nbytes
        await self.expect(adapter, {self.key(): data})

    @pytest.mark.parametrize(
        "layout",
        [
            Layout.kv(layers=3, tokens=16, kv_heads=2, head_dim=8, dtype="bfloat16"),
            Layout.mla(layers=3, tokens=16, latent_dim=24, dtype="float8_e4m3fn"),
            Layout.pages(layers=3, blocks=2, page_bytes=640, tokens=32),
        ],
        ids=lambda layout: layout.kind,
    )
    async def test_an_object_of_any_layout_comes_back(self, adapter: Adapter, layout: Layout) -> None:
        data = content(layout.kind, layout.nbytes)
        await adapter.submit_store_task([self.key()], [MemoryObj.wrap(data, layout)])
        target = MemoryObj.allocate(layout)
        [outcome] = await adapter.submit_load_task([self.key()], [target])
        assert outcome.loaded, outcome
        assert outcome.nbytes == layout.nbytes
        assert same(target.tobytes(), data)

    @pytest.mark.parametrize("nbytes", [70 * _KIB, 2 * _MIB])
    async def test_scatter_gather_lists(self, adapter: Adapter, nbytes: int) -> None:
        self._needs_room(adapter, nbytes)
        data, received = content("segments", nbytes), bytearray(nbytes)
        gather = MemoryObj.wrap(split(data, 1, 4095, 0, 30_000), Layout.raw(nbytes))
        scatter = MemoryObj.wrap(split(received, 4097, 3, 20_000, 1), Layout.raw(nbytes))
        await adapter.submit_store_task([self.key()], [gather])
        [outcome] = await adapter.submit_load_task([self.key()], [scatter])
        assert outcome.loaded, outcome
        assert same(received, data)

    async def test_more_segments_than_one_system_call_takes(self, adapter: Adapter) -> None:
        data, received = content("many segments", 3000 * 40), bytearray(3000 * 40)
        layout = Layout.raw(len(data))
        await adapter.submit_store_task([self.key()], [MemoryObj.wrap(split(data, *[40] * 2999), layout)])
        target = MemoryObj.wrap(split(received, *[40] * 2999), layout)
        [outcome] = await adapter.submit_load_task([self.key()], [target])
        assert outcome.loaded, outcome
        assert same(received, data)

    @pytest.mark.parametrize("offset", [1, 3, 8])
    async def test_misaligned_buffers(self, adapter: Adapter, offset: int) -> None:
        nbytes = 64 * _KIB + 5
        data = content("misaligned", nbytes)
        sent = bytearray(offset) + data
        received = bytearray([UNTOUCHED]) * (nbytes + 2 * offset)
        layout = Layout.raw(nbytes)
        await adapter.submit_store_task([self.key()], [MemoryObj.wrap(memoryview(sent)[offset:], layout)])
        target = MemoryObj.wrap(memoryview(received)[offset:-offset], layout)
        [outcome] = await adapter.submit_load_task([self.key()], [target])
        assert outcome.loaded, outcome
        edge = bytes([UNTOUCHED]) * offset
        assert same(received, edge + data + edge), "bytes around the destination were written to"

    async def test_read_only_sources(self, adapter: Adapter) -> None:
        data = content("read-only", 70 * _KIB)
        mapped = mmap.mmap(-1, len(data))
        mapped[:] = data
        gather: list[memoryview] = split(data, 1, 40_000)
        sources = [
            MemoryObj.wrap(data, Layout.raw(len(data))),
            MemoryObj.wrap(memoryview(bytearray(data)).toreadonly(), Layout.raw(len(data))),
            MemoryObj.wrap(memoryview(mapped).toreadonly(), Layout.raw(len(data))),
            MemoryObj.wrap(gather, Layout.raw(len(data))),
        ]
        assert all(each.read_only for each in sources)
        outcomes = await adapter.submit_store_task(self.keys(4), sources)
        assert [outcome.status for outcome in outcomes] == ["stored"] * 4
        await self.expect(adapter, dict.fromkeys(self.keys(4), data))

    async def test_a_store_leaves_its_source_as_it_was(self, adapter: Adapter) -> None:
        data = content("source", 2 * _MIB)
        sent = bytearray(data)
        await adapter.submit_store_task([self.key()], [MemoryObj.wrap(sent, Layout.raw(len(sent)))])
        assert same(sent, data)
        sent[:] = bytes(len(sent))  # the adapter must not have kept the caller's memory
        await self.expect(adapter, {self.key(): data})

    async def test_the_stored_length_may_vary(self, adapter: Adapter) -> None:
        objects = {self.key(n): content(n, nbytes) for n, nbytes in enumerate([0, 1, 100, 4096, 40_000])}
        await self.store(adapter, objects)
        targets = [destination(50_000) for _ in objects]
        outcomes = await adapter.submit_load_task(list(objects), targets)
        for data, outcome, target in zip(objects.values(), outcomes, targets, strict=True):
            assert outcome.loaded, outcome
            assert outcome.nbytes == len(data)
            assert target.tobytes()[: len(data)] == data

    @pytest.mark.parametrize(("nbytes", "room"), [(4096, 4095), (100, 0), (_MIB + 3, _MIB)])
    async def test_a_destination_too_short_fails_and_keeps_the_object(
        self, adapter: Adapter, nbytes: int, room: int
    ) -> None:
        data = content("too short", nbytes)
        await self.store(adapter, {self.key(): data})
        received = bytearray([UNTOUCHED]) * (room + 64)
        target = MemoryObj.wrap(memoryview(received)[:room], Layout.raw(room))
        [outcome] = await adapter.submit_load_task([self.key()], [target])
        assert outcome.status == "failed"
        assert isinstance(outcome.error, CapacityError)
        assert same(received[room:], bytes([UNTOUCHED]) * 64), "bytes behind the destination were written to"
        await self.expect(adapter, {self.key(): data})

    async def test_a_read_only_destination_is_refused(self, adapter: Adapter) -> None:
        with pytest.raises(ConfigError, match="read-only"):
            _ = adapter.submit_load_task([self.key()], [source(b"read-only")])

    async def test_an_object_above_the_limit_fails_and_leaves_nothing(self, adapter: Adapter) -> None:
        limit = adapter.capabilities.max_object_bytes
        if limit is None or limit > 64 * _MIB:
            self.skip("the capability max_object_bytes, of at most 64 MiB")
        small = content("small", 100)
        objects = [source(content("large", limit)), source(small)]
        outcomes = await adapter.submit_store_task(self.keys(2), objects)
        assert [outcome.status for outcome in outcomes] == ["failed", "stored"]
        assert isinstance(outcomes[0].error, CapacityError)
        await self.expect(adapter, {self.key(0): None, self.key(1): small})

    def _needs_room(self, adapter: Adapter, nbytes: int) -> None:
        limit = adapter.capabilities.max_object_bytes
        if limit is not None and nbytes + 64 * _KIB > limit:
            self.skip(f"the capability max_object_bytes for objects of {nbytes} bytes")
