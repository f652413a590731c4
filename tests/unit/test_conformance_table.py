"""The reference page of the conformance kit says what the suites do today."""

from __future__ import annotations

from tests.unit.conformance_table import PAGE, filled, missing_names


def test_the_tables_are_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    up_to_date = page == filled(page)
    assert up_to_date, "run python -m tests.unit.conformance_table"


def test_every_hook_is_described() -> None:
    assert not list(missing_names(PAGE.read_text(encoding="utf-8")))
