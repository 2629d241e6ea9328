"""Requests of vLLM's and their keys, for tests of what decides a key."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from vllm_tiered_kv.connector.identity.request_keys import KeyMaker
from vllm_tiered_kv.core.key import BlockKey

NAMESPACE = b"n" * 32
BLOCK = 16
TOKENS = tuple(random.Random(5).choices(range(1000), k=8 * BLOCK + 5))


def make_request(tokens: Sequence[int] | None = TOKENS, **facts: Any) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=None if tokens is None else list(tokens),
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        **facts,
    )


def keys_of(
    request: Request,
    stops: Sequence[int] = (),
    block_sizes: Sequence[int] = (BLOCK,),
    maker: KeyMaker | None = None,
) -> list[list[BlockKey]]:
    """Keys per group, made in one go or by way of `stops`."""
    keys = (maker or KeyMaker(NAMESPACE, block_sizes)).keys_for(request)
    for stop in (*stops, request.num_tokens):
        keys.extend(request, stop)
    return keys.of_group


def flat(request: Request, **how: Any) -> list[BlockKey]:
    (keys,) = keys_of(request, **how)
    return keys


def differ_from(one: list[BlockKey], other: list[BlockKey]) -> int:
    """The first block whose keys differ; behind it all must."""
    assert len(one) == len(other)
    same = [a == b for a, b in zip(one, other, strict=True)]
    first = same.index(False) if False in same else len(same)
    assert not any(same[first:])
    return first


def image(content: str, offset: int, length: int) -> MultiModalFeatureSpec:
    """As vLLM calls it, by a digest of what it shows."""
    return named_image(hashlib.sha256(content.encode()).hexdigest(), offset, length)


def named_image(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def write_adapter(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder
