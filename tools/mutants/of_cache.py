"""Decisions without bytes: `cache/`."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

_INDEX = ("tests/unit/test_index.py",)
_LEDGER = ("tests/unit/test_ledger.py",)

CACHE = (
    Mutation(
        "index-pin-not-taken",
        "cache/index.py",
        "            entry.pins += 1\n\n    def unpin",
        "            entry.pins += 0\n\n    def unpin",
        "a slot is reused while a copy reads it",
        _INDEX,
    ),
    Mutation(
        "index-evicts-pinned",
        "cache/index.py",
        "if not entry.pins and not entry.followers and self._may_evict(entry.key):",
        "if not entry.followers and self._may_evict(entry.key):",
        "a slot is reused while a copy reads it",
        _INDEX,
    ),
    Mutation(
        "index-empties-slab-of-pinned",
        "cache/index.py",
        "if entry.pins or entry.state is not _State.COMMITTED:",
        "if entry.state is not _State.COMMITTED:",
        "memory moves to another size class while a copy reads it",
        _INDEX,
    ),
    Mutation(
        "index-slot-freed-while-pinned",
        "cache/index.py",
        "if not being_written and not entry.pins:",
        "if not being_written:",
        "a block removed while it is read is overwritten under its reader",
        _INDEX,
    ),
    Mutation(
        "index-slot-freed-while-written",
        "cache/index.py",
        "if not being_written and not entry.pins:",
        "if not entry.pins:",
        "a copy still writes to a slot that is given to another block",
        _INDEX,
    ),
    Mutation(
        "index-half-written-is-a-hit",
        "cache/index.py",
        "return Lookup.PENDING if key in self._slot_of else Lookup.MISS",
        "return Lookup.HIT if key in self._slot_of else Lookup.MISS",
        "a block is loaded before it was stored",
        _INDEX,
    ),
    Mutation(
        "index-removed-block-comes-back",
        "cache/index.py",
        "        self._readable.discard(entry.key)\n",
        "",
        "a block that turned out bad is still found",
        _INDEX,
    ),
    Mutation(
        "index-commit-of-what-was-removed",
        "cache/index.py",
        """            self._free(slot)
            return False
""",
        """            self._free(slot)
            return True
""",
        "a block removed by a reset counts as stored, and is sent to daemons",
        _INDEX,
    ),
    Mutation(
        "index-evicts-the-block-before",
        "cache/index.py",
        """            with self._kept(parent_key):
                slot = self._make_free(size_class, 1 + more)
""",
        """            slot = self._make_free(size_class, 1 + more)
""",
        "a new block pushes out the head it follows and can never be found",
        _INDEX,
    ),
    Mutation(
        "index-makes-more-room-than-asked-for",
        "cache/index.py",
        "            for slot in islice(victims, wanted):\n",
        "            for slot in victims:\n",
        "one block that is stored empties the tier",
        _INDEX,
    ),
    Mutation(
        "index-admits-heads-as-leaves",
        "cache/index.py",
        ".admit(slot, entry.key, bool(entry.followers))\n        return True\n",
        ".admit(slot, entry.key)\n        return True\n",
        "each eviction walks over heads that cannot leave",
        _INDEX,
    ),
    Mutation(
        "index-quota-off-by-one",
        "cache/index.py",
        "for c in classes) >= quota",
        "for c in classes) > quota",
        "a tenant holds more than its quota",
        _INDEX,
    ),
    Mutation(
        "slots-beyond-the-capacity",
        "cache/slots.py",
        "if self._next_fresh_slab >= self._usable_slabs:",
        "if self._next_fresh_slab > self._usable_slabs:",
        "a block is written behind the end of the arena",
        _INDEX,
    ),
    Mutation(
        "slots-in-memory-not-yet-pinned",
        "cache/slots.py",
        "usable = usable_bytes // self.geometry.slab_bytes",
        "usable = -(-usable_bytes // self.geometry.slab_bytes)",
        "a block is stored where the GPU cannot write yet",
        _INDEX,
    ),
    Mutation(
        "slots-returned-slab-beyond-the-limit",
        "cache/slots.py",
        "if self._returned_slabs and self._returned_slabs[0] < self._usable_slabs:",
        "if self._returned_slabs:",
        "a block is stored where the GPU cannot write",
        _INDEX,
    ),
    Mutation(
        "durable-slot-reused-without-quarantine",
        "cache/durable_index.py",
        """        self._entries[slot].state = _State.QUARANTINED
        self._quarantined.append(slot)
""",
        """        super()._free(slot)
""",
        "after a crash an old key points at a new block's bytes",
        _INDEX,
    ),
    Mutation(
        "durable-bad-slot-handed-out-again",
        "cache/durable_index.py",
        "        self._entries[slot].state = _State.RETIRED\n",
        "        super()._free(slot)\n",
        "every write to a broken place of the disk fails, for ever",
        _INDEX,
    ),
    Mutation(
        "ledger-first-rank-commits",
        "cache/ledger.py",
        "if len(store.reports) == self._num_ranks:",
        "if len(store.reports) >= 1:",
        "a block is a hit that only some ranks can serve",
        _LEDGER,
    ),
    Mutation(
        "ledger-most-generous-rank-decides",
        "cache/ledger.py",
        "least = min(store.reports, key=lambda report: report.stored)",
        "least = max(store.reports, key=lambda report: report.stored)",
        "a block is a hit that only some ranks can serve",
        _LEDGER,
    ),
    Mutation(
        "ledger-failed-load-is-offered-again",
        "cache/ledger.py",
        "        if failed is Tier.CPU:\n",
        "        if failed is Tier.REMOTE:\n",
        "a request fails on the same bad block over and over",
        _LEDGER,
    ),
    Mutation(
        "ledger-load-never-unpinned",
        "cache/ledger.py",
        "        self._index.unpin(load.slots)\n",
        "",
        "the tier fills with blocks that cannot leave",
        _LEDGER,
    ),
    Mutation(
        "ledger-lent-blocks-never-given-back",
        "cache/ledger.py",
        "            load.on_end()\n",
        "            pass\n",
        "a daemon's memory fills with blocks that cannot leave",
        _LEDGER,
    ),
    Mutation(
        "ledger-put-ends-with-the-first-rank",
        "cache/ledger.py",
        "if len(put.reports) < self._num_ranks:",
        "if len(put.reports) < 1:",
        "a slot is reused while another rank sends it to a daemon",
        ("tests/unit/test_remote_half.py",),
    ),
    Mutation(
        "ledger-ahead-load-good-if-any-rank-was",
        "cache/ledger.py",
        "if not all(ahead.reports):",
        "if not any(ahead.reports):",
        "a block that one rank could not load stays in the tier",
        _LEDGER,
    ),
    Mutation(
        "ledger-ahead-load-ends-with-the-first-rank",
        "cache/ledger.py",
        "if len(ahead.reports) < self._num_ranks:",
        "if len(ahead.reports) < 1:",
        "a slot is reused while another rank still loads it",
        _LEDGER,
    ),
    Mutation(
        "ledger-spoilt-stores-become-readable",
        "cache/ledger.py",
        "                self._index.remove(key, slot)\n\n",
        "                pass\n\n",
        "blocks computed from wrong bytes are stored",
        _LEDGER,
    ),
    Mutation(
        "planner-stores-a-tail-without-its-head",
        "cache/planner.py",
        "            return StorePlan(positions, slots, stop - position)\n",
        "            continue\n",
        "where room ends, blocks are stored that can never be found",
        _LEDGER,
    ),
    Mutation(
        "planner-loads-half-a-unit",
        "cache/planner.py",
        "* group.block_size)\n        end -= end % alignment\n",
        "* group.block_size)\n",
        "groups of different block sizes load different tokens",
        _LEDGER,
    ),
    Mutation(
        "planner-first-group-decides",
        "cache/planner.py",
        "in zip(groups, keys, strict=True):",
        "in zip(groups[:1], keys[:1], strict=True):",
        "a hit counts that only some groups can serve",
        _LEDGER,
    ),
)
