"""Sliding windows, replicas, comparisons of what a tier holds, and hits the GPU serves alone."""

from __future__ import annotations

from tools.mutants.mutation import Mutation, Needs

_PLANNER = ("tests/unit/test_planner.py",)
_SEARCH = ("tests/unit/test_window_search.py",)
_REPLICAS = ("tests/unit/test_replicas.py",)
_COMPARE = ("tests/unit/test_block_compare.py",)
_LEDGER = ("tests/unit/test_verification_ledger.py",)
_VERIFICATION = ("tests/engine/test_verification.py",)
_DEVICE_HITS = ("tests/engine/test_device_hits.py",)

WINDOWS_AND_COMPARISONS = (
    Mutation(
        "window-one-block-short",
        "cache/planner.py",
        "(end - self.window + 1) // self.block_size)",
        "(end - self.window + 1) // self.block_size + 1)",
        "tokens at the edge of a window read a block that was never loaded",
        _PLANNER,
    ),
    Mutation(
        "window-not-asked-for",
        "cache/planner.py",
        "while settled < len(windowed) and end > computed:",
        "while False:",
        "a hit ends where a window is missing",
        _PLANNER,
    ),
    Mutation(
        "window-with-a-hole",
        "connector/remote_lookup.py",
        "                if count < len(some):\n",
        "                if not count:\n",
        "a block that no daemon has is promised, and the engine ends",
        _SEARCH,
    ),
    Mutation(
        "replicas-all-send",
        "connector/shard.py",
        "return first[0] % self.replicas == self.replica",
        "return True",
        "each rank sends the same block, and the network carries it many times",
        _REPLICAS,
    ),
    Mutation(
        "replicas-have-tags-of-their-own",
        "connector/shard.py",
        "shard, replica = divmod(tensor, replicas)",
        "shard, replica = tensor, tensor % replicas",
        "a daemon is asked for shards that nobody sends",
        _REPLICAS,
    ),
    Mutation(
        "comparison-without-numbers",
        "core/block_compare.py",
        "    if not np.isfinite(apart).all():\n",
        "    if not len(apart):\n",
        "a block of infinities passes for a block that rounds differently",
        _COMPARE,
    ),
    Mutation(
        "comparison-by-the-first-rank",
        "cache/verification_ledger.py",
        "        if len(comparison.reports) < self._num_ranks:\n",
        "        if not comparison.reports:\n",
        "a bad shard of another rank is not noticed",
        _LEDGER,
    ),
    Mutation(
        "comparison-after-a-reset",
        "cache/verification_ledger.py",
        "            comparison.is_void = True\n",
        "            pass\n",
        "good blocks are accused because the weights have changed",
        _LEDGER,
    ),
    Mutation(
        "bad-block-not-evicted",
        "connector/verification.py",
        "                    self._index.remove(key, slot)",
        "                    pass",
        "a block that was found to be wrong is served again",
        _VERIFICATION,
        Needs.VLLM,
    ),
    Mutation(
        "bad-block-left-at-daemons",
        "connector/verification.py",
        "            self.delete_at_daemons(keys)\n",
        "            pass\n",
        "a block that was found to be wrong comes back from a daemon",
        _VERIFICATION,
        Needs.VLLM,
    ),
    Mutation(
        "device-hit-hashes-for-its-last-block",
        "connector/scheduler_half.py",
        "        had = state.on_gpu + state.computed_again\n",
        "        had = state.on_gpu\n",
        "a prompt that fills its last block waits for its keys",
        _DEVICE_HITS,
        Needs.VLLM,
    ),
    Mutation(
        "device-hit-asks-daemons",
        "connector/load_planner.py",
        "prefix_cache and not self._gpu_has_block_before(request, limit):",
        "prefix_cache:",
        "daemons are asked for, and lease, what the GPU has",
        _DEVICE_HITS,
        Needs.VLLM,
    ),
    Mutation(
        "device-hit-not-used",
        "connector/store_planner.py",
        "            self._index.touch(keys[start:stop])\n            missing",
        "            missing",
        "prompts that are asked all the time leave the tier first",
        _DEVICE_HITS,
        Needs.VLLM,
    ),
    Mutation(
        "device-hit-outlives-a-reset",
        "connector/store_planner.py",
        "        self._unseen.clear()\n",
        "",
        "blocks computed with old weights are stored after a reset",
        _DEVICE_HITS,
        Needs.VLLM,
    ),
)
