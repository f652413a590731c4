"""Fault plans: what goes wrong, at which call of which operation. Pure; `FaultyAdapter` does the damage.

A rule is written ``KIND[:VALUE][@CALLS][~PROBABILITY]``::

    error               every call fails
    latency:0.05        every call takes 50 ms longer
    flip@3              the third call, and no other
    hang@10-20          calls 10 to 20
    slow:10MiB@100-     from call 100 on, 10 MiB a second
    disconnect~0.01     each call with a probability of 1 %
    busy@50-99~0.5      of calls 50 to 99, about every second one
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from l2kit.config import parse_size_bytes
from l2kit.errors import ConfigError, nearest

Operation = Literal["open", "lookup", "load", "store", "delete", "release"]
OPERATIONS: Final[tuple[Operation, ...]] = get_args(Operation)

Kind = Literal[
    "latency",
    "jitter",
    "hang",
    "stuck",
    "slow",
    "error",
    "transient",
    "busy",
    "denied",
    "disconnect",
    "full",
    "lost",
    "short",
    "truncate",
    "flip",
    "wrong",
    "lie",
]

#: Each kind of fault with the operations that it can hurt.
KINDS: Final[Mapping[Kind, tuple[Operation, ...]]] = {
    "latency": OPERATIONS,
    "jitter": OPERATIONS,
    "hang": OPERATIONS,
    "stuck": OPERATIONS,
    "slow": ("load", "store"),
    "error": OPERATIONS,
    "transient": OPERATIONS,
    "busy": OPERATIONS,
    "denied": OPERATIONS,
    "disconnect": OPERATIONS,
    "full": ("store",),
    "lost": ("store",),
    "short": ("load",),
    "truncate": ("load", "store"),
    "flip": ("load", "store"),
    "wrong": ("load",),
    "lie": ("lookup",),
}

#: Kinds that need a value, with an example of it.
_EXAMPLES: Final[Mapping[Kind, str]] = {
    "latency": "latency:0.05",
    "jitter": "jitter:0.2",
    "stuck": "stuck:30",
    "slow": "slow:10MiB",
}

_LONGEST_S: Final = 86_400.0
_RULE: Final = re.compile(
    r"(?P<kind>[^:@~]+)(?::(?P<value>[^:@~]*))?(?:@(?P<calls>[^:@~]*))?(?:~(?P<probability>[^:@~]*))?", re.ASCII
)
_CALLS: Final = re.compile(r"(?P<first>\d+)(?P<dash>-)?(?P<last>\d+)?", re.ASCII)
_NUMBER: Final = re.compile(r"\d+(?:\.\d*)?|\.\d+", re.ASCII)


class FaultRule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule of a plan.

    Attributes:
        kind: what goes wrong.
        value: seconds of ``latency``, ``jitter`` and ``stuck``, bytes a second of ``slow``; else 0.
        first, last: the calls that it covers, counted from 1, both included; ``last`` None for all that follow.
        probability: of each covered call to be hurt.
    """

    kind: Kind
    value: float = 0.0
    first: int = 1
    last: int | None = None
    probability: float = 1.0

    @classmethod
    def parse(cls, text: str, operation: Operation) -> FaultRule:
        """Read one rule for ``operation``.

        Raises:
            ConfigError: names the operation, the rule, what is wrong with it and the nearest valid choice.
        """
        where = f"{operation}: {text!r}"
        match = _RULE.fullmatch(text)
        if match is None:
            raise ConfigError(f"{where}: write KIND[:VALUE][@CALLS][~PROBABILITY], for example flip@3 or error~0.01")
        kind = _kind(match["kind"], operation, where)
        first, last = _calls(match["calls"], where)
        return cls(
            kind=kind,
            value=_value(kind, match["value"], where),
            first=first,
            last=last,
            probability=_probability(match["probability"], where),
        )

    def covers(self, call: int) -> bool:
        """True when the rule is about this call."""
        return self.first <= call and (self.last is None or call <= self.last)


class Fault(NamedTuple):
    """One fault that is to happen now: ``random`` is seeded for it alone and decides the rest, e.g. which bit flips."""

    kind: Kind
    value: float
    call: int
    random: Random


class FaultPlan:
    """Says for each call what goes wrong.

    - What it says depends on the seed, the operation, the number of the call and the place of the rule: not on
      other operations, and not on how calls of several operations interleave.
    - Calls are counted from 1 for each operation apart. While the plan is paused none is counted, so that what a test
      prepares does not shift it.
    """

    def __init__(self, rules: Mapping[Operation, Sequence[FaultRule]], seed: int = 0) -> None:
        """``rules`` by operation; their order is the order of :meth:`decide`."""
        self._rules: Final = {operation: tuple(rules.get(operation, ())) for operation in OPERATIONS}
        self._seed: Final = seed
        self._calls: Counter[Operation] = Counter()
        self._paused = False

    def decide(self, operation: Operation) -> list[Fault]:
        """Count one call of ``operation`` and return its faults in the order of their rules."""
        if self._paused:
            return []
        self._calls[operation] += 1
        call = self._calls[operation]
        faults: list[Fault] = []
        for place, rule in enumerate(self._rules[operation]):
            if rule.covers(call):
                random = Random(f"{self._seed}/{operation}/{call}/{place}")
                if random.random() < rule.probability:
                    faults.append(Fault(rule.kind, rule.value, call, random))
        return faults

    @property
    def is_empty(self) -> bool:
        """True when no rule is there at all."""
        return not any(self._rules.values())

    @property
    def paused(self) -> bool:
        """True between :meth:`pause` and :meth:`resume`."""
        return self._paused

    def calls(self, operation: Operation) -> int:
        """How many calls were counted so far."""
        return self._calls[operation]

    def pause(self) -> None:
        """Decide on no faults, and count no calls, until :meth:`resume`."""
        self._paused = True

    def resume(self) -> None:
        """Go on where :meth:`pause` stopped."""
        self._paused = False


def _kind(text: str, operation: Operation, where: str) -> Kind:
    for kind, operations in KINDS.items():
        if kind == text:
            if operation in operations:
                return kind
            raise ConfigError(f"{where}: {kind} is no fault of {operation}, only of {' and '.join(operations)}")
    valid = [kind for kind, operations in KINDS.items() if operation in operations]
    raise ConfigError(f"{where}: unknown kind {text!r}{nearest(text, valid)}")


def _value(kind: Kind, text: str | None, where: str) -> float:
    example = _EXAMPLES.get(kind)
    if example is None:
        if text is not None:
            raise ConfigError(f"{where}: {kind} takes no value; write {kind}")
        return 0.0
    if kind == "slow":
        if not text:
            raise ConfigError(f"{where}: slow needs bytes per second, for example {example}")
        bytes_per_s = parse_size_bytes(text, where=where)
        if bytes_per_s < 1:
            raise ConfigError(f"{where}: slow needs at least 1 byte per second, for example {example}")
        return float(bytes_per_s)
    seconds = _number(text)
    if seconds is None or not 0 < seconds <= _LONGEST_S:
        raise ConfigError(f"{where}: {kind} needs seconds above 0 and up to {_LONGEST_S:.0f}, for example {example}")
    return seconds


def _calls(text: str | None, where: str) -> tuple[int, int | None]:
    if text is None:
        return 1, None
    match = _CALLS.fullmatch(text)
    if match is None or (match["last"] and not match["dash"]):
        raise ConfigError(f"{where}: after @ stand calls: @3, @3-7 or @3-")
    first = int(match["first"])
    last = int(match["last"]) if match["last"] else None if match["dash"] else first
    if first < 1:
        raise ConfigError(f"{where}: calls are counted from 1")
    if last is not None and last < first:
        raise ConfigError(f"{where}: no call is in @{text}; write @{last}-{first}")
    return first, last


def _probability(text: str | None, where: str) -> float:
    if text is None:
        return 1.0
    probability = _number(text)
    if probability is None or not 0 < probability <= 1:
        raise ConfigError(f"{where}: after ~ stands a probability above 0 and up to 1, for example ~0.05")
    return probability


def _number(text: str | None) -> float | None:
    return float(text) if text and _NUMBER.fullmatch(text) else None
