"""The process that is killed: it stores, replaces and deletes objects as fast as it can, and says what it was told.

``python -m tests.crash.writer URL SEED ROUND``. One line for each batch before it is submitted, and one for each that
has ended: ``? NUMBER {"store": {"3": 9000}}`` and ``! NUMBER ["stored"]``. Each of a few loops has keys of its own, so
what happens to one key happens in order.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys

import anyio

import l2kit

KEYS = 48
LOOPS = 3
SIZES = (1, 4096, 9000, 65_536, 200_000, 700_000, 2_500_000)
#: How often each of `SIZES` is taken.
WEIGHTS = (2, 4, 4, 6, 4, 2, 1)


def key(number: int) -> l2kit.ObjectKey:
    """The key of that number."""
    return l2kit.ObjectKey("crash", hashlib.blake2b(number.to_bytes(4, "little"), digest_size=16).digest())


def content(version: str, nbytes: int) -> bytes:
    """The bytes of one version of one object."""
    return random.Random(version).randbytes(nbytes)


def version_name(seed: int, number: int, batch: int, key_number: int) -> str:
    """What makes the content of a version its own: run, round, batch and key."""
    return f"{seed}/{number}/{batch}/{key_number}"


def say(line: str) -> None:
    """At once: what was said before the kill counts."""
    os.write(1, f"{line}\n".encode())


async def write(url: str, seed: int, number: int) -> None:
    """Until it is killed."""
    batches = iter(range(1 << 30))

    async with l2kit.open_adapter(url, timeout_s=120) as adapter, anyio.create_task_group() as group:
        say("open")

        async def loop(own: int) -> None:
            choice = random.Random(f"{seed}/{number}/{own}")
            mine = list(range(own, KEYS, LOOPS))
            while True:
                batch, some = next(batches), choice.sample(mine, choice.randint(1, 5))
                if choice.random() < 0.2:
                    say(f"? {batch} {json.dumps({'delete': some})}")
                    deleted = await adapter.submit_delete_task([key(one) for one in some])
                    say(f"! {batch} {json.dumps([outcome.status for outcome in deleted])}")
                    continue
                sizes = {one: choice.choices(SIZES, WEIGHTS)[0] for one in some}
                objects = []
                for one, size in sizes.items():
                    obj = l2kit.MemoryObj.allocate(l2kit.Layout.raw(size))
                    obj.segments[0][:] = content(version_name(seed, number, batch, one), size)
                    objects.append(obj)
                say(f"? {batch} {json.dumps({'store': sizes})}")
                stored = await adapter.submit_store_task([key(one) for one in sizes], objects)
                say(f"! {batch} {json.dumps([outcome.status for outcome in stored])}")

        for own in range(LOOPS):
            group.start_soon(loop, own)


if __name__ == "__main__":
    anyio.run(write, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
