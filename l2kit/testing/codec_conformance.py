"""`CodecConformance`: the codec contract as a test suite, for plugins inside and outside this repository.

::

    import pytest

    from l2kit import Codec
    from l2kit.testing import CodecConformance


    class TestMyCodec(CodecConformance):
        @pytest.fixture
        def codec(self) -> Codec:
            return MyCodec(level=3)

- Everything is tested that ``dtypes`` and ``lossless`` promise; what a codec does not take is skipped by name.
- A lossy codec overrides ``check_lossy(original, decoded, layout)``, which asserts its error bound.
- A test that cannot hold is overridden under ``@pytest.mark.xfail(reason="…")``, nothing less.
"""

from __future__ import annotations

from typing import Any

from l2kit.testing.codec_groups.buffers import BufferTests
from l2kit.testing.codec_groups.chains import ChainTests
from l2kit.testing.codec_groups.damage import DamageTests
from l2kit.testing.codec_groups.identity import IdentityTests
from l2kit.testing.codec_groups.round_trip import RoundTripTests
from l2kit.testing.completeness import check_complete, forbid_override


class CodecConformance(RoundTripTests, BufferTests, DamageTests, IdentityTests, ChainTests):
    """Subclass it as ``Test…`` and override the fixture ``codec``.

    More can be overridden, all of it named in ``hooks``: ``check_lossy`` for a lossy codec, ``reopen(codec)`` for one
    that its parameters alone do not make again, and the promises ``binds_key`` and ``detects_damage``.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuse a subclass without the test that keeps it whole."""
        super().__init_subclass__(**arguments)
        forbid_override(cls, "test_no_test_is_missing")

    def test_no_test_is_missing(self) -> None:
        """Every test of the suite is there as it was written, or marked as an expected failure with its reason."""
        check_complete(CodecConformance, type(self), CodecConformance.hooks)
