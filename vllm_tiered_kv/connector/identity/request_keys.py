"""Keys of a vLLM request: its scope (epoch, LoRA, salt), its tokens, its multimodal inputs."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, cast

from vllm_tiered_kv.connector.identity.model_fingerprint import adapter_digest
from vllm_tiered_kv.core.key import BlockKey, canonical, group_suffix, root_digest, tail_key
from vllm_tiered_kv.errors import TieredKVError, UnsupportedError
from vllm_tiered_kv.native.cpu import extend_keys

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

# A digest, or a UUID: whoever made such a name had none like it in mind elsewhere.
_UNIQUE_NAME = re.compile(r"[0-9a-fA-F]{32,}|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class RequestKeys:
    """Grows with the request: keys of every full block of its confirmed tokens, per group.

    The chain is hashed once, at the granularity all groups' block sizes are multiples of; a
    group's key is the digest at its block's end.
    """

    def __init__(
        self,
        root: bytes,
        block_sizes: Sequence[int],
        adapter: bytes | None = None,
        engine: bytes = b"",
    ) -> None:
        """`adapter`: what the files of the request's adapter hold, which is part of the root.
        `engine`: a name that no other engine has, nor this one after a restart."""
        self.adapter = adapter
        self._engine = engine
        self._digest = self._root = root
        self._unit = math.gcd(*block_sizes)
        self._steps = [size // self._unit for size in block_sizes]
        self._suffixes = [group_suffix(group_id) for group_id in range(len(block_sizes))]
        self._units: list[bytes] = []
        self._mm_index = 0
        self.of_group: list[list[BlockKey]] = [[] for _ in block_sizes]

    def extend(self, request: Request, num_tokens: int) -> None:
        """Covers the full blocks of the first `num_tokens` tokens, all of them confirmed."""
        start = len(self._units) * self._unit
        stop = num_tokens - num_tokens % self._unit
        if stop <= start:
            return
        single = len(self._steps) == 1
        keys, self._digest = extend_keys(
            self._digest,
            request._all_token_ids,
            start,
            stop,
            self._unit,
            self._extras(request, start, stop),
            self._suffixes[0] if single else b"",
        )
        self._units.extend(keys)
        if single:
            self.of_group[0].extend(cast("list[BlockKey]", keys))  # a call for each would show
            return
        for group, step in enumerate(self._steps):
            have = len(self.of_group[group])
            ends = self._units[have * step + step - 1 :: step]
            self.of_group[group].extend(BlockKey(end + self._suffixes[group]) for end in ends)

    def of_tail(self, request: Request, start: int, end: int) -> BlockKey:
        """The key of the block that tokens `start` to `end` of the prompt fill in part. The one
        before it has one already."""
        extra = b""
        if request.mm_features or request.prompt_embeds is not None:
            extra, _ = _extra(request, start, end, 0, self._engine)
        parent = self._units[start // self._unit - 1] if start else self._root
        return tail_key(parent, request._all_token_ids[start:end], extra)

    def _extras(self, request: Request, start: int, stop: int) -> dict[int, bytes] | None:
        """What besides the token ids decides a block's content: images, embeddings."""
        if not request.mm_features and request.prompt_embeds is None:
            return None
        extras: dict[int, bytes] = {}
        for index, first in enumerate(range(start, stop, self._unit)):
            end = first + self._unit
            extra, self._mm_index = _extra(request, first, end, self._mm_index, self._engine)
            if extra:
                extras[index] = extra
        return extras


def _extra(
    request: Request, start: int, end: int, mm_index: int, engine: bytes
) -> tuple[bytes, int]:
    """The same of one block. `mm_index`: those before it end before the block; and which do before
    the next one."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    found, mm_index = generate_block_hash_extra_keys(request, start, end, mm_index)
    parts = [part for part in found or () if not _is_in_root(part)]
    if any(map(_is_named_by_client, parts)):
        parts.append(engine)
    # Where both are given; vLLM's zeros for the other kind are a token, and an embedding, too.
    is_token = getattr(request, "prompt_is_token_ids", None)
    if is_token is not None:
        parts.append(bytes(is_token[start:end]))
    return canonical(tuple(parts)) if parts else b"", mm_index


def _is_in_root(part: object) -> bool:
    """Adapter and salt come along too; the adapter by name and path, which differ between hosts.
    Media have a number beside their names, whatever those are: 0.31 does not say what is what."""
    return (
        isinstance(part, tuple)
        and part[0] in ("lora", "cache_salt")
        and all(isinstance(word, str) for word in part)
    )


def _is_named_by_client(part: object) -> bool:
    """Whether this is an image or the like that a client has given a name (`multi_modal_uuids`)
    that may be another's elsewhere, or later: vLLM believes it as long as it runs. Those of vLLM's
    own making are digests, some behind the name of an adapter."""
    if not (isinstance(part, tuple) and len(part) > 1 and isinstance(part[-1], int)):
        return False
    return _UNIQUE_NAME.fullmatch(str(part[-2]).rpartition(":")[2]) is None


def _share_tokens(media: Sequence[MultiModalFeatureSpec]) -> bool:
    """Whether one begins before another has ended. Of such, vLLM's hashes know only the first until
    the block in which that ends; those on the GPU's blocks, too, so that better keys would not
    help."""
    places = [one.mm_position for one in media]
    ends = accumulate((place.offset + place.length for place in places), max)
    return any(place.offset < end for place, end in zip(places[1:], ends, strict=False))


class KeyMaker:
    """Starts chains for requests of one engine."""

    def __init__(
        self,
        namespace: bytes,
        block_sizes: Sequence[int],
        media_have_hashes: bool = True,
        adapter_settings: str = "",
    ) -> None:
        """`media_have_hashes`: what vLLM calls an image follows from what it shows.
        `adapter_settings`: what changes how the engine computes with any adapter."""
        self._namespace = namespace
        self._adapter_settings = adapter_settings
        self._media_have_hashes = media_have_hashes
        self._block_sizes = tuple(block_sizes)
        self._epoch = b""
        self._engine = os.urandom(16)
        # By vLLM's number of an adapter: the files it was loaded from; None where nobody knows.
        self._adapters: dict[int, bytes | None] = {}
        # By what vLLM's own prefix cache tells adapters apart by: the files it means; None where it
        # may mean several.
        self._files_of: dict[tuple[str, str], bytes | None] = {}

    def new_epoch(self, nonce: bytes) -> None:
        """After weights changed in place: no key made from now on equals an earlier one."""
        self._epoch = nonce
        self._files_of.clear()

    def keys_for(self, request: Request) -> RequestKeys:
        lora = request.lora_request
        adapter = self._adapter(lora) if lora else None
        if request.mm_features and not self._media_have_hashes:
            raise UnsupportedError(
                "vLLM only numbers images and the like while both its prefix cache and its "
                "processor cache are off; set --mm-processor-cache-gb above 0"
            )
        if _share_tokens(request.mm_features):
            raise UnsupportedError(
                "media that lie among each other's tokens (the audio of a video) are mixed up by "
                "vLLM's own prefix cache"
            )
        return self._keys(request, adapter)

    def renewed(self, request: Request, keys: RequestKeys) -> RequestKeys:
        """Those of a request that had others before `new_epoch`. It has loaded nothing since,
        whatever its adapter's files hold by now."""
        return self._keys(request, keys.adapter)

    def _keys(self, request: Request, adapter: bytes | None) -> RequestKeys:
        scope = (self._epoch, adapter, request.cache_salt or None)
        root = root_digest(self._namespace, scope)
        return RequestKeys(root, self._block_sizes, adapter, self._engine)

    def _adapter(self, lora: LoRARequest) -> bytes:
        """What the adapter of this request holds.

        vLLM goes on computing with what it once loaded under a number, whatever becomes of the
        files and whichever path a later request gives: such a request must not store under the
        name of the new files what the old ones computed.
        """
        number = lora.lora_int_id
        is_loaded_now = lora.load_inplace or number not in self._adapters
        place = lora.lora_name, lora.lora_path
        try:
            digest = self._digest_of(lora)
        except (TieredKVError, OSError):
            # vLLM may load something all the same, and go on with it when files can be read here.
            self._files_of[place] = None
            if is_loaded_now:
                self._adapters[number] = None
            raise
        if is_loaded_now:
            self._adapters[number] = digest
        elif self._adapters[number] != digest:
            self._adapters[number] = None
        # GPU blocks computed with other files may be taken for those of the ones that are there.
        if self._files_of.setdefault(place, digest) != digest:
            self._files_of[place] = None
            raise UnsupportedError(
                f"the files of adapter {lora.lora_name!r} have changed at {lora.lora_path}, or are "
                "not what vLLM has computed with under that name and path, which its prefix cache "
                "does not notice; load them from another path"
            )
        if self._adapters[number] is None:
            self._files_of[place] = None
            raise UnsupportedError(
                f"the files of adapter {lora.lora_name!r} are not those vLLM loaded as number "
                f"{number}; load them from another path, and under a new number or with "
                "load_inplace"
            )
        return digest

    def has_lost_adapter(self, request: Request, keys: RequestKeys, is_starting: bool) -> bool:
        """Whether a request computes with other files than it came with. vLLM reads them when it
        schedules the request, if it does not have them or not any more; of one with `load_inplace`
        again in each step. `is_starting`: none of its blocks has been looked at so far."""
        lora = request.lora_request
        if lora is None or not (lora.load_inplace or is_starting):
            return False
        try:
            is_lost = self._digest_of(lora) != keys.adapter
        except (TieredKVError, OSError):
            is_lost = True
        if is_lost:
            self._adapters[lora.lora_int_id] = None  # also if the files are changed back
        return is_lost

    def _digest_of(self, lora: LoRARequest) -> bytes:
        files = adapter_digest(lora.lora_name, lora.lora_path)
        settings = (self._adapter_settings, getattr(lora, "is_3d_lora_weight", False))
        return hashlib.sha256(files + canonical(settings)).digest()
