"""What the system says becomes an error of the tree, with its place and what to do."""

from __future__ import annotations

import errno

import pytest

from l2kit.errors import (
    AuthError,
    BackendBusyError,
    BackendError,
    CapacityError,
    TransientBackendError,
)
from l2kit.system_errors import translate_os_error


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, CapacityError),
        (errno.EDQUOT, CapacityError),
        (errno.EACCES, AuthError),
        (errno.EMFILE, BackendBusyError),
        (errno.ESTALE, TransientBackendError),
        (errno.EIO, BackendError),
        (None, BackendError),
    ],
)
def test_each_errno_has_its_error(code: int | None, kind: type) -> None:
    error = OSError() if code is None else OSError(code, "it says")
    assert type(translate_os_error(error, name="disk", path="/d", mend={})) is kind


def test_the_message_says_what_where_and_what_to_do() -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/d/x")
    text = str(translate_os_error(error, name="disk", path="/d", mend={errno.ENOSPC: "free some"}))
    for word in ("disk", "No space left on device", "ENOSPC", "/d/x", "; free some"):
        assert word in text
    assert "at /d" in str(translate_os_error(OSError(errno.EIO, "failed"), name="disk", path="/d", mend={}))
