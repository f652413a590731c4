"""``l2kit evict``: what is meant goes, nothing else does, and what cannot be said of a backend is said."""

from __future__ import annotations

import time

import pytest

from tests.unit.command_line import CommandLine, command, held, key, load, put

pytestmark = pytest.mark.timeout(120)

__all__ = ["command"]

HERE = {key(number, namespace): 1000 for namespace in ("cli", "other") for number in range(4)}


@pytest.fixture(params=["odd", "file", "nvme"])
def url(request: pytest.FixtureRequest, command: CommandLine) -> str:
    made = command.url(request.param)
    put(made, HERE)
    return made


@pytest.fixture
def odd(command: CommandLine) -> str:
    made = command.url("odd")
    put(made, HERE)
    return made


# --- what goes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selection", "goes"),
    [
        (["--namespace", "other"], {name for name in HERE if name.namespace == "other"}),
        (["--namespace", "nobody"], set()),
        (["--prefix", "cli/0000000000000002"], {key(2)}),
        (["--prefix", "cli/000000000000000"], {name for name in HERE if name.namespace == "cli"}),
        (["--namespace", "cli", "--prefix", "other/"], set()),
        (["--key", str(key(1)), "--key", str(key(3, "other"))], {key(1), key(3, "other")}),
        (["--key", str(key(9))], set()),
        (["--all", "--yes"], set(HERE)),
    ],
)
def test_what_is_meant_goes_and_nothing_else(
    command: CommandLine, url: str, selection: list[str], goes: set[object]
) -> None:
    looked = command("evict", url, *selection, "--dry-run")
    assert (looked.code, looked.err) == (0, "")
    assert set(held(url)) == set(HERE)
    done = command("evict", url, *selection)
    assert (done.code, done.err) == (0, "")
    assert set(held(url)) == set(HERE) - goes
    assert looked.keys == done.keys == {str(name) for name in goes}
    assert looked.out.splitlines()[-1].endswith("would be removed")
    assert done.out.splitlines()[-1].startswith(f"{len(goes)} objects, ")
    assert done.out.splitlines()[-1].endswith("bytes removed")


def test_a_namespace_that_stands_hashed_in_keys_is_found_by_its_name(command: CommandLine, odd: str) -> None:
    put(odd, {key(0, "Org/Model 7B"): 10})
    assert command("evict", odd, "--namespace", "Org/Model 7B").out.startswith("         266  x-")
    assert set(held(odd)) == set(HERE)


def test_many_objects_go_in_several_batches(command: CommandLine) -> None:
    url = command.url("odd")
    put(url, {key(number): 0 for number in range(600)})
    assert command("evict", url, "--all", "--yes", "--json").report["objects"] == 600
    assert held(url) == {}


def test_as_json(command: CommandLine, odd: str) -> None:
    names = sorted(str(name) for name in HERE if name.namespace == "cli")
    for dry_run in (True, False):
        done = command("evict", odd, "--namespace", "cli", "--json", *["--dry-run"] * dry_run)
        report = done.report
        assert (done.code, sorted(report.pop("keys"))) == (0, names)
        assert report == {"objects": 4, "bytes": 4 * 1256, "failures": [], "dry_run": dry_run}


def test_what_could_not_be_removed_is_told(command: CommandLine) -> None:
    url = f"dated://?shelf={command.folder}/stubborn"
    put(url, {key(0): 10})
    done = command("evict", f"{url}&stubborn=true", "--key", key(0))
    assert done.code == 1
    assert done.out.startswith("not removed: dated: Read-only file system (errno 30): cli/")
    assert command("evict", f"{url}&stubborn=true", "--key", key(0), "--json").report["failures"][0]["key"] == str(
        key(0)
    )


# --- by age -----------------------------------------------------------------------------------------


def test_by_age(command: CommandLine) -> None:
    now = time.time()
    ages_s = [10, 3000, 5 * 3600, 3 * 86_400]
    url = f"dated://?shelf={command.folder}/dated&dates={','.join(str(now - age_s) for age_s in ages_s)}"
    put(url, {key(number): 10 for number in range(4)})
    for age, goes in (
        ("4d", []),
        ("2d", [3]),
        ("1h", [2, 3]),
        ("3000s", [1, 2, 3]),
        ("50m", [1, 2, 3]),
        ("0", [0, 1, 2, 3]),
    ):
        done = command("evict", url, "--older-than", age, "--dry-run")
        assert done.keys == {str(key(number)) for number in goes}, age
    assert command("evict", url, "--older-than", "2h", "--prefix", "cli/0000000000000003").code == 0
    assert set(held(url)) == {key(0), key(1), key(2)}


def test_a_backend_without_ages_says_so_and_loses_nothing(command: CommandLine, url: str) -> None:
    done = command("evict", url, "--older-than", "1h")
    if done.code == 0:  # this one tells them: nothing here is an hour old
        assert done.keys == set()
    else:
        assert (done.code, done.out) == (2, "")
        assert "does not tell when an object was last used" in done.err
    assert set(held(url)) == set(HERE)


# --- down to a size ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "nvme"])
def test_down_to_a_size_the_least_recently_used_go_first(command: CommandLine, kind: str) -> None:
    url = command.url(kind)
    put(url, {key(number): 60_000 for number in range(10)})
    if kind == "file":  # a slab knows the order of storing only, after it was closed
        load(url, [key(0), key(1)])
    assert command("evict", url, "--to", "10MiB").out.startswith("0 objects, 0 bytes removed")
    looked = command("evict", url, "--to", "330KB", "--dry-run")
    assert (looked.code, looked.keys) == (0, set())
    assert "the backend chooses, by last use" in looked.out
    assert len(command("ls", url).out.splitlines()) == 10
    done = command("evict", url, "--to", "330KB")
    assert (done.code, done.err) == (0, "")
    goes = {2, 3, 4, 5, 6} if kind == "file" else {0, 1, 2, 3, 4}
    assert done.keys == {str(key(number)) for number in goes}
    assert set(held(url)) == {key(number) for number in set(range(10)) - goes}
    assert command("evict", url, "--to", "330KB", "--json").report["bytes_in_use"] <= 330_000


def test_a_backend_without_a_limit_of_its_own_says_so(command: CommandLine, odd: str) -> None:
    done = command("evict", odd, "--to", "1KiB")
    assert (done.code, done.out) == (2, "")
    assert "no limit of its own" in done.err
    assert set(held(odd)) == set(HERE)


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "say what"),
        (["--yes"], "say what"),
        (["--prefix", ""], "say what"),
        (["--namespace", ""], "must be a non-empty string"),
        (["--all"], "add --yes"),
        (["--all", "--yes", "--namespace", "cli"], "stand alone"),
        (["--to", "1MiB", "--prefix", "cli"], "stand alone"),
        (["--key", "cli/00/s0of1.g0.all", "--older-than", "1d"], "stand alone"),
        (["--key", "nonsense"], "not an encoded object key"),
        (["--older-than", "soon"], "--older-than: 'soon' is no age"),
        (["--older-than", "-3d"], None),
        (["--to", "much"], "--to: 'much' is no size"),
    ],
)
def test_what_is_unclear_removes_nothing(
    command: CommandLine, odd: str, arguments: list[str], says: str | None
) -> None:
    if says is None:
        with pytest.raises(SystemExit):
            command("evict", odd, *arguments)
    else:
        done = command("evict", odd, *arguments)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert says in done.err
    assert set(held(odd)) == set(HERE)
