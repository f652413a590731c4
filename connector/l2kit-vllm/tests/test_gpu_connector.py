"""Gather, scatter and copy against a reference that knows only where single elements lie.

Every test compares the whole storage, so a byte written next to the slots that were meant is a failure.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from l2kit import ConfigError, Layout, MemoryObj
from l2kit.layout import DTYPES
from l2kit_vllm.cuda_transfers import CudaTransfers
from l2kit_vllm.device_pages import DevicePages
from l2kit_vllm.gpu_connector import Chunk, GPUConnector, Representation
from l2kit_vllm.object_bytes import Span
from l2kit_vllm.page_geometry import Arrangement
from l2kit_vllm.paged_layout import PagedLayout

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

# What an allocator may do with each arrangement: axes from outermost to innermost, L the layers.
ORDERS = {
    Arrangement.HND_PACKED: ("LBHNC", "BLHNC", "LHBNC", "BHLNC"),
    Arrangement.NHD_PACKED: ("LBNHC", "BLNHC"),
    Arrangement.CPU_VEC: ("LBHNC",),
    Arrangement.CPU_AMX: ("LBHNC",),
    Arrangement.NHD_SPLIT: ("L2BNHD", "2LBNHD"),
    Arrangement.HND_SPLIT: ("L2BHND",),
    Arrangement.NHD_BLOCKS: ("LB2NHD", "BL2NHD", "L2BNHD"),
    Arrangement.HND_BLOCKS: ("LB2HND", "BL2HND"),
    Arrangement.MLA: ("LBHNC", "BLHNC", "LBNC"),
}
DTYPE_TENSORS = [
    ("bfloat16", torch.bfloat16),
    ("float16", torch.float16),
    ("float32", torch.float32),
    ("float8_e4m3fn", torch.uint8),
    ("float8_e5m2", torch.float8_e5m2),
]


@dataclass
class Pool:
    """Paged tensors in one storage full of noise, and the element offset of every slot in it."""

    layout: PagedLayout
    storage: torch.Tensor
    tensors: dict[str, torch.Tensor]
    slots: list[Ints]  # K and V, or the latent: [layer, page, token, head, element]

    @property
    def bytes(self) -> Bytes:
        return np.asarray(self.storage.numpy())

    @property
    def elements(self) -> npt.NDArray[Any]:
        return self.bytes.view(f"u{self.layout.page.itemsize}")

    def token_slots(self, block_ids: list[int], start: int, end: int) -> Ints:
        """Elements of tokens in canonical order: plane, layer, token, head, element; flat."""
        tokens = np.arange(start, end)
        block = np.array(block_ids, np.int64)[tokens // self.layout.block_size]
        page, place = np.divmod(tokens % self.layout.block_size, self.layout.page.tokens)
        page += block * self.layout.pages_per_block
        return np.concatenate([plane[:, page, place].ravel() for plane in self.slots])

    def block_elements(self, block_ids: list[int], layer: int) -> npt.NDArray[Any]:
        """Native bytes of blocks of a layer: each page's elements in the order of their addresses."""
        ratio = self.layout.pages_per_block
        pages = [block * ratio + i for block in block_ids for i in range(ratio)]
        places = [np.sort(np.concatenate([plane[layer, page].ravel() for plane in self.slots])) for page in pages]
        return np.take(self.elements, np.concatenate(places))


def make_pool(layout: PagedLayout, torch_dtype: torch.dtype, order: str, *, pad: int = 0, lead: int = 0) -> Pool:
    page, arrangement = layout.page, layout.arrangement
    sizes = page.sizes(layout.num_pages) | {"L": len(layout.layers)}
    strides: dict[str, int] = {}
    step = 1
    for axis in reversed(order):
        if axis in "LB" and not strides.keys() & set("LB"):
            step += pad
        strides[axis] = step
        step *= sizes[axis]
    total = lead + step
    storage = torch.from_numpy(np.random.default_rng(step).integers(0, 256, total * page.itemsize, dtype=np.uint8))
    where = torch.arange(total)
    axes = "2BNHD" if arrangement.name.endswith("SPLIT") else "B2NHD" if "BLOCKS" in arrangement.name else "BHNC"
    if "H" not in order:
        axes = axes.replace("H", "")
    shape, steps = [sizes[a] for a in axes], [strides[a] for a in axes]
    tensors, slots = {}, []
    for index, name in enumerate(layout.layers):
        at = lead + index * strides["L"]
        typed = storage.view(torch_dtype)
        tensors[name] = torch.as_strided(typed, shape, steps, at)
        slots.append(naive_slots(torch.as_strided(where, shape, steps, at), layout))
    return Pool(layout, storage, tensors, [np.stack(plane) for plane in zip(*slots, strict=True)])


def naive_slots(where: torch.Tensor, layout: PagedLayout) -> list[Ints]:
    """[page, token, head, element] -> element offset, of K and V; every arrangement from its written definition."""
    n, h, d = layout.page.tokens, layout.kv_heads, layout.head_dim
    match layout.arrangement:
        case Arrangement.MLA:
            return [where.reshape(layout.num_pages, n, 1, d).numpy()]
        case Arrangement.HND_PACKED | Arrangement.NHD_PACKED:
            rows = where.permute(0, 2, 1, 3)
            return [rows[..., :d].numpy(), rows[..., d:].numpy()]
        case Arrangement.NHD_SPLIT | Arrangement.HND_SPLIT:
            return [*where.numpy()]
        case Arrangement.NHD_BLOCKS | Arrangement.HND_BLOCKS:
            return [*where.permute(1, 0, 2, 3, 4).numpy()]
    heads = where.reshape(layout.num_pages, h, 2 * n * d).numpy()
    t, e = np.arange(n)[:, None], np.arange(d)
    if layout.arrangement is Arrangement.CPU_VEC:
        k, v = e * n + t, n * d + t * d + e
    else:
        k = t // 16 * 16 * d + e // 2 * 32 + t % 16 * 2 + e % 2
        v = n * d + e // 16 * 16 * n + t // 2 * 32 + e % 16 * 2 + t % 2
    return [heads[:, :, places].swapaxes(1, 2) for places in (k, v)]


@st.composite
def layouts(
    draw: st.DrawFn, /, arrangement: Arrangement, dtype: str, *, equal: bool = True, **fixed: Any
) -> PagedLayout:
    amx, mla = arrangement is Arrangement.CPU_AMX, arrangement is Arrangement.MLA
    if DTYPES[dtype][1] > 2 and amx:
        dtype = "float16"
    kernel = draw(st.sampled_from([32] if amx else [1, 2, 5, 16]))
    values: dict[str, Any] = {
        "layers": tuple(f"layer.{i}" for i in range(draw(st.integers(1, 3)))),
        "num_blocks": draw(st.integers(3, 8)),
        "block_size": kernel * draw(st.sampled_from([1, 1, 2])),
        "kernel_block_size": kernel,
        "kv_heads": 1 if mla else draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from([16, 32] if amx else [1, 4, 6])),
        "dtype": dtype,
    }
    if arrangement.name.endswith("PACKED") and "head_dim" not in fixed:
        values["head_dim_v"] = draw(st.sampled_from([values["head_dim"], *([] if equal else [3])]))
    return PagedLayout(arrangement, **(values | fixed))


def pool_of(draw: st.DrawFn, layout: PagedLayout) -> Pool:
    order = draw(st.sampled_from(ORDERS[layout.arrangement]))
    torch_dtype = dict(DTYPE_TENSORS)[layout.dtype]
    pad = draw(st.sampled_from([0, 0, 8])) if layout.pages_per_block == 1 else 0
    return make_pool(layout, torch_dtype, order, pad=pad, lead=draw(st.sampled_from([0, 8])))


@dataclass
class Case:
    source: Pool
    target: Pool
    source_ids: list[int]
    target_ids: list[int]
    start: int
    end: int
    skip: int
    segments: int


@st.composite
def cases(draw: st.DrawFn, /, arrangement: Arrangement, representation: Representation) -> Case:
    dtype = draw(st.sampled_from([name for name, _ in DTYPE_TENSORS]))
    layout = draw(layouts(arrangement, dtype, equal=representation == "canonical"))
    source, target = pool_of(draw, layout), pool_of(draw, layout)
    count = draw(st.integers(1, layout.num_blocks))
    table = st.permutations(range(layout.num_blocks))
    unit = layout.block_size if representation == "native" else 1
    last = count * layout.block_size // unit
    start = draw(st.integers(0, last - 1))
    end = draw(st.integers(start + 1, last))
    skip = draw(st.integers(0, (end - start) * unit))
    source_ids, target_ids = draw(table)[:count], draw(table)[:count]
    return Case(source, target, source_ids, target_ids, start * unit, end * unit, skip, draw(st.integers(1, 3)))


def object_of(layout: Layout, segments: int = 1) -> MemoryObj:
    """An object in ``segments`` pieces that are cut without regard to layers."""
    memory = np.zeros(layout.nbytes, np.uint8)
    cuts = [layout.nbytes * i // segments for i in range(segments + 1)]
    return MemoryObj.wrap([memory[a:b].data for a, b in itertools.pairwise(cuts) if a < b], layout)


def expected_object(case: Case, representation: Representation) -> bytes:
    pool, size = case.source, case.source.layout.block_size
    if representation == "canonical":
        return pool.elements[pool.token_slots(case.source_ids, case.start, case.end)].tobytes()
    blocks = case.source_ids[case.start // size : case.end // size]
    return b"".join(pool.block_elements(blocks, layer).tobytes() for layer in range(len(pool.layout.layers)))


def expected_pool(case: Case) -> Bytes:
    wanted = case.target.elements.copy()
    first = case.start + case.skip
    if first < case.end:
        source = case.source.token_slots(case.source_ids, first, case.end)
        wanted[case.target.token_slots(case.target_ids, first, case.end)] = case.source.elements[source]
    return wanted.view(np.uint8)


quick = settings(max_examples=8, deadline=None)
REPRESENTATIONS: list[Representation] = ["native", "canonical"]
every = pytest.mark.parametrize("representation", REPRESENTATIONS)
each = pytest.mark.parametrize("arrangement", list(Arrangement), ids=str)


@each
@every
@given(data=st.data())
@quick
def test_tokens_move_and_nothing_else(arrangement: Arrangement, representation: Representation, data: Any) -> None:
    check_move(data.draw(cases(arrangement, representation)), representation)


@pytest.mark.slow
@each
@every
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_tokens_move_in_many_more_cases(arrangement: Arrangement, representation: Representation, data: Any) -> None:
    check_move(data.draw(cases(arrangement, representation)), representation)


def check_move(case: Case, representation: Representation) -> None:
    source = GPUConnector(case.source.layout, case.source.tensors, representation)
    target = GPUConnector(case.target.layout, case.target.tensors, representation)
    obj = object_of(source.object_layout(case.end - case.start), case.segments)
    untouched = case.source.bytes.copy()

    transfer = source.gather(case.source_ids, case.start, case.end, obj)

    assert transfer.done()
    assert obj.tobytes() == expected_object(case, representation)
    assert np.array_equal(case.source.bytes, untouched)
    wanted = expected_pool(case)
    target.scatter(case.target_ids, case.start, case.end, obj, skip_prefix_n_tokens=case.skip).wait()
    assert np.array_equal(case.target.bytes, wanted)
    assert obj.tobytes() == expected_object(case, representation)


@each
@given(data=st.data())
@quick
def test_canonical_objects_go_from_one_arrangement_into_any_other(arrangement: Arrangement, data: Any) -> None:
    heads, dim, count = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([16, 32])), 2
    other = data.draw(st.sampled_from([a for a in Arrangement if (a == "mla") == (arrangement == "mla")]))
    fixed: dict[str, Any] = {"layers": ("a", "b")[:count], "head_dim": dim, "num_blocks": 8}
    fixed |= {} if arrangement == "mla" else {"kv_heads": heads}
    dtype = data.draw(st.sampled_from(["bfloat16", "float8_e4m3fn"]))
    pools = [pool_of(data.draw, data.draw(layouts(a, dtype, **fixed))) for a in (arrangement, other)]
    source, target = (GPUConnector(pool.layout, pool.tensors, "canonical") for pool in pools)
    room = min(8 * pool.layout.block_size for pool in pools)
    start = data.draw(st.integers(0, room - 1))
    end = data.draw(st.integers(start + 1, room))
    ids = [data.draw(st.permutations(range(8))) for _ in pools]
    obj = object_of(source.object_layout(end - start))

    source.gather(ids[0], start, end, obj)
    target.scatter(ids[1], start, end, obj)

    before, after = (pool.elements[pool.token_slots(i, start, end)] for pool, i in zip(pools, ids, strict=True))
    assert np.array_equal(before, after)


@each
@every
@given(data=st.data())
@quick
def test_many_chunks_are_the_same_as_one_after_the_other(
    arrangement: Arrangement, representation: Representation, data: Any
) -> None:
    layout = data.draw(layouts(arrangement, "bfloat16", num_blocks=6))
    source, one, many = (pool_of(data.draw, layout) for _ in range(3))
    one.bytes[:] = 0
    many.bytes[:] = 0
    ids, others = data.draw(st.permutations(range(6))), data.draw(st.permutations(range(6)))
    gpu = GPUConnector(layout, source.tensors, representation)
    size = layout.block_size * 2
    chunks = [Chunk(ids, at, at + size, object_of(gpu.object_layout(size))) for at in range(0, 3 * size, size)]
    gpu.gather_many(chunks).wait()
    for pool in (one, many):
        moved = [Chunk(others, c.start_token, c.end_token, c.obj, 1) for c in chunks]
        target = GPUConnector(layout, pool.tensors, representation)
        if pool is many:
            target.scatter_many(moved).wait()
        else:
            for c in moved:
                target.scatter(others, c.start_token, c.end_token, c.obj, skip_prefix_n_tokens=1).wait()
    for name in layout.layers:
        first, second = (pool.tensors[name].view(torch.int16).flatten() for pool in (one, many))
        assert torch.equal(first, second)


@each
@given(data=st.data())
@quick
def test_blocks_are_copied_between_pools_and_within_one(arrangement: Arrangement, data: Any) -> None:
    layout = data.draw(layouts(arrangement, "bfloat16"))
    source, other = pool_of(data.draw, layout), pool_of(data.draw, layout)
    count = data.draw(st.integers(0, layout.num_blocks))
    src = data.draw(st.lists(st.integers(0, layout.num_blocks - 1), min_size=count, max_size=count))
    dst = data.draw(st.permutations(range(layout.num_blocks)))[:count]
    ours = GPUConnector(layout, source.tensors)
    for target in (other, source):
        wanted, tokens = target.elements.copy(), count * layout.block_size
        if count:
            wanted[target.token_slots(dst, 0, tokens)] = source.elements[source.token_slots(src, 0, tokens)]
        ours.copy_pages(src, dst, target=None if target is source else GPUConnector(layout, other.tensors)).wait()
        assert np.array_equal(target.elements, wanted)


@each
@every
@given(data=st.data())
@quick
def test_torch_index_operations_agree(arrangement: Arrangement, representation: Representation, data: Any) -> None:
    """What runs on CUDA, run on CPU tensors: the copies of `CudaTransfers` without its streams."""
    case = data.draw(cases(arrangement, representation))
    native = representation == "native"
    with cuda_on_cpu():
        source, target = (
            CudaTransfers(
                pool.layout.page,
                pool.layout.map_layers(pool.tensors),
                [pool.tensors[name] for name in pool.layout.layers],
                slot_bytes=data.draw(st.sampled_from([64, 1 << 20])),
                slots=2,
            )
            for pool in (case.source, case.target)
        )
        gpu = GPUConnector(case.source.layout, case.source.tensors, representation)
        obj = object_of(gpu.object_layout(case.end - case.start), case.segments)
        source.gather([span_of(gpu, case.source_ids, case, obj)], None, native=native)
        assert obj.tobytes() == expected_object(case, representation)
        wanted = expected_pool(case)
        if case.skip < case.end - case.start:
            target.scatter([span_of(gpu, case.target_ids, case, obj, case.skip)], None, native=native)
        assert np.array_equal(case.target.bytes, wanted)


def span_of(gpu: GPUConnector, ids: list[int], case: Case, obj: MemoryObj, skip: int = 0) -> Span:
    return gpu._span(Chunk(ids, case.start, case.end, obj), skip)


class _Inert:
    """Stands for a stream, an event or a context: on the CPU every copy has ended when it returns."""

    def __init__(self, *_: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, *_: object) -> None: ...


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        for name in ("Stream", "Event", "device", "stream", "current_stream"):
            patch.setattr(torch.cuda, name, _Inert)

        def unpinned(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return empty(*size, **options)

        patch.setattr(torch, "empty", unpinned)
        patch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        patch.setattr(torch.Tensor, "is_pinned", lambda self: self.data_ptr() % 3 == 0)  # now and then
        yield


def connector(representation: Representation = "native", **changes: Any) -> tuple[GPUConnector, Pool]:
    values: dict[str, Any] = {"block_size": 4, "kv_heads": 2, "head_dim": 4, "dtype": "bfloat16"} | changes
    layout = PagedLayout(Arrangement.HND_PACKED, ("a", "b"), 5, **values)
    pool = make_pool(layout, torch.bfloat16, "LBHNC")
    return GPUConnector(layout, pool.tensors, representation), pool


def test_layouts_of_objects() -> None:
    native, _ = connector()
    assert native.object_layout(8) == Layout.pages(layers=2, blocks=2, page_bytes=128, tokens=8)
    canonical, _ = connector("canonical")
    assert canonical.object_layout(7) == Layout.kv(layers=2, tokens=7, kv_heads=2, head_dim=4, dtype="bfloat16")
    mla = PagedLayout(Arrangement.MLA, ("a",), 3, 4, 1, 6, "float8_e4m3fn")
    pool = make_pool(mla, torch.uint8, "LBNC")
    wanted = Layout.mla(layers=1, tokens=5, latent_dim=6, dtype="float8_e4m3fn")
    assert GPUConnector(mla, pool.tensors, "canonical").object_layout(5) == wanted


@pytest.mark.parametrize(
    ("ids", "start", "end", "skip", "message"),
    [
        ([0, 1], 0, 9, 0, r"\[0, 9\) is no range within 2 blocks of 4"),
        ([0, 1], 4, 4, 0, r"\[4, 4\)"),
        ([0, 1], -4, 4, 0, r"\[-4, 4\)"),
        ([0, 1], 0, 6, 0, "does not start and end at a block of 4"),
        ([0, 5], 0, 8, 0, r"\[5\] are not within the 5 blocks"),
        ([-1, 1], 0, 8, 0, r"\[-1\]"),
        ([0, 1], 0, 8, 9, "skip_prefix_n_tokens: 9"),
        ([0, 1], 0, 8, -1, "skip_prefix_n_tokens: -1"),
        ([0, 1], 4, 8, 0, "layout is .*expected"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_byte_moves(
    ids: list[int], start: int, end: int, skip: int, message: str
) -> None:
    gpu, pool = connector()
    before, obj = pool.bytes.copy(), object_of(gpu.object_layout(8))
    good = Chunk([2, 3], 0, 8, object_of(gpu.object_layout(8)))
    with pytest.raises(ConfigError, match=message):
        gpu.scatter_many([good, Chunk(ids, start, end, obj, skip)])
    assert np.array_equal(pool.bytes, before)
    if skip == 0:
        with pytest.raises(ConfigError, match=message):
            gpu.gather(ids, start, end, obj)


def test_blocks_outside_the_range_may_be_anything() -> None:
    gpu, _ = connector()
    gpu.scatter([10**9, 1, -7], 4, 8, object_of(gpu.object_layout(4)))


def test_read_only_objects_can_be_scattered_but_not_gathered_into() -> None:
    gpu, pool = connector()
    layout = gpu.object_layout(4)
    obj = MemoryObj.wrap(bytes(layout.nbytes), layout)
    gpu.scatter([1], 0, 4, obj)
    assert not pool.elements[pool.token_slots([1], 0, 4)].any()
    with pytest.raises(ConfigError, match="read-only"):
        gpu.gather([1], 0, 4, obj)


def test_copies_that_make_no_sense_are_refused() -> None:
    gpu, _ = connector()
    other, _ = connector(head_dim=8)
    for src, dst, target, message in (
        ([0], [1, 2], None, "2 blocks for 1"),
        ([0, 0], [1, 1], None, "named twice"),
        ([9], [1], None, r"\[9\]"),
        ([0], [1], other, "cannot take pages"),
    ):
        with pytest.raises(ConfigError, match=message):
            gpu.copy_pages(src, dst, target=target)


def test_representations_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'native'"):
        connector("nativ")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="equal K and V sizes"):
        connector("canonical", head_dim_v=6)
    gpu, _ = connector(head_dim_v=6)
    assert gpu.object_layout(4).nbytes == 2 * 4 * 2 * 10 * 2
    layout = PagedLayout(Arrangement.HND_PACKED, ("a",), 5, 4, 2, 4, "bfloat16")
    with pytest.raises(ConfigError, match="meta"):
        GPUConnector(layout, {"a": torch.empty(5, 2, 4, 8, dtype=torch.bfloat16, device="meta")})


def test_groups_that_share_a_storage_keep_out_of_each_others_layers() -> None:
    """As in a hybrid model: layers of two groups at the same offsets, a block owned by one group at a time."""
    names = ("a", "b")
    layout = PagedLayout(Arrangement.CPU_VEC, names, 6, 4, 2, 4, "bfloat16")
    pool = make_pool(layout, torch.bfloat16, "LBHNC")
    other = PagedLayout(Arrangement.CPU_VEC, ("c",), 6, 4, 2, 4, "bfloat16")
    tensors = pool.tensors | {"c": pool.tensors["a"]}
    first, second = GPUConnector(layout, tensors), GPUConnector(other, tensors)
    before = pool.elements.copy()
    second.scatter([3], 0, 4, object_of(second.object_layout(4)))
    for plane in pool.slots:
        before[plane[0, 3]] = 0
    assert np.array_equal(pool.elements, before)
    first.scatter([2], 0, 4, object_of(first.object_layout(4)))
    for plane in pool.slots:
        before[plane[:, 2]] = 0
    assert np.array_equal(pool.elements, before)


def test_device_pages_need_no_common_width() -> None:
    """Pages whose bytes are no multiple of eight fall back to byte-wide views."""
    layout = PagedLayout(Arrangement.MLA, ("a",), 4, 3, 1, 5, "float8_e4m3fn")
    pool = make_pool(layout, torch.uint8, "LBNC")
    pages = DevicePages(layout.page, layout.map_layers(pool.tensors), [pool.tensors["a"]])
    assert pages.read_pages(0, torch.tensor([2])).numpy().tobytes() == pool.block_elements([2], 0).tobytes()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@each
@every
@pytest.mark.parametrize("pinned", [True, False])
@given(data=st.data())
@quick
def test_cuda_pages(arrangement: Arrangement, representation: Representation, pinned: bool, data: Any) -> None:
    case = data.draw(cases(arrangement, representation))
    storages = [pool.storage.cuda() for pool in (case.source, case.target)]
    source, target = (
        GPUConnector(pool.layout, {name: moved(t, storage) for name, t in pool.tensors.items()}, representation)
        for pool, storage in zip((case.source, case.target), storages, strict=True)
    )
    layout = source.object_layout(case.end - case.start)
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8, pin_memory=pinned)
    obj = MemoryObj.wrap(memory.numpy().data, layout)
    gathered = source.gather(case.source_ids, case.start, case.end, obj)
    gathered.wait()
    assert gathered.done()
    assert obj.tobytes() == expected_object(case, representation)
    wanted = expected_pool(case)
    scattered = target.scatter(case.target_ids, case.start, case.end, obj, skip_prefix_n_tokens=case.skip)
    scattered.wait_on()
    assert np.array_equal(storages[1].cpu().numpy(), wanted)


def moved(tensor: torch.Tensor, storage: torch.Tensor) -> torch.Tensor:
    typed = storage.view(tensor.dtype)
    return torch.as_strided(typed, tensor.shape, tensor.stride(), tensor.storage_offset())
