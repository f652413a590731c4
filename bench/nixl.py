"""``nixl+posix://`` and ``nixl+ucx://`` beside bare NIXL transfers of the same bytes, and LMCache's ``nixl_store``.

All memory of a batch lies in one map, as in L1, and is registered once by everybody. Bare NIXL moves a batch in one
transfer: over files that it opens, registers, closes and renames, or to places in a pool that it was given before. By
itself: ``python bench/nixl.py [--quick] [--json FILE]``. Ours makes and verifies checksums; the others do not, so the
adapter's own reads and writes, without checksums, stand beside bare NIXL as well: these have the target.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import mmap
import os
import select
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import l2kit
from bench.lmcache_peer import why_missing
from bench.objects import VERIFIED, Batch, blocking, our_load, our_store
from bench.pairs import Result, Side, Target, Work, compare_all, run_all
from l2kit.items import LoadItem, StoreItem

ItemT = TypeVar("ItemT")

_SHAPES: Final = [(256, 64 << 10), (64, 1 << 20), (16, 4 << 20), (4, 32 << 20)]
_BARE: Final = "bare nixl"
_TARGET: Final = {_BARE: Target(0.9)}
#: Objects that go to an adapter in one call have so many bytes together, as the framework has it.
_GROUP_BYTES: Final = 16 << 20
_POOL_BYTES: Final = "1GiB"
_TIMEOUT_S: Final = 60
#: Pages of LMCache's L1, which are its descriptors, too.
_PEER_PAGE_BYTES: Final = 4096


async def measure(*, quick: bool) -> list[Result]:
    """Compare for objects from 64 KiB to 32 MiB, files in the folder for temporary files (``TMPDIR``)."""
    if importlib.util.find_spec("nixl") is None:
        print("# nixl: the package is not installed here")
        return []
    rounds = 5 if quick else 15
    return [*await _measure_files(rounds), *await _measure_pool(rounds)]


async def _measure_files(rounds: int) -> list[Result]:
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="l2kit-bench-") as name:
        folder = Path(name)
        async with l2kit.open_adapter(f"nixl+posix://{folder / 'ours'}") as adapter:
            for count, nbytes in _SHAPES:
                batch = _ArenaBatch(count, nbytes)
                with contextlib.ExitStack() as stack:
                    bare = _BareFiles(folder / f"bare-{nbytes}", batch)
                    stack.callback(bare.close)
                    peers = [stack.enter_context(contextlib.closing(peer)) for peer in _peers(folder, batch)]
                    results += await _compare(
                        "nixl+posix://",
                        adapter,
                        batch,
                        [*(peer.storing() for peer in peers), bare.storing()],
                        [*(peer.loading() for peer in peers), bare.loading()],
                        rounds,
                    )
                    await adapter.submit_delete_task(batch.keys)
    return results


async def _measure_pool(rounds: int) -> list[Result]:
    testing = importlib.import_module("l2kit_nixl.testing")
    results: list[Result] = []
    with testing.running_pool(max_bytes=_POOL_BYTES) as pool:
        async with l2kit.open_adapter(pool.url) as adapter:
            for count, nbytes in _SHAPES:
                batch = _ArenaBatch(count, nbytes)
                with contextlib.closing(_BarePool(pool.where, batch)) as bare:
                    sides = [bare.storing()], [bare.loading()]
                    results += await _compare("nixl+ucx://", adapter, batch, *sides, rounds)
                    await adapter.submit_delete_task(batch.keys)
    return results


async def _compare(
    scheme: str, adapter: l2kit.L2Adapter[Any], batch: Batch, storing: list[Side], loading: list[Side], rounds: int
) -> list[Result]:
    common: dict[str, Any] = {"amount": batch.gigabytes, "unit": "GB/s", "rounds": rounds}
    results = await compare_all(
        f"{scheme} store {batch.size}", our_store(adapter, batch), storing, note=VERIFIED, **common
    )
    results += await compare_all(
        f"{scheme} store without checksums {batch.size}",
        _sealed(adapter, batch),
        storing[-1:],
        targets=_TARGET,
        note="the adapter's own writes; neither side makes checksums",
        **common,
    )
    results += await compare_all(
        f"{scheme} load {batch.size}", our_load(adapter, batch), loading, note=VERIFIED, **common
    )
    results += await compare_all(
        f"{scheme} load without verification {batch.size}",
        _unverified(adapter, batch),
        loading[-1:],
        targets=_TARGET,
        note="the adapter's own reads; neither side verifies",
        **common,
    )
    return results


def _sealed(adapter: l2kit.L2Adapter[Any], batch: Batch) -> Side:
    """The adapter's own writes, in groups as the framework makes them."""
    items = [StoreItem(key, source, adapter) for key, source in zip(batch.keys, batch.sources, strict=True)]
    for item in items:
        item.data()  # makes the checksum, once and for all

    async def store_group(group: list[StoreItem]) -> None:
        for status in await adapter.store_many(group):
            assert status is l2kit.StoreStatus.STORED, status

    async def store() -> None:
        await adapter.for_each(_grouped(items, adapter, batch), store_group)

    return Side(name="ours", work=store, before=our_store(adapter, batch).before)


def _grouped(items: list[ItemT], adapter: l2kit.L2Adapter[Any], batch: Batch) -> list[list[ItemT]]:
    most = max(1, min(_GROUP_BYTES // batch.nbytes, adapter.capabilities.group_keys))
    return [items[start : start + most] for start in range(0, len(items), most)]


class _Unverified(LoadItem):
    """Takes what it gets."""

    def verify(self, size: int | None) -> None:
        """Nothing."""


def _unverified(adapter: l2kit.L2Adapter[Any], batch: Batch) -> Side:
    """The adapter's own reads, in groups as the framework makes them."""
    items = [_Unverified(key, target, adapter) for key, target in zip(batch.keys, batch.targets, strict=True)]

    async def load_group(group: list[_Unverified]) -> None:
        for size in await adapter.load_many(group):
            assert isinstance(size, int), size

    async def load() -> None:
        await adapter.for_each(_grouped(items, adapter, batch), load_group)

    return Side(name="ours", work=load, first=batch.proven(load))


class _ArenaBatch(Batch):
    """A batch whose sources and targets lie in one memory map, sources first."""

    def __init__(self, count: int, nbytes: int) -> None:
        super().__init__(count, nbytes)
        self.arena = mmap.mmap(-1, 2 * count * nbytes)
        view = memoryview(self.arena)
        layout = l2kit.Layout.raw(nbytes)
        slots = [view[index * nbytes : (index + 1) * nbytes] for index in range(2 * count)]
        for slot, source in zip(slots, self.sources, strict=False):
            slot[:] = source.segments[0]
        self.sources = [l2kit.MemoryObj.wrap(slot, layout) for slot in slots[:count]]
        self.targets = [l2kit.MemoryObj.wrap(slot, layout) for slot in slots[count:]]

    def offset(self, index: int, *, target: bool) -> int:
        """Where an object lies in the map."""
        return (index + (len(self.keys) if target else 0)) * self.nbytes


class _Bare:
    """One agent with the batch's map registered."""

    def __init__(self, plugin: str, batch: _ArenaBatch) -> None:
        api = importlib.import_module("nixl._api")
        self.batch = batch
        self.agent: Any = api.nixl_agent(f"bare-{os.urandom(8).hex()}", api.nixl_agent_config(backends=[]))
        self.agent.create_backend(plugin, {})
        numpy = importlib.import_module("numpy")
        self.base = numpy.frombuffer(batch.arena, dtype=numpy.uint8).__array_interface__["data"][0]
        self.registered = self.agent.register_memory([(self.base, len(batch.arena), 0, "")], "DRAM")

    def close(self) -> None:
        self.agent.deregister_memory(self.registered)
        self.agent = None

    def near(self, *, target: bool) -> Any:
        nbytes = self.batch.nbytes
        offsets = [self.batch.offset(index, target=target) for index in range(len(self.batch.keys))]
        return self.agent.get_xfer_descs([(self.base + offset, nbytes, 0) for offset in offsets], "DRAM")

    def transfer(self, operation: str, near: Any, far: Any, remote: str) -> None:
        handle = self.agent.initialize_xfer(operation, near, far, remote)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE", state
        self.agent.release_xfer_handle(handle)


class _BareFiles(_Bare):
    """Files: temporary name, one transfer, rename; open, one transfer."""

    def __init__(self, folder: Path, batch: _ArenaBatch) -> None:
        super().__init__("POSIX", batch)
        folder.mkdir()
        self._folder = folder

    def storing(self) -> Side:
        def store() -> None:
            self._move("WRITE", os.O_CREAT | os.O_RDWR | os.O_EXCL, ".new", target=False)
            for index in range(len(self.batch.keys)):
                os.rename(f"{self._folder}/{index}.new", f"{self._folder}/{index}")  # noqa: PTH104 - not to time paths

        def delete() -> None:
            for path in self._folder.iterdir():
                path.unlink()

        return Side(name=_BARE, work=blocking(store), before=blocking(delete))

    def loading(self) -> Side:
        work = blocking(lambda: self._move("READ", os.O_RDONLY, "", target=True))
        return Side(name=_BARE, work=work, first=self.batch.proven(work))

    def _move(self, operation: str, flags: int, suffix: str, *, target: bool) -> None:
        fds = [os.open(f"{self._folder}/{index}{suffix}", flags) for index in range(len(self.batch.keys))]
        try:
            files = self.agent.register_memory([(0, self.batch.nbytes, fd, "") for fd in fds], "FILE")
            far = self.agent.get_xfer_descs([(0, self.batch.nbytes, fd) for fd in fds], "FILE")
            self.transfer(operation, self.near(target=target), far, self.agent.name)
            self.agent.deregister_memory(files)
        finally:
            for fd in fds:
                os.close(fd)


class _BarePool(_Bare):
    """The memory of a pool, at places that were reserved before and are used again and again."""

    def __init__(self, where: str, batch: _ArenaBatch) -> None:
        super().__init__("UCX", batch)
        client = importlib.import_module("l2kit_nixl.pool_client")
        say = importlib.import_module("l2kit_nixl.pool_protocol")
        host, _, port = where.rpartition(":")
        self._link = client.PoolLink(client.PoolTarget("bare", host, int(port), None, None, os.urandom(16), 5.0, 5.0))
        names = [l2kit.ObjectKey("bare", os.urandom(16)).encode() for _ in batch.keys]
        places = self._link.ask(say.Reserve(names, [batch.nbytes] * len(names)), say.Places).places
        self._generations = [place.generation for place in places]
        self._abandon: Callable[[], Any] = lambda: self._link.ask(say.Abandon(self._generations), say.Flags)
        self._remote = self.agent.add_remote_agent(self._link.metadata)
        self._far = self.agent.get_xfer_descs([(place.address, place.size, 0) for place in places], "DRAM")

    def close(self) -> None:
        self._abandon()
        self._link.close()
        super().close()

    def storing(self) -> Side:
        return Side(name=_BARE, work=self._moving("WRITE", target=False))

    def loading(self) -> Side:
        work = self._moving("READ", target=True)
        return Side(name=_BARE, work=work, first=self.batch.proven(work))

    def _moving(self, operation: str, *, target: bool) -> Work:
        near = self.near(target=target)
        return blocking(lambda: self.transfer(operation, near, self._far, self._remote))


def _peers(folder: Path, batch: _ArenaBatch) -> Iterator[_NixlStorePeer]:
    reason = why_missing()
    if reason is None:
        try:
            yield _NixlStorePeer(folder / f"peer-{batch.nbytes}", batch)
        except Exception as error:  # its own package's: whatever keeps it from running here is worth a line, not an end
            reason = f"{type(error).__name__}: {error}"
        else:
            return
    print(f"# no LMCache nixl_store for {batch.size}: {reason}")


class _NixlStorePeer:
    """LMCache's ``nixl_store`` with the plugin POSIX: files that it makes and opens beforehand, 4 KiB pages."""

    def __init__(self, folder: Path, batch: _ArenaBatch) -> None:
        adapters = importlib.import_module("lmcache.v1.distributed.l2_adapters")
        configs = importlib.import_module("lmcache.v1.distributed.l2_adapters.config")
        internal = importlib.import_module("lmcache.v1.distributed.internal_api")
        numpy = importlib.import_module("numpy")
        base = numpy.frombuffer(batch.arena, dtype=numpy.uint8).__array_interface__["data"][0]
        options = {
            "type": "nixl_store",
            "backend": "POSIX",
            "backend_params": {
                "file_path": str(folder),
                "use_direct_io": "false",
                "file_size": str(batch.nbytes),
            },
            "pool_size": len(batch.keys),
        }
        config = configs.get_l2_adapter_config_class("nixl_store").from_dict(options)
        memory = internal.L1MemoryDesc(ptr=base, size=len(batch.arena), align_bytes=_PEER_PAGE_BYTES)
        self.name = f"LMCache {importlib.metadata.version('lmcache')} nixl_store"
        self._batch = batch
        self._adapter: Any = adapters.create_l2_adapter(config, memory)
        make_key: Any = importlib.import_module("lmcache.v1.distributed.api").ObjectKey
        self._keys = [make_key(chunk_hash=key.chunk_hash, model_name="bench", kv_rank=0) for key in batch.keys]

    def close(self) -> None:
        self._adapter.close()

    def storing(self) -> Side:
        objects = self._objects(target=False)

        def store() -> None:
            task = self._adapter.submit_store_task(self._keys, objects)
            take = lambda: self._adapter.pop_completed_store_tasks().get(task)  # noqa: E731
            assert _wait(self._adapter.get_store_event_fd(), take).is_successful()

        return Side(name=self.name, work=blocking(store), before=blocking(lambda: self._adapter.delete(self._keys)))

    def loading(self) -> Side:
        objects = self._objects(target=True)

        def load() -> None:
            task = self._adapter.submit_load_task(self._keys, objects)
            found = _wait(self._adapter.get_load_event_fd(), lambda: self._adapter.query_load_result(task))
            assert found.popcount() == len(self._keys)

        return Side(name=self.name, work=blocking(load), first=self._batch.proven(blocking(load)))

    def _objects(self, *, target: bool) -> list[Any]:
        torch = importlib.import_module("torch")
        memory = importlib.import_module("lmcache.v1.memory_management")
        described: list[Any] = []
        for index, obj in enumerate(self._batch.targets if target else self._batch.sources):
            metadata = memory.MemoryObjMetadata(
                shape=torch.Size([obj.nbytes]),
                dtype=torch.uint8,
                address=self._batch.offset(index, target=target),
                phy_size=obj.nbytes,
                fmt=memory.MemoryFormat.KV_2LTD,
                ref_count=1,
            )
            tensor = torch.frombuffer(obj.segments[0], dtype=torch.uint8)
            described.append(memory.TensorMemoryObj(raw_data=tensor, metadata=metadata, parent_allocator=None))
        return described


def _wait(event_fd: int, take: Callable[[], Any]) -> Any:
    """Wait for the descriptor until the result is there, and return it."""
    poll = select.poll()
    poll.register(event_fd, select.POLLIN)
    while True:
        assert poll.poll(_TIMEOUT_S * 1000), "LMCache did not finish in time"
        os.eventfd_read(event_fd)
        result = take()
        if result is not None:
            return result


if __name__ == "__main__":
    # A script's own folder comes first, and this file would be taken for the package.
    sys.path = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    run_all({"nixl": measure}, "NIXL, beside peers.", by_name=False)
