"""`Question`: a conversation about some keys, held with one server after the other until it is settled for each key.

One round asks each server about all the keys that it should have, side by side. What comes back as a redirection, or as
a failure that another server can make good, goes into the next round. Without news there is one round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import anyio

from l2kit.errors import BackendError, L2Error
from l2kit_redis.connection import Connection
from l2kit_redis.faults import NodeError, ServerError, had_no_effect
from l2kit_redis.fleet import time_left_s
from l2kit_redis.pool import ConnectionPool
from l2kit_redis.redirected import RedirectedConnection
from l2kit_redis.topology import Topology, Way

ResultT = TypeVar("ResultT")

_MAX_ROUNDS: Final = 16
#: Waits for a cluster that is about to recover; then its error is the answer.
_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.4)
#: From this round on, servers seem to disagree who has a key: they get a moment to settle it.
_PATIENT_ROUND: Final = 3
_ROUND_PAUSE_S: Final = 0.05


class Failed(NamedTuple):
    """In place of an answer: why there is none."""

    error: Exception


_UNANSWERED: Final = Failed(BackendError("no server was asked"))


class _Job(NamedTuple):
    """Keys that one server is asked about.

    Attributes:
        pool: of the server; None where nobody serves them.
        indexes: of the keys.
        asking: whether the server was named by ASK.
        singly: in a conversation for each.
    """

    pool: ConnectionPool | None
    indexes: Sequence[int]
    asking: bool = False
    singly: bool = False


class _Fault(NamedTuple):
    """A key without an answer, after one round.

    Attributes:
        pool: of the server that was asked.
        number: index of the key.
        error: what came instead.
        raised: by the conversation; else it is what the conversation answered for this key.
        alone: it is about no other key.
    """

    pool: ConnectionPool | None
    number: int
    error: Exception
    raised: bool
    alone: bool


class Question(Generic[ResultT]):
    """One question about some keys. Belongs to the loop; the conversations are held in threads."""

    def __init__(
        self,
        topology: Topology,
        names: Sequence[bytes],
        conversation: Callable[[Connection, Sequence[bytes]], Sequence[ResultT]],
        deadline: float,
        *,
        reads: bool,
        idempotent: bool = True,
    ) -> None:
        """Nothing is asked before :meth:`settle`.

        Args:
            topology: knows the servers.
            names: the keys.
            conversation: gets some of ``names`` and answers for each; an answer may be a `ServerError`.
            deadline: on the clock of `time.monotonic`.
            reads: whether replicas may be asked.
            idempotent: False for a conversation of one command, or one transaction, that must not be sent again once it
                may have had an effect. What was answered with a redirection had none.
        """
        self._topology: Final = topology
        self._names: Final = names
        self._conversation: Final = conversation
        self._deadline: Final = deadline
        self._reads: Final = reads
        self._idempotent: Final = idempotent
        self._pauses: Final = iter(_PAUSES_S)
        self._answers: list[ResultT | Failed] = [_UNANSWERED] * len(names)

    async def settle(self) -> Sequence[ResultT | Failed]:
        """Ask, and return the answers in the order of the names. Servers that fail do not fail the others' answers."""
        if not self._names:
            return []
        await self._topology.refresh(self._deadline)
        jobs = self._jobs(range(len(self._names)))
        for number in range(_MAX_ROUNDS):
            faults = await self._round(jobs)
            if not faults:
                break
            jobs = await self._next_jobs(faults, number)
        return self._answers

    def _jobs(self, indexes: Sequence[int]) -> list[_Job]:
        shares = self._topology.shares(self._names, indexes, reads=self._reads)
        return [_Job(pool, share) for pool, share in shares.items()]

    async def _round(self, jobs: Sequence[_Job]) -> list[_Fault]:
        if len(jobs) == 1:
            return await self._ask(jobs[0])
        faults: list[_Fault] = []

        async def ask(job: _Job) -> None:
            faults.extend(await self._ask(job))

        async with anyio.create_task_group() as group:  # one task for each server
            for job in jobs:
                group.start_soon(ask, job)
        return faults

    async def _ask(self, job: _Job) -> list[_Fault]:
        faults: list[_Fault] = []
        for part in [[index] for index in job.indexes] if job.singly else [job.indexes]:
            alone = len(part) == 1
            names = [self._names[index] for index in part]
            try:
                answers = await self._converse(job, names)
            except Exception as error:  # it becomes a value, or is raised when the question is settled
                faults += [_Fault(job.pool, index, error, raised=True, alone=alone) for index in part]
                continue
            if len(part) == len(self._names) and ServerError not in map(type, answers):
                self._answers = list(answers)
                continue
            for index, answer in zip(part, answers, strict=True):
                if isinstance(answer, ServerError):
                    faults.append(_Fault(job.pool, index, answer, raised=False, alone=True))
                self._answers[index] = answer
        return faults

    async def _converse(self, job: _Job, names: Sequence[bytes]) -> Sequence[ResultT]:
        if job.pool is None:
            raise ServerError("CLUSTERDOWN no node is known to serve the key's slot")

        def hold(connection: Connection) -> Sequence[ResultT]:
            return self._conversation(connection, names)

        def hold_asking(connection: Connection) -> Sequence[ResultT]:
            assert isinstance(connection, RedirectedConnection)
            connection.asking = True
            try:
                return self._conversation(connection, names)
            finally:
                connection.asking = False

        talk = hold_asking if job.asking else hold
        return await self._topology.fleet.converse(job.pool, talk, self._deadline, idempotent=self._idempotent)

    async def _next_jobs(self, faults: Sequence[_Fault], number: int) -> list[_Job]:
        """Who is asked what after round ``number``; what nobody can answer is settled as failed."""
        ways = self._ways(faults)
        if not all(way is Way.END for way in ways.values()):
            await self._topology.refresh(self._deadline)
        if Way.LATER in ways.values():
            more = await self._paused(next(self._pauses, None))
            ways = {key: way if more or way is not Way.LATER else Way.END for key, way in ways.items()}
        elif number >= _PATIENT_ROUND and not all(way is Way.END for way in ways.values()):
            await self._paused(_ROUND_PAUSE_S)
        over = number + 1 == _MAX_ROUNDS or time_left_s(self._deadline) <= 0
        again: list[int] = []
        asked: dict[ConnectionPool, list[int]] = {}
        singly: dict[ConnectionPool, list[int]] = {}
        for fault in faults:
            way = Way.END if over else ways[id(fault.error)]
            name = self._names[fault.number]
            if way is Way.ASK and fault.pool is not None and isinstance(fault.error, ServerError):
                slot, other = self._topology.asked_of(fault.error, fault.pool)
                if fault.alone:
                    asked.setdefault(other, []).append(fault.number)
                elif self._topology.slot_of(name) == slot:  # which of the slot's keys are still here?
                    singly.setdefault(fault.pool, []).append(fault.number)
                else:
                    again.append(fault.number)
            elif way is Way.END or (
                way is Way.ELSEWHERE and self._topology.route(name, reads=self._reads) is fault.pool
            ):
                self._fail(fault)
            else:
                again.append(fault.number)
        return [
            *(self._jobs(again) if again else ()),
            *(_Job(pool, indexes, asking=True, singly=True) for pool, indexes in asked.items()),
            *(_Job(pool, indexes, singly=True) for pool, indexes in singly.items()),
        ]

    def _ways(self, faults: Iterable[_Fault]) -> dict[int, Way]:
        """How to go on after each error, by its id."""
        ways: dict[int, Way] = {}
        for fault in faults:
            if id(fault.error) not in ways:
                way = self._topology.after(fault.error, fault.pool)
                final = isinstance(fault.error, L2Error) or not (self._idempotent or had_no_effect(fault.error))
                ways[id(fault.error)] = Way.END if final else way
        return ways

    async def _paused(self, pause_s: float | None) -> bool:
        """Wait a moment; False when there is no time for it."""
        if pause_s is None or time_left_s(self._deadline) <= pause_s:
            return False
        await anyio.sleep(pause_s)
        return True

    def _fail(self, fault: _Fault) -> None:
        error: Any = self._topology.final(fault.error)
        if self._topology.several and fault.pool is not None:
            where = str(fault.pool.endpoint)
            if isinstance(error, ServerError):
                error.node = where
            elif not isinstance(error, L2Error):
                error = NodeError(where, error)
        self._answers[fault.number] = Failed(error) if fault.raised else error
