"""Codecs that are broken on purpose, each in one way, with the conformance test that must notice it.

One module for each group of the suite. All are `BrokenCodec`, a head with the length in front of the bytes, with one
fault, whose docstring says what it is. The attribute ``caught_by`` names the test.
"""

from __future__ import annotations

from tests.unit.broken_codecs.base import BrokenCodec, every_broken_codec

__all__ = ["BrokenCodec", "every_broken_codec"]
