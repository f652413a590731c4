"""`to_the_end`: steps that are better completed than left in the middle, also when they are cancelled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from l2kit.errors import BackendTimeoutError, first_error


@asynccontextmanager
async def to_the_end(bound_s: float) -> AsyncIterator[None]:
    """Go on with the block for ``bound_s`` after a cancellation, which is raised when the block has ended.

    The deadline that holds outside holds inside as well.

    Raises:
        BackendTimeoutError: the deadline passed in the block.
    """
    scope = anyio.CancelScope(shield=True, deadline=anyio.current_effective_deadline())

    async def watch() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            scope.deadline = min(scope.deadline, anyio.current_time() + bound_s)

    try:
        async with anyio.create_task_group() as watcher:
            watcher.start_soon(watch)
            with scope:
                yield
            watcher.cancel_scope.cancel()
    except Exception as group:
        error = first_error(group)
        raise error from error.__cause__
    if scope.cancelled_caught:
        raise BackendTimeoutError("the store was not completed in time")
