"""Keys of real vLLM requests: what decides a block's content decides its key, nothing else does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec

from tests.engine.keyed_requests import (
    BLOCK,
    NAMESPACE,
    TOKENS,
    differ_from,
    flat,
    image,
    keys_of,
    make_request,
    named_image,
    write_adapter,
)
from tests.key_chain import extend_chain
from vllm_tiered_kv.connector import assembly
from vllm_tiered_kv.connector.identity.request_keys import KeyMaker
from vllm_tiered_kv.connector.scheduler.partial_tail import Tail, tail_of
from vllm_tiered_kv.core.key import BlockKey, group_suffix, root_digest, tail_key
from vllm_tiered_kv.errors import UnsupportedError

# ---- the chain ----------------------------------------------------------------------------------


def test_keys_are_the_defined_chain() -> None:
    keys = flat(make_request(cache_salt="salt"))
    root = root_digest(NAMESPACE, (b"", None, "salt"))
    expected, _ = extend_chain(root, TOKENS[: 8 * BLOCK], BLOCK)
    assert keys == expected
    assert len(keys) == len(TOKENS) // BLOCK


@pytest.mark.parametrize("block_sizes", [(16,), (16, 32), (32, 48), (64, 16, 32)])
def test_growing_in_pieces_gives_the_keys_of_one_go(block_sizes: tuple[int, ...]) -> None:
    rng = random.Random(1)
    request = make_request()
    whole = keys_of(request, block_sizes=block_sizes)
    for _ in range(50):
        stops = sorted(rng.randrange(len(TOKENS) + 1) for _ in range(rng.randrange(6)))
        # A smaller number than before must change nothing: a preempted request starts over.
        assert keys_of(request, [*stops, *stops[:2]], block_sizes) == whole
    assert keys_of(request, range(len(TOKENS)), block_sizes) == whole


def test_generated_tokens_continue_the_chain_of_the_prompt() -> None:
    request = make_request(TOKENS[:20])
    keys = KeyMaker(NAMESPACE, (BLOCK,)).keys_for(request)
    keys.extend(request, request.num_tokens)
    assert len(keys.of_group[0]) == 1
    for token in TOKENS[20:]:
        request.append_output_token_ids(token)
        keys.extend(request, request.num_tokens)
    assert keys.of_group == keys_of(make_request())


def test_keys_of_groups_are_the_chain_at_their_boundaries() -> None:
    request = make_request()
    root = root_digest(NAMESPACE, (b"", None, None))
    chain, _ = extend_chain(root, TOKENS[: 8 * BLOCK], 16, suffix=b"")
    small, large = keys_of(request, block_sizes=(16, 32))
    assert small == [key + group_suffix(0) for key in chain]
    assert large == [key + group_suffix(1) for key in chain[1::2]]
    # Other sizes may be hashed at another granularity, and never meet: namespaces differ.
    large_first, small_last = keys_of(request, block_sizes=(32, 16))
    assert large_first == [key + group_suffix(0) for key in chain[1::2]]
    assert small_last == [key + group_suffix(1) for key in chain]
    # No common divisor among the sizes but the smaller unit.
    (a, b) = keys_of(request, block_sizes=(32, 48))
    assert a == [key + group_suffix(0) for key in chain[1::2]]
    assert b == [key + group_suffix(1) for key in chain[2::3]]


def test_one_group_of_two_sees_a_block_before_the_other() -> None:
    request = make_request()
    keys = KeyMaker(NAMESPACE, (16, 32)).keys_for(request)
    counts = []
    for stop in (15, 16, 31, 32, 48, 64):
        keys.extend(request, stop)
        counts.append(tuple(map(len, keys.of_group)))
    assert counts == [(0, 0), (1, 0), (1, 0), (2, 1), (3, 1), (4, 2)]


@pytest.mark.parametrize("lookahead", [1, 3])
@pytest.mark.parametrize("block_sizes", [(BLOCK,), (BLOCK, 2 * BLOCK)])
def test_keys_with_lookahead_cover_the_tokens_after_a_block(
    lookahead: int, block_sizes: tuple[int, ...]
) -> None:
    def keys(tokens: Sequence[int], stops: Sequence[int] = ()) -> list[list[BlockKey]]:
        maker = KeyMaker(NAMESPACE, block_sizes, lookahead=lookahead)
        return keys_of(make_request(tokens), stops, maker=maker)

    base = keys(TOKENS)
    assert keys(TOKENS, stops=range(1, len(TOKENS), 5)) == base
    assert [len(group) for group in base] == [len(TOKENS) // size for size in block_sizes]
    # The key of a block is known with the tokens after it, not before.
    for known in (3 * BLOCK, 3 * BLOCK + lookahead - 1, 3 * BLOCK + lookahead):
        expected = (known - lookahead) // BLOCK
        assert keys(TOKENS[:known])[0] == base[0][:expected]
    # Each token counts for its own block, and for the one before it if that reads it.
    for at in range(5 * BLOCK):
        changed = [*TOKENS[:at], TOKENS[at] + 1, *TOKENS[at + 1 :]]
        first = max(0, at - lookahead) // BLOCK
        for group, size in zip(keys(changed), block_sizes, strict=True):
            here = base[block_sizes.index(size)]
            assert differ_from(here, group) == first * BLOCK // size
    assert keys(TOKENS) != keys_of(make_request(TOKENS), block_sizes=block_sizes)


def test_keys_with_lookahead_cover_an_image_after_a_block() -> None:
    maker = KeyMaker(NAMESPACE, (BLOCK,), lookahead=1)
    for offset, first in ((0, 0), (BLOCK - 1, 0), (BLOCK, 0), (BLOCK + 1, 1)):
        one, other = (
            flat(make_request(mm_features=[image(name, offset, 4)]), maker=maker)
            for name in ("a" * 32, "b" * 32)
        )
        assert differ_from(one, other) == first


# ---- the scope ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processor_cache", "prefix_cache", "have"),
    [
        (4.0, True, True),
        (0, True, True),
        (4.0, False, True),
        (0, False, False),
        (None, False, True),
    ],
)
def test_media_have_hashes_where_vllm_caches_anything(
    processor_cache: float | None, prefix_cache: bool, have: bool
) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            multimodal_config=None
            if processor_cache is None
            else SimpleNamespace(mm_processor_cache_gb=processor_cache)
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_cache),
    )
    assert assembly._media_have_hashes(config) is have


def test_images_without_a_hash_get_no_keys() -> None:
    request = make_request(mm_features=[image("renderer0-mm-1-image-0", 4, 20)])
    maker = KeyMaker(NAMESPACE, (BLOCK,), media_have_hashes=False)
    with pytest.raises(UnsupportedError, match="mm-processor-cache-gb"):
        maker.keys_for(request)
    assert flat(make_request(), maker=maker) == flat(make_request())


@pytest.mark.parametrize(
    ("name", "is_unique"),
    [
        ("1", False),
        ("cat.png", False),
        ("cafe", False),  # hexadecimal, but too short to be a digest
        (f"{'ab' * 32}.png", False),
        ("ab" * 32, True),
        (f"adapter:{'ab' * 32}", True),
        ("adapter:1", False),
        ("123e4567-e89b-12d3-a456-426614174000", True),
    ],
)
def test_names_of_images_chosen_by_clients_count_in_one_engine_only(
    name: str, is_unique: bool
) -> None:
    """vLLM takes a client's word (`multi_modal_uuids`) as long as it runs. After a restart, or for
    another client, "1" is another image."""
    request = make_request(mm_features=[named_image(name, 40, 40)])
    maker, later = (KeyMaker(NAMESPACE, (BLOCK,)) for _ in range(2))
    mine = flat(request, maker=maker)
    assert flat(request, maker=maker) == mine
    assert differ_from(mine, flat(request, maker=later)) == (8 if is_unique else 40 // BLOCK)
    in_tail = make_request(TOKENS[:10], mm_features=[named_image(name, 4, 3)])
    tails = {tail_of(in_tail, one.keys_for(in_tail), BLOCK).key for one in (maker, maker, later)}
    assert len(tails) == (1 if is_unique else 2)


def test_salts_separate_requests() -> None:
    plain = flat(make_request())
    assert flat(make_request(cache_salt="")) == plain
    assert differ_from(flat(make_request(cache_salt="a")), plain) == 0
    assert differ_from(flat(make_request(cache_salt="a")), flat(make_request(cache_salt="b"))) == 0
    assert flat(make_request(cache_salt="a")) == flat(make_request(cache_salt="a"))


def test_new_epoch_changes_every_key() -> None:
    maker = KeyMaker(NAMESPACE, (16, 32))
    epochs = [keys_of(make_request(), maker=maker)]
    for nonce in (b"1" * 16, b"2" * 16):
        maker.new_epoch(nonce)
        epochs.append(keys_of(make_request(), maker=maker))
        assert keys_of(make_request(), maker=maker) == epochs[-1]
    assert len({key for groups in epochs for keys in groups for key in keys}) == 3 * (8 + 4)


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("kind", ["text", "images", "embeddings"])
def test_keys_under_other_scopes_are_those_of_requests_with_them(
    tmp_path: Path, kind: str, lookahead: int
) -> None:
    contents: dict[str, Any] = {
        "text": {"tokens": TOKENS},
        "images": {"tokens": TOKENS, "mm_features": [image("a", 2, 4), image("b", 15, 3)]},
        "embeddings": {"tokens": None, "prompt_embeds": embeds()},
    }
    lora = LoRARequest("tune", 1, str(write_adapter(tmp_path / "tune", b"1")))
    maker = KeyMaker(NAMESPACE, (BLOCK, 2 * BLOCK), lookahead=lookahead)
    scopes: list[dict[str, Any]] = [
        {"cache_salt": "a"},
        {},
        {"lora_request": lora},
        {"lora_request": lora, "cache_salt": "b"},
    ]
    expected = [keys_of(make_request(**contents[kind], **scope), maker=maker) for scope in scopes]
    request = make_request(**contents[kind], lora_request=lora, cache_salt="a")
    found = list(maker.under_other_scopes(request, maker.keys_for(request), 2 * BLOCK))
    assert [keys.of_group for keys, _ in found] == [
        [small[:2], large[:1]] for small, large in expected
    ]
    assert [has_same_salt for _, has_same_salt in found] == [True, False, False, False]


# ---- images and embeddings ----------------------------------------------------------------------


def with_images(*images: MultiModalFeatureSpec, **how: Any) -> list[BlockKey]:
    return flat(make_request(mm_features=list(images)), **how)


def test_keys_differ_by_image_identifier_and_position() -> None:
    base = with_images(image("a", 40, 40))
    assert with_images(image("a", 40, 40)) == base
    assert differ_from(base, flat(make_request())) == 40 // BLOCK
    assert differ_from(base, with_images(image("b", 40, 40))) == 40 // BLOCK
    assert differ_from(base, with_images(image("a", 41, 40))) == 40 // BLOCK
    assert differ_from(base, with_images(image("a", 40, 50))) == 80 // BLOCK
    pair = with_images(image("a", 40, 10), image("b", 50, 10))
    assert differ_from(pair, with_images(image("b", 40, 10), image("a", 50, 10))) == 40 // BLOCK
    assert differ_from(pair, with_images(image("a", 40, 10))) == 50 // BLOCK


IMAGES = {
    "one": [image("a", 40, 40)],
    "block-aligned": [image("a", 32, 32)],
    "in one block": [image("a", 33, 3), image("b", 36, 3), image("c", 40, 2)],
    "neighbours": [image("a", 10, 30), image("b", 40, 30), image("c", 70, 30)],
    "from the first token to the last": [image("a", 0, len(TOKENS))],
    "far apart": [image("a", 0, 5), image("b", 120, 8)],
    "the same twice": [image("a", 10, 30), image("a", 60, 30)],
}


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("block_sizes", [(16,), (16, 32)])
def test_pieces_may_cut_through_an_image(name: str, block_sizes: tuple[int, ...]) -> None:
    request = make_request(mm_features=IMAGES[name])
    whole = keys_of(request, block_sizes=block_sizes)
    rng = random.Random(3)
    for step in (1, 7, 16, 24, 33):
        stops = range(0, len(TOKENS), step)
        assert keys_of(make_request(mm_features=IMAGES[name]), stops, block_sizes) == whole
    for _ in range(20):
        stops = sorted(rng.randrange(len(TOKENS) + 1) for _ in range(4))
        assert keys_of(make_request(mm_features=IMAGES[name]), stops, block_sizes) == whole


def test_generated_tokens_after_an_image_keep_it_in_their_keys() -> None:
    def grown(identifier: str) -> list[BlockKey]:
        request = make_request(TOKENS[:40], mm_features=[image(identifier, 20, 20)])
        keys = KeyMaker(NAMESPACE, (BLOCK,)).keys_for(request)
        keys.extend(request, 40)
        request.append_output_token_ids(list(TOKENS[40:]))
        keys.extend(request, request.num_tokens)
        return keys.of_group[0]

    assert grown("a") == with_images(image("a", 20, 20))
    assert differ_from(grown("a"), grown("b")) == 20 // BLOCK


def test_salted_image_request_with_an_adapter_is_stable(tmp_path: Path) -> None:
    adapter = LoRARequest("a", 1, str(write_adapter(tmp_path / "one", b"1" * 50)))

    def ask(**changes: Any) -> list[BlockKey]:
        facts = {
            "mm_features": [image("a", 40, 40)],
            "lora_request": adapter,
            "cache_salt": "s",
            **changes,
        }
        return flat(make_request(**facts))

    assert ask() == ask()
    for changes in ({"mm_features": []}, {"lora_request": None}, {"cache_salt": None}):
        assert differ_from(ask(), ask(**changes)) <= 40 // BLOCK


def embeds(seed: int = 0, length: int = 70) -> torch.Tensor:
    return torch.randn(length, 8, generator=torch.Generator().manual_seed(seed))


def test_keys_differ_by_content_of_prompt_embeddings() -> None:
    base = flat(make_request(None, prompt_embeds=embeds()))
    assert len(base) == 70 // BLOCK
    assert flat(make_request(None, prompt_embeds=embeds())) == base
    assert differ_from(base, flat(make_request(None, prompt_embeds=embeds(1)))) == 0
    assert differ_from(base, flat(make_request([0] * 70))) == 0
    changed = embeds()
    changed[33, 5] += 1e-3
    assert differ_from(base, flat(make_request(None, prompt_embeds=changed))) == 33 // BLOCK
    for step in (1, 7, 16, 40):
        request = make_request(None, prompt_embeds=embeds())
        assert flat(request, stops=range(0, 70, step)) == base


def test_tokens_generated_after_embeddings_get_keys_too() -> None:
    def grown(seed: int, tokens: Sequence[int], step: int) -> list[BlockKey]:
        request = make_request(None, prompt_embeds=embeds(seed))
        keys = KeyMaker(NAMESPACE, (BLOCK,)).keys_for(request)
        keys.extend(request, request.num_tokens)
        for at in range(0, len(tokens), step):
            request.append_output_token_ids(list(tokens[at : at + step]))
            keys.extend(request, request.num_tokens)
        return keys.of_group[0]

    assert grown(0, TOKENS[:58], 1) == grown(0, TOKENS[:58], 58)
    assert len(grown(0, TOKENS[:58], 1)) == 8
    assert differ_from(grown(0, TOKENS[:58], 1), grown(0, TOKENS[1:59], 1)) == 70 // BLOCK


def test_tokens_and_embeddings_can_be_mixed() -> None:
    """Positions without a token id of their own are zeroed by vLLM; their embeddings count."""

    def mixed(seed: int, tokens: Sequence[int]) -> list[BlockKey]:
        is_token = [at < 40 for at in range(70)]
        return flat(make_request(tokens, prompt_embeds=embeds(seed), prompt_is_token_ids=is_token))

    base = mixed(0, TOKENS[:70])
    assert mixed(0, [*TOKENS[:40], *([9] * 30)]) == base
    assert mixed(1, TOKENS[:70]) != base
    assert mixed(0, [1, *TOKENS[1:70]]) != base


def test_zeros_for_missing_inputs_differ_from_the_first_token() -> None:
    """vLLM fills both in with zeros: embeddings where there are tokens, tokens where there are
    embeddings. The embedding of the first token is something else."""

    def mixed(first_embedding: int) -> list[BlockKey]:
        is_token = [at < first_embedding for at in range(70)]
        return flat(
            make_request([0] * 70, prompt_embeds=torch.zeros(70, 8), prompt_is_token_ids=is_token)
        )

    assert mixed(40) == mixed(40)
    assert differ_from(mixed(40), mixed(20)) == 20 // BLOCK


# ---- the block in which a prompt ends -----------------------------------------------------------


def tail(
    tokens: Sequence[int] | None = TOKENS, maker: KeyMaker | None = None, **facts: Any
) -> Tail:
    request = make_request(tokens, **facts)
    found = tail_of(request, (maker or KeyMaker(NAMESPACE, (BLOCK,))).keys_for(request), BLOCK)
    assert found is not None
    return found


def test_tail_is_named_by_its_tokens_and_all_before_them() -> None:
    base = tail()
    assert base == tail()
    assert (base.end, base.position, base.is_partial) == (len(TOKENS), 8, True)
    assert base.keys[:-1] == flat(make_request())
    others = [TOKENS[:-1], (*TOKENS, 1), (1, *TOKENS[1:]), (*TOKENS[:-1], 1), TOKENS[BLOCK:]]
    assert len({base.key, *(tail(tokens).key for tokens in others)}) == 1 + len(others)
    short = tail(TOKENS[:5])
    assert (short.position, short.is_partial) == (0, True)
    assert short.key != tail(TOKENS[:5], cache_salt="x").key


def test_full_block_is_its_own_tail_and_one_token_needs_none() -> None:
    full = tail(TOKENS[: 2 * BLOCK])
    assert (full.keys, full.is_partial) == (flat(make_request(TOKENS[: 2 * BLOCK])), False)
    for length in (1, BLOCK + 1):
        request = make_request(TOKENS[:length])
        assert tail_of(request, KeyMaker(NAMESPACE, (BLOCK,)).keys_for(request), BLOCK) is None


def test_images_and_embeddings_are_part_of_a_tail() -> None:
    seen = {tail(mm_features=[image(name, 8 * BLOCK, 4)]).key for name in "ab"}
    seen.add(tail(mm_features=[image("a", 8 * BLOCK + 1, 4)]).key)
    seen |= {tail(mm_features=[image("c", 2, 4), image(name, 8 * BLOCK, 4)]).key for name in "ab"}
    assert len(seen | {tail().key}) == 6
    changed = embeds()
    changed[69] += 1
    assert tail(None, prompt_embeds=embeds()).key != tail(None, prompt_embeds=changed).key

    def mixed(first_embedding: int) -> BlockKey:
        is_token = [at < first_embedding for at in range(10)]
        facts = {"prompt_embeds": torch.zeros(10, 8), "prompt_is_token_ids": is_token}
        return tail([0] * 10, **facts).key

    assert len({mixed(4), mixed(8), mixed(0)}) == 3


def test_tail_is_no_full_block_of_the_same_tokens() -> None:
    parent, full = flat(make_request(TOKENS[: 2 * BLOCK]))
    assert tail_key(parent, TOKENS[BLOCK : 2 * BLOCK]) != full
