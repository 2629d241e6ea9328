"""Keys, identity, memory and copies: `core/`, `connector/identity/`, `device/`, `csrc/`."""

from __future__ import annotations

from tools.mutants.mutation import Mutation, Needs

_INDEX = (
    "tests/unit/test_index.py",
    "tests/unit/test_durable_index.py",
    "tests/unit/test_eviction.py",
)
_CLASSES = ("tests/unit/test_size_classes.py",)
_KEY = ("tests/unit/test_key.py",)
_DEVICE = ("tests/unit/test_device.py",)
_MEMORY_STORE = ("tests/stores/test_memory_store.py",)
_TAILS = "tests/engine/test_partial_tail.py"
_KEYS = ("tests/engine/test_request_keys.py",)
_COMPARE = ("tests/unit/test_block_compare.py",)

KEYS_AND_COPIES = (
    Mutation(
        "index-pin-not-taken",
        "csrc/index/block_index.cpp",
        "for (const int64_t slot : slots) ++entries_[id_in(slot)].pins;",
        "for (const int64_t slot : slots) id_in(slot);",
        "a slot is reused while a copy reads it",
        _INDEX,
    ),
    Mutation(
        "index-evicts-pinned",
        "csrc/index/block_leaving.cpp",
        "if (entry.pins == 0 && index_.may_evict(id)) return id;",
        "if (index_.may_evict(id)) return id;",
        "a slot is reused while a copy reads it",
        _INDEX,
    ),
    Mutation(
        "index-slot-freed-while-pinned",
        "csrc/index/block_index.cpp",
        "if (!is_being_written && entries_[id].pins == 0) free(id);",
        "if (!is_being_written) free(id);",
        "a block removed while it is read is overwritten under its reader",
        _INDEX,
    ),
    Mutation(
        "index-slot-freed-while-written",
        "csrc/index/block_index.cpp",
        "if (!is_being_written && entries_[id].pins == 0) free(id);",
        "if (entries_[id].pins == 0) free(id);",
        "a copy still writes to a slot that is given to another block",
        _INDEX,
    ),
    Mutation(
        "index-half-written-is-a-hit",
        "csrc/index/block_index.cpp",
        "  return entries_[id].is_readable() ? Lookup::kHit : Lookup::kPending;\n",
        "  return Lookup::kHit;\n",
        "a block is loaded before it was stored",
        _INDEX,
    ),
    Mutation(
        "index-removed-block-comes-back",
        "csrc/index/block_chains.cpp",
        "  table_.erase(hash_(entries_.key(id)), id);\n",
        "",
        "a block that turned out bad is still found",
        _INDEX,
    ),
    Mutation(
        "index-commit-of-what-was-removed",
        "csrc/index/block_index.cpp",
        "    free(id);\n    return false;\n",
        "    free(id);\n    return true;\n",
        "a block removed by a reset counts as stored, and is sent to daemons",
        _INDEX,
    ),
    Mutation(
        "index-class-in-use-is-given-away",
        "csrc/index/slot_pool.cpp",
        "    if (last.slabs == 0) {\n",
        "    if (last.slabs >= 0) {\n",
        "blocks of a namespace are looked for in the places of another's",
        _CLASSES,
    ),
    Mutation(
        "slots-in-memory-not-yet-pinned",
        "csrc/index/slot_pool.cpp",
        "std::max<int64_t>(0, usable_bytes) / geometry_.slab_bytes",
        "(std::max<int64_t>(0, usable_bytes) + geometry_.slab_bytes - 1) / geometry_.slab_bytes",
        "a block is stored where the GPU cannot write yet",
        _INDEX,
    ),
    Mutation(
        "durable-slot-reused-without-quarantine",
        "csrc/index/durable_index.cpp",
        """  entries_[id].state = State::kQuarantined;
  quarantined_.push_back(entries_[id].slot);
""",
        "  drop(id);\n",
        "after a crash an old key points at a new block's bytes",
        _INDEX,
    ),
    Mutation(
        "key-without-namespace",
        "core/key.py",
        r'b"tiered-kv root\0" + namespace + canonical(scope)',
        r'b"tiered-kv root\0" + canonical(scope)',
        "blocks of another model, dtype or layout are served",
        _KEY,
    ),
    Mutation(
        "key-without-scope",
        "core/key.py",
        r'b"tiered-kv root\0" + namespace + canonical(scope)',
        r'b"tiered-kv root\0" + namespace',
        "tenants, adapters and epochs share blocks",
        _KEY,
    ),
    Mutation(
        "canonical-without-length",
        "core/key.py",
        'out += tag + struct.pack("<I", len(body)) + body',
        "out += tag + body",
        "two different scopes give the same key",
        _KEY,
    ),
    Mutation(
        "store-key-without-rank",
        "core/store.py",
        "StoreKey(namespace[:NAMESPACE_BYTES] + key + rank.encode())",
        "StoreKey(namespace[:NAMESPACE_BYTES] + key)",
        "one rank gets the shard of another",
        (*_KEY, "tests/unit/test_remote_worker.py"),
    ),
    Mutation(
        "cpu-store-reported-before-it-is-copied",
        "device/cpu_copier.py",
        """            native.gather(
                self._layouts[transfer.group_id],
                transfer.block_ids,
                self._arena.region,
                self._offsets(transfer),
                self._threads,
            )
""",
        """            arguments = (
                self._layouts[transfer.group_id],
                transfer.block_ids,
                self._arena.region,
                self._offsets(transfer),
                self._threads,
            )
            threading.Timer(0.5, native.gather, arguments).start()
""",
        "a slot is readable before it holds the block",
        _DEVICE,
    ),
    Mutation(
        "cpu-failed-load-counts-as-loaded",
        "device/cpu_copier.py",
        "error = str(failure)",
        "error = None",
        "a request goes on with blocks that hold anything",
        _DEVICE,
    ),
    Mutation(
        "generation-not-compared",
        "device/shared_arena.py",
        "return bool(np.array_equal(self._generations[offsets // PAGE], generations))",
        "return True",
        "bytes that changed while they were copied are used",
        ("tests/unit/test_leased_blocks.py::test_blocks_that_changed_are_not_used",),
    ),
    Mutation(
        "memory-generation-even-while-written",
        "device/shared_arena.py",
        "(before + 1 + before % 2) & _LAST_GENERATION",
        "(before + 1) & _LAST_GENERATION",
        "who copies out of a slot takes half a block for a whole one",
        _MEMORY_STORE,
    ),
    Mutation(
        "tail-key-without-its-tokens",
        "core/key.py",
        'canonical((parent, extra, struct.pack(f"<{len(tokens)}I", *tokens)))',
        "canonical((parent, extra, len(tokens)))",
        "prompts that differ in their last tokens get each other's answers",
        (*_KEYS, f"{_TAILS}::test_tail_matches_only_a_prompt_with_the_same_end"),
        Needs.VLLM,
    ),
    Mutation(
        "comparison-without-numbers",
        "core/block_compare.py",
        "    if not np.isfinite(apart).all():\n",
        "    if not len(apart):\n",
        "a block of infinities passes for a block that rounds differently",
        _COMPARE,
    ),
)
