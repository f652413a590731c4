"""What stands in every envelope: a codec's id, version and parameters, from which any reader makes it again."""

# ruff: noqa: D102 - the names of the tests say what they test

from __future__ import annotations

import math
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from l2kit.envelope import MAX_METADATA_BYTES
from l2kit.layout import DTYPES, Layout
from l2kit.serde import Codec, CodecChain
from l2kit.testing.codec_groups.base import CodecSuite
from l2kit.testing.codec_groups.values import ordinary

_ID = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}\Z")
_THREADS = 4
_ROUNDS = 12


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class IdentityTests(CodecSuite):
    """Identity, parameters, and use from many threads."""

    def test_its_id_and_version_are_the_class_s(self, codec: Codec) -> None:
        assert isinstance(codec.codec_id, str)
        assert _ID.match(codec.codec_id), f"{codec.codec_id!r} cannot be an entry point's name"
        assert codec.codec_id == type(codec).codec_id == self.reopen(codec).codec_id, "the id is not stable"
        assert type(codec.version) is int
        assert codec.version >= 1
        assert codec.version == type(codec).version == self.reopen(codec).version, "the version is not stable"

    def test_what_it_declares_is_well_formed(self, codec: Codec) -> None:
        assert isinstance(codec.lossless, bool)
        if codec.dtypes is not None:
            assert codec.dtypes, "a codec that takes no element type is of no use"
            assert set(codec.dtypes) <= set(DTYPES), f"unknown element types: {set(codec.dtypes) - set(DTYPES)}"

    def test_its_parameters_survive_json(self, codec: Codec) -> None:
        params = dict(codec.params())
        assert all(isinstance(name, str) for name in params)
        assert all(isinstance(value, int | float | str) for value in params.values()), "int, float, str or bool"
        assert all(math.isfinite(value) for value in params.values() if isinstance(value, float))
        assert msgspec.json.decode(msgspec.json.encode(params)) == params
        assert dict(codec.params()) == params, "two answers of params()"
        assert len(CodecChain([codec]).metadata) <= MAX_METADATA_BYTES

    def test_a_codec_made_from_its_parameters_decodes(self, codec: Codec) -> None:
        again = self.reopen(codec)
        assert again is not codec, "reopen must make another codec"
        assert dict(again.params()) == dict(codec.params()), "its parameters are others after it was made from them"
        for layout in self.layouts(codec):
            data = ordinary(layout)
            self.check(codec, data, self.decode(again, self.encode(codec, data, layout), layout), layout)
            assert again.estimate_serialized_size(layout) == codec.estimate_serialized_size(layout)

    def test_decoding_needs_no_encoding_before(self, codec: Codec) -> None:
        """A reader that never encoded anything decodes in any order."""
        layouts = self.layouts(codec)
        payloads = [self.encode(codec, ordinary(layout), layout) for layout in layouts]
        for layout, payload in reversed(list(zip(layouts, payloads, strict=True))):
            self.check(codec, ordinary(layout), self.decode(self.reopen(codec), payload, layout), layout)

    def test_a_payload_of_another_key_is_corrupt(self, codec: Codec) -> None:
        if not self.binds_key:
            self.skip("a codec with binds_key = True")
        for layout in self.layouts(codec):
            if layout.nbytes:
                payload = self.encode(codec, ordinary(layout), layout, key=self.key(1))
                assert not self.survives(codec, payload, layout, key=self.key(2)), f"{layout} of another key passes"

    def test_many_threads_use_one_codec(self, codec: Codec) -> None:
        layout = Layout.kv(layers=2, tokens=16, kv_heads=2, head_dim=8, dtype=self.dtypes(codec)[0])
        start, failures = threading.Barrier(_THREADS), list[BaseException]()

        def work(number: int) -> None:
            try:
                start.wait(10)
                for turn in range(_ROUNDS):
                    data, key = ordinary(layout, _ROUNDS * number + turn), self.key(number)
                    payload = self.encode(codec, data, layout, 7, key=key)
                    self.check(codec, data, self.decode(codec, payload, layout, 5, key=key), layout)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(_THREADS)]
        with _quick_switches():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        if failures:
            raise failures[0]
