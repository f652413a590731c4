"""Whether what lies at the paths is our slab, nothing, or something else: opened, made, or refused.

Nothing is ever overwritten that could be somebody's: a slab of another shape, a part of another slab, a file system.
Only ``reset`` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from l2kit.errors import ConfigError
from l2kit_nvme.config import NvmeConfig
from l2kit_nvme.geometry import HEADER_BYTES, PAGE_BYTES, Superblock, newest, plan
from l2kit_nvme.medium import Medium

_PREFILL_BYTES: Final = 4 << 20
_RESET: Final = "set reset=true for one opening to make a new, empty slab over it"


def open_medium(medium: Medium, config: NvmeConfig, checkpoint: Callable[[], None]) -> None:
    """Open all members of ``medium``, which nobody else has then, and make the slab where there is none.

    Raises:
        ConfigError: something else lies there, or another slab than the options describe.
        TransientBackendError: somebody else has it open.
        OSError: a member cannot be opened, or has not so much space. A file that was made for it is removed again.
    """
    try:
        for member in medium.members:
            member.open(create=config.size_bytes is not None)
        superblocks = [None if config.reset else newest(member.superblock_copies()) for member in medium.members]
        known = [superblock for superblock in superblocks if superblock is not None]
        if known:
            _use(medium, config, superblocks, known)
        else:
            _make(medium, config)
    except BaseException:
        for member in medium.members:
            if member.created:
                with suppress(OSError):
                    Path(member.path).unlink()
        raise
    for member in medium.members:
        member.note_owner()
    if config.direct:
        medium.probe_direct()
    if config.prefill and not known:
        for member in medium.members:
            for offset in range(HEADER_BYTES, medium.geometry.member_bytes, _PREFILL_BYTES):
                checkpoint()
                member.clear(offset, min(_PREFILL_BYTES, medium.geometry.member_bytes - offset))
            member.flush()


def _make(medium: Medium, config: NvmeConfig) -> None:
    for member in medium.members:
        if not config.reset and not member.is_blank():
            raise ConfigError(f"path: {member.path} holds something that is no slab; name another path, or {_RESET}")
        if member.is_device:
            if config.size_bytes is not None and config.size_bytes > member.size:
                raise ConfigError(f"size_bytes: {config.size_bytes} is more than {member.path} has ({member.size})")
        elif config.size_bytes is None and not member.size:
            raise ConfigError(f"size_bytes: say how large to make the slab {member.path}, for example 100GiB")
    smallest = config.size_bytes or min(member.size for member in medium.members)
    geometry = plan(smallest, len(medium.members), config.max_objects)
    for member in medium.members:
        if not member.is_device:
            member.allocate(geometry.member_bytes)
    medium.format(geometry)


def _use(
    medium: Medium, config: NvmeConfig, superblocks: Sequence[Superblock | None], known: Sequence[Superblock]
) -> None:
    for member, superblock in zip(medium.members, superblocks, strict=True):
        if superblock is None:
            raise ConfigError(f"paths: {member.path} is no part of the slab of the others; name its part, or {_RESET}")
        if superblock.slab_id != known[0].slab_id:
            raise ConfigError(
                f"paths: {member.path} and {medium.members[0].path} are parts of different slabs; name those of one, "
                f"or {_RESET}"
            )
    geometry = known[0].geometry
    if {superblock.member for superblock in known} != set(range(geometry.members)):
        raise ConfigError(
            f"paths: the slab is striped over {geometry.members} files or devices, {len(known)} are named; name all of "
            f"them, each once, or {_RESET}"
        )
    order = sorted(zip(known, medium.members, strict=True), key=lambda pair: pair[0].member)
    medium.members[:] = [member for _, member in order]
    _check(config, medium, known[0])
    medium.use([superblock for superblock, _ in order])


def _check(config: NvmeConfig, medium: Medium, superblock: Superblock) -> None:
    geometry = superblock.geometry
    wanted = config.size_bytes
    if wanted is not None and wanted // PAGE_BYTES * PAGE_BYTES != geometry.member_bytes:
        raise ConfigError(
            f"size_bytes: {wanted} is not what the slab {config.path} was made with ({geometry.member_bytes}); name "
            f"that size or none, or {_RESET}"
        )
    if config.max_objects is not None and config.max_objects != geometry.records:
        raise ConfigError(
            f"max_objects: {config.max_objects} is not what the slab {config.path} was made with "
            f"({geometry.records}); name that number or none, or {_RESET}"
        )
    for member in medium.members:
        if member.size < geometry.member_bytes:
            raise ConfigError(
                f"path: {member.path} was made with {geometry.member_bytes} bytes and has {member.size}; restore it, "
                f"or {_RESET}"
            )
