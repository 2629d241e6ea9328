"""Block keys depend on every input and are the same in every process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.key_chain import extend_chain
from tests.patience import examples
from vllm_tiered_kv.core.key import (
    Fingerprint,
    RankTag,
    canonical,
    group_suffix,
    root_digest,
)
from vllm_tiered_kv.native.cpu import extend_keys

FINGERPRINT = Fingerprint(
    model="aa",
    revision="r1",
    dtype="bfloat16",
    quantization="",
    kv_dtype="auto",
    layout="LBHNC",
    kernels="vLLM 0.32.0 cuda",
    block_sizes=(16,),
    group_layers=(("l0", "l1"),),
    parallel={"tp": 2, "pp": 1, "dcp": 1, "pcp": 1},
)
CHANGES = {
    "model": "ab",
    "revision": "r2",
    "dtype": "float16",
    "quantization": "fp8",
    "kv_dtype": "fp8_e4m3",
    "layout": "LBNHC",
    "kernels": "vLLM 0.32.1 cuda",
    "block_sizes": (32,),
    "group_layers": (("l0", "l2"),),
    "parallel": {"tp": 4, "pp": 1, "dcp": 1, "pcp": 1},
    "tenant": "them",
    "format_version": 2,
}

tokens = st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=40)
scopes = st.tuples(
    st.binary(max_size=4), st.none() | st.binary(max_size=4), st.none() | st.text(max_size=4)
)


def chain(fingerprint: Fingerprint = FINGERPRINT, scope: tuple = (), ids: tuple = tuple(range(32))):
    keys, _ = extend_keys(
        root_digest(fingerprint.namespace(), scope), list(ids), 0, len(ids), 16, None, b"\0"
    )
    return keys


def test_fingerprint_every_field_changes_keys() -> None:
    assert set(CHANGES) == {field.name for field in dataclasses.fields(Fingerprint)}
    base = chain()
    for name, value in CHANGES.items():
        other = chain(dataclasses.replace(FINGERPRINT, **{name: value}))
        assert not set(base) & set(other), name


@given(scopes, scopes)
def test_root_digest_differs_exactly_when_scopes_differ(a: tuple, b: tuple) -> None:
    assert (a == b) == (chain(scope=a) == chain(scope=b))


@examples(200)
@given(tokens, st.data())
def test_extend_chain_changed_token_changes_all_later_keys(ids: list[int], data) -> None:
    ids = ids[: len(ids) // 4 * 4]
    at = data.draw(st.integers(0, len(ids) - 1))
    changed = [*ids]
    changed[at] ^= data.draw(st.integers(1, 2**32 - 1))
    root = root_digest(b"n" * 32)
    a, _ = extend_keys(root, ids, 0, len(ids), 4, None, b"\0")
    b, _ = extend_keys(root, changed, 0, len(ids), 4, None, b"\0")
    assert [x == y for x, y in zip(a, b, strict=True)] == [i < at // 4 for i in range(len(a))]


@examples(200)
@given(
    tokens, st.sampled_from([1, 2, 4]), st.dictionaries(st.integers(0, 3), st.binary(max_size=70))
)
def test_native_keys_match_reference(ids: list[int], size: int, extras: dict) -> None:
    ids = ids[: len(ids) // size * size]
    root = root_digest(b"n" * 32)
    assert extend_keys(root, ids, 0, len(ids), size, extras, b"\7") == extend_chain(
        root, ids, size, extras, b"\7"
    )


@given(tokens, st.data())
def test_extend_chain_in_pieces_gives_same_keys(ids: list[int], data) -> None:
    ids = ids[: len(ids) // 4 * 4]
    cut = data.draw(st.integers(0, len(ids) // 4)) * 4
    root = root_digest(b"n" * 32)
    whole, end = extend_keys(root, ids, 0, len(ids), 4, None, b"")
    first, middle = extend_keys(root, ids, 0, cut, 4, None, b"")
    second, last = extend_keys(middle, ids, cut, len(ids), 4, None, b"")
    assert (first + second, last) == (whole, end)


def test_extend_chain_extra_changes_all_later_keys() -> None:
    root = root_digest(b"n" * 32)
    ids = list(range(64))
    plain, _ = extend_keys(root, ids, 0, 64, 16, None, b"")
    image, _ = extend_keys(root, ids, 0, 64, 16, {1: canonical([("mm", "hash", 3)])}, b"")
    moved, _ = extend_keys(root, ids, 0, 64, 16, {1: canonical([("mm", "hash", 4)])}, b"")
    assert plain[0] == image[0] == moved[0]
    assert len({plain[1], image[1], moved[1]}) == 3
    assert plain[3] != image[3]


def test_group_and_rank_tags_are_distinct() -> None:
    assert len({group_suffix(g) for g in range(256)}) == 256
    tags = [
        RankTag(tp=t, pp=p, dcp=d, pcp=c)
        for t in (0, 1)
        for p in (0, 1)
        for d in (0, 1)
        for c in (0, 1)
    ]
    assert len({tag.encode() for tag in tags}) == 16


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_keys_are_equal_in_another_process(seed: str) -> None:
    program = (
        "from tests.unit.test_key import chain;"
        "print(','.join(k.hex() for k in chain(scope=(b'', None, 'salt'))))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert printed.split(",") == [key.hex() for key in chain(scope=(b"", None, "salt"))]


@given(st.lists(st.none() | st.booleans() | st.binary() | st.text() | st.integers()), st.data())
def test_canonical_distinguishes_sequences(parts: list, data) -> None:
    other = data.draw(st.lists(st.none() | st.booleans() | st.binary() | st.text() | st.integers()))
    same = [type(p) for p in parts] == [type(p) for p in other] and parts == other
    assert (canonical(parts) == canonical(other)) == same


def test_canonical_refuses_unsupported_types() -> None:
    with pytest.raises(TypeError, match="float"):
        canonical([1.5])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["asb"], ["a", "b"]),
        ([b"ayb"], [b"a", b"b"]),
        ([["a"], "b"], [["a", "b"]]),
        (["1"], [1]),
        ([""], [None]),
        ([True], [1]),
        ([], [[]]),
    ],
)
def test_canonical_distinguishes_types_and_nesting(one: list, other: list) -> None:
    assert canonical(one) != canonical(other)
