"""What decides the key of a request's blocks: `connector/request_keys.py` and who calls it."""

from __future__ import annotations

from tools.mutants.mutation import Mutation, Needs

_ADAPTERS = ("tests/engine/test_adapter_keys.py",)
_ISOLATION = ("tests/engine/test_isolation.py",)
_KEYS = ("tests/engine/test_request_keys.py",)

REQUEST_KEYS = (
    Mutation(
        "images-by-number",
        "connector/request_keys.py",
        "if request.mm_features and not self._media_have_hashes:",
        "if False:",
        "after a restart another image with the same number is taken for the first",
        _KEYS,
        Needs.VLLM,
    ),
    Mutation(
        "media-that-share-tokens",
        "connector/request_keys.py",
        "if _share_tokens(request.mm_features):",
        "if False:",
        "a video with another sound is taken for the first",
        ("tests/engine/test_shared_media.py",),
        Needs.VLLM,
    ),
    Mutation(
        "request-key-without-salt",
        "connector/request_keys.py",
        "request.cache_salt or None)",
        "None)",
        "one tenant's prompts are answered from another's cache",
        _KEYS,
        Needs.VLLM,
    ),
    Mutation(
        "request-key-without-lora",
        "connector/request_keys.py",
        "scope = (self._epoch, adapter,",
        "scope = (self._epoch, None,",
        "an adapter gets blocks computed with another one",
        _ADAPTERS,
        Needs.VLLM,
    ),
    Mutation(
        "adapter-changed-at-its-path",
        "connector/request_keys.py",
        "if self._files_of.setdefault(place, digest) != digest:",
        "if self._files_of.setdefault(place, digest) is None:",
        "blocks of an adapter's old files are stored as those of its new ones",
        _ADAPTERS,
        Needs.VLLM,
    ),
    Mutation(
        "adapter-replaced-while-in-use",
        "connector/request_state.py",
        "        self.lost_adapter = True\n        self.close(DropReason.RESET)\n",
        "        self.lost_adapter = True\n",
        "blocks computed with a new adapter are stored as the old one's",
        _ISOLATION,
        Needs.VLLM,
    ),
    Mutation(
        "adapter-replaced-and-started-over",
        "connector/request_state.py",
        "self.closed = DropReason.RESET if self.lost_adapter else None",
        "self.closed = None",
        "a request that starts over stores a new adapter's blocks as the old one's",
        _ISOLATION,
        Needs.VLLM,
    ),
    Mutation(
        "adapter-refused-takes-no-place",
        "connector/scheduler_half.py",
        "            take_adapters(self._requests.values(), request.lora_request, None)\n",
        "",
        "blocks computed with files that cannot be cached are stored as those before them",
        _ISOLATION,
        Needs.VLLM,
    ),
    Mutation(
        "adapter-read-again-unnoticed",
        "connector/request_keys.py",
        "return self._digest_of(lora) != keys.adapter",
        "return False",
        "blocks of files that changed under a request are stored as those it came with",
        _ISOLATION,
        Needs.VLLM,
    ),
    Mutation(
        "request-key-without-epoch",
        "connector/request_keys.py",
        "scope = (self._epoch,",
        'scope = (b"",',
        "after weights changed in place old blocks are found",
        _KEYS,
        Needs.VLLM,
    ),
    Mutation(
        "request-key-without-images",
        "connector/request_keys.py",
        "                extras[index] = extra\n",
        "                pass\n",
        "a question about one picture is answered about another",
        _KEYS,
        Needs.VLLM,
    ),
    Mutation(
        "tail-key-without-images",
        "connector/request_keys.py",
        "            extra, _ = _extra(request, start, end, 0)\n",
        "            pass\n",
        "a question about one picture, asked in less than a block, is answered about another",
        _KEYS,
        Needs.VLLM,
    ),
    Mutation(
        "request-key-half-a-block",
        "connector/request_keys.py",
        "stop = num_tokens - num_tokens % self._unit",
        "stop = -(-num_tokens // self._unit) * self._unit",
        "tokens that do not exist yet are hashed",
        _KEYS,
        Needs.VLLM,
    ),
)
