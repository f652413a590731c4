"""The storage of one engine: a small L1, and two tiers, most of them hurt after a random plan of their own."""

from __future__ import annotations

import math
from random import Random
from typing import Any, Final

from l2kit.faults import KINDS, OPERATIONS
from l2kit.faults.plan import Kind, Operation

L1_BYTES: Final = 6 << 20
FILE_TIER_BYTES: Final = 24 << 20
SERVER_BYTES: Final = 24 << 20

#: So many tiers are hurt from outside only: nothing stands between l2kit and the backend.
_BARE: Final = 0.2

#: These keep a call until its own time-out, or a thread beyond it.
_LONG: Final = ("hang", "stuck")


def storage_config(random: Random, directory: str, redis_url: str) -> dict[str, Any]:
    """Options for `open_storage`; which tier is preferred is left to chance, too."""
    urls = {"file": f"file://{directory}?max_bytes={FILE_TIER_BYTES}", "server": redis_url}
    tiers: list[dict[str, Any]] = []
    for name, url in urls.items():
        tier: dict[str, Any] = {"name": name, "timeout_s": 1.0, "open_timeout_s": 3.0}
        tier["resilience"] = {"breaker_pause_s": 0.3, "breaker_max_pause_s": 2.0}
        if random.random() < _BARE:
            tier["url"] = url
        else:
            tier["url"] = f"fault+{url}"
            tier["fault"] = fault_options(random)
        tiers.append(tier)
    random.shuffle(tiers)
    return {
        "chunk_size": 16,
        "l1": {"max_bytes": L1_BYTES},
        "tiers": tiers,
        "lookup_timeout_s": 1.0,
        "drain_timeout_s": 5.0,
    }


def fault_options(random: Random) -> dict[str, Any]:
    """Every kind of fault at every operation that it can hurt, each at a rate of its own, and sometimes an outage."""
    options: dict[str, Any] = {"seed": random.randrange(1 << 31)}
    for operation in OPERATIONS:
        kinds = [kind for kind, operations in KINDS.items() if operation in operations]
        options[operation] = [_rule(kind, operation, random) for kind in kinds]
    outage = random.choice(("error", "hang", "busy", "denied", "disconnect", None, None))
    if outage is not None:
        first, calls = random.randint(20, 400), random.randint(5, 40)
        options[random.choice(("lookup", "load", "store"))].insert(0, f"{outage}@{first}-{first + calls}")
    return options


def _rule(kind: Kind, operation: Operation, random: Random) -> str:
    if operation == "open":
        probability = 0.01
    else:
        low, high = (0.0005, 0.004) if kind in _LONG else (0.003, 0.02)
        probability = math.exp(random.uniform(math.log(low), math.log(high)))
    value = {
        "latency": f":{random.uniform(0.01, 0.1):.3f}",
        "jitter": f":{random.uniform(0.02, 0.2):.3f}",
        "stuck": f":{random.uniform(0.2, 3.0):.3f}",
        "slow": f":{int(math.exp(random.uniform(math.log(1 << 16), math.log(1 << 22))))}",
    }.get(kind, "")
    return f"{kind}{value}~{probability:.5f}"
