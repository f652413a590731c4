"""``l2kit evict URL``: take objects out of a backend, by name, by age, or down to a size."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final, NamedTuple

import anyio

from l2kit import open_adapter
from l2kit.adapter import KeyInfo, L2Adapter
from l2kit.cli.report import Report
from l2kit.config import parse_size_bytes
from l2kit.errors import ConfigError
from l2kit.inventory import DatedKeyInfo, listing
from l2kit.keys import ObjectKey
from l2kit.outcomes import DeleteStatus

_AT_ONCE: Final = 256
_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)", re.ASCII)
_AGE_UNITS_S: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


class Selection(NamedTuple):
    """Which objects are meant; those that every given condition holds for.

    Attributes:
        namespace: as keys have it.
        prefix: of the canonical text of a key.
        used_before_s: last used before this, in seconds since the epoch.
    """

    namespace: str | None
    prefix: str
    used_before_s: float | None

    def takes(self, info: KeyInfo, name: str) -> bool:
        """Whether an object is meant.

        Raises:
            ConfigError: its age is asked for, and the backend ``name`` does not tell.
        """
        if self.namespace is not None and info.key.namespace != self.namespace:
            return False
        if not info.key.encode().startswith(self.prefix):
            return False
        if self.used_before_s is None:
            return True
        if not isinstance(info, DatedKeyInfo):
            raise ConfigError(
                f"--older-than: {name} does not tell when an object was last used; choose by --namespace, --prefix or "
                "--key, or give --to BYTES where the backend evicts by itself"
            )
        return info.last_used_s < self.used_before_s


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What ``evict`` takes besides the URL."""
    command.add_argument("--key", action="append", default=[], metavar="KEY", help="this object; may be given again")
    command.add_argument("--namespace", metavar="NAME", help="objects of this namespace")
    command.add_argument("--prefix", metavar="TEXT", help="objects whose key begins like this")
    command.add_argument("--older-than", metavar="AGE", help="objects not used for so long: 90s, 30m, 12h, 7d, 2w")
    command.add_argument("--to", metavar="BYTES", help="the least recently used ones, until so much is left: 40GiB")
    command.add_argument("--all", action="store_true", help="every object")
    command.add_argument("--yes", action="store_true", help="mean it (with --all)")
    command.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """One line for each object that went, then the sum; 1 when something that was meant is still there.

    Raises:
        ConfigError: nothing is selected, or what contradicts itself.
    """
    # An empty prefix is mostly a variable of a script that was never set: it does not stand for everything.
    by_property = options.namespace is not None or bool(options.prefix) or options.older_than is not None
    ways = [bool(options.key), by_property, options.to is not None, options.all]
    if not any(ways):
        raise ConfigError("evict: say what: --key, --namespace, --prefix, --older-than, --to, or --all")
    if sum(ways) > 1:
        raise ConfigError("evict: --key, --to and --all each stand alone; the others go together")
    if options.all and not (options.yes or options.dry_run):
        raise ConfigError("evict: --all removes every object of the backend; add --yes, or look first with --dry-run")
    report = Report(as_json=options.json)
    if options.to is not None:
        target_bytes = parse_size_bytes(options.to, where="--to")
        return anyio.run(partial(_shrink, options.url, target_bytes, report, dry_run=options.dry_run))
    keys = [ObjectKey.parse(key) for key in options.key]
    return anyio.run(partial(_evict, options.url, keys, _selection(options), report, dry_run=options.dry_run))


def _selection(options: argparse.Namespace) -> Selection:
    namespace = options.namespace
    if namespace is not None:
        namespace = ObjectKey(namespace, bytes(16)).namespace  # long and odd labels stand hashed in keys
    before_s = None if options.older_than is None else time.time() - _age_s(options.older_than)
    return Selection(namespace, options.prefix or "", before_s)


def _age_s(text: str) -> float:
    match = _AGE.fullmatch(text.strip().lower())
    if match is None:
        raise ConfigError(f"--older-than: {text!r} is no age; write seconds, or 30m, 12h, 7d, 2w")
    return float(match[1]) * _AGE_UNITS_S[match[2]]


async def _evict(url: str, keys: Sequence[ObjectKey], selection: Selection, report: Report, *, dry_run: bool) -> int:
    async with open_adapter(url) as adapter:
        batch: list[KeyInfo] = []
        chosen = _named(adapter, keys) if keys else listing(adapter)
        async with aclosing(chosen) as found:
            async for info in found:
                if keys or selection.takes(info, adapter.name):
                    batch.append(info)
                if len(batch) == _AT_ONCE:
                    await _remove(adapter, batch, report, dry_run=dry_run)
                    batch.clear()
        await _remove(adapter, batch, report, dry_run=dry_run)
    report.end("would be removed" if dry_run else "removed", dry_run=dry_run)
    return 1 if report.failures else 0


async def _named(adapter: L2Adapter[Any], keys: Sequence[ObjectKey]) -> AsyncGenerator[KeyInfo, None]:
    """Those of ``keys`` that are there; works where a backend cannot list."""
    found = await adapter.submit_lookup_and_lock_task(keys)
    hits = [KeyInfo(key, outcome.size) for key, outcome in zip(keys, found, strict=True) if outcome.hit]
    await adapter.submit_unlock_task([info.key for info in hits])
    for outcome in found:
        if outcome.error is not None:
            raise outcome.error
    for info in hits:
        yield info


async def _remove(adapter: L2Adapter[Any], batch: Sequence[KeyInfo], report: Report, *, dry_run: bool) -> None:
    if dry_run:
        for info in batch:
            report.done(info.key, info.size)
        return
    outcomes = await adapter.submit_delete_task([info.key for info in batch])
    for info, outcome in zip(batch, outcomes, strict=True):
        if outcome.status is DeleteStatus.DELETED:
            report.done(info.key, info.size)
        elif outcome.error is not None:
            report.failed(info.key, f"not removed: {outcome.error}")


async def _shrink(url: str, target_bytes: int, report: Report, *, dry_run: bool) -> int:
    """Have the backend itself make room: opened with a smaller limit, it gives up what was used least recently."""
    plain = open_adapter(url)
    if not (plain.capabilities.persistent and "max_bytes" in plain.config.__struct_fields__):
        raise ConfigError(
            f"--to: {plain.name} has no limit of its own (an option max_bytes) that it evicts down to; choose by "
            "--namespace, --prefix, --key or --older-than"
        )
    before: dict[ObjectKey, int] = {}
    async with plain, aclosing(listing(plain)) as found:
        used_bytes = (await plain.usage()).used_bytes
        if used_bytes > target_bytes and not dry_run:
            before = {info.key: info.size async for info in found}
    if dry_run and used_bytes > target_bytes:
        report.note(f"{used_bytes - target_bytes} of {used_bytes} bytes would go; the backend chooses, by last use")
    elif used_bytes > target_bytes:
        async with open_adapter(url, max_bytes=target_bytes) as adapter:
            used_bytes = (await adapter.usage()).used_bytes
            async with aclosing(listing(adapter)) as found:
                async for info in found:
                    before.pop(info.key, None)
        for key, size in before.items():
            report.done(key, size)
    report.end("removed", bytes_in_use=used_bytes, dry_run=dry_run)
    return 1 if used_bytes > target_bytes and not dry_run else 0
