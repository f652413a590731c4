"""``l2kit export`` and ``l2kit import``: the same objects, bit by bit, and nothing else, whatever happens between."""

from __future__ import annotations

import stat
import subprocess
import sys
import tracemalloc
from io import BytesIO
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from l2kit.archive import ArchiveWriter
from l2kit.envelope import HEADER_BYTES
from l2kit.keys import ObjectKey
from tests.unit.command_line import CommandLine, command, held, key, load, put
from tests.unit.odd_tiers import _SHELVES

pytestmark = pytest.mark.timeout(120)

__all__ = ["command"]

slow = pytest.mark.slow

SIZES = {key(number): nbytes for number, nbytes in enumerate([0, 1, 5000, 65_536, 1_200_000, 6 << 20])}
#: From where to where; each kind once in either place is enough for every day.
WAYS = [
    pytest.param(
        here, there, marks=[] if (here, there) in {("odd", "file"), ("file", "nvme"), ("nvme", "odd")} else slow
    )
    for here in ("odd", "file", "nvme")
    for there in ("odd", "file", "nvme")
]


def few(count: int = 4, nbytes: int = 500) -> dict[ObjectKey, int]:
    return {key(number): nbytes for number in range(count)}


@pytest.fixture
def source(command: CommandLine) -> str:
    url = command.url("odd", "source")
    put(url, few())
    return url


@pytest.fixture
def archive(command: CommandLine, source: str) -> Path:
    path = command.folder / "objects.l2kit"
    assert command("export", source, path).code == 0
    return path


def shelf(command: CommandLine, name: str) -> dict[ObjectKey, bytes]:
    """The stored objects behind an ``odd://`` URL, to be damaged."""
    return _SHELVES[f"{command.folder}/{name}"]


def written(objects: dict[ObjectKey, bytes]) -> bytes:
    sink = BytesIO()
    writer = ArchiveWriter(sink)
    for name, stored in objects.items():
        writer.add(name, memoryview(stored))
    writer.finish()
    return sink.getvalue()


# --- there and back ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("here", "there"), WAYS)
def test_another_backend_has_the_same_objects_bit_by_bit(command: CommandLine, here: str, there: str) -> None:
    source, target, path = command.url(here, "source"), command.url(there, "target"), command.folder / "objects.l2kit"
    put(source, SIZES)
    before = held(source)
    done = command("export", source, path)
    assert (done.code, done.err) == (0, "")
    nbytes = sum(map(len, before.values()))
    assert done.out == f"{len(SIZES)} objects, {nbytes} bytes exported\n"
    done = command("import", path, target)
    assert (done.code, done.out, done.err) == (0, f"{len(SIZES)} objects, {nbytes} bytes imported\n", "")
    assert held(target) == before == held(source)
    load(target, list(SIZES))
    assert command("verify", target).code == 0
    assert sorted(item.name for item in command.folder.iterdir() if item.is_file() and "partial" in item.name) == []


def test_repadded_the_objects_are_as_if_stored_there(command: CommandLine) -> None:
    source, target, path = command.url("odd", "source"), command.url("file", "target"), command.folder / "archive"
    put(source, SIZES)
    assert command("export", source, path).code == 0
    assert command("import", "--repad", path, target).code == 0
    stored_there = command.url("file", "stored")
    put(stored_there, SIZES)
    assert held(target) == held(stored_there) != held(source)


def test_what_is_there_is_skipped(command: CommandLine, archive: Path) -> None:
    target = command.url("file", "target")
    put(target, few(2))
    before = {file: file.stat().st_ino for file in (command.folder / "target" / "objects").rglob("*-*")}
    done = command("import", archive, target)
    assert done.out == "2 objects, 1512 bytes imported\n         2  present\n"
    assert len(held(target)) == 4
    assert len(before) == 2
    assert all(file.stat().st_ino == number for file, number in before.items()), "one was written again"
    report = command("import", "--json", archive, target).report
    assert report == {"objects": 0, "bytes": 0, "present": 4, "failures": []}


@slow
def test_through_a_pipe(command: CommandLine, source: str) -> None:
    here, there = command.url("file", "here"), command.url("file", "there")
    put(here, SIZES)
    l2kit = Path(sys.executable).with_name("l2kit")
    with subprocess.Popen([l2kit, "export", here, "-"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as export:
        done = subprocess.run(
            [l2kit, "import", "-", there], stdin=export.stdout, capture_output=True, text=True, timeout=60, check=False
        )
        assert export.stderr is not None
        assert export.stderr.read().startswith(b"6 objects, ")
        assert export.wait(30) == 0
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("6 objects, ")
    assert held(there) == held(here)


def test_an_empty_backend_gives_an_empty_archive(command: CommandLine) -> None:
    path = command.folder / "empty.l2kit"
    assert command("export", command.url("odd", "nothing"), path).out == "0 objects, 0 bytes exported\n"
    assert command("import", path, command.url("odd", "target")).code == 0


@slow
def test_memory_goes_by_the_batch_not_by_the_backend(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("l2kit.cli.archives._BATCH_BYTES", 2 << 20)
    source, target, path = command.url("file", "source"), command.url("file", "target"), command.folder / "archive"
    put(source, few(64, 500_000))
    for arguments in (("export", source, path), ("import", path, target)):
        tracemalloc.start()
        try:
            assert command(*arguments).code == 0
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 10 << 20
    assert held(target) == held(source)


# --- export -----------------------------------------------------------------------------------------


def test_what_is_damaged_is_left_out_named_and_left_alone(command: CommandLine, source: str) -> None:
    objects = shelf(command, "source")
    objects[key(1)] = objects[key(1)][:-1] + bytes([objects[key(1)][-1] ^ 1])
    objects[key(2)] = objects[key(3)]
    newer = bytearray(objects[key(3)])
    newer[8:10] = (2).to_bytes(2, "little")
    newer[HEADER_BYTES - 16 : HEADER_BYTES] = xxhash.xxh3_128_digest(bytes(newer[: HEADER_BYTES - 16]))
    objects[key(3)] = bytes(newer)
    before = dict(objects)
    path, target = command.folder / "archive", command.url("odd", "target")
    done = command("export", source, path)
    assert done.code == 1
    *left_out, last = done.out.splitlines()
    assert sorted(left_out) == [
        f"damaged (checksum): {key(1)}",
        f"damaged (key): {key(2)}",
        f"intact, not readable here (unsupported): {key(3)}",
    ]
    assert last == "1 objects, 756 bytes exported"
    assert dict(objects) == before
    assert command("import", path, target).code == 0
    assert held(target) == {key(0): before[key(0)]}
    report = command("export", "--json", source, path).report
    assert sorted(failure["key"] for failure in report["failures"]) == [str(key(number)) for number in (1, 2, 3)]


def test_a_backend_that_fails_leaves_the_old_archive(command: CommandLine, source: str, archive: Path) -> None:
    before = archive.read_bytes()
    done = command("export", f"{source}&broken=true", archive)
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert archive.read_bytes() == before
    assert [item.name for item in command.folder.iterdir()] == [archive.name]


def test_an_archive_that_cannot_be_written_leaves_nothing(
    command: CommandLine, source: str, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = archive.read_bytes()

    def full(self: ArchiveWriter) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ArchiveWriter, "finish", full)
    done = command("export", source, archive)
    assert (done.code, done.out) == (1, "")
    assert done.err.endswith("objects.l2kit: cannot be written: No space left on device\n")
    assert archive.read_bytes() == before
    assert [item.name for item in command.folder.iterdir()] == [archive.name]


@slow
def test_a_full_stdout_is_one_line(command: CommandLine) -> None:
    url = command.url("file")
    put(url, few(4, 3 << 20))
    with Path("/dev/full").open("wb") as full:
        l2kit = Path(sys.executable).with_name("l2kit")
        done = subprocess.run([l2kit, "export", url, "-"], stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == b"error: -: cannot be written: No space left on device\n"


@slow
def test_a_reader_that_leaves_early_ends_the_export_quietly(command: CommandLine) -> None:
    url = command.url("file")
    put(url, few(4, 3 << 20))
    l2kit = Path(sys.executable).with_name("l2kit")
    with subprocess.Popen([l2kit, "export", url, "-"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as export:
        assert export.stdout is not None
        assert export.stderr is not None
        export.stdout.read(100)
        export.stdout.close()
        assert export.stderr.read() == b""
        assert export.wait(30) == 141


def test_only_this_user_may_read_it_and_a_link_stays_one(command: CommandLine, source: str, archive: Path) -> None:
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    link = command.folder / "link"
    link.symlink_to(archive)
    before = archive.stat().st_ino
    assert command("export", source, link).code == 0
    assert link.is_symlink()
    assert archive.stat().st_ino != before


@pytest.mark.parametrize("target", ["nowhere/archive", "folder", "/dev/null"])
def test_where_no_archive_can_be_is_said_before_anything_is_read(
    command: CommandLine, source: str, target: str
) -> None:
    (command.folder / "folder").mkdir()
    done = command("export", source, command.folder / target)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert Path("/dev/null").is_char_device()


# --- import -----------------------------------------------------------------------------------------


def test_damaged_records_are_named_and_the_rest_is_imported(command: CommandLine, archive: Path) -> None:
    target = command.url("odd", "target")
    data = bytearray(archive.read_bytes())
    data[data.index(str(key(1)).encode()) + 400] ^= 1
    archive.write_bytes(data)
    done = command("import", archive, target)
    assert done.code == 1
    assert done.out.startswith("its record in the archive is damaged or cut off, at byte ")
    assert str(key(1)) in done.out.splitlines()[0]
    assert "3 objects, 2268 bytes imported" in done.out
    assert set(held(target)) == {key(0), key(2), key(3)}
    report = command("import", "--json", archive, target).report
    assert [failure["key"] for failure in report["failures"]] == [str(key(1)), None]


def test_a_truncated_archive_gives_what_it_has_and_is_called_truncated(command: CommandLine, archive: Path) -> None:
    target = command.url("odd", "target")
    archive.write_bytes(archive.read_bytes()[:2000])
    done = command("import", archive, target)
    assert done.code == 1
    assert "the archive is cut off: it has no end record" in done.out
    assert set(held(target)) == {key(0), key(1)}


def test_objects_that_are_not_what_they_are_called_are_not_imported(
    command: CommandLine, source: str, archive: Path
) -> None:
    """Every checksum of the archive holds: whoever made it put damaged objects in."""
    target, objects = command.url("odd", "target"), dict(shelf(command, "source"))
    objects[key(0)] = objects[key(1)]
    objects[key(2)] = objects[key(2)][:-1]
    objects[key(3)] = b""
    archive.write_bytes(written(objects))
    done = command("import", archive, target)
    assert done.code == 1
    assert done.out.splitlines()[:3] == [
        f"damaged (key): {key(0)}",
        f"damaged (truncated): {key(2)}",
        f"damaged (truncated): {key(3)}",
    ]
    assert held(target) == {key(1): objects[key(1)]}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_whatever_happens_to_an_archive_nothing_wrong_is_imported(
    command: CommandLine, source: str, archive: Path, data: st.DataObject
) -> None:
    objects = dict(shelf(command, "source"))
    damaged = bytearray(written(objects))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        what = data.draw(st.sampled_from(["flip", "cut", "lose", "add"]))
        if what == "flip":
            damaged[position] ^= 1 << data.draw(st.integers(0, 7))
        elif what == "cut":
            del damaged[max(position, 1) :]
        elif what == "lose":
            del damaged[position : position + data.draw(st.integers(1, 900))]
            damaged = damaged or bytearray(1)
        else:
            damaged[position:position] = data.draw(st.binary(max_size=50))
    path = command.folder / "damaged"
    path.write_bytes(damaged)
    _SHELVES.pop(f"{command.folder}/target", None)
    target = command.url("odd", "target")
    done = command("import", path, target)
    assert done.code == (0 if bytes(damaged) == written(objects) else 1)
    assert all(objects[name] == stored for name, stored in held(target).items())


def test_where_there_is_no_room_it_is_said(command: CommandLine, archive: Path) -> None:
    done = command("import", archive, f"{command.url('odd', 'target')}&max_bytes=700")
    assert done.code == 1
    assert done.out.splitlines()[:4] == [f"no room: {key(number)}" for number in range(4)]


def test_a_backend_that_fails_is_told_key_by_key(
    command: CommandLine, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from l2kit_posix.directory import ObjectDirectory

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ObjectDirectory, "store", full)
    done = command("import", archive, command.url("file", "target"))
    assert done.code == 1
    assert done.out.count("failed (CapacityError") == 4
    assert done.out.endswith("0 objects, 0 bytes imported\n")


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (b"", 1, "this is no l2kit archive"),
        (b"something else", 1, "this is no l2kit archive"),
        (None, 2, "cannot be read: No such file"),
    ],
)
def test_what_is_no_archive_is_refused(command: CommandLine, content: bytes | None, code: int, says: str) -> None:
    path = command.folder / "archive"
    if content is not None:
        path.write_bytes(content)
    done = command("import", path, command.url("odd", "target"))
    assert (done.code, done.out, done.err.count("\n")) == (code, "", 1)
    assert says in done.err


def test_a_newer_format_is_refused(command: CommandLine, archive: Path) -> None:
    head = b"L2KITARC" + (2).to_bytes(4, "little") + bytes(4)
    archive.write_bytes(head + xxhash.xxh3_128_digest(head) + archive.read_bytes()[32:])
    done = command("import", archive, command.url("odd", "target"))
    assert (done.code, done.err) == (1, f"error: {archive}: archive format 2 is not readable here (known: 1)\n")


def test_an_archive_that_cannot_be_read_on_is_one_line(command: CommandLine) -> None:
    target = command.url("odd", "target")
    done = command("import", command.folder, target)
    assert (done.code, done.out) == (2, "")
    assert "Is a directory" in done.err
    assert list(command.folder.iterdir()) == []


# --- both -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("fiel:///x", "did you mean 'file'"),
        ("file:///x?max_byte=1&codecs=hunter2", "did you mean 'max_bytes'"),
        ("redis://:hunter2@127.0.0.1:1/0?resilience.enabled=0&connect_timout_s=1", "did you mean 'connect_timeout_s'"),
    ],
)
def test_a_wrong_url_is_one_line_without_secrets(command: CommandLine, archive: Path, url: str, says: str) -> None:
    before = archive.read_bytes()
    for arguments in (("export", url, archive), ("import", archive, url), ("evict", url, "--prefix", "x")):
        done = command(*arguments)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert says in done.err
        assert "hunter2" not in done.err
    assert archive.read_bytes() == before
