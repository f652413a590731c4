"""One connection: commands out, their own replies in, and the knowledge whether it can be used again."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

from l2kit_redis.faults import ProtocolError, ServerError
from l2kit_redis.resp import Reply, ReplyReader, pipeline, request
from l2kit_redis.stream import Patience, Stream

#: The end of a value that is longer than its destination is read and thrown away up to here; beyond it a new
#: connection is cheaper.
_MAX_DRAIN_BYTES: Final = 1 << 20
#: How long to wait at most for a server to deal with what it was sent, before a connection is given up.
_LINGER_S: Final = 0.25
#: Commands in flight at once: their replies fit into the kernel's buffers, so neither side blocks the other.
_PIPELINE_COMMANDS: Final = 1024


class Traffic(NamedTuple):
    """What one conversation moved."""

    round_trips: int
    sent_bytes: int
    received_bytes: int


class Connection:
    """A RESP2 conversation: what is sent next, a command or a pipeline, waits for all replies to the last.

    One thread at a time, except for :meth:`abort`.

    Attributes:
        closed: True once it is.
        compares_expiry: False once the server has said that it does not know ``PEXPIRE … GT`` (before Redis 7).
        writing: True while values are sent whose replies were not taken.
        watching: True between WATCH and what ends it; such a connection is not used again.
    """

    __slots__ = (
        "_cut",
        "_in_value",
        "_outstanding",
        "_replies",
        "_round_trips",
        "_stream",
        "closed",
        "compares_expiry",
        "watching",
        "writing",
    )

    def __init__(self, stream: Stream) -> None:
        """Take ownership of ``stream``."""
        self._stream = stream
        self._replies = ReplyReader(stream)
        self._outstanding = 0
        self._round_trips = 0
        self._cut = False  # a reply was left unread in the middle
        self._in_value = False
        self.closed = False
        self.compares_expiry = True
        self.watching = False
        self.writing = False

    @property
    def settled(self) -> bool:
        """True when every reply was taken to its last byte, and nothing else came. Only then use it again."""
        return self._outstanding == 0 and self._replies.empty and not self.watching

    @property
    def answered(self) -> bool:
        """True when anything was received since :meth:`begin`."""
        return self._stream.received > 0

    @property
    def is_cut(self) -> bool:
        """True when a reply was left unread in the middle: what was asked after it has no answer."""
        return self._cut

    @property
    def traffic(self) -> Traffic:
        """What moved since :meth:`begin`."""
        return Traffic(self._round_trips, self._stream.sent, self._stream.received)

    def begin(self, patience: Patience) -> None:
        """Start a conversation that may take as long as ``patience`` allows."""
        patience.moved()
        self._stream.patience = patience
        self._stream.received = self._stream.sent = self._round_trips = 0

    def is_alive(self) -> bool:
        """False when the server has closed the connection, or said something that nobody asked for."""
        return self._stream.is_quiet()

    def call(self, *words: bytes) -> Reply:
        """Send one small command and return its reply.

        Raises:
            ServerError: the server answered with an error.
        """
        self.send([request(*words)], 1)
        return self.take_reply()

    def call_integer(self, *words: bytes) -> int:
        """As :meth:`call`, for commands that are answered with a number."""
        reply = self.call(*words)
        if not isinstance(reply, int):
            raise ProtocolError("no integer where one was due")
        return reply

    def call_bytes(self, *words: bytes) -> bytes:
        """As :meth:`call`, for commands that are answered with a string."""
        reply = self.call(*words)
        if not isinstance(reply, bytes):
            raise ProtocolError("no string where one was due")
        return reply

    def log_in(self, *words: bytes) -> None:
        """Send a command that holds a secret. Nothing of its reply but a known code gets into the error.

        Raises:
            ServerError: the server refused it.
        """
        self.send([request(*words)], 1)
        reply = self._take()
        if isinstance(reply, ServerError):
            raise ServerError(str(reply), secret=True)
        if reply != b"OK":
            raise ProtocolError("AUTH was not answered with OK")

    def call_integers(self, command: bytes, keys: Sequence[bytes]) -> list[int | ServerError]:
        """Send ``command`` for each key in pipelines and return the integers, or errors, in key order."""
        answers: list[int | ServerError] = []
        for start in range(0, len(keys), _PIPELINE_COMMANDS):
            part = keys[start : start + _PIPELINE_COMMANDS]
            self.send([pipeline(command, part)], len(part))
            answers += self.take_integers(len(part))
        return answers

    def call_each(self, commands: Iterable[Sequence[bytes]]) -> list[int | ServerError]:
        """Send small commands that are answered with integers, in pipelines; the integers, or errors, in order."""
        answers: list[int | ServerError] = []
        requests = [request(*words) for words in commands]
        for start in range(0, len(requests), _PIPELINE_COMMANDS):
            part = requests[start : start + _PIPELINE_COMMANDS]
            self.send([b"".join(part)], len(part))
            answers += self.take_integers(len(part))
        return answers

    # --- for conversations that pipeline: see `l2kit_redis.values` ---------------------------------------------------

    def send(self, buffers: Sequence[bytes | memoryview], replies: int) -> None:
        """Send what will have so many replies: small commands, one with a value, or transactions."""
        self._send(buffers, replies)

    def take_reply(self) -> Reply:
        """Take the next reply.

        Raises:
            ServerError: it is an error.
        """
        return self._take_reply()

    def take_status(self, command: str) -> ServerError | None:
        """Take the reply to a command that says OK; an error is returned."""
        reply = self._take()
        if isinstance(reply, ServerError):
            return reply
        if reply != b"OK":
            raise ProtocolError(f"{command} was not answered with OK")
        return None

    def take_integers(self, count: int) -> list[int | ServerError]:
        """Take replies that are integers or errors."""
        taken = self._replies.integers(count)
        self._outstanding -= count
        return taken

    def take_strings(self, count: int) -> list[bytes | ServerError | None]:
        """Take replies that are short strings, errors or nothing."""
        taken = self._replies.strings(count)
        self._outstanding -= count
        return taken

    def take_expected(self, replies: bytes, count: int) -> bool:
        """Take these ``count`` replies if they are what comes next."""
        if not self._replies.literal(replies):
            return False
        self._outstanding -= count
        return True

    def take_list(self, replies: bytes, count: int, items: int) -> list[Reply] | None:
        """Take these ``count`` replies, if they come next, of which the last is a list of so many items that follow."""
        if not self._replies.literal(replies):
            return None
        found = [self._replies.reply() for _ in range(items)]
        self._outstanding -= count
        return found

    def take_transaction(self, commands: int) -> list[Reply] | ServerError | None:
        """Take the replies to MULTI, ``commands`` and EXEC: what EXEC gave, or the first error there was."""
        replies: list[Reply] = []
        failure: ServerError | None = None  # later ones only say that there was one
        for _ in range(commands + 2):
            try:
                replies.append(reply := self._take())
            except ConnectionError:
                if failure is None:
                    raise
                break  # it was the reason to hang up
            if isinstance(reply, ServerError):
                failure = failure or reply
        if failure is not None:
            return failure
        if replies[0] != b"OK" or replies[1:-1] != [b"QUEUED"] * commands:
            raise ProtocolError("a transaction was not answered like one")
        done = replies[-1]
        if done is None:  # a watched key has changed
            return None
        if not isinstance(done, list) or len(done) != commands:
            raise ProtocolError("EXEC was not answered with a list")
        return done

    def receive_value(
        self,
        into: Sequence[memoryview],
        *,
        length_of_head: int = 0,
        near_end: Callable[[], None] | None = None,
    ) -> int | bytes | ServerError | None:
        """Receive a value into ``into``, as much as fits, and return its full length; None for no value.

        One of exactly ``length_of_head`` bytes is returned, and ``into`` left alone. After a value that was far too
        long to be received, the connection is cut: what was asked after it is lost. In a long value ``near_end`` is
        called shortly before its end, to send what comes next: the server need not wait for us.
        """
        ahead = None if near_end is None else partial(self._in_the_middle, near_end)
        room = sum(map(len, into))
        if room > length_of_head and self._replies.value_of(into, room, self._is_more_due, ahead):
            self._outstanding -= 1
            return room
        length = self._replies.value_length()
        if length is None or isinstance(length, ServerError):
            self._outstanding -= 1
            return length
        if length == length_of_head:
            head = bytearray(length)
            self._replies.value([memoryview(head)], length)
            self._outstanding -= 1
            return bytes(head)
        beyond = length - room
        if beyond > _MAX_DRAIN_BYTES:
            self._replies.value_part(into)
            self._cut = True
            return length  # the reply stays outstanding: whoever owns the connection closes it
        self._replies.value([*into, memoryview(bytearray(beyond))] if beyond > 0 else into, length, ahead)
        self._outstanding -= 1
        return length

    def abort(self) -> None:
        """Make the conversation in progress fail at once. From any thread."""
        self._stream.abort()

    def close(self) -> None:
        """Close the connection.

        In the middle of writes only when the server has dealt with those that it got, unless that takes long: an object
        must not appear after the store that was cancelled has ended.
        """
        self.closed = True
        if self.writing:
            self._stream.end(_LINGER_S)
        self._stream.close()

    def _is_more_due(self) -> bool:
        return self._outstanding > 1

    def _in_the_middle(self, work: Callable[[], None]) -> None:
        """Do ``work``, which may send, while a value is being received."""
        self._in_value = True
        work()
        self._in_value = False

    def _send(self, buffers: Sequence[bytes | memoryview], replies: int) -> None:
        self._round_trips += 1
        self._outstanding += replies
        try:
            self._stream.send(buffers)
        except ConnectionError:
            if not self._in_value:
                self._raise_last_words()
            raise

    def _take_reply(self) -> Reply:
        reply = self._take()
        if isinstance(reply, ServerError):
            raise reply
        return reply

    def _take(self) -> Reply:
        reply = self._replies.reply()
        self._outstanding -= 1
        return reply

    def _raise_last_words(self) -> None:
        """Raise why the server hung up in the middle of a request, if it has said so and that can be read."""
        try:
            for _ in range(min(self._outstanding, 4)):  # before it come answers to the beginning of a transaction
                reply = self._replies.reply()
                if isinstance(reply, ServerError):
                    raise reply from None
        except ssl.SSLError as alert:
            raise alert from None
        except (OSError, ProtocolError):
            return
