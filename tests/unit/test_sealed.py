"""Sealed objects: read as they lie there, checked without a codec, stored exactly as they were."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from l2kit import envelope
from l2kit.envelope import HEADER_BYTES
from l2kit.errors import BackendError, BackendTimeoutError, CapacityError, CorruptObjectError
from l2kit.framing import seal
from l2kit.inventory import counts_as_use, listing, looking_only
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus
from l2kit.sealed import MAX_SEALED_BYTES, check_sealed, read_checked, read_head, read_sealed, repadded, store_sealed
from l2kit.serde import CodecChain
from tests.unit.dict_adapter import (
    DATA,
    KEY,
    AlignedAdapter,
    DictAdapter,
    SmallAdapter,
    blank,
    hang,
    keys,
    make,
    raising,
    wrap,
)
from tests.unit.small_codecs import XorCodec, ZlibCodec

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

CHAINS = [CodecChain(), CodecChain([ZlibCodec()]), CodecChain([XorCodec(), ZlibCodec()])]


def sealed(data: bytes, chain: CodecChain | None = None, alignment: int = 1, key: ObjectKey = KEY) -> bytes:
    return b"".join(seal(key, wrap(data), chain or CodecChain(), alignment))


# --- checking ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("alignment", [1, 4096])
@given(data=st.binary(max_size=200))
def test_what_was_sealed_passes_whatever_its_codecs(chain: CodecChain, alignment: int, data: bytes) -> None:
    header = check_sealed(KEY, memoryview(sealed(data, chain, alignment)))
    assert header.layout.nbytes == len(data)


@pytest.mark.parametrize("chain", CHAINS)
@given(st.data())
def test_no_changed_byte_passes(chain: CodecChain, data: st.DataObject) -> None:
    stored = bytearray(sealed(DATA, chain))
    stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptObjectError):
        check_sealed(KEY, memoryview(stored))


@given(st.data())
def test_no_other_length_and_no_other_key_passes(data: st.DataObject) -> None:
    stored = sealed(DATA)
    with pytest.raises(CorruptObjectError):
        check_sealed(KEY, memoryview(stored[: data.draw(st.integers(0, len(stored) - 1))]))
    with pytest.raises(CorruptObjectError, match="header says"):
        check_sealed(KEY, memoryview(stored + data.draw(st.binary(min_size=1, max_size=9))))
    with pytest.raises(CorruptObjectError, match="another key"):
        check_sealed(keys(2)[1], memoryview(stored))


def test_an_uncoded_payload_of_another_length_than_its_object_does_not_pass() -> None:
    head = envelope.seal(KEY, wrap(DATA).layout, [memoryview(DATA[:-1])])
    with pytest.raises(CorruptObjectError, match="differs in length"):
        check_sealed(KEY, memoryview(head + DATA[:-1]))


# --- reading and storing ----------------------------------------------------------------------------


async def test_what_is_read_is_what_is_stored() -> None:
    async with make(DictAdapter) as adapter:
        adapter.objects[KEY] = stored = sealed(DATA)
        for expected_bytes in (0, HEADER_BYTES, len(stored), 10 * len(stored)):
            read = await read_sealed(adapter, KEY, expected_bytes)
            assert read is not None
            assert bytes(read) == stored
        head = await read_head(adapter, KEY)
        assert head is not None
        assert bytes(head) == stored[:HEADER_BYTES]
        assert await read_sealed(adapter, keys(2)[1], 100) is None
        assert await read_head(adapter, keys(2)[1]) is None
        assert await read_checked(adapter, keys(2)[1], 100) is None


async def test_what_is_checked_is_whole_and_damage_is_left_alone() -> None:
    async with make(DictAdapter) as adapter:
        for data in (DATA, DATA * 50_000):  # checked here, and in a thread
            adapter.objects[KEY] = stored = sealed(data)
            read = await read_checked(adapter, KEY, len(stored))
            assert read is not None
            assert bytes(read) == stored
            adapter.objects[KEY] = stored[:-1] + bytes([stored[-1] ^ 1])
            with pytest.raises(CorruptObjectError, match="checksum"):
                await read_checked(adapter, KEY, len(stored))
            assert KEY in adapter.objects
        assert not adapter.counters, "it is nobody's load"


async def test_an_object_that_claims_too_much_gets_no_memory() -> None:
    async with make(DictAdapter) as adapter:
        with pytest.raises(CorruptObjectError, match="no object has more"):
            await read_sealed(adapter, KEY, MAX_SEALED_BYTES + 1)

        async def claim(key: ObjectKey, into: Sequence[memoryview]) -> int:
            return MAX_SEALED_BYTES + 1

        adapter.hooks["load"] = claim
        with pytest.raises(CorruptObjectError, match="no object has more"):
            await read_sealed(adapter, KEY, 0)


async def test_an_object_that_grows_all_the_time_is_given_up() -> None:
    async with make(DictAdapter) as adapter:

        async def grow(key: ObjectKey, into: Sequence[memoryview]) -> int:
            return 2 * len(into[0])

        adapter.hooks["load"] = grow
        with pytest.raises(BackendError, match="grew"):
            await read_sealed(adapter, KEY, 0)


async def test_errors_are_of_the_tree_and_a_hung_backend_is_not_waited_for() -> None:
    async with make(DictAdapter, timeout_s=0.05) as adapter:
        for hook in ("load", "store"):
            adapter.hooks[hook] = hang
        with pytest.raises(BackendTimeoutError, match="no answer to a load within"):
            await read_sealed(adapter, KEY, 0)
        with pytest.raises(BackendTimeoutError, match="no answer to a store"):
            await store_sealed(adapter, KEY, memoryview(sealed(DATA)))
        for hook in ("load", "store"):
            adapter.hooks[hook] = raising(OSError(5, "Input/output error"))
        with pytest.raises(BackendError, match="Input/output error"):
            await read_head(adapter, KEY)
        with pytest.raises(BackendError, match="Input/output error"):
            await store_sealed(adapter, KEY, memoryview(sealed(DATA)))


async def test_cancelling_is_passed_on() -> None:
    async with make(DictAdapter) as adapter:
        adapter.hooks["load"] = hang
        with anyio.move_on_after(0.02) as scope:
            await read_sealed(adapter, KEY, 0)
        assert scope.cancelled_caught


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("kind", [DictAdapter, AlignedAdapter])
async def test_what_another_adapter_sealed_can_be_loaded(kind: type[DictAdapter], chain: CodecChain) -> None:
    stored = sealed(DATA, chain, alignment=4096)
    async with make(kind) as adapter:
        assert await store_sealed(adapter, KEY, memoryview(stored)) is StoreStatus.STORED
        assert adapter.objects[KEY] == stored
        target = blank(len(DATA))
        [outcome] = await adapter.submit_load_task([KEY], [target])
        assert outcome.loaded
        assert target.tobytes() == DATA


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("there", [1, 512, 4096])
@pytest.mark.parametrize("here", [1, 512, 4096])
def test_repadded_it_is_what_would_have_been_stored_here(chain: CodecChain, here: int, there: int) -> None:
    for data in (b"", DATA):
        assert b"".join(repadded(KEY, memoryview(sealed(data, chain, there)), here)) == sealed(data, chain, here)


async def test_repadded_it_is_read_in_one_step() -> None:
    stored = memoryview(sealed(DATA, alignment=4096))
    for repad in (False, True):
        async with make(AlignedAdapter) as adapter:
            await store_sealed(adapter, KEY, stored, repad=repad)
            [outcome] = await adapter.submit_load_task([KEY], [blank(len(DATA))])
            assert outcome.loaded
            assert adapter.calls["load"] == (1 if repad else 2)


async def test_an_object_that_is_too_large_for_the_backend_is_refused() -> None:
    async with make(SmallAdapter) as adapter:
        with pytest.raises(CapacityError, match="largest object of 300 bytes"):
            await store_sealed(adapter, KEY, memoryview(sealed(DATA)))


# --- looking only -----------------------------------------------------------------------------------


def test_only_the_block_is_looking_only() -> None:
    assert counts_as_use()
    with looking_only():
        assert not counts_as_use()
        with looking_only():
            assert not counts_as_use()
        assert not counts_as_use()
    assert counts_as_use()


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (OSError(13, "Permission denied"), "Permission denied"),
        (BackendError("tier: of its own"), "of its own"),
        (KeyError("secret"), "listing failed: KeyError"),
    ],
)
async def test_a_listing_fails_with_errors_of_the_tree(raised: Exception, says: str) -> None:
    async with make(DictAdapter) as adapter:

        def fail() -> None:
            raise raised

        adapter.iter_keys = fail  # type: ignore[method-assign, assignment]
        with pytest.raises(BackendError, match=says) as caught:
            _ = [info async for info in listing(adapter)]
        assert "secret" not in str(caught.value)
