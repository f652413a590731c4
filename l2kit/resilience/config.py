"""The options of resilience, per tier: ``resilience = { max_retries = 0 }``; in a URL ``resilience.max_retries=0``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from l2kit.config import PositiveInt, PositiveSeconds

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class ResilienceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a tier is protected from its backend, and its backend from the tier.

    Attributes:
        enabled: false leaves the adapter bare: its own time-outs are all there is.
        reopen: whether a tier whose backend cannot be reached at start-up is left out until it can be, rather than keep
            the engine from starting. Wrong options and credentials are errors either way.
        operation_timeout_s: longest time for one call of the backend, be it one key or one lookup; by default half of
            the tier's ``timeout_s``, so that one key that hangs leaves the rest of its batch some time.
        max_retries: how often one key is tried again after a failure that may pass (connection lost, busy). Time-outs
            are not retried: the time is gone.
        retry_share: retries are at most this share of all operations, beyond a first ``retry_burst``; a backend that
            fails for everybody is not hit harder for it.
        retry_burst: retries that may come at once.
        breaker: whether a tier that keeps failing is left alone for a while: lookups and loads are misses at once,
            stores are dropped. Reads and writes are judged apart: a full disk can still be read.
        breaker_calls: the breaker judges by this many of the latest calls, and not before it has seen a quarter.
        breaker_failures: the share of failures among them that opens the circuit.
        breaker_pause_s: how long it stays open before a probe is sent; doubles with each probe that fails.
        breaker_max_pause_s: the longest pause.
        max_inflight_bytes: objects in transfer at once. Loads go first; stores get half of it at most.
        max_waiting_store_bytes: stores that wait for their turn beyond this are dropped and counted.
    """

    enabled: bool = True
    reopen: bool = True
    operation_timeout_s: PositiveSeconds | None = None
    max_retries: Count = 2
    retry_share: Share = 0.1
    retry_burst: PositiveInt = 10
    breaker: bool = True
    breaker_calls: PositiveInt = 20
    breaker_failures: Share = 0.5
    breaker_pause_s: PositiveSeconds = 1.0
    breaker_max_pause_s: PositiveSeconds = 30.0
    max_inflight_bytes: PositiveInt = 256 << 20
    max_waiting_store_bytes: PositiveInt = 1 << 30
