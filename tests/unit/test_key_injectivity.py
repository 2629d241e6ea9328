"""Different models, tenants, scopes, tokens, groups and ranks never have the same key."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from tests.key_chain import extend_chain
from tests.patience import examples
from vllm_tiered_kv.core.key import (
    BlockKey,
    Fingerprint,
    RankTag,
    group_suffix,
    root_digest,
)
from vllm_tiered_kv.core.store import store_key

# A few values of each input, chosen to collide if they were concatenated carelessly.
words = st.sampled_from(["", "a", "b", "ab", "a,b", '","', "\0", "auto", "fp8", "[]", "0"])
names = st.lists(words, max_size=2).map(tuple)

fingerprints = st.builds(
    Fingerprint,
    model=words,
    revision=words,
    dtype=words,
    quantization=words,
    kv_dtype=words,
    layout=words,
    kernels=words,
    block_sizes=st.lists(st.sampled_from([1, 11, 16]), max_size=2).map(tuple),
    group_layers=st.lists(names, max_size=2).map(tuple),
    parallel=st.dictionaries(st.sampled_from(["tp", "pp"]), st.sampled_from([1, 2, 11])),
    tenant=words,
    format_version=st.sampled_from([1, 2]),
)
scopes = st.tuples(
    st.sampled_from([b"", b"a", b"an"]),
    st.sampled_from([None, b"", b"a", b"s"]),
    st.none() | words.filter(bool),
)


@dataclass(frozen=True)
class Block:
    """All inputs that decide the content of a block."""

    fingerprint: Fingerprint
    scope: tuple[bytes, bytes | None, str | None]
    tokens: tuple[int, ...]
    extras: tuple[tuple[int, bytes], ...]
    group: int
    rank: RankTag

    def key(self) -> bytes:
        namespace = self.fingerprint.namespace()
        keys, _ = extend_chain(
            root_digest(namespace, self.scope),
            self.tokens,
            2,
            dict(self.extras),
            group_suffix(self.group),
        )
        return store_key(namespace, BlockKey(keys[-1]), self.rank)

    def facts(self) -> Any:
        fingerprint = asdict(self.fingerprint)
        parallel = sorted(fingerprint.pop("parallel").items())  # dict order does not matter
        return repr((fingerprint, parallel, self.scope, self.tokens, self.extras, self.group)), (
            self.rank
        )


blocks = st.builds(
    Block,
    fingerprint=fingerprints,
    scope=scopes,
    tokens=st.lists(st.integers(0, 3), min_size=2, max_size=6)
    .filter(lambda ids: len(ids) % 2 == 0)
    .map(tuple),
    # A block without extras and one with empty extras have the same content.
    extras=st.dictionaries(st.just(0), st.binary(min_size=1, max_size=3), max_size=1).map(
        lambda extras: tuple(sorted(extras.items()))
    ),
    group=st.integers(0, 2),
    rank=st.builds(RankTag, *[st.integers(0, 1)] * 4),
)


@examples(400)
@given(blocks, blocks)
def test_keys_are_equal_exactly_when_inputs_are(a: Block, b: Block) -> None:
    assert (a.key() == b.key()) == (a.facts() == b.facts())


@examples(400)
@given(blocks, st.data())
def test_keys_differ_with_any_single_difference(block: Block, data: st.DataObject) -> None:
    """Two independent draws rarely differ in exactly one input; these always do."""
    name = data.draw(st.sampled_from([*asdict(block.fingerprint), "scope", "tokens", "group"]))
    donor = data.draw(blocks)
    if name in asdict(block.fingerprint):
        fingerprint = replace(block.fingerprint, **{name: getattr(donor.fingerprint, name)})
        other = replace(block, fingerprint=fingerprint)
    else:
        other = replace(block, **{name: getattr(donor, name)})
    assume(other.facts() != block.facts())
    assert other.key() != block.key()


@given(fingerprints, fingerprints)
def test_key_prefix_distinguishes_namespaces(a: Fingerprint, b: Fingerprint) -> None:
    """A daemon keeps only the first half of a namespace, which must distinguish them."""
    assert (a.namespace()[:16] == b.namespace()[:16]) == (asdict(a) == asdict(b))
