"""Media that lie among each other's tokens, as the audio of a video does."""

from __future__ import annotations

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

from tests.engine.keyed_requests import BLOCK, TOKENS, flat, image, make_request
from vllm_tiered_kv.errors import UnsupportedError


@pytest.mark.parametrize(
    "places",
    [
        [(4, 100), (4, 100)],  # a video and its audio: both have all of its tokens
        [(4, 60), (43, 40)],
        [(4, 60), (10, 5), (40, 9)],
    ],
)
def test_overlapping_media_get_no_keys(places: list[tuple[int, int]]) -> None:
    """vLLM's own hashes do not tell them apart: a GPU block may hold what is another's."""

    def hashes(last: str) -> list[bytes]:
        names = [*map(str, range(len(places) - 1)), last]
        media = [image(name, *place) for name, place in zip(names, places, strict=True)]
        hasher = get_request_block_hasher(BLOCK, sha256)
        return make_request(mm_features=media, block_hasher=hasher).block_hashes

    init_none_hash(sha256)
    at = places[-1][0] // BLOCK
    assert hashes("cat")[at] == hashes("dog")[at], "vLLM has learned it, so keys could be made"
    media = [image(f"{number}", *place) for number, place in enumerate(places)]
    with pytest.raises(UnsupportedError, match="the audio of a video"):
        flat(make_request(mm_features=media))


def test_adjacent_media_get_keys() -> None:
    media = [image("a", 4, 40), image("b", 44, 9), image("c", 53, 1)]
    assert len(flat(make_request(mm_features=media))) == len(TOKENS) // BLOCK
