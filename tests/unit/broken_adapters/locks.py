"""Faults in leases."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from l2kit.adapter import Capabilities
from l2kit.keys import ObjectKey
from tests.unit.broken_adapters.base import BrokenAdapter


class HidesItsLeases(BrokenAdapter):
    """Says that no lease is held: a host that forgot one never learns of it."""

    caught_by = "test_every_hit_holds_a_lease_until_it_is_released"

    @property
    def held_leases(self) -> int:
        return 0


class UnlocksDistinctKeys(BrokenAdapter):
    """Answers an unlock with one outcome for a key that was given twice."""

    caught_by = "test_releasing_what_is_not_held_is_a_miss"

    def submit_unlock_task(self, keys: Any) -> Any:
        return super().submit_unlock_task(list(dict.fromkeys(keys)))


class ForgetsTheLocked(BrokenAdapter):
    """Deleting an object takes it from those who hold a lock."""

    caught_by = "test_an_owned_lock_keeps_a_deleted_object_until_the_last_release"

    async def delete_one(self, key: ObjectKey) -> bool:
        self._locked.pop(key, None)
        return await super().delete_one(key)


class ReleasesAtOnce(BrokenAdapter):
    """The first of two releases ends both locks."""

    caught_by = "test_an_owned_lock_keeps_a_deleted_object_until_the_last_release"

    async def release_many(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            self._locks[key] = 1
        await super().release_many(keys)


class PutsTheLockedBack(BrokenAdapter):
    """Releasing a lock restores the object that it held, over a newer one."""

    caught_by = "test_an_owned_lock_survives_replacement"

    async def release_many(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            if key in self._objects:
                self._objects[key] = self._locked[key]
        await super().release_many(keys)


class RefusesToDeleteTheLocked(BrokenAdapter):
    """A lease of one host keeps all others from deleting."""

    caught_by = "test_a_lease_does_not_hinder_storing_and_deleting"

    async def delete_one(self, key: ObjectKey) -> bool:
        return False if self._locks[key] else await super().delete_one(key)


class ExtendsNothing(BrokenAdapter):
    """Promises that a lookup extends the time to live on the server, and leaves it as it is."""

    caught_by = "test_a_server_lock_extends_the_time_to_live"
    capabilities = Capabilities(persistent=False, shared=False, lock="server", evicts=True)
    time_to_live_s = 10.0


class KeepsLeasesAfterClosing(BrokenAdapter):
    """Gives its leases back on the server, and goes on counting them."""

    caught_by = "test_closing_releases_every_lease"

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._opened is not None
        leases = self._opened.batches.leases.copy()
        await super().__aexit__(kind, error, traceback)
        self._opened.batches.leases.update(leases)
