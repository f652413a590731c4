"""L1Manager against a model, step by step: any overlap or early reuse of memory shows as a change of bytes."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from l2kit.errors import ClosedError
from l2kit.keys import ObjectKey
from l2kit.l1 import L1Manager, ReadLease, Refusal, WriteReservation
from l2kit.layout import Layout
from l2kit.memory import PAGE_BYTES
from l2kit.policy import LRUPolicy
from tests.unit.odd_tiers import content, key

_ARENA_PAGES = 32
_SIZES = (1, 3 * PAGE_BYTES, 3 * PAGE_BYTES - 5, 5 * PAGE_BYTES, 8 * PAGE_BYTES)

KEYS = st.integers(0, 11).map(key)
SIZES = st.sampled_from(_SIZES)


def _slot_bytes(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class L1Machine(RuleBasedStateMachine):
    """Everything that is out carries its bytes in the model; any overlap or early reuse of memory shows as a change."""

    def __init__(self) -> None:
        super().__init__()
        self.serial = 0
        self.readable: dict[ObjectKey, bytes] = {}
        self.writing: list[tuple[WriteReservation, bytes]] = []
        self.leases: list[tuple[ReadLease, bytes]] = []

    @initialize()
    def open(self) -> None:
        self.l1 = L1Manager(_ARENA_PAGES * PAGE_BYTES, LRUPolicy())

    def _sync(self) -> None:
        """Take over what eviction removed: only what nobody leased may be missing."""
        gone = [name for name in self.readable if not self.l1.contains(name)]
        for name in gone:
            assert not any(lease.key == name and lease.obj.tobytes() != data for lease, data in self.leases)
            del self.readable[name]

    @rule(name=KEYS, nbytes=SIZES, beside=st.booleans())
    def reserve(self, name: ObjectKey, nbytes: int, beside: bool) -> None:
        before = set(self.readable)
        # A lease on an object that was removed protects that object's memory, not a newer object of the same key.
        leased = {lease.key for lease, _ in self.leases if lease._entry is not None and lease._entry.indexed}
        reserve = self.l1.reserve_beside if beside else self.l1.reserve_write
        answer = reserve(name, Layout.raw(nbytes), owner="writer")
        self._sync()
        assert before & leased <= set(self.readable), "a leased object was evicted"
        if name in before:
            assert answer is Refusal.PRESENT
        elif not beside and any(r.key == name and not r.detached for r, _ in self.writing):
            assert answer is Refusal.WRITING
        elif isinstance(answer, WriteReservation):
            self.serial += 1
            data = content(f"{name} {self.serial}", nbytes)
            answer.obj.segments[0][:] = data
            self.writing.append((answer, data))
        else:
            assert answer is Refusal.NO_MEMORY
            assert set(self.readable) == before, "objects were evicted in vain"
            idle = [n for n in before if n not in leased and _slot_bytes(len(self.readable[n])) == _slot_bytes(nbytes)]
            assert not idle, "an idle object of that size would have made room"
            assert self.writing or self.leases, "with nothing held everything fits"

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), owners=st.lists(st.sampled_from(["a", "b"]), max_size=2))
    def finish(self, data: st.DataObject, owners: list[str]) -> None:
        reservation, written = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        present = self.readable.get(reservation.key)
        leases = reservation.finish(owners)
        assert [lease.owner for lease in leases] == owners
        self.leases += [(lease, written) for lease in leases]
        self.readable[reservation.key] = written if present is None else present
        with pytest.raises(ClosedError):
            reservation.finish()
        reservation.abort()  # harmless now

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        reservation, _ = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        reservation.abort()
        reservation.abort()
        with pytest.raises(ClosedError):
            reservation.finish()

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        reservation, _ = self.writing[data.draw(st.integers(0, len(self.writing) - 1))]
        reservation.detach()
        reservation.detach()

    @rule(name=KEYS)
    def acquire(self, name: ObjectKey) -> None:
        lease = self.l1.acquire(name, owner="reader")
        assert (lease is not None) == (name in self.readable)
        if lease is not None:
            self.leases.append((lease, self.readable[name]))

    @rule(names=st.lists(KEYS, max_size=4, unique=True))
    def acquire_prefix(self, names: list[ObjectKey]) -> None:
        count = self.l1.readable_prefix(names)
        leases = self.l1.acquire_prefix(names, owner="reader")
        assert len(leases) == count
        assert [lease.key for lease in leases] == names[:count]
        assert count == len(names) or names[count] not in self.readable
        self.leases += [(lease, self.readable[lease.key]) for lease in leases]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        lease.release()
        lease.release()

    @rule(name=KEYS)
    def remove(self, name: ObjectKey) -> None:
        assert self.l1.remove(name) == (self.readable.pop(name, None) is not None)
        assert not self.l1.contains(name)

    @invariant()
    def bytes_are_where_they_belong(self) -> None:
        for lease, data in self.leases:
            assert lease.obj.tobytes() == data, "bytes changed under a lease"
        for reservation, data in self.writing:
            assert reservation.obj.tobytes() == data, "somebody wrote into a reservation"
        for name, data in self.readable.items():
            assert self.l1._readable[name].obj.tobytes() == data

    @invariant()
    def counts_are_exact(self) -> None:
        usage = self.l1.usage()
        assert usage.entries == len(self.readable)
        assert usage.writing == len(self.writing)
        assert usage.leases == len(self.leases)
        held = sorted((hold.kind, hold.key, hold.owner) for hold in self.l1.holds())
        expected = [("lease", lease.key, lease.owner) for lease, _ in self.leases]
        expected += [("reservation", reservation.key, reservation.owner) for reservation, _ in self.writing]
        assert held == sorted(expected)
        memory = {id(e.slot): e.slot for e in self.l1._readable.values()}
        memory |= {id(lease._entry.slot): lease._entry.slot for lease, _ in self.leases if lease._entry}
        memory |= {id(r._entry.slot): r._entry.slot for r, _ in self.writing if r._entry}
        assert usage.used_bytes == sum(slot.slot_bytes for slot in memory.values()) <= usage.capacity_bytes

    def teardown(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        for reservation, _ in self.writing:
            reservation.abort()
        usage = self.l1.usage()
        assert (usage.leases, usage.writing) == (0, 0)
        assert usage.used_bytes == sum(_slot_bytes(len(data)) for data in self.readable.values())
        self.l1.close()
        assert self.l1.usage().used_bytes == 0


TestL1Machine = L1Machine.TestCase
TestL1Machine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
