"""A connection to a node that ASK has named: what it is told about a slot that it is to get needs ASKING before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from l2kit_redis.connection import Connection
from l2kit_redis.faults import ProtocolError, ServerError
from l2kit_redis.resp import Reply, request
from l2kit_redis.stream import Stream

_ASKING: Final = request(b"ASKING")
_MULTI: Final = request(b"MULTI")


class RedirectedConnection(Connection):
    """A connection that can put ASKING in front of each command and take its reply away again.

    Attributes:
        asking: whether it does; set between conversations.
    """

    __slots__ = ("_asked", "asking")

    def __init__(self, stream: Stream) -> None:
        """Take ownership of ``stream``."""
        super().__init__(stream)
        self.asking = False
        self._asked: deque[bool] = deque()  # per reply that is due: whether one to ASKING comes before it

    def take_integers(self, count: int) -> list[int | ServerError]:
        """See `Connection.take_integers`."""
        if not self.asking:
            return super().take_integers(count)
        taken: list[int | ServerError] = []
        for _ in range(count):
            self._after_asking()
            taken += super().take_integers(1)
        return taken

    def take_strings(self, count: int) -> list[bytes | ServerError | None]:
        """See `Connection.take_strings`."""
        if not self.asking:
            return super().take_strings(count)
        taken: list[bytes | ServerError | None] = []
        for _ in range(count):
            self._after_asking()
            taken += super().take_strings(1)
        return taken

    def take_expected(self, replies: bytes, count: int) -> bool:
        """See `Connection.take_expected`; nothing is expected where replies to ASKING lie between."""
        return not self.asking and super().take_expected(replies, count)

    def receive_value(
        self,
        into: Sequence[memoryview],
        *,
        length_of_head: int = 0,
        near_end: Callable[[], None] | None = None,
    ) -> int | bytes | ServerError | None:
        """See `Connection.receive_value`."""
        if self.asking:
            self._after_asking()
        return super().receive_value(into, length_of_head=length_of_head, near_end=near_end)

    def _send(self, buffers: Sequence[bytes | memoryview], replies: int) -> None:
        if not self.asking:
            super()._send(buffers, replies)
        elif replies == 1 or bytes(buffers[0]).startswith(_MULTI):  # holds for all of a transaction
            self._asked += [True] + [False] * (replies - 1)
            super()._send([_ASKING, *buffers], replies + 1)
        else:
            commands = split_requests(b"".join(buffers))
            if len(commands) != replies:
                raise ProtocolError(f"{replies} replies are due to {len(commands)} commands")
            self._asked += [True] * replies
            super()._send([_ASKING + command for command in commands], 2 * replies)

    def _take(self) -> Reply:
        if self.asking:
            self._after_asking()
        return super()._take()

    def _after_asking(self) -> None:
        """Take the reply to ASKING that comes before the next one, if there is one."""
        if not self._asked.popleft():
            return
        reply = super()._take()
        if isinstance(reply, ServerError):
            raise reply
        if reply != b"OK":
            raise ProtocolError("ASKING was not answered with OK")


def split_requests(data: bytes) -> list[bytes]:
    """Cut small pipelined commands apart."""
    requests: list[bytes] = []
    start = 0
    while start < len(data):
        end = data.index(b"\r\n", start) + 2
        for _ in range(int(data[start + 1 : end - 2])):
            word = data.index(b"\r\n", end) + 2
            end = word + int(data[end + 1 : word - 2]) + 2
        requests.append(data[start:end])
        start = end
    return requests
