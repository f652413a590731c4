"""Damaged objects are deleted once, and decoding follows the envelope, whatever a tier is configured with now."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.lowlevel
import pytest

from l2kit.config import AdapterConfig
from l2kit.errors import AdapterContractError, CorruptObjectError
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.outcomes import StoreStatus
from l2kit.quarantine import Quarantine
from l2kit.serde import Codec, CodecChain
from tests.unit.dict_adapter import (
    DATA,
    KEY,
    AlignedAdapter,
    DictAdapter,
    blank,
    keys,
    make,
    raising,
    wrap,
)
from tests.unit.small_codecs import Codecs, XorCodec, ZlibCodec

pytestmark = pytest.mark.anyio


class TestHealing:
    async def test_a_damaged_object_is_deleted_once(self, caplog: pytest.LogCaptureFixture) -> None:
        async with make(DictAdapter) as adapter:
            await adapter.submit_store_task(keys(2), [wrap(DATA)] * 2)
            adapter.objects[KEY] = adapter.objects[KEY][:-1] + b"?"
            targets = [blank(len(DATA)) for _ in range(2)]
            outcomes = await adapter.submit_load_task(keys(2), targets)
            assert [outcome.status for outcome in outcomes] == ["corrupt", "loaded"]
            assert adapter.calls["delete"] == 1
            assert (adapter.counters["load.corrupt"], adapter.counters["corrupt.checksum"]) == (1, 1)
            assert KEY.encode() in caplog.text
            [again] = await adapter.submit_load_task([KEY], [blank(len(DATA))])
            assert again.status == "miss"

    async def test_corruption_inside_a_group_heals_too(self) -> None:
        async with make(DictAdapter) as adapter:
            adapter.hooks["load"] = raising(ExceptionGroup("", [CorruptObjectError("length", "a part is missing")]))
            [outcome] = await adapter.submit_load_task([KEY], [blank(1)])
            assert outcome.status == "corrupt"
            assert adapter.calls["delete"] == 1

    async def test_a_failed_deletion_changes_no_outcome(self) -> None:
        async with make(DictAdapter) as adapter:
            await adapter.submit_store_task([KEY], [wrap(DATA)])
            adapter.objects[KEY] = b"foreign" * 50
            adapter.hooks["delete"] = raising(PermissionError(13, "Permission denied"))
            [outcome] = await adapter.submit_load_task([KEY], [blank(len(DATA))])
            assert outcome.status == "corrupt"

    async def test_what_cannot_be_deleted_is_tried_once_and_replaced_by_the_next_store(self) -> None:
        async with make(DictAdapter) as adapter:
            await adapter.submit_store_task([KEY], [wrap(DATA)])
            adapter.objects[KEY] = b"foreign" * 50
            adapter.hooks["delete"] = raising(PermissionError(13, "Permission denied"))
            await adapter.submit_load_task([KEY], [blank(len(DATA))])
            tried = adapter.calls["load"]
            [found] = await adapter.submit_lookup_and_lock_task([KEY])
            [again] = await adapter.submit_load_task([KEY], [blank(len(DATA))])
            assert (found.status, again.status) == ("miss", "miss")
            assert adapter.calls["load"] == tried
            assert adapter.counters["load.quarantined"] == 1
            assert adapter.held_leases == 0
            [kept] = await adapter.submit_store_task([KEY], [wrap(DATA)])
            assert kept.status == "failed", "it is in the way as long as it cannot be deleted"
            del adapter.hooks["delete"]
            [stored] = await adapter.submit_store_task([KEY], [wrap(DATA)])
            target = blank(len(DATA))
            [loaded] = await adapter.submit_load_task([KEY], [target])
            assert (stored.status, loaded.status) == ("stored", "loaded")
            assert target.tobytes() == DATA

    async def test_a_store_that_keeps_what_is_present_does_not_keep_the_damaged(self) -> None:
        class Keeping(DictAdapter):
            async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
                if key in self.objects:
                    return StoreStatus.ALREADY_PRESENT
                return await super().store_one(key, data)

        async with make(Keeping) as adapter:
            await adapter.submit_store_task([KEY], [wrap(DATA)])
            adapter.objects[KEY] = b"foreign" * 50
            adapter.hooks["delete"] = raising(ConnectionResetError())
            await adapter.submit_load_task([KEY], [blank(len(DATA))])
            del adapter.hooks["delete"]
            await adapter.submit_store_task([KEY], [wrap(DATA)])
            [loaded] = await adapter.submit_load_task([KEY], [blank(len(DATA))])
            assert loaded.status == "loaded"

    async def test_loads_at_the_same_time_delete_a_damaged_object_once(self) -> None:
        async with make(DictAdapter) as adapter:
            await adapter.submit_store_task([KEY], [wrap(DATA)])
            adapter.objects[KEY] = adapter.objects[KEY][:-1] + b"?"
            deleting = anyio.Event()

            async def wait(*_: object) -> None:
                await deleting.wait()

            adapter.hooks["delete"] = wait
            tasks = [adapter.submit_load_task([KEY], [blank(len(DATA))]) for _ in range(5)]
            while not adapter.calls["delete"]:
                await anyio.lowlevel.checkpoint()
            [late] = await adapter.submit_load_task([KEY], [blank(len(DATA))])
            deleting.set()
            statuses = [(await task)[0].status for task in tasks]
            assert "corrupt" in statuses
            assert late.status == "miss"
            assert adapter.calls["delete"] == 1

    async def test_what_others_can_read_is_kept(self) -> None:
        async with make(DictAdapter, [ZlibCodec()]) as adapter:
            await adapter.submit_store_task([KEY], [wrap(DATA)])
            stored = adapter.objects[KEY]
            reader = DictAdapter(AdapterConfig(), name="reader", codecs=CodecChain(), codec_source=Codecs(XorCodec))
            async with reader:
                reader.objects[KEY] = stored
                [outcome] = await reader.submit_load_task([KEY], [blank(len(DATA))])
                assert outcome.status == "corrupt"
                assert isinstance(outcome.error, CorruptObjectError)
                assert outcome.error.reason == "unsupported"
                assert reader.objects == {KEY: stored}
                [found] = await reader.submit_lookup_and_lock_task([KEY])
                assert found.status == "miss", "it cannot be read here, so nobody asks for it again"

    async def test_a_reader_with_another_layout_destroys_nothing(self) -> None:
        layouts = [Layout.kv(layers=1, tokens=tokens, kv_heads=1, head_dim=8, dtype="int8") for tokens in (2, 4)]
        async with make(DictAdapter) as adapter:
            await adapter.submit_store_task([KEY], [MemoryObj.wrap(bytes(32), layouts[0])])
            [outcome] = await adapter.submit_load_task([KEY], [MemoryObj.allocate(layouts[1])])
            assert isinstance(outcome.error, CorruptObjectError)
            assert outcome.error.reason == "layout"
            [outcome] = await adapter.submit_load_task([KEY], [MemoryObj.allocate(layouts[0])])
            assert outcome.loaded

    async def test_a_store_hook_that_forgot_its_answer_is_no_success(self) -> None:
        class Forgetful(DictAdapter):
            async def store_one(self, key: ObjectKey, data: Sequence[memoryview]) -> StoreStatus:
                await super().store_one(key, data)
                return None  # type: ignore[return-value]

        async with make(Forgetful) as adapter:
            [outcome] = await adapter.submit_store_task([KEY], [wrap(DATA)])
            assert not outcome.present
            assert isinstance(outcome.error, AdapterContractError)

    @pytest.mark.parametrize("filled", [0, 100, 256, 300])
    async def test_a_short_read_is_never_loaded(self, filled: int) -> None:
        async with make(DictAdapter) as adapter:
            await adapter.submit_store_task([KEY], [wrap(DATA)])

            async def short(key: ObjectKey, into: Sequence[memoryview]) -> int:
                adapter.fill(into, adapter.objects[key][:filled])
                return len(adapter.objects[key])  # a lie

            adapter.hooks["load"] = short
            [outcome] = await adapter.submit_load_task([KEY], [blank(len(DATA))])
            assert outcome.status == "corrupt"


CHAINS: list[list[Codec]] = [[], [ZlibCodec()], [XorCodec(3)], [XorCodec(4)], [ZlibCodec(), XorCodec(5)]]


class TestMixedHistory:
    @pytest.mark.parametrize("reader_kind", [DictAdapter, AlignedAdapter])
    @pytest.mark.parametrize("writer_kind", [DictAdapter, AlignedAdapter])
    async def test_decoding_follows_the_envelope(
        self, writer_kind: type[DictAdapter], reader_kind: type[DictAdapter]
    ) -> None:
        for nbytes in (0, 1, 10_000):
            data = (b"compressible" * 1000)[:nbytes]
            for written in CHAINS:
                async with make(writer_kind, written) as writer:
                    await writer.submit_store_task([KEY], [wrap(data)])
                    stored = writer.objects[KEY]
                for reading in CHAINS:
                    async with make(reader_kind, reading) as reader:
                        reader.objects[KEY] = stored
                        target = blank(nbytes)
                        [outcome] = await reader.submit_load_task([KEY], [target])
                        assert outcome.loaded, (written, reading, nbytes, outcome)
                        assert outcome.nbytes == nbytes
                        assert target.tobytes() == data

    async def test_payloads_start_at_the_alignment(self) -> None:
        async with make(AlignedAdapter, [ZlibCodec()]) as adapter:
            [outcome] = await adapter.submit_store_task([KEY], [wrap(DATA)])
            stored = adapter.objects[KEY]
            assert outcome.nbytes == len(stored)
            assert ZlibCodec.codec_id.encode() in stored[:512]
            assert stored[512:514] == b"\x78\x01"

    async def test_damage_in_an_object_of_another_chain(self) -> None:
        async with make(DictAdapter, [ZlibCodec()]) as writer:
            await writer.submit_store_task([KEY], [wrap(DATA)])
            stored = bytearray(writer.objects[KEY])
        stored[-1] ^= 1
        async with make(DictAdapter) as reader:
            reader.objects[KEY] = bytes(stored)
            [outcome] = await reader.submit_load_task([KEY], [blank(len(DATA))])
            assert outcome.status == "corrupt"
            assert reader.counters["corrupt.checksum"] == 1

    async def test_an_object_that_goes_between_the_two_reads_is_a_miss(self) -> None:
        async with make(DictAdapter, [ZlibCodec()]) as writer:
            await writer.submit_store_task([KEY], [wrap(DATA)])
            stored = writer.objects[KEY]
        async with make(DictAdapter) as reader:

            async def once(key: ObjectKey, into: Sequence[memoryview]) -> int | None:
                return reader.fill(into, stored if reader.calls["load"] == 1 else None)

            reader.hooks["load"] = once
            [outcome] = await reader.submit_load_task([KEY], [blank(len(DATA))])
            assert outcome.status == "miss"
            assert reader.calls["load"] == 2


class TestQuarantine:
    def test_a_term_ends(self) -> None:
        now = [0.0]
        quarantine = Quarantine(lambda: now[0])
        quarantine.add(KEY, damaged=True)
        assert KEY in quarantine
        assert quarantine.is_damaged(KEY)
        now[0] = 61.0
        assert KEY not in quarantine
        assert not quarantine.is_damaged(KEY)
        assert len(quarantine) == 0

    def test_it_is_bounded_and_forgets_the_oldest(self) -> None:
        quarantine = Quarantine()
        for number in keys(5000):
            quarantine.add(number, damaged=True)
        assert len(quarantine) == 4096
        assert keys(5000)[-1] in quarantine
        assert KEY not in quarantine
        quarantine.discard(keys(5000)[-1])
        assert keys(5000)[-1] not in quarantine
