"""States of token sequences for other programs: `api/`, and the copies in place it brought."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

_FOUND = "tests/remote/test_token_cache.py"
_SEVERAL = "tests/remote/test_token_cache_several.py"
_TROUBLE = "tests/remote/test_token_cache_trouble.py"

API = (
    Mutation(
        "token-cache-match-past-a-gap",
        "api/chain_store.py",
        "            if here < stop - start:\n                return Outcome(count, {})\n",
        "",
        "a query is told that memory holds states which nobody has",
        (f"{_SEVERAL}::test_a_match_ends_where_one_of_several_has_lost_its_share",),
    ),
    Mutation(
        "token-cache-counts-a-part-twice",
        "api/chain_store.py",
        "            left[server] -= here\n",
        "",
        "a query is told that memory holds states which nobody has",
        (f"{_SEVERAL}::test_a_match_ends_within_the_second_part_of_one_of_several",),
    ),
    Mutation(
        "token-cache-prefix-of-parts-of-chunks",
        "api/token_cache.py",
        "        if partial:\n",
        "        if partial > self.chunk_tokens:\n",
        "states are stored under the keys of other tokens",
        (f"{_FOUND}::test_a_prefix_has_whole_chunks",),
    ),
    Mutation(
        "token-cache-keys-without-sizes",
        "api/token_keys.py",
        "root_digest(self.namespace, (token_bytes, chunk_tokens))",
        "root_digest(self.namespace)",
        "where a daemon has forgotten a namespace, states of other sizes are found",
        (f"{_FOUND}::test_keys_are_those_of_the_reference_in_a_namespace_of_their_own",),
    ),
    Mutation(
        "copied-rows-not-rechecked",
        "remote/shm_copy.py",
        "return count if memory.arena.have_generations(offsets, generations) else 0",
        "return count",
        "bytes that changed while they were copied are used",
        (f"{_TROUBLE}::test_what_changed_while_it_was_copied_is_not_used",),
    ),
    Mutation(
        "memory-closed-with-its-daemon",
        "remote/local_daemon.py",
        "self._keeps_departed(memory):\n                memory.retire()\n",
        "self._keeps_departed(memory):\n                memory.close()\n",
        "a daemon dies, and the program that copies from its memory with it",
        (f"{_TROUBLE}::test_memory_stays_mapped_while_somebody_copies",),
    ),
    Mutation(
        "cache-closed-under-a-copy",
        "remote/local_daemon.py",
        "                memory.wait_until_closed()\n",
        "                pass\n",
        "a cache is said to be closed while a thread of the program still copies",
        (f"{_TROUBLE}::test_the_end_waits_for_those_who_copy",),
    ),
    Mutation(
        "rows-copied-that-are-not-leased",
        "remote/shm_copy.py",
        "lambda fact: fact[0] and fact[1] == nbytes",
        "lambda fact: True",
        "bytes of other blocks, or of none, are taken for those asked for",
        (f"{_TROUBLE}::test_only_what_is_leased_is_copied",),
    ),
    Mutation(
        "late-leases-of-an-idle-program",
        "remote/local_daemon.py",
        "            memory.settle()\n",
        "            pass\n",
        "an idle program keeps blocks of a daemon that had answered too late",
        (f"{_TROUBLE}::test_leases_that_came_too_late_go_back_without_a_further_call",),
    ),
)
