"""The one place that touches NIXL: what is registered, for how long, and what is left when a transfer fails."""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from l2kit.errors import AdapterImportError, BackendError
from l2kit_nixl.agent import Piece, Span, TransferAgent, cut
from l2kit_nixl.regions import address_of, merged
from l2kit_nixl.spares import Spares

_NBYTES = 1 << 16


def _go_on() -> None:
    """Nobody cancels."""


def _posix() -> TransferAgent:
    return TransferAgent("POSIX", {"use_aio": "true"})


@pytest.fixture
def agent() -> Iterator[TransferAgent]:
    made = _posix()
    yield made
    made.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def _write(agent: TransferAgent, fd: int, *segments: memoryview) -> None:
    pieces: list[Piece] = []
    offset = 0
    for segment in segments:
        pieces.append(Piece(segment, offset, fd))
        offset += len(segment)
    with agent.files([(fd, offset)]):
        agent.move("WRITE", pieces, "FILE", checkpoint=_go_on)


def test_cutting_keeps_every_byte_in_order() -> None:
    spans = [Span(1000, 10, 0, 3), Span(5000, 25, 10, 3), Span(9000, 5, 0, 4)]
    parts = list(cut(spans, 16))
    assert [sum(span.nbytes for span in part) for part in parts] == [16, 16, 8]
    flat = [(span.near + i, span.far + i, span.device) for part in parts for span in part for i in range(span.nbytes)]
    assert flat == [(s.near + i, s.far + i, s.device) for s in spans for i in range(s.nbytes)]
    assert list(cut([], 16)) == []


def test_no_byte_is_registered_twice() -> None:
    assert merged([(30, 40), (0, 10), (5, 20), (20, 25), (30, 35)]) == [(0, 25), (30, 40)]


def test_a_map_is_registered_once_and_as_a_whole(agent: TransferAgent, fd: int) -> None:
    arena = mmap.mmap(-1, 4 * _NBYTES)
    view = memoryview(arena)
    for start in range(0, 4 * _NBYTES, _NBYTES):
        _write(agent, fd, view[start : start + 100], view[start + 200 : start + _NBYTES])
    assert len(agent.regions) == 1


def test_other_memory_is_registered_for_one_transfer(agent: TransferAgent, fd: int) -> None:
    for index in range(3):
        data = os.urandom(_NBYTES)
        _write(agent, fd, memoryview(bytearray(data[:20_000])), memoryview(data)[20_000:])  # writable, and not
        assert os.pread(fd, _NBYTES, 0) == data, index
    assert len(agent.regions) == 0


def test_small_pieces_go_by_way_of_one_map_of_the_agents_own(agent: TransferAgent, fd: int) -> None:
    sizes = [1, 8192, 100] * 60  # more than there is room for
    parts = [os.urandom(size) for size in sizes]
    _write(agent, fd, *[memoryview(part) for part in parts])
    assert os.pread(fd, sum(sizes), 0) == b"".join(parts)
    targets = [bytearray(size) for size in sizes]
    pieces, offset = [], 0
    for target in targets:
        pieces.append(Piece(memoryview(target), offset, fd))
        offset += len(target)
    with agent.files([(fd, offset)]):
        agent.move("READ", pieces, "FILE", checkpoint=_go_on)
    assert targets == parts
    assert len(agent.regions) == 1
    pieces.clear()
    for target in targets:
        target.append(0)  # a bytearray refuses while anybody holds on to its memory


def test_a_closed_map_is_forgotten_before_its_address_can_mean_another_one(agent: TransferAgent, fd: int) -> None:
    first = mmap.mmap(-1, _NBYTES)
    _write(agent, fd, memoryview(first))
    first.close()  # registered, and yet nothing of ours holds it
    second = mmap.mmap(-1, _NBYTES)
    second[:] = os.urandom(_NBYTES)
    _write(agent, fd, memoryview(second))
    assert len(agent.regions) == 1
    assert os.pread(fd, _NBYTES, 0) == second[:]


def test_maps_that_come_and_go_do_not_pile_up(agent: TransferAgent, fd: int) -> None:
    kept = [mmap.mmap(-1, 4096) for _ in range(100)]
    for one in kept:
        _write(agent, fd, memoryview(one))
    assert len(agent.regions) <= 64


def test_a_failed_transfer_takes_the_agent_down_before_anybody_hears_of_it(fd: int) -> None:
    agent = _posix()
    inner = weakref.ref(agent._agent)
    os.ftruncate(fd, 10)
    target = bytearray(_NBYTES)
    with pytest.raises(BackendError, match="POSIX"), agent.files([(fd, _NBYTES)]):  # noqa: PT012
        try:
            agent.move("READ", [Piece(memoryview(target), 0, fd)], "FILE", checkpoint=_go_on)
        except BackendError:
            assert inner() is None, "it may still write into the buffer"
            assert not agent.usable
            raise
    agent.close()


def test_stopping_between_parts_leaves_the_agent_usable(agent: TransferAgent, fd: int) -> None:
    calls = 0

    def stop_at_the_second() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise InterruptedError

    nbytes = 34 << 20
    os.ftruncate(fd, nbytes)
    target = bytearray(nbytes)
    pieces = [Piece(memoryview(target), 0, fd)]
    with pytest.raises(InterruptedError), agent.files([(fd, nbytes)]):
        agent.move("READ", pieces, "FILE", checkpoint=stop_at_the_second)
    assert agent.usable
    _write(agent, fd, memoryview(b"again"))
    assert os.pread(fd, 5, 0) == b"again"


def test_lanes_are_used_again_and_broken_ones_are_not(fd: int) -> None:
    spares = Spares(_posix)
    with spares.borrowed() as first:
        pass
    with spares.borrowed() as second:
        assert second is first
        with spares.borrowed() as other:
            assert other is not first
        second.close()
    with spares.borrowed() as third:
        assert third is other
    spares.discard()
    assert not third.usable


def test_a_missing_plugin_is_one_clear_error() -> None:
    with pytest.raises(AdapterImportError, match=r"plugin NOSUCH cannot be loaded: it, or a library"):
        TransferAgent("NOSUCH", {})


def test_a_missing_package_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(AdapterImportError, match=r"pip install 'l2kit\[nixl\]'"):
        _posix()


def test_addresses_of_read_only_memory_are_known() -> None:
    data = b"read only"
    view = memoryview(data)
    assert address_of(view[3:]) == address_of(view) + 3
