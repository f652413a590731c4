"""The codec suite: codecs that keep their promises pass it, and no broken one does."""

from __future__ import annotations

import pytest

from l2kit.layout import Layout
from l2kit.serde import Codec, RawCodec
from l2kit.testing import CodecConformance
from tests.unit.broken_codecs import every_broken_codec
from tests.unit.inner_pytest import not_caught, outcomes_of
from tests.unit.small_codecs import HalfCodec, XorCodec, ZlibCodec

pytest_plugins = ["pytester"]

PROJECT = """
import pytest
from l2kit.testing import CodecConformance
from tests.unit.broken_codecs import BrokenCodec, every_broken_codec

KINDS = {kind.__name__: kind for kind in every_broken_codec()}


class Suite(CodecConformance):
    kind = BrokenCodec

    @pytest.fixture
    def codec(self):
        return self.kind.make()

    @property
    def binds_key(self):
        return self.kind.binds_key

    @property
    def detects_damage(self):
        return self.kind.detects_damage

    def check_lossy(self, original, decoded, layout):
        assert all(abs(before - after) <= 1 for before, after in zip(original, decoded, strict=True))


class TestNotBroken(Suite):
    pass
"""


class TestRawCodec(CodecConformance):
    @pytest.fixture
    def codec(self) -> Codec:
        return RawCodec()


class TestZlibCodec(CodecConformance):
    @pytest.fixture
    def codec(self) -> Codec:
        return ZlibCodec()


class TestXorCodec(CodecConformance):
    binds_key = True

    @pytest.fixture
    def codec(self) -> Codec:
        return XorCodec(0x33)


class TestHalfCodec(CodecConformance):
    @pytest.fixture
    def codec(self) -> Codec:
        return HalfCodec()

    def check_lossy(self, original: bytes, decoded: bytes, layout: Layout) -> None:
        assert decoded[1::2] == original[1::2]


@pytest.mark.slow
def test_every_broken_codec_is_caught(pytester: pytest.Pytester) -> None:
    assert not not_caught(pytester, PROJECT, every_broken_codec()), "the suite lets these broken codecs pass"


def test_a_codec_that_is_not_broken_passes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_project=PROJECT)
    found = outcomes_of(pytester, "TestNotBroken")
    assert found
    assert not [node for node, outcomes in found.items() if "failed" in outcomes]


def test_every_test_of_the_suite_is_known_to_catch_a_fault() -> None:
    tests = {name for name in dir(CodecConformance) if name.startswith("test_")}
    assert tests - {kind.caught_by for kind in every_broken_codec()} == {"test_no_test_is_missing"}


def test_every_fault_has_a_docstring_of_its_own() -> None:
    kinds = every_broken_codec()
    assert len({vars(kind)["__doc__"] for kind in kinds}) == len(kinds)
    assert all("caught_by" in vars(kind) for kind in kinds)


def test_a_test_that_is_weakened_or_removed_fails_the_suite(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_project=f"""{PROJECT}

class TestWeakened(Suite):
    def test_an_empty_payload_is_corrupt(self, codec):
        pass

class TestHelped(Suite):
    def survives(self, codec, payload, layout, *, key=None):
        return False

class TestExcused(Suite):
    @pytest.mark.xfail(reason="the format has no length")
    def test_an_empty_payload_is_corrupt(self, codec):
        pytest.fail("not here")
"""
    )
    names = ["Weakened", "Helped", "Excused"]
    found = outcomes_of(pytester, *(f"Test{name}::test_no_test_is_missing" for name in names))
    assert [name for name in names if found[f"Test{name}::test_no_test_is_missing"] == {"failed"}] == names[:2]


def test_a_lossy_codec_without_its_bound_says_what_to_do(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
import pytest
from l2kit.testing import CodecConformance
from tests.unit.small_codecs import HalfCodec

class TestHalf(CodecConformance):
    @pytest.fixture
    def codec(self):
        return HalfCodec()
"""
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "every_layout")
    result.stdout.fnmatch_lines(["*the codec is lossy: override check_lossy*"])


def test_nothing_overridden_says_what_to_do(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("from l2kit.testing import CodecConformance\nclass TestIt(CodecConformance): pass\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "empty_payload")
    result.stdout.fnmatch_lines(["*override the fixture codec*"])
