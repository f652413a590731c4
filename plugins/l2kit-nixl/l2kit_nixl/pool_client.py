"""A client's side of a memory pool, in plain blocking calls: one connection, and the NIXL agent that goes with it.

They live and die together. While a request is on its way nobody else uses the connection, so an answer can only belong
to it; after anything unexpected the connection is closed, after a failed transfer the agent is taken down first: when
the pool hears that we are gone, nothing of ours is on its way into its memory.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

from l2kit.errors import AuthError, BackendError, BackendTimeoutError, L2Error, TransientBackendError
from l2kit.keys import ObjectKey
from l2kit.memory import first_bytes
from l2kit.outcomes import StoreStatus
from l2kit_nixl import pool_protocol as say
from l2kit_nixl.agent import Operation, Piece, TransferAgent

AnswerT = TypeVar("AnswerT", bound=say.Message)
Segments = Sequence[memoryview]


class PoolTarget(msgspec.Struct, frozen=True):
    """Which pool, as whom. ``path`` is a Unix socket, otherwise ``host`` and ``port``; times in seconds."""

    name: str
    host: str
    port: int
    path: str | None
    token: str | None
    session: bytes
    answer_timeout_s: float
    transfer_timeout_s: float

    def __repr__(self) -> str:
        return f"PoolTarget({self.where!r})"  # token and session are nobody else's business

    @property
    def where(self) -> str:
        """The pool's address, for messages."""
        return self.path or f"{self.host}:{self.port}"


class PoolLink:
    """One connection to a pool, with an agent as soon as it moves bytes; used by one thread at a time.

    Attributes:
        usable: False after anything that leaves its state unknown.
        metadata: what NIXL needs to reach the memory of the pool.
        proven: the pool has answered a request; a failure after that may only mean that it was started anew.
    """

    def __init__(self, target: PoolTarget) -> None:
        """Connect.

        Raises:
            AuthError: the token is missing or wrong.
            BackendError: the pool refuses us for another reason, or it is no pool.
            TransientBackendError: nobody answers there.
        """
        self._target: Final = target
        self._agent: TransferAgent | None = None
        self._remote = ""
        self.usable = True
        self.proven = False
        try:
            self._socket: Final = _connected(target)
        except OSError as error:
            raise TransientBackendError(
                f"{target.name}: no pool answers at {target.where}: {error.strerror or error}; "
                "start one with 'l2kit nixl-pool'"
            ) from error
        try:
            challenge = self._answer(say.Challenge)
            if challenge.version != say.VERSION:
                raise BackendError(
                    f"{target.name}: the pool at {target.where} speaks version {challenge.version} of the protocol, "
                    f"this client {say.VERSION}"
                )
            proof = say.proof(target.token, challenge.nonce, target.session) if target.token else b""
            welcome = self.ask(say.Hello(say.VERSION, target.session, proof), say.Welcome)
            self.metadata: Final = welcome.metadata
            self.proven = False
        except BaseException:
            self.close()
            raise

    def start_agent(self) -> None:
        """Make the agent now, rather than with the first transfer.

        Raises:
            AdapterImportError: nixl, or its plugin UCX, is missing.
            BackendError: it does not start.
        """
        if self._agent is None:
            self._agent = TransferAgent("UCX", {})
            self._remote = self._agent.connect(self.metadata)

    def close(self) -> None:
        """End the agent, then the connection; harmless when repeated."""
        self.usable = False
        try:
            if self._agent is not None:
                agent, self._agent = self._agent, None
                agent.close()
        finally:
            self._socket.close()

    def ask(self, request: say.Request, kind: type[AnswerT]) -> AnswerT:
        """Send a request and wait for its answer.

        Raises:
            AuthError, BackendError: the pool refused.
            BackendTimeoutError: it did not answer in time.
            TransientBackendError: the connection is lost.
        """
        self._send(request)
        answer = self._answer(kind)
        self.proven = True
        return answer

    # --- objects ----------------------------------------------------------------------------------

    def store(
        self, objects: Sequence[tuple[ObjectKey, Segments]], checkpoint: Callable[[], None]
    ) -> list[StoreStatus | L2Error]:
        """Store objects in one transfer; visible when the pool has heard that all of it is written.

        Raises:
            L2Error: none was stored.
        """
        sizes = [sum(map(len, data)) for _, data in objects]
        asked = say.Reserve([key.encode() for key, _ in objects], sizes)
        places = self.ask(asked, say.Places).places
        if len(places) != len(objects):
            raise self._confused("places")
        pieces: list[Piece] = []
        written: list[int] = []
        try:
            for place, (_, data), size in zip(places, objects, sizes, strict=True):
                if isinstance(place, say.Place):
                    if place.size != size:
                        raise self._confused("a place of another size")
                    written.append(place.generation)
                    pieces += _pieces(data, place.address)
            self._move("WRITE", pieces, checkpoint)
        except BaseException:
            if self.usable:  # the transfer has ended, or never began
                self.ask(say.Abandon(written), say.Flags)
            raise
        committed = iter(self.ask(say.Commit(written), say.Flags).flags if written else [])
        answers: list[StoreStatus | L2Error] = []
        for place in places:
            if place == "present":
                answers.append(StoreStatus.ALREADY_PRESENT)
            elif isinstance(place, str):
                answers.append(StoreStatus.DROPPED)
            elif next(committed, False):
                answers.append(StoreStatus.STORED)
            else:
                answers.append(TransientBackendError(f"{self._target.name}: the pool says that our place was stale"))
        return answers

    def load(
        self,
        objects: Sequence[tuple[ObjectKey, Segments]],
        checkpoint: Callable[[], None],
        arrived: Callable[[int, int], None] = lambda index, size: None,
    ) -> list[int | L2Error | None]:
        """Read objects in one transfer; each stored size in bytes, or None.

        ``arrived`` is called with the index and the size of each object that was read, while the pool is asked whether
        the lease held: that something was read is no promise yet.

        Raises:
            L2Error: none was loaded; what the buffers hold is undefined.
        """
        places = self.ask(say.Lease([key.encode() for key, _ in objects]), say.Places).places
        if len(places) != len(objects):
            raise self._confused("places")
        pieces: list[Piece] = []
        leased: list[int] = []
        for place, (_, into) in zip(places, objects, strict=True):
            if isinstance(place, say.Place):
                leased.append(place.generation)
                pieces += _pieces(first_bytes(into, place.size), place.address)
        try:
            self._move("READ", pieces, checkpoint)
        except BaseException:
            if self.usable:  # stopped between two parts
                self.ask(say.Return(leased), say.Flags)
            raise
        held = iter(self._returned(leased, places, arrived))
        answers: list[int | L2Error | None] = []
        for place in places:
            if not isinstance(place, say.Place):
                answers.append(None if place == "absent" else self._busy())
            elif next(held, False):
                answers.append(place.size)
            else:
                answers.append(TransientBackendError(f"{self._target.name}: the pool moved the object under our read"))
        return answers

    def _returned(
        self, leased: list[int], places: Sequence[say.Place | str], arrived: Callable[[int, int], None]
    ) -> list[bool]:
        """Whether each lease held, up to the end of its read."""
        if not leased:
            return []
        self._send(say.Return(leased))
        try:
            for index, place in enumerate(places):
                if isinstance(place, say.Place):
                    arrived(index, place.size)
        except BaseException:
            self.close()  # with an answer on its way nobody else can use the connection
            raise
        return self._answer(say.Flags).flags

    def _busy(self) -> L2Error:
        return TransientBackendError(f"{self._target.name}: too many leases are out on one connection")

    def _move(self, operation: Operation, pieces: Sequence[Piece], checkpoint: Callable[[], None]) -> None:
        if not pieces:
            return
        try:
            self.start_agent()
            assert self._agent is not None
            self._agent.move(
                operation,
                pieces,
                "DRAM",
                remote=self._remote,
                checkpoint=checkpoint,
                give_up_s=self._target.transfer_timeout_s,
            )
        finally:
            if self._agent is None or not self._agent.usable:
                self.close()

    # --- words ------------------------------------------------------------------------------------

    def _send(self, request: say.Request) -> None:
        try:
            self._socket.sendall(say.pack(request))
        except OSError as error:
            raise self._lost(error) from error

    def _answer(self, kind: type[AnswerT]) -> AnswerT:
        try:
            nbytes = say.body_bytes(self._receive(say.LENGTH.size))
            answer = say.answer(self._receive(nbytes))
        except ValueError as error:
            raise self._confused(str(error)) from error
        except OSError as error:
            raise self._lost(error) from error
        if isinstance(answer, say.Refused):
            self._part()
            text = f"{self._target.name}: the pool at {self._target.where} refuses: {answer.reason}"
            if answer.reason.startswith("token"):
                raise AuthError(text)
            raise BackendError(text)
        if not isinstance(answer, kind):
            raise self._confused(f"{type(answer).__name__} in place of {kind.__name__}")
        return answer

    def _receive(self, nbytes: int) -> bytearray:
        buffer = bytearray(nbytes)
        view = memoryview(buffer)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise ConnectionResetError("the pool closed the connection")
            view = view[received:]
        return buffer

    def _lost(self, error: OSError) -> TransientBackendError:
        self._part()
        if isinstance(error, TimeoutError):
            seconds = self._target.answer_timeout_s
            return BackendTimeoutError(f"{self._target.name}: {self._target.where} did not answer within {seconds:g} s")
        return TransientBackendError(f"{self._target.name}: the connection to {self._target.where} is lost: {error}")

    def _confused(self, what: str) -> BackendError:
        self._part()
        return BackendError(f"{self._target.name}: {self._target.where} does not talk as a pool does: {what}")

    def _part(self) -> None:
        """End it without minding what the agent says: another error is on its way already."""
        with suppress(L2Error):
            self.close()


def _pieces(segments: Segments, address: int) -> list[Piece]:
    pieces: list[Piece] = []
    for segment in segments:
        if segment:
            pieces.append(Piece(segment, address, 0))
        address += len(segment)
    return pieces


def _connected(target: PoolTarget) -> socket.socket:
    if target.path is None:
        made = socket.create_connection((target.host, target.port), timeout=target.answer_timeout_s)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(target.answer_timeout_s)
        made.connect(target.path)
    except BaseException:
        made.close()
        raise
    return made
