#!/usr/bin/env bash
# Tests what a user installs instead of the tree: builds every sdist and wheel, installs wheels into an empty virtual
# environment and, from a folder that holds nothing of ours, runs the posix adapter's tests and the command line.
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

say "install into an empty environment"
venv=$scratch/venv
"$python" -m venv --without-pip "$venv"
"$python" -m pip freeze --exclude-editable >"$scratch/constraints.txt"
wheel() { echo "$scratch"/dist/"$1"-*.whl; }
quietly "$python" -m pip --python "$venv/bin/python" install --no-input --constraint "$scratch/constraints.txt" \
    "$(wheel l2kit)[testing]" "$(wheel l2kit_posix)" "$(wheel l2kit_redis)"

mkdir "$scratch/empty"
cd "$scratch/empty"

say "import every module, from site-packages only"
"$venv/bin/python" - <<'PY'
import importlib
import pkgutil
import sys
import sysconfig
from pathlib import Path

site = Path(sysconfig.get_path("purelib")).resolve()
for name in ("l2kit", "l2kit_posix", "l2kit_redis"):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
ours = [m for n, m in sys.modules.items() if n.split(".")[0] in {"l2kit", "l2kit_posix", "l2kit_redis"}]
strangers = [m.__file__ for m in ours if not Path(m.__file__).resolve().is_relative_to(site)]
assert not strangers, f"not from the installed wheels: {strangers}"
print(f"   {len(ours)} modules")
PY

say "l2kit plugins"
"$venv/bin/l2kit" plugins | tee "$scratch/plugins"
for scheme in memory file redis valkey; do
    grep -qw "$scheme" "$scratch/plugins" || { echo "l2kit plugins does not list $scheme" >&2; exit 1; }
done

say "the posix adapter's tests"
cp -r "$tree/plugins/l2kit-posix/tests" "$scratch/tests"
"$venv/bin/pytest" -q -p no:cacheprovider --import-mode=importlib "$scratch/tests"
