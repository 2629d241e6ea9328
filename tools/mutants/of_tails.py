"""Faults planted where the block in which a prompt ends is stored and loaded."""

from __future__ import annotations

from tools.mutants.mutation import Mutation, Needs

_HAZARDS = "tests/engine/test_tail_hazards.py"
_TAILS = "tests/engine/test_partial_tail.py"
_KEYS = ("tests/engine/test_request_keys.py",)

TAILS = (
    Mutation(
        "tail-key-without-its-tokens",
        "core/key.py",
        'canonical((parent, extra, struct.pack(f"<{len(tokens)}I", *tokens)))',
        "canonical((parent, extra, len(tokens)))",
        "prompts that differ in their last tokens get each other's answers",
        (*_KEYS, f"{_TAILS}::test_a_tail_is_matched_for_exactly_the_tokens_it_holds"),
        Needs.VLLM,
    ),
    Mutation(
        "tail-key-without-what-comes-before",
        "connector/request_keys.py",
        "        parent = self._units[start // self._unit - 1] if start else self._root\n",
        "        parent = self._root\n",
        "prompts that end alike get each other's answers",
        (*_KEYS, f"{_TAILS}::test_a_tail_is_matched_for_exactly_the_tokens_it_holds"),
        Needs.VLLM,
    ),
    Mutation(
        "tail-stored-too-early",
        "connector/request_state.py",
        " or self.has_tail or ready < tail.end:",
        " or self.has_tail or ready < tail.position:",
        "what another request left in the block is read as the end of a prompt",
        (f"{_HAZARDS}::test_a_tail_is_stored_when_all_of_its_tokens_are_there",),
        Needs.VLLM,
    ),
    Mutation(
        "tail-of-who-has-gone-on",
        "connector/request_state.py",
        "        if self.tail is None or self.request.num_tokens != self.tail.end:\n",
        "        if self.tail is None:\n",
        "a request that was preempted goes on from tokens that nobody has computed",
        (f"{_HAZARDS}::test_who_starts_over_behind_the_prompt_has_no_tail",),
        Needs.VLLM,
    ),
    Mutation(
        "tail-with-its-last-token",
        "connector/load_planner.py",
        "        loadable = min(loadable, limit - computed)  # of a tail all but the last token\n",
        "",
        "there is nothing to compute, and vLLM stops",
        (f"{_TAILS}::test_a_repeated_prompt_computes_its_last_token",),
        Needs.VLLM,
    ),
    Mutation(
        "tail-of-a-closed-sequence",
        "connector/store_planner.py",
        "        state.has_tail = True\n        if state.closed is not None:\n",
        "        state.has_tail = True\n        if False:\n",
        "what another adapter computed is stored under the name of the one before",
        (f"{_HAZARDS}::test_a_tail_of_an_adapter_that_was_replaced",),
        Needs.VLLM,
    ),
    Mutation(
        "tail-of-bad-blocks",
        "connector/failed_step.py",
        "                    index.remove(state.tail.key)\n",
        "                    pass\n",
        "what was computed from a load that failed is served",
        (f"{_HAZARDS}::test_a_tail_that_was_made_from_bad_blocks_is_forgotten",),
        Needs.VLLM,
    ),
    Mutation(
        "tail-spoiled-for-good",
        "connector/failed_step.py",
        "            state.has_tail = False\n",
        "",
        "tails of a step that failed are missing",
        (f"{_HAZARDS}::test_a_failed_step_stores_the_tails_of_all_again",),
        Needs.VLLM,
    ),
    Mutation(
        "tail-forgotten-after-a-failed-load",
        "connector/request_state.py",
        "        self.has_tail = False\n",
        "",
        "a tail whose load failed is not stored when it was computed",
        (f"{_HAZARDS}::test_a_load_of_a_tail_that_fails_is_computed",),
        Needs.VLLM,
    ),
    Mutation(
        "full-block-taken-for-the-daemons-tail",
        "connector/remote_tier.py",
        "range(held.start, min(held.stop, full))",
        "held",
        "the block that a prompt and its answer share is stored nowhere",
        (f"{_HAZARDS}::test_the_block_that_a_daemons_tail_becomes_is_stored",),
        Needs.VLLM,
    ),
    Mutation(
        "daemon-asked-just-for-a-tail",
        "connector/remote_tier.py",
        "            lacks_some |= first + found < stop\n",
        "            lacks_some |= first + found < stop + tail\n",
        "prompts that this engine holds wait for a daemon",
        (f"{_TAILS}::test_nobody_asks_a_daemon_just_for_a_tail",),
        Needs.VLLM,
    ),
    Mutation(
        "tail-left-at-the-daemon",
        "connector/load_planner.py",
        " and self._keeps_tail(state, loads[0])",
        "",
        "a prompt that came from a daemon computes its tail again",
        (f"{_HAZARDS}::test_a_tail_from_a_daemon_is_kept_where_the_other_blocks_are",),
        Needs.VLLM,
    ),
)
