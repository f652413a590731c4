"""Keys: one injective encoding, a chain in which equal hashes mean equal prefixes, and the same in every process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from l2kit.errors import ConfigError
from l2kit.keys import MAX_KEY_CHARS, MultimodalHash, Namespace, ObjectKey, TokenDatabase

NAMESPACE = Namespace(
    model="SmolLM2-135M-Instruct",
    revision="main",
    kv_dtype="bfloat16",
    layout="canonical:kv_2ltd:1",
    layers=30,
    kv_heads=3,
    head_dim=64,
    chunk_size=4,
)

numbers = st.integers(0, 2**32 - 1) | st.integers(0, 12)
labels = st.text(min_size=1) | st.from_regex(r"[a-z0-9_-]{1,70}", fullmatch=True) | st.sampled_from([".", "..", "x-"])
tokens = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 2), max_size=40)


@st.composite
def object_keys(draw: st.DrawFn) -> ObjectKey:
    shards = draw(st.integers(1, 2**32 - 1) | st.integers(1, 9))
    return ObjectKey(
        draw(labels),
        draw(st.binary(min_size=8, max_size=32)),
        draw(st.integers(0, shards - 1)),
        shards,
        draw(numbers),
        draw(st.none() | numbers),
    )


class TestEncoding:
    @given(object_keys())
    def test_parse_inverts_encode(self, key: ObjectKey) -> None:
        assert ObjectKey.parse(key.encode()) == key

    @given(object_keys())
    def test_it_is_short_and_harmless(self, key: ObjectKey) -> None:
        text = key.encode()
        assert re.fullmatch(r"[a-z0-9._/-]+", text)
        assert len(text) <= MAX_KEY_CHARS == 200
        components = text.split("/")
        assert len(components) == 3
        assert all(1 <= len(part) <= 120 and part.strip(".") for part in components)

    @given(object_keys(), object_keys())
    def test_different_keys_have_different_texts_and_digests(self, one: ObjectKey, other: ObjectKey) -> None:
        assert (one == other) == (one.encode() == other.encode()) == (one.digest == other.digest)

    @given(labels, labels)
    def test_different_labels_stay_different(self, one: str, other: str) -> None:
        def hashed_of(label: str) -> str:
            return ObjectKey(label, bytes(8)).namespace

        # The hash of a label is the one other label that it equals, so that a key equals its own encoding.
        assert (hashed_of(one) == hashed_of(other)) == (
            one == other or hashed_of(one) == other or one == hashed_of(other)
        )

    def test_the_longest_key(self) -> None:
        top = 2**32 - 1
        assert len(ObjectKey("n" * 64, bytes(32), top - 1, top, top, top).encode()) <= MAX_KEY_CHARS

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "a/b/c",
            "ns/0011223344556677/s0of1.g0",
            "ns/0011223344556677/s00of1.g0.all",
            "ns/0011223344556677/s0of1.g0.all ",
            "ns/0011223344556677/s0of1.g0.all\n",
            "ns/0011223344556677/s1of1.g0.all",
            "ns/0011223344556677/s0of1.g0.l٣",
            "ns/00112233445566/s0of1.g0.all",
            "ns/001122334455667/s0of1.g0.all",
            "NS/0011223344556677/s0of1.g0.all",
            "x-abc/0011223344556677/s0of1.g0.all",
            f"{'n' * 65}/0011223344556677/s0of1.g0.all",
            f"ns/0011223344556677/s0of{'9' * 5000}.g0.all",
            "../0011223344556677/s0of1.g0.all",
        ],
    )
    def test_what_is_no_key_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigError):
            ObjectKey.parse(text)

    @given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
    def test_parse_refuses_or_inverts(self, text: str) -> None:
        try:
            key = ObjectKey.parse(text)
        except ConfigError:
            return
        assert key.encode() == text

    @pytest.mark.parametrize(
        "fields",
        [
            {"namespace": ""},
            {"chunk_hash": bytes(7)},
            {"chunk_hash": bytes(33)},
            {"shard": 1},
            {"shard": -1},
            {"shards": 0},
            {"shards": 2**32},
            {"group": -1},
            {"group": 2**32},
            {"layer": -1},
            {"layer": 2**32},
        ],
        ids=str,
    )
    def test_fields_out_of_range_are_refused(self, fields: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            ObjectKey(**{"namespace": "ns", "chunk_hash": bytes(16), **fields})


class TestNamespace:
    @pytest.mark.parametrize("field", Namespace.__struct_fields__)
    def test_every_field_changes_the_digest(self, field: str) -> None:
        value = getattr(NAMESPACE, field)
        other = value + 1 if isinstance(value, int) else value + "x"
        changed = msgspec.structs.replace(NAMESPACE, **{field: other})
        assert changed.digest != NAMESPACE.digest

    @pytest.mark.parametrize("field", Namespace.__struct_fields__)
    def test_an_unknown_field_is_refused(self, field: str) -> None:
        for nothing in (None, 0 if isinstance(getattr(NAMESPACE, field), int) else ""):
            with pytest.raises(ConfigError, match=field):
                msgspec.structs.replace(NAMESPACE, **{field: nothing})

    def test_similar_dtypes_are_different(self) -> None:
        names = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "bfloat16", "float16"]
        assert len({msgspec.structs.replace(NAMESPACE, kv_dtype=name).digest for name in names}) == len(names)

    def test_values_do_not_run_into_each_other(self) -> None:
        one = msgspec.structs.replace(NAMESPACE, model="ab", revision="c")
        other = msgspec.structs.replace(NAMESPACE, model="a", revision="bc")
        assert one.digest != other.digest

    def test_any_text_is_taken(self) -> None:
        assert msgspec.structs.replace(NAMESPACE, model="\ud800 lone surrogate").digest != NAMESPACE.digest


def hashes(token_ids: list[int], chunk_size: int = 4, **extras: Any) -> list[bytes]:
    return [
        chunk for _, _, chunk in TokenDatabase("ns", chunk_size, save_unfull_chunk=True).chunks(token_ids, **extras)
    ]


class TestChain:
    @given(tokens, tokens, st.integers(1, 7))
    def test_equal_hashes_mean_equal_prefixes(self, one: list[int], other: list[int], chunk_size: int) -> None:
        for n, (a, b) in enumerate(zip(hashes(one, chunk_size), hashes(other, chunk_size), strict=False), start=1):
            assert (a == b) == (one[: n * chunk_size] == other[: n * chunk_size])

    @given(tokens, st.integers(0, 45), st.integers(1, 7), st.booleans())
    def test_ranges_are_aligned_and_cover_all(self, ids: list[int], start: int, size: int, unfull: bool) -> None:
        database = TokenDatabase("ns", size, save_unfull_chunk=unfull)
        found = list(database.chunks(ids, start=start))
        covered = len(ids) if unfull else len(ids) // size * size
        if found:
            assert found[0][0] == start // size * size
            assert found[-1][1] == covered
        else:
            assert start >= covered
        assert all(before[1] == after[0] for before, after in pairwise(found))
        assert all(begin % size == 0 for begin, _, _ in found)
        assert all(end - begin == size for begin, end, _ in found if end != len(ids))
        # `start` skips yielding, not hashing.
        assert found == [chunk for chunk in database.chunks(ids) if chunk[1] > start]

    def test_a_rest_is_a_chunk_only_when_asked_for(self) -> None:
        assert [c[:2] for c in TokenDatabase("ns", 4).chunks(range(10))] == [(0, 4), (4, 8)]
        unfull = TokenDatabase("ns", 4, save_unfull_chunk=True)
        assert [c[:2] for c in unfull.chunks(range(10))] == [(0, 4), (4, 8), (8, 10)]
        assert not list(TokenDatabase("ns", 4).chunks([]))

    def test_an_unfull_chunk_is_no_full_one(self) -> None:
        assert hashes([1, 2, 3])[0] not in hashes([1, 2, 3, 0]) + hashes([1, 2, 3, 4])

    def test_chunk_size_and_namespace_are_in_the_hash(self) -> None:
        ids = list(range(12))
        assert hashes(ids, 4)[-1] != hashes(ids, 6)[-1] != hashes(ids, 12)[-1]
        other = TokenDatabase("other", 4).chunks(ids)
        assert not {chunk for _, _, chunk in other} & set(hashes(ids))

    @pytest.mark.parametrize("name", ["salt", "lora"])
    def test_salt_and_lora_change_every_chunk(self, name: str) -> None:
        variants: list[Any] = [None, "", "a", "b", "ab", "\ud800"]
        chains = [hashes(list(range(12)), **{name: value}) for value in variants]
        assert len({chunk for chain in chains for chunk in chain}) == 3 * len(variants)

    def test_salt_and_lora_do_not_pass_for_each_other(self) -> None:
        ids = list(range(4))
        combinations = [("a", "b"), ("b", "a"), ("ab", ""), ("", "ab"), ("a", None), (None, "a"), (None, None)]
        assert len({hashes(ids, salt=salt, lora=lora)[0] for salt, lora in combinations}) == len(combinations)

    def test_an_image_changes_the_chunks_from_its_placeholders_on(self) -> None:
        ids = list(range(16))
        plain = hashes(ids)
        image = hashes(ids, mm_hashes=[MultimodalHash("f00d", 6, 4)])
        assert image[0] == plain[0]
        assert all(a != b for a, b in zip(image[1:], plain[1:], strict=True))
        assert hashes(ids, mm_hashes=[MultimodalHash("f00e", 6, 4)])[1:] != image[1:]
        for moved in (MultimodalHash("f00d", 5, 4), MultimodalHash("f00d", 6, 3)):
            assert hashes(ids, mm_hashes=[moved])[1] != image[1]

    def test_the_whole_image_hash_counts(self) -> None:
        one, other = "ab" * 32, "ab" * 31 + "ac"
        assert hashes([0] * 4, mm_hashes=[MultimodalHash(one, 0, 4)]) != hashes(
            [0] * 4, mm_hashes=[MultimodalHash(other, 0, 4)]
        )

    def test_an_image_without_a_place_changes_every_chunk(self) -> None:
        assert not set(hashes(list(range(12)), mm_hashes=["f00d"])) & set(hashes(list(range(12))))

    @pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "7", None])
    def test_what_is_no_token_id_is_refused(self, bad: Any) -> None:
        with pytest.raises(ConfigError, match="token_ids"):
            hashes([1, 2, 3, 4, bad, 6])

    def test_any_sequence_of_ids_hashes_alike(self) -> None:
        assert hashes(tuple(range(8))) == hashes(range(8)) == hashes(list(range(8)))  # type: ignore[arg-type]
        assert hashes(bytes(range(8))) == hashes(list(range(8)))  # type: ignore[arg-type]

    def test_wrong_arguments_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="chunk_size"):
            TokenDatabase("ns", 0)
        with pytest.raises(ConfigError, match="chunk_size"):
            TokenDatabase(NAMESPACE, 8)
        with pytest.raises(ConfigError, match="start"):
            list(TokenDatabase("ns", 4).chunks([1, 2, 3, 4], start=-1))


class TestVector:
    """Literals: if one of these changes, every object ever stored is lost."""

    def test_pinned(self) -> None:
        assert NAMESPACE.digest == "6825296ef01256618f01a5e590f46a09"
        extras: dict[str, Any] = {"salt": "tenant", "lora": "adapter-7"}
        found = TokenDatabase(NAMESPACE, 4).chunks(
            range(9), **extras, mm_hashes=[MultimodalHash("f00d", 5, 2), "loose"]
        )
        assert [(start, end, chunk.hex()) for start, end, chunk in found] == [
            (0, 4, "00004acff1e35ea8bf95d32f880b991f"),
            (4, 8, "b773561fa15ae10dced4b3f42aea2c68"),
        ]
        found = TokenDatabase(NAMESPACE, 4, save_unfull_chunk=True).chunks(range(9))
        assert [(start, end, chunk.hex()) for start, end, chunk in found] == [
            (0, 4, "69f3a6887d1753c40d85e17538b6e244"),
            (4, 8, "c8158992d0cedafb8c49f8c3f5e23908"),
            (8, 9, "0ba4a99317f3d65d9c67b6fce6449044"),
        ]
        key = ObjectKey(NAMESPACE.digest, bytes(range(16)), 1, 2, 3, 4)
        assert key.encode() == "6825296ef01256618f01a5e590f46a09/000102030405060708090a0b0c0d0e0f/s1of2.g3.l4"
        assert key.digest.hex() == "dfc464c67ffaf8e35d1b048c3a31561f"
        key = ObjectKey("../../etc/passwd", bytes(range(16)))
        label = "x-bd800e3e9d15837d7ad3e88a0b3b2cb5973ed358"
        assert key.encode() == f"{label}/000102030405060708090a0b0c0d0e0f/s0of1.g0.all"

    def test_four_interpreters_agree(self) -> None:
        program = """
from l2kit import MultimodalHash, Namespace, ObjectKey, TokenDatabase
fields = dict(model="m", revision="r", kv_dtype="bfloat16", layout="l", engine="e")
namespace = Namespace(**fields, layers=2, kv_heads=1, head_dim=8, chunk_size=2)
print(namespace.digest)
database = TokenDatabase(namespace, 2, save_unfull_chunk=True)
for salt, lora in [(None, None), ("s", None), (None, "l"), ("s", "l")]:
    images = [MultimodalHash("h", 1, 3), "x"]
    for start, end, chunk in database.chunks(range(7), salt=salt, lora=lora, mm_hashes=images):
        print(ObjectKey(namespace.digest, chunk), ObjectKey("ключ", chunk, 1, 2, layer=0).digest.hex())
"""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        interpreters = [
            subprocess.Popen([sys.executable, "-c", program], env=environment | seed, stdout=subprocess.PIPE, text=True)
            for seed in ({}, {"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"})
        ]
        outputs = [interpreter.communicate(timeout=60)[0] for interpreter in interpreters]
        assert [interpreter.returncode for interpreter in interpreters] == [0] * 4
        assert len(outputs[0].splitlines()) == 17
        assert len(set(outputs)) == 1


def test_keys_with_and_without_a_layer_sort_together() -> None:
    chunk = bytes(16)
    ordered = sorted([ObjectKey("b", chunk), ObjectKey("a", chunk, layer=3), ObjectKey("a", chunk)])
    assert [(key.namespace, key.layer) for key in ordered] == [("a", None), ("a", 3), ("b", None)]


@pytest.mark.parametrize("fields", [{"shard": True}, {"group": 1.0}, {"layer": "1"}, {"shards": None}])
def test_numbers_of_a_key_are_integers(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is no key"):
        ObjectKey("a", bytes(16), **fields)
