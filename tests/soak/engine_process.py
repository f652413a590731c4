"""One life of one engine of the soak: ``python -m tests.soak.engine_process SPEC_JSON``.

SIGTERM asks for an orderly end: faults are calmed, the storage is closed, and what is left is counted. SIGKILL may come
at any time; what was counted until then stays. SIGUSR1 writes all stacks to stderr. An error that escapes ends the
process with 1, which no kill does.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import anyio

from l2kit.blocking import BlockingStorage
from l2kit.errors import L2Error
from l2kit.storage_manager import StorageManager, open_storage
from tests.soak.hostility import storage_config
from tests.soak.rest import Census, calm, check_closed, settle
from tests.soak.tally import FAULTS, SUMS, Tally
from tests.soak.watchdog import Watchdog
from tests.soak.workload import Workload

_PUBLISH_S: Final = 0.1
_CALLS: Final = ("load", "store", "lookup", "delete")


class Spec:
    """What the conductor says."""

    def __init__(self, text: str) -> None:
        facts = json.loads(text)
        self.seed: Final[str] = facts["seed"]
        self.slot: Final[int] = facts["slot"]
        self.counters: Final = Path(facts["counters"])
        self.findings: Final = Path(facts["findings"])
        self.directory: Final[str] = facts["directory"]
        self.redis_url: Final[str] = facts["redis_url"]


class Engine:
    """One life."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._tally = Tally(spec.counters, spec.slot, spec.findings)
        self._stop = threading.Event()
        self._parent = os.getppid()
        self._before: dict[str, int] = {}  # totals of storages that were closed since this life began
        self._random = Random(spec.seed)
        self._watchdog = Watchdog(self._tally)

    def live(self) -> None:
        """Open the storage, as often as it takes, and work until the end."""
        signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        logging.getLogger().addHandler(_ErrorCounter(self._tally))
        self._watchdog.start()
        census = Census()
        while not self._stop.is_set():
            config = storage_config(self._random, self._spec.directory, self._spec.redis_url)
            self._tally.add("opens")
            try:
                self._work(config, blocking=self._random.random() < 0.5)
            except L2Error as error:  # a fault, or the server is down: nothing may be left, and the next one is tried
                logging.getLogger("soak").warning("did not open: %s", error)
                self._tally.add("opens_failed")
                self._stop.wait(0.1)
            gc.collect()
            census.check(self._tally)
        self._watchdog.end()
        self._tally.close()

    def _work(self, config: dict[str, Any], *, blocking: bool) -> None:
        if blocking:
            storage = BlockingStorage(config)
            try:
                with storage:
                    storage.call(partial(self._run, storage.manager))
                self._tally.add("closes")
            finally:
                self._account(storage.manager)
        else:
            manager = open_storage(config)
            try:
                anyio.run(self._open_and_run, manager)
                self._tally.add("closes")
            finally:
                self._account(manager)

    async def _open_and_run(self, manager: StorageManager) -> None:
        async with manager:
            await self._run(manager)

    async def _run(self, manager: StorageManager) -> None:
        workload = Workload(manager, self._tally, self._spec.seed, self._stop)
        async with anyio.create_task_group() as group:
            group.start_soon(self._watchdog.beat)
            group.start_soon(self._publish, manager)
            await workload.run()
            calm(manager)
            await settle(manager, self._tally)
            group.cancel_scope.cancel()

    async def _publish(self, manager: StorageManager) -> None:
        """Write down now and then what the adapters count."""
        while True:
            await anyio.sleep(_PUBLISH_S)
            for name, value in self._totals(manager).items():
                self._tally.peak(name, self._before.get(name, 0) + value)
            if os.getppid() != self._parent:
                os.kill(os.getpid(), signal.SIGKILL)  # the conductor is gone

    def _account(self, manager: StorageManager) -> None:
        """A storage is closed, or did not open: what it counted is final."""
        if manager._l1 is not None:
            check_closed(manager, self._tally)
            for name, value in self._totals(manager).items():
                self._before[name] = self._before.get(name, 0) + value
                self._tally.peak(name, self._before[name])

    def _totals(self, manager: StorageManager) -> dict[str, int]:
        counters: Counter[str] = Counter()
        totals: Counter[str] = Counter(evictions=manager.l1.evictions)
        for tier in manager.tiers:
            counters += tier.adapter.counters
            totals.update({f"tier.{name}": value for name, value in tier.counters.snapshot().items()})
        totals.update({name: counters[name] for name in (*FAULTS, "orphans_swept")})
        totals["circuits_opened"] = counters["circuit.read.opened"] + counters["circuit.write.opened"]
        totals["adapter_calls"] = sum(value for name, value in counters.items() if name.partition(".")[0] in _CALLS)
        return {name: value for name, value in totals.items() if name in SUMS}


class _ErrorCounter(logging.Handler):
    """Counts what l2kit logs as an error, which is a bug of somebody and no mishap of a backend."""

    def __init__(self, tally: Tally) -> None:
        super().__init__(logging.ERROR)
        self._tally = tally

    def emit(self, record: logging.LogRecord) -> None:
        self._tally.add("errors_logged")
        self._tally.find("error logged", message=record.getMessage()[:2000], traced=record.exc_info is not None)


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    Engine(Spec(sys.argv[1])).live()


if __name__ == "__main__":
    main()
