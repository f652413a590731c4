"""A published suite stays whole: no test is removed, weakened or replaced without a reason."""

from __future__ import annotations

import inspect
from collections.abc import Set

_MISSING = object()


def check_complete(suite: type, given: type, hooks: Set[str]) -> None:
    """Fail unless ``given`` has all of ``suite`` as it was written, apart from its ``hooks``.

    A test may be overridden under ``@pytest.mark.xfail(reason="…")``; fixtures and helpers may not, for tests stand on
    them.

    Raises:
        AssertionError: names what was changed.
    """
    changed = []
    for name in dir(suite):
        mine, theirs = (inspect.getattr_static(kind, name, _MISSING) for kind in (suite, given))
        if theirs is mine or name in hooks or name == "pytestmark" or name.startswith("__"):
            continue
        marks = getattr(theirs, "pytestmark", [])
        if not name.startswith("test_"):
            changed.append(f"{name} is a part of the suite and no hook: give yours another name")
        elif not any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks):
            changed.append(f"{name} is overridden without xfail(reason=…)")
    assert not changed, "; ".join(changed)


def forbid_override(given: type, name: str) -> None:
    """Refuse a subclass that replaces the very test that would notice it.

    Raises:
        TypeError: ``given`` defines ``name``.
    """
    if name in vars(given):
        raise TypeError(f"{given.__qualname__}.{name}: this test keeps the suite whole and cannot be overridden")
