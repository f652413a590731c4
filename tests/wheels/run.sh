#!/usr/bin/env bash
# Tests what a user installs instead of the tree: builds every sdist and wheel, installs wheels into an empty virtual
# environment and, from a folder that holds nothing of ours, runs the command line, the posix adapter's tests, and those
# of an adapter from outside (examples/l2kit-dirstore).
set -euo pipefail

tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$tree/.venv/bin/python
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset PYTHONPATH

say() { printf '== wheels: %s\n' "$*"; }
quietly() { "$@" >"$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }; }

say "build"
for project in "$tree"/pyproject.toml "$tree"/{plugins,connector}/l2kit-*/pyproject.toml; do
    quietly "$python" -m build --no-isolation --outdir "$scratch/dist" "$(dirname "$project")"
done
"$python" - "$tree" "$scratch"/dist/*.whl <<'PY'
"""Each wheel holds every file of its package, the licence, and nothing else."""
import sys
from pathlib import Path
from zipfile import ZipFile

tree, *wheels = map(Path, sys.argv[1:])
for wheel in wheels:
    package = wheel.name.split("-")[0]
    root = next(p for p in (tree, *tree.glob("plugins/*"), *tree.glob("connector/*")) if (p / package).is_dir())
    source = {p.relative_to(root).as_posix() for p in (root / package).rglob("*")
              if p.is_file() and "__pycache__" not in p.parts}
    names = set(ZipFile(wheel).namelist())
    metadata = {n for n in names if n.split("/")[0].endswith(".dist-info")}
    difference = source ^ (names - metadata)
    assert not difference, f"{wheel.name} differs from its source: {sorted(difference)}"
    assert f"{package}/py.typed" in names, f"{wheel.name} has no py.typed"
    assert any(n.endswith("/licenses/LICENSE") for n in metadata), f"{wheel.name} has no licence"
    print(f"   {wheel.name}: {len(source)} files")
PY

# Apart from ours: it is no distribution of this repository, and may look like anybody's.
quietly "$python" -m build --wheel --no-isolation --outdir "$scratch/outside" "$tree/examples/l2kit-dirstore"

say "install into an empty environment"
venv=$scratch/venv
"$python" -m venv --without-pip "$venv"
"$python" -m pip freeze --exclude-editable >"$scratch/constraints.txt"
packages=(l2kit)
for plugin in "$tree"/plugins/l2kit-*/; do packages+=("$(basename "$plugin" | tr - _)"); done
wheels=("$(echo "$scratch"/dist/l2kit-*.whl)[testing]" "$scratch"/outside/*.whl)
for package in "${packages[@]:1}"; do wheels+=("$scratch"/dist/"$package"-*.whl); done
quietly "$python" -m pip --python "$venv/bin/python" install --no-input --constraint "$scratch/constraints.txt" \
    "${wheels[@]}"

mkdir "$scratch/empty"
cd "$scratch/empty"

say "import every module, from site-packages only"
"$venv/bin/python" - "${packages[@]}" <<'PY'
import importlib
import pkgutil
import sys
import sysconfig
from pathlib import Path

site = Path(sysconfig.get_path("purelib")).resolve()
packages = sys.argv[1:]
for name in packages:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
ours = [m for n, m in sys.modules.items() if n.split(".")[0] in packages]
strangers = [m.__file__ for m in ours if not Path(m.__file__).resolve().is_relative_to(site)]
assert not strangers, f"not from the installed wheels: {strangers}"
print(f"   {len(ours)} modules")
PY

say "l2kit plugins"
"$venv/bin/l2kit" plugins | tee "$scratch/plugins"
for scheme in memory file nvme redis valkey s3 dirstore; do
    grep -qw "$scheme" "$scratch/plugins" || { echo "l2kit plugins does not list $scheme" >&2; exit 1; }
done

for project in plugins/l2kit-posix examples/l2kit-dirstore; do
    say "the tests of $project"
    cp -r "$tree/$project/tests" "$scratch/tests-of-$(basename "$project")"
    "$venv/bin/pytest" -q -p no:cacheprovider --import-mode=importlib "$scratch/tests-of-$(basename "$project")"
done
