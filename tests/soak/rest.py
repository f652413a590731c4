"""What an engine may leave behind: nothing. Looked for before and after its storage is closed."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import anyio

from l2kit.adapter import L2Adapter
from l2kit.faults import FaultyAdapter
from l2kit.resilience import ByteBudgetAdapter
from l2kit.storage_manager import StorageManager
from l2kit.wrapper import WrappingAdapter
from l2kit_posix import FileAdapter
from tests.soak.tally import Tally

#: A hook that hangs ends with its tier's time-out of a second, a thread that is stuck soon after, and this is more.
SETTLE_S: Final = 15.0
_TICK_S: Final = 0.02
_FILES: Final = Path("/proc/self/fd")


def layers(manager: StorageManager) -> Iterator[L2Adapter[Any]]:
    """Every adapter of every tier, the wrapped ones too."""
    for tier in manager.tiers:
        adapter = tier.adapter
        yield adapter
        while isinstance(adapter, WrappingAdapter):
            adapter = adapter.inner
            yield adapter


def calm(manager: StorageManager) -> None:
    """No more faults."""
    for adapter in layers(manager):
        if isinstance(adapter, FaultyAdapter):
            adapter.calm()


async def settle(manager: StorageManager, tally: Tally) -> None:
    """Wait until nothing is held by anybody, with a bound; what still is then has leaked."""
    with anyio.move_on_after(SETTLE_S):
        while held_leases(manager) or held_bytes(manager):  # noqa: ASYNC110 - watches state that sets no event
            await anyio.sleep(_TICK_S)
    _note(tally, "leaked_leases", held_leases(manager), holds=[str(hold) for hold in manager.l1.holds()])
    _note(tally, "leaked_bytes", held_bytes(manager))


def check_closed(manager: StorageManager, tally: Tally) -> None:
    """A storage manager that was closed holds nothing."""
    usage = manager.l1.usage()
    _note(tally, "leaked_leases", held_leases(manager), after="close")
    _note(tally, "leaked_bytes", Counter(l1=usage.used_bytes) + held_bytes(manager), after="close")


def held_leases(manager: StorageManager) -> Counter[str]:
    """Every right that somebody holds, by what it is; nothing at rest."""
    usage = manager.l1.usage()
    held = Counter(leases=usage.leases, reservations=usage.writing, prefetches=len(manager._open_prefetches))
    if hasattr(manager, "_prefetcher"):  # it has been open
        held["arrivals"] = len(manager._prefetcher._arrivals._by_key)
    for tier in manager.tiers:
        held[f"{tier.name} unanswered"] += sum(tier._unanswered.values())
    for adapter in layers(manager):
        held[f"{adapter.name} leases"] += adapter.held_leases
        if isinstance(adapter, FaultyAdapter):
            held[f"{adapter.name} invented hits"] += sum(adapter._phantoms.values())
        elif isinstance(adapter, FileAdapter) and adapter._directory is not None:
            held[f"{adapter.name} locks"] += len(adapter._directory._leases)
    return +held


def held_bytes(manager: StorageManager) -> Counter[str]:
    """Bytes that belong to nobody or are on their way, by where; nothing at rest."""
    l1 = manager.l1
    with l1._lock:
        entries = sum(entry.slot.slot_bytes for entry in l1._readable.values())
        held = Counter(l1=abs(l1._arena.used_bytes - entries))
    for adapter in layers(manager):
        if isinstance(adapter, ByteBudgetAdapter):
            held[f"{adapter.name} in flight"] += adapter.gate.inflight_bytes + adapter.gate.waiting_store_bytes
        elif isinstance(adapter, FileAdapter) and adapter._directory is not None:
            held[f"{adapter.name} set aside"] += adapter._directory._index._reserved_bytes
    return +held


class Census:
    """The threads and file descriptors of this process, before and after."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._files = _open_files()

    def check(self, tally: Tally) -> None:
        """Count what is there now and was not at first; what is on its way out gets a moment."""
        give_up = time.monotonic() + 3.0
        while (self._new_threads() or self._new_files()) and time.monotonic() < give_up:
            time.sleep(_TICK_S)
        _note(tally, "leaked_threads", Counter(self._new_threads()))
        _note(tally, "leaked_files", Counter(self._new_files()))

    def _new_threads(self) -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread not in self._threads]

    def _new_files(self) -> list[str]:
        return [f"{number} -> {target}" for number, target in _open_files() - self._files]


def _open_files() -> set[tuple[int, str]]:
    found: set[tuple[int, str]] = set()
    for descriptor in _FILES.iterdir():
        try:
            found.add((int(descriptor.name), str(descriptor.readlink())))
        except FileNotFoundError:  # the one that lists the folder
            continue
    return found


def _note(tally: Tally, name: str, held: Counter[str], **facts: Any) -> None:
    if held:
        tally.add(name, held.total())
        tally.find(name, held=dict(held), pid=os.getpid(), **facts)
