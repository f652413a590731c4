"""Going through all objects of a backend: its listing, what that may tell of their use, and reads that are no use.

Tools and the scrubber see every object. An adapter that keeps an order of use asks `counts_as_use` when it loads one:
otherwise whoever looks through a tier would leave it in the order in which he looked.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from l2kit.adapter import KeyInfo, L2Adapter
from l2kit.errors import BackendError, L2Error

_looking_only: Final[ContextVar[bool]] = ContextVar("l2kit_looking_only", default=False)


class DatedKeyInfo(KeyInfo, frozen=True):
    """What `L2Adapter.iter_keys` yields where the backend knows when an object was last stored, loaded or looked up.

    Attributes:
        last_used_s: that time, in seconds since the epoch.
    """

    last_used_s: float


@contextmanager
def looking_only() -> Iterator[None]:
    """What runs in this block, threads that it starts included, looks objects over and is no use of them."""
    token = _looking_only.set(True)
    try:
        yield
    finally:
        _looking_only.reset(token)


def counts_as_use() -> bool:
    """Whether the running hook works for somebody who uses the object; False for a scrubber or an export. Any thread.

    An adapter that evicts the least recently used asks this before it moves an object to the young end.
    """
    return not _looking_only.get()


async def listing(adapter: L2Adapter[Any]) -> AsyncGenerator[KeyInfo, None]:
    """Every object of an open adapter, as `L2Adapter.iter_keys` yields them. Close it (``aclosing``).

    Raises:
        L2Error: the backend failed, or cannot list its keys.
    """
    try:
        async for info in adapter.iter_keys():
            yield info
    except L2Error:
        raise
    except OSError as error:
        raise adapter.translate_error(error) from error
    except Exception as error:
        raise BackendError(f"{adapter.name}: listing failed: {type(error).__name__}") from error
