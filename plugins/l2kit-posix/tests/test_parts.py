"""The pure parts: names, vectors, index, configuration."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l2kit import ConfigError, L2Error, ObjectKey, open_adapter
from l2kit.errors import AuthError, BackendBusyError, BackendError, CapacityError, TransientBackendError
from l2kit_posix import FileConfig
from l2kit_posix.failures import translate
from l2kit_posix.index import Found, Index
from l2kit_posix.names import Names, object_path, parse_names
from l2kit_posix.vectors import read_file, vectors, write_file

numbers = st.integers(0, 2**32 - 1)
keys = st.builds(
    lambda namespace, chunk, shards, group, layer: ObjectKey(namespace, chunk, shards - 1, shards, group, layer),
    st.text(min_size=1, max_size=300) | st.from_regex(r"\A[a-z0-9_.-]{1,64}\Z"),
    st.binary(min_size=8, max_size=32),
    st.integers(1, 2**32 - 1),
    numbers,
    st.none() | numbers,
)


@given(keys)
def test_every_key_has_a_path_that_says_which_key_it_is(key: ObjectKey) -> None:
    path = object_path("/cache/objects", key)
    assert path.startswith("/cache/objects/")
    assert Path(path).as_posix() == path
    parts = path.removeprefix("/cache/objects/").split("/")
    assert len(parts) == 3
    assert all(part not in ("", ".", "..") and len(part) <= 120 for part in parts)
    assert path == path.lower(), "file systems that fold case must not fold keys"
    assert parse_names(*parts) == key


@given(st.lists(keys, unique=True, max_size=20))
def test_no_two_keys_share_a_path(some: list[ObjectKey]) -> None:
    assert len({object_path("", key) for key in some}) == len(some)


@pytest.mark.parametrize(
    "names",
    [
        ("ns", "00", "README"),
        ("ns", "00", "00112233445566aa-s0of1.g0.all.tmp"),
        ("ns", "00", "00112233445566aa-s00of1.g0.all"),
        ("ns", "00", "00112233445566AA-s0of1.g0.all"),
        ("ns", "00", ""),
        ("ns", "00", "-"),
        ("NS", "00", "00112233445566aa-s0of1.g0.all"),
    ],
)
def test_strange_files_are_no_objects(names: tuple[str, str, str]) -> None:
    assert all(parse_names(names[0], f"{n:02x}", names[2]) is None for n in range(256))


def test_a_file_in_the_wrong_folder_is_no_object() -> None:
    namespace, fan_out, name = object_path("", ObjectKey("ns", bytes(8))).split("/")[1:]
    assert parse_names(namespace, fan_out, name) is not None
    assert parse_names(namespace, f"{int(fan_out, 16) ^ 1:02x}", name) is None


@given(st.lists(keys, min_size=1, max_size=5))
def test_a_short_key_says_which_key_it_is(some: list[ObjectKey]) -> None:
    names = Names("/cache/objects")
    shorts = [names.short(key) for key in some]
    assert shorts == [names.place(key)[0] for key in some]
    assert len(set(shorts)) == len(set(some))
    for key, short in zip(some, shorts, strict=True):
        path = object_path("/cache/objects", key)
        assert names.path(short) == names.place(key)[1] == path
        assert names.key(short) == key
        assert names.parse(*path.removeprefix("/cache/objects/").split("/")) == short


def test_one_chunk_lies_in_one_folder_and_chunks_spread() -> None:
    def folder(key: ObjectKey) -> str:
        return object_path("", key).split("/")[2]

    assert (
        len({folder(ObjectKey("ns", b"chunk hash", shard, 8, 0, layer)) for shard in range(8) for layer in range(4)})
        == 1
    )
    assert len({folder(ObjectKey("ns", b"same beginning" + n.to_bytes(4, "big"))) for n in range(4000)}) == 256


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 7), st.integers(1, 60))
def test_vectors_cover_all_bytes_in_order_within_their_bounds(sizes: list[int], most: int, room: int) -> None:
    data = bytes(range(256)) * 10
    segments, position = [], 0
    for size in sizes:
        segments.append(memoryview(data)[position : position + size])
        position += size
    cut = list(vectors(segments, most, room))
    assert b"".join(piece for vector in cut for piece in vector) == data[:position]
    assert all(1 <= len(vector) <= most and 1 <= sum(map(len, vector)) <= room for vector in cut)
    assert all(piece.obj is data for vector in cut for piece in vector), "a copy"


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 5000])
def test_more_segments_than_one_call_takes(tmp_path: Path, count: int) -> None:
    data = [memoryview(n.to_bytes(4, "big") * (n % 5)) for n in range(count)]
    whole = b"".join(data)
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        write_file(file.fileno(), data, lambda: None)
        assert (tmp_path / "file").read_bytes() == whole
        received = bytearray(len(whole) + 10)
        into = [memoryview(received)[start : start + 3] for start in range(0, len(received), 3)]
        assert read_file(file.fileno(), into, lambda: None) == len(whole)
    assert received == whole + bytes(10)


def test_short_writes_go_on_where_they_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = bytearray()

    def stingy(fd: int, buffers: list[memoryview], offset: int) -> int:
        assert offset == len(written)
        piece = b"".join(buffers)[:7]
        written.extend(piece)
        return len(piece)

    monkeypatch.setattr("os.pwritev", stingy)
    data = bytes(range(100))
    write_file(-1, [memoryview(data)[:10], memoryview(data)[10:11], memoryview(data)[11:]], lambda: None)
    assert written == data


def test_a_write_that_does_not_get_on_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.pwritev", lambda fd, buffers, offset: 0)
    with pytest.raises(OSError, match="no more bytes"):
        write_file(-1, [memoryview(b"abc")], lambda: None)


def _key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def test_index_keeps_order_and_bytes() -> None:
    index = Index()
    index.fill([Found(_key(1), 10, 300), Found(_key(2), 20, 100), Found(_key(3), 30, 200)])
    assert (len(index), index.used_bytes) == (3, 60)
    assert index.oldest(lambda key: False) == _key(2)
    assert index.use([(_key(2), 21), (_key(4), 1)]) == [_key(2), _key(4)], "another size is another object"
    assert index.use([(_key(2), 20)]) == []
    assert index.oldest(lambda key: False) == _key(3)
    assert index.oldest(lambda key: key == _key(3)) == _key(1)
    index.put(_key(3), 5, 500)
    assert index.used_bytes == 35
    assert index.remove(_key(3)) == 5
    assert index.remove(_key(3)) == 0
    assert (len(index), index.used_bytes) == (2, 30)
    assert index.size(_key(1)) == 10
    assert index.size(_key(3)) is None


def test_index_says_once_whose_time_of_use_is_to_be_saved() -> None:
    index = Index()
    now_ns = index.now_ns()
    index.fill([Found(_key(1), 10, now_ns), Found(_key(2), 10, now_ns - 1)])
    assert index.unsaved() == []
    index.use([(_key(2), 10)])
    [(short, used_ns)] = index.unsaved()
    assert (short, used_ns > now_ns) == (_key(2), True)
    assert index.saved_ns(_key(2)) == used_ns
    assert index.unsaved() == []


@given(st.lists(st.tuples(st.sampled_from(["put", "use", "remove", "elsewhere"]), st.integers(0, 9)), max_size=60))
def test_index_agrees_with_a_list(steps: list[tuple[str, int]]) -> None:
    """The order of use, step by step, as a plain list keeps it."""
    index, order = Index(), list[int]()
    for number, (step, which) in enumerate(steps):
        if step == "put":
            index.put(_key(which), 7, number)
        elif step == "use":
            index.use([(_key(which), 7)])
        elif step == "elsewhere":
            index.used_elsewhere(_key(which), number)
        else:
            index.remove(_key(which))
        known = which in order
        if known:
            order.remove(which)
        if step == "put" or (known and step != "remove"):
            order.append(which)
        seen: list[bytes] = []
        while (oldest := index.oldest(seen.__contains__)) is not None:
            seen.append(oldest)
        assert seen == [_key(one) for one in order]
        assert index.used_bytes == 7 * len(order) == 7 * len(index)


def test_index_reservations_count_against_the_limit() -> None:
    index = Index()
    assert index.reserve(60, 100)
    assert not index.reserve(41, 100)
    assert index.wait_for_change(index.version, 0.0)
    index.put(_key(1), 60, 1, reserved=60)
    assert not index.wait_for_change(index.version, 0.0), "nothing is under way any more"
    assert not index.reserve(41, 100)
    assert index.reserve(40, 100)
    index.unreserve(40)
    assert index.excess_bytes(100) == -40


def test_index_times_are_never_equal() -> None:
    index = Index()
    times = [index.now_ns() for _ in range(1000)]
    assert times == sorted(set(times))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("file://relative/cache", "three slashes"),
        ("file://?path=relative", "path: 'relative' is not absolute"),
        ("file:///cache?path=/other", "path: given twice"),
        ("file://", "'path' is required"),
        ("file:///", "'path' is required"),
        ("file://server:80/cache", "path: a relative path or a host"),
        ("file://user@localhost/cache", "username has no meaning"),
        ("file:///cache%00", "zero byte"),
        ("file:///cache?max_byte=1", "unknown option 'max_byte'; did you mean 'max_bytes'"),
        ("file:///cache?max_bytes=0", "max_bytes"),
        ("file:///cache?max_bytes=10GB10", "max_bytes"),
        ("file:///cache?file_mode=rw", "file_mode"),
        ("file:///cache?file_mode=044", "file_mode"),
        ("file:///cache?max_open_files=0", "max_open_files"),
    ],
)
def test_a_wrong_option_is_named(url: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        open_adapter(url)
    assert expected in str(raised.value)


def test_options_from_a_url() -> None:
    config = open_adapter("file://localhost/var/my%20cache?max_bytes=10GiB&file_mode=0640").config
    assert isinstance(config, FileConfig)
    assert (config.path, config.max_bytes) == ("/var/my cache", 10 << 30)
    assert (config.file_mode_bits, config.folder_mode_bits) == (0o640, 0o750)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, CapacityError),
        (errno.EDQUOT, CapacityError),
        (errno.EFBIG, CapacityError),
        (errno.EACCES, AuthError),
        (errno.EPERM, AuthError),
        (errno.EROFS, BackendError),
        (errno.EIO, BackendError),
        (errno.ESTALE, TransientBackendError),
        (errno.EMFILE, BackendBusyError),
    ],
)
def test_every_errno_finds_its_place_in_the_tree(code: int, expected: type[L2Error]) -> None:
    error = translate(OSError(code, "what the system says", "/cache/objects/x"), name="disk", path="/cache")
    assert type(error) is expected
    for part in ("disk", "what the system says", errno.errorcode[code], "/cache/objects/x"):
        assert part in str(error)
