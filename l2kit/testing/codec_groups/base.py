"""What all groups of the codec suite stand on: what a codec's tests override, and the words that tests use."""

from __future__ import annotations

import gc
import hashlib
import tracemalloc
from collections.abc import Callable, Iterator
from typing import ClassVar, Final, NoReturn, TypeVar

import pytest

from l2kit.errors import CorruptObjectError
from l2kit.keys import ObjectKey
from l2kit.layout import DTYPES, Layout
from l2kit.serde import Codec
from l2kit.testing.codec_groups.values import layouts_of
from l2kit.testing.groups.base import same, split
from l2kit.testing.leaks import no_leaked_temporary_files, no_leaked_threads_or_files

ResultT = TypeVar("ResultT")

#: What lies around every buffer that a codec is given.
GUARD: Final = b"\xa5" * 64

#: What decoding may allocate beside a few times the object.
_ALLOWANCE_BYTES: Final = 1 << 20


class CodecSuite:
    """Fixtures, hooks and helpers; the tests are in the groups."""

    # --- what a codec's tests override ------------------------------------------------------------------------------

    #: All of it by name. A subclass that defines another name of the suite anew fails it.
    hooks: ClassVar[frozenset[str]] = frozenset(
        {"codec", "reopen", "check_lossy", "binds_key", "detects_damage", "setup_method"}
    )

    #: True for a codec that refuses a payload which was made for another key (encryption with associated data).
    binds_key: ClassVar[bool] = False

    #: True for a codec that notices every change of a payload. Others may decode a changed payload to other bytes:
    #: the envelope's checksum is there to notice.
    detects_damage: ClassVar[bool] = False

    @pytest.fixture
    def codec(self) -> Codec:
        """The codec: override this one."""
        pytest.fail("override the fixture codec in your subclass of CodecConformance")

    def reopen(self, codec: Codec) -> Codec:
        """Make the codec again, as a reader does from an envelope; by default from its ``params`` alone.

        Override it for one that needs more, such as a secret, which never stands in an envelope.
        """
        return type(codec)(**codec.params())

    def check_lossy(self, original: bytes, decoded: bytes, layout: Layout) -> None:
        """Assert that ``decoded`` is as near to ``original``, finite values, as the codec promises. For lossy ones."""
        pytest.fail(
            "the codec is lossy: override check_lossy(original, decoded, layout), which asserts its error bound"
        )

    # --- fixtures that stay as they are -----------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def no_leaks(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        """No test leaves a thread, a file descriptor or a temporary file behind."""
        tmp_path_factory.getbasetemp()  # made now, it is none of the test's temporary files
        with no_leaked_temporary_files(), no_leaked_threads_or_files():
            yield

    # --- words ------------------------------------------------------------------------------------------------------

    def skip(self, missing: str) -> NoReturn:
        """Skip the test and say what it needs."""
        pytest.skip(f"needs {missing}")

    def key(self, number: int = 0) -> ObjectKey:
        """The key of that number."""
        return ObjectKey("codec", hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest())

    def dtypes(self, codec: Codec) -> list[str]:
        """The element types that the codec takes."""
        return [dtype for dtype in DTYPES if codec.dtypes is None or dtype in codec.dtypes]

    def layouts(self, codec: Codec) -> list[Layout]:
        """Small layouts of every element type that the codec takes."""
        return [layout for dtype in self.dtypes(codec) for layout in layouts_of(dtype)]

    def encode(self, codec: Codec, data: bytes, layout: Layout, *cuts: int, key: ObjectKey | None = None) -> bytes:
        """Serialize from segments of these sizes into a buffer of exactly the estimate, with guards around it."""
        bound = codec.estimate_serialized_size(layout)
        buffer = bytearray(GUARD + bytes(bound) + GUARD)
        room = memoryview(buffer)[len(GUARD) : len(GUARD) + bound]
        segments = split(data, *cuts)
        nbytes = codec.serialize([part.toreadonly() for part in segments], room, key or self.key(), layout)
        assert isinstance(nbytes, int), f"serialize returned {nbytes!r}, not a number of bytes"
        assert 0 <= nbytes <= bound, f"serialize says {nbytes} bytes, its estimate for {layout} was {bound}"
        self.check_guards(buffer)
        return bytes(room[:nbytes])

    def decode(self, codec: Codec, payload: bytes, layout: Layout, *cuts: int, key: ObjectKey | None = None) -> bytes:
        """Deserialize into segments of these sizes, with guards around the object and between its segments."""
        sizes = [len(part) for part in split(bytes(layout.nbytes), *cuts)]
        buffers = [bytearray(GUARD + b"\x5a" * size + GUARD) for size in sizes]
        parts = [
            memoryview(buffer)[len(GUARD) : len(GUARD) + size] for buffer, size in zip(buffers, sizes, strict=True)
        ]
        try:
            codec.deserialize(memoryview(payload).toreadonly(), parts, key or self.key(), layout)
        finally:
            for buffer in buffers:
                self.check_guards(buffer)
        return b"".join(parts)

    def check(self, codec: Codec, original: bytes, decoded: bytes, layout: Layout) -> None:
        """Compare as the codec promises."""
        if codec.lossless:
            assert same(decoded, original), f"other bytes came back than were encoded: {layout}"
        else:
            self.check_lossy(original, decoded, layout)

    def check_guards(self, buffer: bytearray) -> None:
        """Fail when something was written around a buffer."""
        intact = buffer.startswith(GUARD) and buffer.endswith(GUARD)
        assert intact, "bytes around a buffer were written to"

    def survives(self, codec: Codec, payload: bytes, layout: Layout, *, key: ObjectKey | None = None) -> bool:
        """Decode hostile bytes: True when they pass for a payload, False when they are reported as corrupt.

        Everything else fails the test: another exception, bytes around the object, or much more memory than it takes.
        """
        corrupt = True
        try:
            _, peak = measured(lambda: self.decode(codec, payload, layout, key=key))
            corrupt = False
        except _CorruptError as error:
            peak = error.peak
        allowed = 8 * (layout.nbytes + len(payload)) + _ALLOWANCE_BYTES
        assert peak <= allowed, f"{peak} bytes were allocated for {len(payload)} hostile bytes, an object of {layout}"
        return not corrupt


class _CorruptError(Exception):
    """A payload was refused as it should be."""

    def __init__(self, peak: int) -> None:
        self.peak = peak


def measured(function: Callable[[], ResultT]) -> tuple[ResultT, int]:
    """Run it and say how many bytes Python allocated at most meanwhile; corruption becomes `_CorruptError`."""
    ours = not tracemalloc.is_tracing()
    if ours:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        try:
            result = function()
        except CorruptObjectError as error:
            if error.reason != "codec":
                pytest.fail(f"the reason is 'codec', not {error.reason!r}")
            raise _CorruptError(tracemalloc.get_traced_memory()[1] - before) from None
        return result, tracemalloc.get_traced_memory()[1] - before
    finally:
        if ours:
            tracemalloc.stop()


def is_kept(buffer: bytearray) -> bool:
    """True when somebody still holds a view of the buffer."""
    gc.collect()
    try:
        buffer.append(0)
    except BufferError:
        return True
    return False
