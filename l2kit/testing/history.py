"""The dict that `AdapterStateMachine` compares an adapter with: what each key may hold while batches are in flight.

A key holds one of a set of versions, None for nothing. A batch that changes a key and overlaps with no other such batch
narrows the set to one; where batches overlap, every order of them is allowed, and nothing else.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from l2kit.errors import CapacityError, TaskCancelledError
from l2kit.keys import ObjectKey
from l2kit.layout import Layout
from l2kit.memory import MemoryObj
from l2kit.outcomes import DeleteOutcome, LoadOutcome, LookupOutcome, StoreOutcome
from l2kit.task import L2Task

#: A number for each content that was ever given to a store; None for no object.
Version = int | None

#: What the caller's memory holds once a batch has given it back.
REUSED: Final = b"R"


class Flight:
    """One submitted batch, and what may have become of its keys since."""

    def __init__(
        self,
        kind: Literal["store", "load", "lookup", "unlock", "delete"],
        task: L2Task[Any],
        keys: Sequence[ObjectKey],
        *,
        versions: Mapping[ObjectKey, int] | None = None,
        buffers: Sequence[bytearray] = (),
        expected: Sequence[str] = (),
    ) -> None:
        """``versions``: what a store writes; ``buffers``: the caller's memory; ``expected``: an unlock's outcomes."""
        self.kind: Final = kind
        self.task: Final = task
        self.keys: Final = tuple(keys)
        self.versions: Final = dict(versions or {})
        self.buffers: Final = tuple(buffers)
        self.expected: Final = tuple(expected)
        self.cancelled = False
        self.changes: Final = kind in ("store", "delete")
        #: Keys that another batch changes at the same time, or that a lease may keep loadable: nothing is learnt.
        self.contended: set[ObjectKey] = set()
        self.before: dict[ObjectKey, set[Version]] = {}
        #: All that a reading batch may find.
        self.seen: defaultdict[ObjectKey, set[Version]] = defaultdict(set)


class DictModel:
    """What the adapter may answer; every method that takes outcomes raises an AssertionError for other ones."""

    def __init__(self, *, owned_locks: bool, forgets: bool) -> None:
        """``owned_locks``: a leased object stays loadable; ``forgets``: any other object may be gone at any time."""
        self.owned_locks: Final = owned_locks
        self.forgets: Final = forgets
        self.contents: Final[list[bytes]] = []
        self.possible: Final[defaultdict[ObjectKey, set[Version]]] = defaultdict(lambda: {None})
        self.leases: Final[Counter[ObjectKey]] = Counter()
        self.flying: Final[list[Flight]] = []
        self._stored_bytes: Final[dict[int, int]] = {}
        self._locked: Final[defaultdict[ObjectKey, set[Version]]] = defaultdict(set)
        self._reused: Final[list[bytearray]] = []

    def version_of(self, content: bytes) -> int:
        """Give new content its number."""
        self.contents.append(content)
        return len(self.contents) - 1

    def take_off(self, flight: Flight) -> None:
        """A batch was submitted."""
        for key in dict.fromkeys(flight.keys):
            for other in self.flying:
                if key in other.keys:
                    if other.changes:
                        flight.contended.add(key)
                    if flight.changes:
                        other.contended.add(key)
            if flight.kind == "unlock":
                flight.seen[key] = set(self._locked[key])
            if flight.changes:
                flight.before[key] = set(self.possible[key])
                self.possible[key].add(flight.versions.get(key))
        for key in flight.keys:  # nobody relies on a lease that is on its way back
            if flight.kind == "unlock" and self.leases[key] > 0:
                self.leases[key] -= 1
        self.flying.append(flight)
        for key in flight.keys:
            self._widen(key)

    def land(self, flight: Flight, outcomes: Sequence[Any]) -> None:
        """A batch has ended: compare its outcomes, learn from them, and use its memory for something else."""
        self.flying.remove(flight)
        assert len(outcomes) == len(flight.keys), outcomes
        if flight.kind == "store":
            self._stored(flight, outcomes)
        elif flight.kind == "load":
            self._loaded(flight, outcomes)
        elif flight.kind == "lookup":
            self._looked_up(flight, outcomes)
        elif flight.kind == "delete":
            self._deleted(flight, outcomes)
        else:
            self._unlocked(flight, outcomes)
        for key in flight.keys:
            self._widen(key)
        for buffer in flight.buffers:
            buffer[:] = REUSED * len(buffer)
        self._reused.extend(flight.buffers)

    def turning(self, key: ObjectKey) -> list[Flight]:
        """Those in flight that may hold a lease on ``key`` already, or still."""
        return [flight for flight in self.flying if flight.kind in ("lookup", "unlock") and key in flight.keys]

    def closed(self) -> None:
        """The adapter was closed: all its leases are gone."""
        self.leases.clear()
        self._locked.clear()

    def check_reused_memory(self) -> None:
        """No adapter writes to memory that it gave back."""
        for buffer in self._reused:
            intact = buffer.count(REUSED) == len(buffer)
            assert intact, "a buffer was written to after its batch had ended"

    def check_listing(self, listed: Mapping[ObjectKey, int]) -> None:
        """A listing while nothing is in flight."""
        for key, versions in self.possible.items():
            if key in listed:
                assert versions != {None}, f"{key} is listed, and nothing is there"
            else:
                assert None in versions or self.forgets, f"{key} is not listed"

    def _widen(self, key: ObjectKey) -> None:
        for flight in self.flying:
            if key in flight.keys and flight.kind in ("load", "lookup"):
                found = set(self.possible[key])
                if self.owned_locks and self._may_be_locked(key, but=flight):
                    flight.contended.add(key)
                    found |= self._locked_versions(key)
                if self.forgets:
                    found.add(None)
                if flight.kind == "load" and self.owned_locks and self.leases[key] > 0:
                    found.discard(None)
                flight.seen[key] |= found

    def _may_be_locked(self, key: ObjectKey, *, but: Flight) -> bool:
        return self.leases[key] > 0 or any(f is not but for f in self.turning(key))

    def _locked_versions(self, key: ObjectKey) -> set[Version]:
        found = set(self._locked[key]) if self.leases[key] > 0 else set()
        return found.union(*(flight.seen[key] for flight in self.turning(key))) - {None}

    def _stored(self, flight: Flight, outcomes: Sequence[StoreOutcome]) -> None:
        for key, outcome in zip(flight.keys, outcomes, strict=True):
            version, exact = flight.versions[key], key not in flight.contended
            if outcome.status == "stored":
                self._stored_bytes[version] = outcome.nbytes
                if exact:
                    self.possible[key] = {version}
            elif outcome.status == "already_present":
                if exact:
                    there = flight.before[key] - {None}
                    assert there, f"{key} is said to be present already, and nothing was there"
                    self.possible[key] = there
            elif outcome.status == "dropped":
                if exact:
                    self.possible[key] = set(flight.before[key])
            else:
                self._check_failure(flight, outcome.error)

    def _deleted(self, flight: Flight, outcomes: Sequence[DeleteOutcome]) -> None:
        for key, outcome in zip(flight.keys, outcomes, strict=True):
            if outcome.status == "failed":
                self._check_failure(flight, outcome.error)
            elif key not in flight.contended:
                before = flight.before[key]
                if outcome.status == "deleted":
                    assert before != {None}, f"{key} is said to be deleted now, and nothing was there"
                else:
                    assert None in before or self.forgets, f"{key} is said to be missing, and it was there"
                self.possible[key] = {None}

    def _looked_up(self, flight: Flight, outcomes: Sequence[LookupOutcome]) -> None:
        answers: dict[ObjectKey, LookupOutcome] = {}
        for key, outcome in zip(flight.keys, outcomes, strict=True):
            if outcome.status == "failed":
                self._check_failure(flight, outcome.error)
                continue
            assert answers.setdefault(key, outcome) == outcome, (
                f"two answers to one question: {answers[key]}, {outcome}"
            )
        for key, outcome in answers.items():
            seen, exact = flight.seen[key], key not in flight.contended
            if not outcome.hit:
                assert None in seen, f"lookup misses {key}, which is there"
                if exact and not self.forgets:
                    self.possible[key] = {None}
                continue
            there = [version for version in seen if version is not None]
            assert there, f"lookup finds {key}, and nothing is there"
            if all(version in self._stored_bytes for version in there):
                sizes = {self._stored_bytes[version] for version in there}
                assert outcome.size in sizes, f"{outcome.size} bytes are looked up, {sorted(sizes)} were stored"
            if exact and self.possible[key] != {None}:
                self.possible[key].discard(None)
            self.leases[key] += 1
            self._locked[key] |= set(there)

    def _loaded(self, flight: Flight, outcomes: Sequence[LoadOutcome]) -> None:
        for key, outcome, buffer in zip(flight.keys, outcomes, flight.buffers, strict=True):
            seen, exact = flight.seen[key], key not in flight.contended
            sizes = [len(self.contents[version]) for version in seen if version is not None]
            if outcome.status == "miss":
                assert None in seen, f"load misses {key}, which is there"
                if exact and not self.forgets:
                    self.possible[key] = {None}
            elif outcome.status == "loaded":
                received = bytes(buffer[: outcome.nbytes])
                found = [version for version in seen if version is not None and self.contents[version] == received]
                assert found, f"load gives {key} other bytes than it holds"
                if exact and found[0] in self.possible[key]:
                    self.possible[key] = {found[0]}
            elif isinstance(outcome.error, CapacityError):
                short = any(size > len(buffer) for size in sizes)
                assert short, f"{len(buffer)} bytes are said to be no room for {sizes}"
            else:
                self._check_failure(flight, outcome.error)

    def _unlocked(self, flight: Flight, outcomes: Sequence[DeleteOutcome]) -> None:
        for key, outcome, expected in zip(flight.keys, outcomes, flight.expected, strict=True):
            if outcome.status == "failed":
                self._check_failure(flight, outcome.error)
            else:
                assert outcome.status == expected, f"unlocking {key}: {outcome}, not {expected}"
            if self.leases[key] == 0:
                self._locked[key].clear()

    def _check_failure(self, flight: Flight, error: object) -> None:
        excused = flight.cancelled and isinstance(error, TaskCancelledError)
        assert excused, f"a {flight.kind} failed: {error!r}"


def memory_objects(buffers: Sequence[bytearray]) -> list[MemoryObj]:
    """Raw objects over the caller's memory."""
    return [MemoryObj.wrap(buffer, Layout.raw(len(buffer))) for buffer in buffers]
