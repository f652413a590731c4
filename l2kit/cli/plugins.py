"""``l2kit plugins``: every adapter, codec and policy that is installed, and what cannot be used and why."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

import msgspec

from l2kit.adapter import Capabilities
from l2kit.registry import ADAPTERS, GROUPS, PluginInfo, default_registry


def run(options: argparse.Namespace) -> int:
    """Print the table, or JSON; 1 when something cannot be used."""
    found = default_registry().plugins()
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        print("\n".join(table(found)))
    return 1 if any(plugin.error for plugin in found) else 0


def table(plugins: Sequence[PluginInfo]) -> Iterable[str]:
    """The lines of the table for people: usable plugins by group, then those that are not."""
    usable = [plugin for plugin in plugins if plugin.error is None]
    rows = {group: [_row(plugin) for plugin in usable if plugin.group == group] for group in GROUPS}
    widths = [max((len(row[i]) for part in rows.values() for row in part), default=0) for i in range(3)]
    for group in GROUPS:
        yield group.removeprefix("l2kit.")
        for row in rows[group] or [("-", "", "", "")]:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            yield f"  {'  '.join([*cells, row[3]])}".rstrip()
    broken = [plugin for plugin in plugins if plugin.error is not None]
    if broken:
        yield "cannot be used"
    for plugin in broken:
        yield f"  {shown_name(plugin)}  {plugin.distribution} {plugin.version}"
        yield f"    {' '.join((plugin.error or '').split())}"


def _row(plugin: PluginInfo) -> tuple[str, str, str, str]:
    api = f"API {plugin.api_version}" if plugin.api_version else ""
    described = describe(plugin.capabilities) if plugin.capabilities else ""
    return shown_name(plugin), f"{plugin.distribution} {plugin.version}", api, described


def shown_name(plugin: PluginInfo) -> str:
    """The name as a configuration has it: adapters by URL scheme, in which a ``+`` may stand but no ``_``."""
    return f"{plugin.name.replace('_', '+')}://" if plugin.group == ADAPTERS else plugin.name


def describe(capabilities: Capabilities) -> str:
    """What a backend can do, in one line."""
    said = [name for name in ("persistent", "shared", "evicts") if getattr(capabilities, name)]
    said.append(f"lock={capabilities.lock}")
    if capabilities.alignment > 1:
        said.append(f"alignment={capabilities.alignment}")
    if capabilities.max_object_bytes is not None:
        said.append(f"max_object_bytes={capabilities.max_object_bytes}")
    return ", ".join(said)
