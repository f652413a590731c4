"""Fault plans: the grammar and its errors, which calls are hurt, and that a seed says all of it."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from l2kit.config import build
from l2kit.errors import ConfigError
from l2kit.faults import KINDS, OPERATIONS, FaultOptions, FaultPlan, FaultRule
from l2kit.faults.damage import between, flip_bit, garble, total, with_flipped_bit
from l2kit.faults.plan import Kind, Operation

VALUES: dict[Kind, str] = {"latency": ":0.5", "jitter": ":0.5", "stuck": ":0.5", "slow": ":1KiB"}


def hurt(plan: FaultPlan, operation: Operation, calls: int) -> list[int]:
    """The calls, of the next ``calls``, that some fault hits."""
    return [fault.call for _ in range(calls) for fault in plan.decide(operation)]


class TestGrammar:
    @pytest.mark.parametrize(
        ("text", "rule"),
        [
            ("error", FaultRule(kind="error")),
            ("latency:0.05", FaultRule(kind="latency", value=0.05)),
            ("latency:.5", FaultRule(kind="latency", value=0.5)),
            ("stuck:3", FaultRule(kind="stuck", value=3.0)),
            ("slow:10MiB", FaultRule(kind="slow", value=10 * 2**20)),
            ("slow:1000", FaultRule(kind="slow", value=1000.0)),
            ("flip@3", FaultRule(kind="flip", first=3, last=3)),
            ("flip@3-7", FaultRule(kind="flip", first=3, last=7)),
            ("flip@3-", FaultRule(kind="flip", first=3, last=None)),
            ("flip~0.25", FaultRule(kind="flip", probability=0.25)),
            ("flip~1", FaultRule(kind="flip")),
            ("jitter:2@5-~.5", FaultRule(kind="jitter", value=2.0, first=5, probability=0.5)),
        ],
    )
    def test_what_is_written_is_what_is_meant(self, text: str, rule: FaultRule) -> None:
        assert FaultRule.parse(text, "load") == rule

    @pytest.mark.parametrize("operation", OPERATIONS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_kinds_are_taken_where_they_can_do_harm(self, kind: Kind, operation: Operation) -> None:
        text = f"{kind}{VALUES.get(kind, '')}"
        if operation in KINDS[kind]:
            assert FaultRule.parse(text, operation).kind == kind
        else:
            only = " and ".join(KINDS[kind])
            with pytest.raises(ConfigError) as caught:
                FaultRule.parse(text, operation)
            assert str(caught.value) == f"{operation}: {text!r}: {kind} is no fault of {operation}, only of {only}"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("flipp@3", "unknown kind 'flipp'; did you mean 'flip'?"),
            ("lost", "lost is no fault of load, only of store"),
            ("FLIP", "unknown kind 'FLIP'; known are: busy, denied, "),
            ("", "write KIND[:VALUE][@CALLS][~PROBABILITY]"),
            ("flip@3@4", "write KIND[:VALUE][@CALLS][~PROBABILITY]"),
            ("flip~0.5@3", "write KIND[:VALUE][@CALLS][~PROBABILITY]"),
            ("@3", "write KIND[:VALUE][@CALLS][~PROBABILITY]"),
            ("flip:3", "flip takes no value; write flip"),
            ("hang:", "hang takes no value; write hang"),
            ("latency", "latency needs seconds above 0 and up to 86400, for example latency:0.05"),
            ("latency:", "latency needs seconds"),
            ("latency:0", "latency needs seconds"),
            ("latency:-1", "latency needs seconds"),
            ("latency:nan", "latency needs seconds"),
            ("latency:1e3", "latency needs seconds"),
            ("jitter:86401", "jitter needs seconds"),
            ("stuck:soon", "stuck needs seconds above 0 and up to 86400, for example stuck:30"),
            ("slow", "slow needs bytes per second, for example slow:10MiB"),
            ("slow:fast", "'fast' is no size"),
            ("slow:0", "slow needs at least 1 byte per second"),
            ("flip@", "after @ stand calls: @3, @3-7 or @3-"),
            ("flip@x", "after @ stand calls"),
            ("flip@-3", "after @ stand calls"),
            ("flip@3-4-5", "after @ stand calls"),
            ("flip@٣", "after @ stand calls"),
            ("flip@0", "calls are counted from 1"),
            ("flip@7-3", "no call is in @7-3; write @3-7"),
            ("flip~", "after ~ stands a probability above 0 and up to 1"),
            ("flip~0", "after ~ stands a probability"),
            ("flip~1.1", "after ~ stands a probability"),
            ("flip~30%", "after ~ stands a probability"),
        ],
    )
    def test_a_bad_rule_is_named_and_said_to_be_bad(self, text: str, message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            FaultRule.parse(text, "load")
        assert str(caught.value).startswith(f"load: {text!r}: ")
        assert message in str(caught.value)

    @given(st.text(max_size=12) | st.from_regex(r"[a-z]{3,5}(:[0-9.]+)?(@[0-9-]*)?(~[0-9.]*)?", fullmatch=True))
    def test_whatever_is_written_is_a_rule_or_a_config_error(self, text: str) -> None:
        for operation in OPERATIONS:
            try:
                rule = FaultRule.parse(text, operation)
            except ConfigError:
                continue
            else:
                assert operation in KINDS[rule.kind]
                assert 0 < rule.probability <= 1 <= rule.first <= (rule.last or rule.first)


class TestOptions:
    @pytest.mark.parametrize(
        ("raw", "message"),
        [
            ({"load": "flip@3,lost"}, "fault: load: 'lost': lost is no fault of load, only of store"),
            ({"store": ["flipp"]}, "fault: store: 'flipp': unknown kind 'flipp'; did you mean 'flip'?"),
            ({"laod": "flip"}, "fault: unknown option 'laod'; did you mean 'load'?"),
            ({"seed": "x"}, "fault: seed: Expected `int`, got `str`"),
            ({"load": [3]}, "fault: load[0]: Expected `str`, got `int`"),
            ({"load": {"flip": 3}}, "fault: load: Expected `array`, got `object`"),
        ],
    )
    def test_errors_name_the_field_and_the_rule(self, raw: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            build(FaultOptions, raw, where="fault")

    def test_they_are_checked_when_they_are_made(self) -> None:
        with pytest.raises(ConfigError, match=r"^delete: 'lie': lie is no fault of delete, only of lookup$"):
            FaultOptions(delete=("lie",))

    def test_strings_and_lists_are_the_same(self) -> None:
        text = build(FaultOptions, {"seed": "7", "load": "latency:0.05~0.3,flip@3"}, where="fault")
        table = build(FaultOptions, {"seed": 7, "load": ["latency:0.05~0.3", "flip@3"]}, where="fault")
        assert text == table == FaultOptions(seed=7, load=("latency:0.05~0.3", "flip@3"))

    def test_each_operation_has_a_field(self) -> None:
        assert {field.name for field in msgspec.structs.fields(FaultOptions)} == {"seed", *OPERATIONS}


class TestDecisions:
    @pytest.mark.parametrize(
        ("rule", "expected"),
        [
            ("flip", [1, 2, 3, 4, 5, 6]),
            ("flip@1", [1]),
            ("flip@3", [3]),
            ("flip@2-4", [2, 3, 4]),
            ("flip@5-", [5, 6]),
            ("flip@7", []),
        ],
    )
    def test_calls_are_counted_from_one(self, rule: str, expected: list[int]) -> None:
        assert hurt(FaultOptions(load=(rule,)).plan(), "load", 6) == expected

    def test_each_operation_has_its_own_count_and_rules(self) -> None:
        plan = FaultOptions(load=("flip@2",), store=("lost@2",)).plan()
        assert hurt(plan, "load", 1) == hurt(plan, "store", 1) == hurt(plan, "delete", 9) == []
        assert [fault.kind for fault in plan.decide("load")] == ["flip"]
        assert [fault.kind for fault in plan.decide("store")] == ["lost"]
        assert (plan.calls("load"), plan.calls("store"), plan.calls("lookup")) == (2, 2, 0)

    def test_faults_come_in_the_order_of_their_rules(self) -> None:
        plan = FaultOptions(load=("slow:1KiB", "latency:2", "flip")).plan()
        assert [(fault.kind, fault.value) for fault in plan.decide("load")] == [
            ("slow", 1024.0),
            ("latency", 2.0),
            ("flip", 0.0),
        ]

    @pytest.mark.parametrize("probability", [0.02, 0.3, 0.9])
    def test_a_probability_is_kept(self, probability: float) -> None:
        calls = 4000
        plan = FaultOptions(seed=1, load=(f"flip~{probability}",)).plan()
        deviation = (probability * (1 - probability) / calls) ** 0.5
        assert abs(len(hurt(plan, "load", calls)) / calls - probability) < 4 * deviation

    def test_a_probability_counts_within_its_calls(self) -> None:
        found = hurt(FaultOptions(load=("flip@101-300~0.5",)).plan(), "load", 1000)
        assert 101 <= min(found) <= max(found) <= 300
        assert 70 < len(found) < 130

    def test_rules_and_seeds_are_independent(self) -> None:
        def both(seed: int) -> tuple[set[int], set[int]]:
            plan = FaultOptions(seed=seed, load=("flip~0.5", "short~0.5")).plan()
            decided = [plan.decide("load") for _ in range(400)]
            first, other = ({f.call for faults in decided for f in faults if f.kind == k} for k in ("flip", "short"))
            return first, other

        sets = [*both(1), *both(2)]
        for index, one in enumerate(sets):
            for other in sets[:index]:
                assert 60 < len(one & other) < 140, "about every fourth call is in both"

    def test_the_same_seed_says_the_same_whatever_happens_between(self) -> None:
        options = FaultOptions(seed=7, load=("flip~0.4", "jitter:1~0.4"), store=("lost~0.4",))
        one, other = options.plan(), options.plan()
        for number in range(100):
            for _ in range(number % 3):
                other.decide("store")
            mine, theirs = one.decide("load"), other.decide("load")
            assert [fault[:3] for fault in mine] == [fault[:3] for fault in theirs]
            assert [fault.random.random() for fault in mine] == [fault.random.random() for fault in theirs]

    def test_it_is_the_same_in_every_process_and_version(self) -> None:
        """A seed in a bug report must still show the bug: these numbers may never change."""
        plan = FaultOptions(seed=7, load=("flip~0.3",), lookup=("lie~0.3",)).plan()
        assert hurt(plan, "load", 20) == [1, 2, 4, 9, 12, 14, 16, 18]
        assert hurt(plan, "lookup", 20) == [1, 5, 7, 13, 14]

    def test_a_pause_neither_hurts_nor_counts(self) -> None:
        plan = FaultOptions(load=("flip@2-3",)).plan()
        assert hurt(plan, "load", 2) == [2]
        plan.pause()
        assert plan.paused
        assert hurt(plan, "load", 50) == []
        plan.resume()
        assert hurt(plan, "load", 50) == [3]

    def test_an_empty_plan_is_known(self) -> None:
        assert FaultOptions(seed=3).plan().is_empty
        assert not FaultOptions(release=("error@9",)).plan().is_empty


buffers = st.lists(st.binary(max_size=9), max_size=5)


def views(parts: list[bytes]) -> list[memoryview]:
    return [memoryview(bytearray(part)) for part in parts]


class TestDamage:
    @given(buffers, st.integers(0, 60), st.integers(0, 60))
    def test_between_is_a_slice_of_the_whole(self, parts: list[bytes], start: int, stop: int) -> None:
        assert b"".join(between(views(parts), start, stop)) == b"".join(parts)[start:stop]

    @given(buffers, st.data())
    def test_one_bit_flips(self, parts: list[bytes], data: st.DataObject) -> None:
        whole = b"".join(parts)
        if not whole:
            return
        bit = data.draw(st.integers(0, 8 * len(whole) - 1))
        flipped = (int.from_bytes(whole, "little") ^ 1 << bit).to_bytes(len(whole), "little")
        sources = [memoryview(part) for part in parts]
        assert b"".join(with_flipped_bit(sources, bit)) == flipped
        assert b"".join(sources) == whole
        written = views(parts)
        flip_bit(written, bit)
        assert b"".join(written) == flipped

    @pytest.mark.parametrize("nbytes", [0, 1, 4096, 10_000])
    def test_garbage_is_never_what_was_there(self, nbytes: int) -> None:
        plan = FaultOptions(load=("wrong",)).plan()
        parts = views([bytes(nbytes), bytes(nbytes)])
        [fault] = plan.decide("load")
        garble(parts, fault.random)
        assert total(parts) == 2 * nbytes
        assert nbytes < 4096 or all(bytes(part) != bytes(nbytes) for part in parts)
