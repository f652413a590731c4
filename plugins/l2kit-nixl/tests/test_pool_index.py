"""Who may write and read which memory of a pool."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from l2kit.keys import ObjectKey
from l2kit_nixl.pool_index import Connection, PoolIndex
from l2kit_nixl.pool_protocol import Place

_PAGE = 4096
_GRACE_S = 30.0


def _gone() -> bool:
    return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def index(clock: Clock) -> Iterator[PoolIndex]:
    """Room for four objects of a page."""
    made = PoolIndex(4 * _PAGE, grace_s=_GRACE_S, clock=clock)
    yield made
    made.close()


def _client(index: PoolIndex, session: bytes | None = None) -> Connection:
    return index.connect(session or os.urandom(16), _gone)


def _key(number: int) -> ObjectKey:
    return ObjectKey("index", number.to_bytes(16, "big"))


def _reserve(index: PoolIndex, client: Connection, number: int) -> Place:
    place = index.reserve(client, _key(number), _PAGE)
    assert isinstance(place, Place), place
    return place


def _store(index: PoolIndex, client: Connection, number: int) -> Place:
    place = _reserve(index, client, number)
    assert index.commit(client, place.generation)
    return place


def test_an_object_is_visible_after_its_commit_and_not_before(index: PoolIndex) -> None:
    writer, reader = _client(index), _client(index)
    place = _reserve(index, writer, 1)
    assert index.look(reader, _key(1), hold=False) is None
    assert index.lease(reader, _key(1)) == "absent"
    assert index.commit(writer, place.generation)
    assert index.look(reader, _key(1), hold=False) == _PAGE
    leased = index.lease(reader, _key(1))
    assert isinstance(leased, Place)
    assert leased.address == place.address


def test_a_stale_generation_commits_nothing(index: PoolIndex) -> None:
    writer, other = _client(index), _client(index)
    place = _reserve(index, writer, 1)
    assert not index.commit(other, place.generation), "it was given to another connection"
    assert not index.commit(writer, place.generation + 1), "it was given to nobody"
    assert index.abandon(writer, place.generation)
    assert not index.commit(writer, place.generation), "it was given up"
    committed = _store(index, writer, 2)
    assert not index.commit(writer, committed.generation), "it was used"
    assert index.look(other, _key(1), hold=False) is None


def test_memory_of_a_lost_writer_is_not_used_before_the_grace_has_passed(index: PoolIndex, clock: Clock) -> None:
    lost, other = _client(index), _client(index)
    places = [_reserve(index, lost, number) for number in range(4)]
    index.disconnect(lost)
    index.release_quarantined()
    assert index.holding().quarantined == 4
    assert index.reserve(other, _key(9), _PAGE) == "full"
    clock.now += _GRACE_S - 1
    index.release_quarantined()
    assert index.reserve(other, _key(9), _PAGE) == "full"
    clock.now += 1
    index.release_quarantined()
    assert index.holding().quarantined == 0
    assert _reserve(index, other, 9).address in {place.address for place in places}
    assert not index.commit(lost, places[0].generation)


def test_memory_of_a_writer_that_still_runs_stays_in_quarantine(index: PoolIndex, clock: Clock) -> None:
    gone = False
    stopped = index.connect(os.urandom(16), lambda: gone)
    _reserve(index, stopped, 1)
    index.disconnect(stopped)
    clock.now += 100 * _GRACE_S
    index.release_quarantined()
    assert index.holding().quarantined == 1
    gone = True
    index.release_quarantined()
    assert index.holding().quarantined == 0


def test_others_may_write_the_key_of_a_lost_writer(index: PoolIndex) -> None:
    lost, other = _client(index), _client(index)
    place = _reserve(index, lost, 1)
    index.disconnect(lost)
    assert _store(index, other, 1).address != place.address
    assert index.look(other, _key(1), hold=False) == _PAGE


def test_of_two_writers_of_a_key_one_object_stays(index: PoolIndex) -> None:
    first, second = _client(index), _client(index)
    one, two = _reserve(index, first, 1), _reserve(index, second, 1)
    assert index.commit(second, two.generation)
    assert index.commit(first, one.generation)
    leased = index.lease(first, _key(1))
    assert isinstance(leased, Place)
    assert leased.address == two.address
    assert index.holding().objects == 1


def test_leased_memory_is_not_evicted_and_a_lease_ends_once(index: PoolIndex) -> None:
    client = _client(index)
    first = _store(index, client, 0)
    leased = index.lease(client, _key(0))
    assert isinstance(leased, Place)
    for number in range(1, 12):
        assert _store(index, client, number).address != first.address
    assert index.delete(_key(0))
    assert index.reserve(client, _key(20), _PAGE) != "full", "there is room beside the leased one"
    assert index.give_back(client, leased.generation)
    assert not index.give_back(client, leased.generation)
    assert index.holding().evicted > 0


def test_a_reader_that_is_lost_holds_nothing(index: PoolIndex) -> None:
    reader, other = _client(index), _client(index)
    for number in range(4):
        _store(index, other, number)
        assert isinstance(index.lease(reader, _key(number)), Place)
    assert index.reserve(other, _key(9), _PAGE) == "full"
    index.disconnect(reader)
    assert isinstance(index.reserve(other, _key(9), _PAGE), Place)


def test_what_a_session_holds_is_there_for_it_though_deleted_and_for_nobody_else(index: PoolIndex) -> None:
    session = os.urandom(16)
    holder, sibling, stranger = _client(index, session), _client(index, session), _client(index)
    place = _store(index, stranger, 1)
    assert index.look(holder, _key(1), hold=True) == _PAGE
    assert index.delete(_key(1))
    found = index.lease(sibling, _key(1))
    assert isinstance(found, Place)
    assert found.address == place.address
    assert index.lease(stranger, _key(1)) == "absent"
    assert index.let_go(sibling, _key(1))
    assert not index.let_go(holder, _key(1))
    for number in range(2, 12):  # the read of what was let go is still under way
        assert _store(index, stranger, number).address != place.address
    assert index.give_back(sibling, found.generation)


def test_holds_end_with_the_last_connection_of_their_session(index: PoolIndex) -> None:
    session = os.urandom(16)
    first, second, other = _client(index, session), _client(index, session), _client(index)
    for number in range(4):
        _store(index, other, number)
        assert index.look(first, _key(number), hold=True) == _PAGE
    index.disconnect(first)
    assert index.reserve(other, _key(9), _PAGE) == "full"
    index.disconnect(second)
    assert isinstance(index.reserve(other, _key(9), _PAGE), Place)


def test_pages_list_every_object_once(index: PoolIndex) -> None:
    client = _client(index)
    for number in range(4):
        _store(index, client, number)
    page = index.page("")
    assert page.keys == sorted(_key(number).encode() for number in range(4))
    assert index.page(page.keys[1]).keys == page.keys[2:]
    assert index.page(page.keys[-1]).keys == []


def test_generations_of_two_pools_differ(index: PoolIndex) -> None:
    other = PoolIndex(_PAGE, grace_s=_GRACE_S)
    ours, theirs = _reserve(index, _client(index), 1), _reserve(other, _client(other), 1)
    other.close()
    assert abs(ours.generation - theirs.generation) > 1_000_000
