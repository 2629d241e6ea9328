"""Block keys of a vLLM request: from its scope (epoch, LoRA, salt), tokens and media."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
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

_MAX_SCOPES = 16  # that misses are looked up under

# A digest or a UUID: a client would not reuse such a name for another image.
_UNIQUE_NAME = re.compile(r"[0-9a-fA-F]{32,}|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class RequestKeys:
    """The keys of all full blocks of a request's confirmed tokens, per group; they grow with the
    request. `KeyMaker` makes it, in the scheduler's thread.

    The chain is hashed once, in units that divide the block sizes of all groups; a group's key is
    the digest at the end of its block.

    With `lookahead`, a key also covers that many tokens after its block: layers of a draft model
    such as EAGLE read the token after the one whose KV they compute. The chain then starts with the
    first `lookahead` tokens, and all units lie that many tokens later.
    """

    def __init__(
        self,
        root: bytes,
        block_sizes: Sequence[int],
        adapter: bytes | None = None,
        engine: bytes = b"",
        lookahead: int = 0,
    ) -> None:
        """`adapter`: the digest of the request's adapter, which is part of the root. `engine`: an
        id that is unique to this engine process."""
        self.adapter = adapter
        self.lookahead = lookahead
        self._engine = engine
        self._digest = self._root = root
        self._unit = math.gcd(*block_sizes)
        self._steps = [size // self._unit for size in block_sizes]
        self._suffixes = [group_suffix(group_id) for group_id in range(len(block_sizes))]
        self._units: list[bytes] = []
        self._mm_index = 0
        self.of_group: list[list[BlockKey]] = [[] for _ in block_sizes]

    def extend(self, request: Request, num_tokens: int) -> None:
        """Adds the keys of the full blocks of the first `num_tokens` tokens, which must be
        confirmed, as far as the tokens after them are known."""
        start = len(self._units) * self._unit
        stop = min(num_tokens, len(request._all_token_ids) - self.lookahead)
        stop -= stop % self._unit
        if stop <= start:
            return
        if self.lookahead:
            if not start:
                self._digest = self._first_tokens(request)
            start, stop = start + self.lookahead, stop + self.lookahead
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
            # A cast, because a BlockKey() call for each key takes measurable time.
            self.of_group[0].extend(cast("list[BlockKey]", keys))
            return
        for group, step in enumerate(self._steps):
            have = len(self.of_group[group])
            ends = self._units[have * step + step - 1 :: step]
            self.of_group[group].extend(BlockKey(end + self._suffixes[group]) for end in ends)

    def _first_tokens(self, request: Request) -> bytes:
        """Returns the digest of the first `lookahead` tokens, which no unit covers."""
        _, digest = extend_keys(
            self._root,
            request._all_token_ids,
            0,
            self.lookahead,
            self.lookahead,
            self._extras(request, 0, self.lookahead, self.lookahead),
            b"",
        )
        return digest

    def of_tail(self, request: Request, start: int, end: int) -> BlockKey:
        """Returns the key of the partial block with the tokens `start` to `end` of the prompt. The
        blocks before it must have their keys."""
        extra = b""
        if request.mm_features or request.prompt_embeds is not None:
            extra, _ = _extra(request, start, end, 0, self._engine)
        parent = self._units[start // self._unit - 1] if start else self._root
        return tail_key(parent, request._all_token_ids[start:end], extra)

    def _extras(
        self, request: Request, start: int, stop: int, unit: int | None = None
    ) -> dict[int, bytes] | None:
        """Returns, by unit, what decides the contents besides the token ids: media, embeddings."""
        if not request.mm_features and request.prompt_embeds is None:
            return None
        unit = unit or self._unit
        extras: dict[int, bytes] = {}
        for index, first in enumerate(range(start, stop, unit)):
            end = first + unit
            extra, self._mm_index = _extra(request, first, end, self._mm_index, self._engine)
            if extra:
                extras[index] = extra
        return extras


def _extra(
    request: Request, start: int, end: int, mm_index: int, engine: bytes
) -> tuple[bytes, int]:
    """Returns the extra key material of one block, and `mm_index` for the next block. `mm_index`:
    the first multimodal input that does not end before the block."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    found, mm_index = generate_block_hash_extra_keys(request, start, end, mm_index)
    parts = [part for part in found or () if not _is_in_root(part)]
    if any(map(_is_named_by_client, parts)):
        parts.append(engine)
    # Prompts that mix tokens and embeddings: vLLM fills the gaps of either kind with zeros, which
    # are also a valid token or embedding.
    is_token = getattr(request, "prompt_is_token_ids", None)
    if is_token is not None:
        parts.append(bytes(is_token[start:end]))
    return canonical(tuple(parts)) if parts else b"", mm_index


def _is_in_root(part: object) -> bool:
    """Whether this extra key is the adapter or the salt, which are part of the root; vLLM names the
    adapter by name and path, which differ between hosts. vLLM 0.31 does not label its extra keys,
    but those of media contain a number, while these consist of strings."""
    return (
        isinstance(part, tuple)
        and part[0] in ("lora", "cache_salt")
        and all(isinstance(word, str) for word in part)
    )


def _is_named_by_client(part: object) -> bool:
    """Whether this extra key is a multimodal input that the client has named (`multi_modal_uuids`).
    Another client may use the name for other contents; vLLM trusts it only for the lifetime of an
    engine. vLLM's own names are digests, some with the name of an adapter as prefix."""
    if not (isinstance(part, tuple) and len(part) > 1 and isinstance(part[-1], int)):
        return False
    return _UNIQUE_NAME.fullmatch(str(part[-2]).rpartition(":")[2]) is None


def _share_tokens(media: Sequence[MultiModalFeatureSpec]) -> bool:
    """Whether two multimodal inputs overlap. vLLM's block hashes then cover only the first of them
    up to the block in which it ends. vLLM's own prefix cache uses these hashes on the GPU, so that
    better keys here would not help."""
    places = [one.mm_position for one in media]
    ends = accumulate((place.offset + place.length for place in places), max)
    return any(place.offset < end for place, end in zip(places[1:], ends, strict=False))


class KeyMaker:
    """Makes the `RequestKeys` of one engine's requests and tracks which adapter files they use. The
    scheduler half calls it, in the scheduler's thread."""

    def __init__(
        self,
        namespace: bytes,
        block_sizes: Sequence[int],
        media_have_hashes: bool = True,
        adapter_settings: str = "",
        lookahead: int = 0,
    ) -> None:
        """`media_have_hashes`: vLLM names media by a hash of their contents. `adapter_settings`:
        settings that change what the engine computes with any adapter. `lookahead`: see
        `RequestKeys`."""
        self._lookahead = lookahead
        self._namespace = namespace
        self._adapter_settings = adapter_settings
        self._media_have_hashes = media_have_hashes
        self._block_sizes = tuple(block_sizes)
        self._epoch = b""
        self._engine = os.urandom(16)
        # By lora_int_id: the digest of the files that vLLM loaded; None if that is unknown.
        self._adapters: dict[int, bytes | None] = {}
        # By name and path, which identify an adapter in vLLM's own prefix cache: the digest of its
        # files; None if blocks of several versions may be in that cache.
        self._files_of: dict[tuple[str, str], bytes | None] = {}
        # By adapter and salt, least recently used first: the roots of the last requests' keys.
        self._roots: OrderedDict[tuple[bytes | None, str | None], bytes] = OrderedDict()

    def new_epoch(self, nonce: bytes) -> None:
        """Makes all later keys differ from earlier ones, after weights changed in place."""
        self._epoch = nonce
        self._files_of.clear()
        self._roots.clear()

    def keys_for(self, request: Request) -> RequestKeys:
        lora = request.lora_request
        adapter = self._adapter(lora) if lora else None
        if request.mm_features and not self._media_have_hashes:
            raise UnsupportedError(
                "vLLM does not hash multimodal inputs while both its prefix cache and its "
                "processor cache are off; set --mm-processor-cache-gb above 0"
            )
        if _share_tokens(request.mm_features):
            raise UnsupportedError(
                "multimodal inputs with overlapping tokens (such as the audio of a video) are not "
                "cached, because vLLM's block hashes do not tell them apart"
            )
        return self._keys(request, adapter)

    def renewed(self, request: Request, keys: RequestKeys) -> RequestKeys:
        """Returns new keys for a request from before `new_epoch`, with the adapter digest of its
        old keys: vLLM has not loaded the adapter since then, even if the files have changed."""
        return self._keys(request, keys.adapter)

    def under_other_scopes(
        self, request: Request, keys: RequestKeys, num_tokens: int
    ) -> Iterator[tuple[RequestKeys, bool]]:
        """Yields the keys that the first `num_tokens` tokens of a request would have with the other
        adapters and salts of recent requests, and whether the salt is that of the request."""
        own_salt = request.cache_salt or None
        for (adapter, salt), root in self._roots.items():
            if (adapter, salt) != (keys.adapter, own_salt):
                other = RequestKeys(root, self._block_sizes, adapter, self._engine, self._lookahead)
                other.extend(request, num_tokens)
                yield other, salt == own_salt

    def _keys(self, request: Request, adapter: bytes | None) -> RequestKeys:
        salt = request.cache_salt or None
        scope = (self._epoch, adapter, salt)
        root = root_digest(self._namespace, scope)
        self._roots[adapter, salt] = root
        self._roots.move_to_end((adapter, salt))
        if len(self._roots) > _MAX_SCOPES:
            self._roots.popitem(last=False)
        return RequestKeys(root, self._block_sizes, adapter, self._engine, self._lookahead)

    def _adapter(self, lora: LoRARequest) -> bytes:
        """Returns the digest of the request's adapter.

        vLLM keeps using the files that it once loaded for a lora_int_id, even if they change or a
        later request gives another path. Blocks computed with the old files must not get keys of
        the new ones, so this raises UnsupportedError for such a request.
        """
        number = lora.lora_int_id
        is_loaded_now = lora.load_inplace or number not in self._adapters
        place = lora.lora_name, lora.lora_path
        try:
            digest = self._digest_of(lora)
        except (TieredKVError, OSError):
            # vLLM's workers may still load files, and keep using them when this host can read some.
            self._files_of[place] = None
            if is_loaded_now:
                self._adapters[number] = None
            raise
        if is_loaded_now:
            self._adapters[number] = digest
        elif self._adapters[number] != digest:
            self._adapters[number] = None
        # vLLM's prefix cache may return GPU blocks that were computed with other files.
        if self._files_of.setdefault(place, digest) != digest:
            self._files_of[place] = None
            raise UnsupportedError(
                f"the files of adapter {lora.lora_name!r} at {lora.lora_path} have changed since "
                "vLLM cached blocks for this name and path, which its prefix cache does not "
                "notice; load them from another path"
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
        """Whether a request computes with other adapter files than at its arrival. vLLM reads the
        files when it schedules the request, unless they are loaded; with `load_inplace` it reads
        them again in each step. `is_starting`: none of the request's blocks was looked up yet."""
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
