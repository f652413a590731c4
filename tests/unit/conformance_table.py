"""Writes the tables of ``docs/reference/conformance.md``: ``python -m tests.unit.conformance_table``.

What stands between two marks of the page comes from the suites and from the broken adapters and codecs; the rest of
the page is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from l2kit.testing import AdapterConformance, CodecConformance
from tests.unit.broken_adapters import every_broken_adapter
from tests.unit.broken_codecs import every_broken_codec

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "conformance.md"


def groups_table(suite: type) -> str:
    """Each group with its promises, which the names of its tests are."""
    rows = ["| group | tests |", "|---|---|"]
    for group in suite.__bases__:
        tests = [f"`{name}`" for name in vars(group) if name.startswith("test_")]
        rows.append(f"| {_sentence(group)} | {'<br>'.join(tests)} |")
    return "\n".join(rows)


def faults_table(kinds: Sequence[type]) -> str:
    """Each fault with the test that catches it, in the order of the suite."""
    rows = ["| fault | what it does | caught by |", "|---|---|---|"]
    rows += [f"| {_words(kind.__name__)} | {_sentence(kind)} | `{_caught_by(kind)}` |" for kind in kinds]
    return "\n".join(rows)


TABLES: Final[dict[str, Callable[[], str]]] = {
    "adapter tests": lambda: groups_table(AdapterConformance),
    "adapter faults": lambda: faults_table(every_broken_adapter()),
    "codec tests": lambda: groups_table(CodecConformance),
    "codec faults": lambda: faults_table(every_broken_codec()),
}


def filled(page: str) -> str:
    """The page with every table as it is today."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->\n"
        before, found, rest = page.partition(begin)
        if not found or end not in rest:
            raise ValueError(f"{PAGE.name} has no place for the table {name!r}")
        page = before + begin + table() + "\n" + end + rest.partition(end)[2]
    return page


def missing_names(page: str) -> Iterator[str]:
    """Hooks of the suites that the page does not mention."""
    for suite in (AdapterConformance, CodecConformance):
        for hook in sorted(suite.hooks - {"setup_method", "anyio_backend"}):
            if not re.search(rf"`{hook}\b", page):
                yield f"{suite.__name__}.{hook}"


def _caught_by(kind: type) -> str:
    return str(vars(kind)["caught_by"])


def _words(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[A-Z0-9])(?=[A-Z][a-z])", " ", name).lower()


def _sentence(kind: type) -> str:
    return " ".join(str(kind.__doc__).split("\n\n", maxsplit=1)[0].split())


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
