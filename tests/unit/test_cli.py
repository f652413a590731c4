"""The ``l2kit`` command as people run it: a process of its own, over real installed entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from l2kit.cli import main

pytestmark = pytest.mark.timeout(60)

SHELF = Path(__file__).with_name("shelf_plugin.py")

PUT = """
import anyio, sys
from l2kit import Layout, MemoryObj, ObjectKey, open_adapter

async def put(url, count, nbytes, codecs):
    async with open_adapter(url, codecs=codecs) as adapter:
        keys = [ObjectKey("cli", n.to_bytes(8, "big")) for n in range(count)]
        objects = [MemoryObj.wrap(bytes([n]) * nbytes, Layout.raw(nbytes)) for n in range(count)]
        assert all(outcome.present for outcome in await adapter.submit_store_task(keys, objects))

anyio.run(put, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""


class Installation:
    """Processes that see the distributions in ``site`` besides what is installed."""

    def __init__(self, folder: Path) -> None:
        self.site = folder / "site"
        self.site.mkdir()
        self.objects = folder / "objects"
        self.objects.mkdir()
        self.url = f"shelf://{self.objects}"

    def install(self, name: str, entry_points: dict[str, dict[str, str]], **modules: str) -> None:
        """Leave a distribution as pip would."""
        info = self.site / f"{name.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        lines = []
        for group, points in entry_points.items():
            lines += [f"[{group}]", *(f"{point} = {target}" for point, target in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for module, source in modules.items():
            (self.site / f"{module}.py").write_text(source)

    def install_shelf(self) -> None:
        points = {"l2kit.adapters": {"shelf": "shelf:Shelf"}, "l2kit.codecs": {"zlib": "shelf:Zlib"}}
        self.install("l2kit-shelf", points, shelf=SHELF.read_text())

    def python(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env={**os.environ, "PYTHONPATH": str(self.site)},
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.python("from l2kit.cli import main; raise SystemExit(main())", *arguments)

    def put(self, count: int, *, nbytes: int = 5000, codecs: str = "") -> list[Path]:
        """Store numbered objects; the files that hold them."""
        done = self.python(PUT, self.url, str(count), str(nbytes), codecs)
        assert done.returncode == 0, done.stderr
        return sorted(self.objects.iterdir())


@pytest.fixture
def bare(tmp_path: Path) -> Installation:
    return Installation(tmp_path)


@pytest.fixture
def shelf(bare: Installation) -> Installation:
    bare.install_shelf()
    return bare


def one_error(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line that a failed command leaves."""
    assert done.returncode == code, done
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


# --- the command ----------------------------------------------------------------------------------


def test_the_installed_command_says_its_version() -> None:
    command = Path(sys.executable).with_name("l2kit")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "l2kit 0.1.0\n")


@pytest.mark.parametrize(
    "arguments",
    [[], ["plugin"], ["ls"], ["verify", "--erase", "memory://"], ["export", "memory://"], ["import", "file"]],
)
def test_a_wrong_command_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: l2kit" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("plugins", "probe", "ls", "verify", "evict", "export", "import"))


# --- plugins --------------------------------------------------------------------------------------


def test_a_plugin_adds_a_command(bare: Installation) -> None:
    code = "def main(arguments):\n    print(*arguments)\n    return 3\n"
    bare.install("l2kit-says", {"l2kit.commands": {"say": "says:main", "hum": "says:missing"}}, says=code)
    done = bare.run("say", "--loud", "x")
    assert (done.returncode, done.stdout, done.stderr) == (3, "--loud x\n", "")
    assert "Commands of plugins:" in (told := bare.run("--help").stdout)
    assert "say" in told
    done = bare.run("hum")
    assert done.returncode == 1
    assert "'hum' of l2kit-says 1.5 cannot be imported" in done.stderr


def test_plugins_lists_what_is_installed(shelf: Installation) -> None:
    done = shelf.run("plugins")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "memory:// l2kit 0.1.0 API 1.0 evicts, lock=owned" in lines
    assert "shelf:// l2kit-shelf 1.5 API 1.0 persistent, shared, lock=none" in lines
    assert "zlib l2kit-shelf 1.5" in lines
    assert "lru l2kit 0.1.0" in lines
    assert [line for line in lines if line in ("adapters", "codecs", "policies")] == ["adapters", "codecs", "policies"]


def test_plugins_tells_what_cannot_be_used_and_why(shelf: Installation) -> None:
    shelf.install("needs-more", {"l2kit.adapters": {"needy": "needy:Needy"}}, needy="import no_such_client_library\n")
    shelf.install("first-claim", {"l2kit.adapters": {"twice": "shelf:Shelf"}})
    shelf.install("second-claim", {"l2kit.adapters": {"twice": "shelf:Shelf"}})
    shelf.install("old-timer", {"l2kit.adapters": {"old": "old:Old"}}, old=OLD)
    shelf.install("no-codec", {"l2kit.codecs": {"nothing": "json:dumps"}})
    shelf.install("no-policy", {"l2kit.policies": {"nothing": "json:dumps"}})
    shelf.install("quitter", {"l2kit.adapters": {"quit": "quitter:X"}}, quitter="raise SystemExit('not today')\n")
    done = shelf.run("plugins")
    assert done.returncode == 1
    usable, _, broken = done.stdout.partition("cannot be used\n")
    assert "shelf://" in usable
    assert "twice://" not in usable
    assert "needy:// needs-more 1.5" in " ".join(broken.split())
    for reason in (
        "ModuleNotFoundError: No module named 'no_such_client_library'",
        "'twice' is claimed by first-claim 1.5 and second-claim 1.5",
        "built for adapter API 0.3, this l2kit has 1.1",
        "codecs: 'nothing' must be a subclass of l2kit.Codec",
        "policies: 'nothing' is no subclass",
        "SystemExit: not today",
    ):
        assert reason in broken
    assert "Traceback" not in done.stdout + done.stderr


OLD = """
from shelf import Shelf

class Old(Shelf):
    api_version = (0, 3)
"""


def test_plugins_as_json(shelf: Installation) -> None:
    shelf.install("needs-more", {"l2kit.adapters": {"needy": "needy:Needy"}}, needy="import no_such_client_library\n")
    done = shelf.run("plugins", "--json")
    assert done.returncode == 1
    found = {(plugin["group"], plugin["name"]): plugin for plugin in json.loads(done.stdout)}
    memory = found["l2kit.adapters", "memory"]
    assert (memory["distribution"], memory["version"], memory["api_version"]) == ("l2kit", "0.1.0", "1.0")
    assert memory["capabilities"]["lock"] == "owned"
    assert memory["error"] is None
    assert "no_such_client_library" in found["l2kit.adapters", "needy"]["error"]


# --- probe ----------------------------------------------------------------------------------------


def test_probe_of_a_healthy_backend(shelf: Installation) -> None:
    done = shelf.run("probe", f"{shelf.url}?password=hunter2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{shelf.url}: ok in ")
    assert "hunter2" not in done.stdout
    assert list(shelf.objects.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("shlef://x", "did you mean 'shelf'"),
        ("nonsense", "expected SCHEME://"),
        ("{url}?pasword=hunter2", "did you mean 'password'"),
        ("{url}?timeout_s=soon&password=hunter2", "timeout_s"),
    ],
)
def test_a_wrong_url_is_one_line_and_exit_code_2(url: str, says: str, shelf: Installation) -> None:
    for command in ("probe", "ls", "verify"):
        error = one_error(shelf.run(command, url.format(url=shelf.url)), 2)
        assert says in error
        assert "hunter2" not in error


@pytest.mark.parametrize(
    ("command", "fails", "says"),
    [
        ("probe", "open", "wrong password"),
        ("probe", "store", "No space left on device"),
        ("probe", "load", "Input/output error"),
        ("ls", "open", "wrong password"),
        ("ls", "list", "Permission denied"),
        ("verify", "list", "Permission denied"),
    ],
)
def test_a_backend_that_fails_is_one_line_and_exit_code_1(
    command: str, fails: str, says: str, shelf: Installation
) -> None:
    error = one_error(shelf.run(command, f"{shelf.url}?password=hunter2&fails={fails}"), 1)
    assert says in error
    assert "hunter2" not in error


def test_a_plugin_that_cannot_be_imported_is_one_line(bare: Installation) -> None:
    bare.install("needs-more", {"l2kit.adapters": {"needy": "needy:Needy"}}, needy="import no_such\nclient = 1\n")
    assert "'needy' of needs-more 1.5 cannot be imported" in one_error(bare.run("probe", "needy://"), 1)


def test_an_adapter_that_cannot_list_says_so(shelf: Installation) -> None:
    source = "from shelf import Shelf\nfrom l2kit.adapter import L2Adapter\nShelf.iter_keys = L2Adapter.iter_keys\n"
    shelf.install("mute", {"l2kit.adapters": {"mute": "mute:Shelf"}}, mute=source)
    assert "cannot list its keys" in one_error(shelf.run("ls", shelf.url.replace("shelf", "mute", 1)), 1)


# --- ls -------------------------------------------------------------------------------------------


def test_ls_shows_size_and_key(shelf: Installation) -> None:
    files = shelf.put(3)
    done = shelf.run("ls", shelf.url)
    assert done.returncode == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines == [[str(file.stat().st_size), file.name.replace("~", "/")] for file in files]
    assert done.stderr == f"3 objects, {sum(file.stat().st_size for file in files)} bytes\n"


def test_ls_into_a_pipe_that_closes_early(shelf: Installation) -> None:
    file = shelf.put(1)[0]
    for number in range(1, 3000):  # far more than a pipe holds
        file.with_name(file.name.replace("0" * 16, f"{number:016x}")).symlink_to(file)
    script = "from l2kit.cli import main; raise SystemExit(main())"
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, "ls", shelf.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(shelf.site)},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == 141


# --- verify ---------------------------------------------------------------------------------------


def damage(files: list[Path]) -> None:
    """The first by one bit, the second cut off, the third under another's name."""
    data = bytearray(files[0].read_bytes())
    data[-1] ^= 1
    files[0].write_bytes(data)
    files[1].write_bytes(files[1].read_bytes()[:3000])
    files[2].write_bytes(files[3].read_bytes())


def counts(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    lines = [line for line in done.stdout.splitlines() if line.startswith("  ")]
    return {name: int(count) for count, name in (line.split(maxsplit=1) for line in lines)}


def test_verify_of_whole_objects(shelf: Installation) -> None:
    shelf.put(9)
    done = shelf.run("verify", shelf.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert counts(done) == {"ok": 9}


def test_verify_reports_and_deletes_nothing_unasked(shelf: Installation) -> None:
    files = shelf.put(9)
    damage(files)
    for _ in range(2):
        done = shelf.run("verify", shelf.url)
        assert (done.returncode, done.stderr) == (1, "")
        assert counts(done) == {
            "ok": 6,
            "damaged (checksum)": 1,
            "damaged (truncated)": 1,
            "damaged (key)": 1,
        }
        assert f"damaged (checksum): {files[0].name.replace('~', '/')}" in done.stdout
    assert sorted(shelf.objects.iterdir()) == files


def test_verify_deletes_what_is_damaged_when_asked(shelf: Installation) -> None:
    files = shelf.put(9)
    damage(files)
    done = shelf.run("verify", "--delete", shelf.url)
    assert done.returncode == 0
    assert counts(done)["damaged (checksum), deleted"] == 1
    assert sorted(shelf.objects.iterdir()) == files[3:]
    assert counts(shelf.run("verify", shelf.url)) == {"ok": 6}


def test_verify_of_objects_that_are_larger_than_what_is_stored(shelf: Installation) -> None:
    (file,) = shelf.put(1, nbytes=9 << 20, codecs="zlib")
    assert file.stat().st_size < 1 << 20
    assert counts(shelf.run("verify", shelf.url)) == {"ok": 1}


def test_verify_keeps_what_is_merely_not_readable_here(shelf: Installation) -> None:
    shelf.put(2, codecs="zlib")
    (shelf.site / "l2kit_shelf-1.5.dist-info" / "entry_points.txt").write_text(
        "[l2kit.adapters]\nshelf = shelf:Shelf\n"
    )
    done = shelf.run("verify", "--delete", shelf.url)
    assert done.returncode == 1
    assert counts(done) == {"intact, not readable here (unsupported)": 2}
    assert len(list(shelf.objects.iterdir())) == 2


def test_verify_counts_loads_that_fail(shelf: Installation) -> None:
    shelf.put(3)
    done = shelf.run("verify", "--delete", f"{shelf.url}?fails=load")
    assert done.returncode == 1
    assert counts(done) == {"failed (BackendError)": 3}
    assert len(list(shelf.objects.iterdir())) == 3
