"""Faults planted where tiers are measured that nobody uses yet."""

from __future__ import annotations

from tools.mutants.mutation import Mutation, Needs

_LOADER = ("tests/unit/test_remote_loader.py",)
_COSTS = ("tests/unit/test_cost_model.py", "tests/unit/test_speed_estimates.py")
_STEPS = ("tests/engine/test_load_or_recompute.py::test_probes_wait_for_steps_without_prefills",)

PROBES = (
    Mutation(
        "probe-behind-a-load-counts",
        "connector/remote_loader.py",
        "            self._rehearsing.disturb()\n",
        "            pass\n",
        "a tier looks slow because it was busy",
        _LOADER,
    ),
    Mutation(
        "probe-of-nothing-counts",
        "connector/remote_loader.py",
        "                if not all(found):\n                    run.disturb()\n",
        "",
        "a daemon that has forgotten everything looks fast",
        _LOADER,
    ),
    Mutation(
        "probe-without-an-end",
        "connector/remote_loader.py",
        " and now < self._begun_at + _REHEARSED_S",
        "",
        "a slow daemon is kept busy for nobody",
        _LOADER,
    ),
    Mutation(
        "probe-beside-a-prefill",
        "connector/remote_tier.py",
        "        if is_quiet or time.monotonic() > self._rehearse_until:\n",
        "        if True:\n",
        "prefills are launched late",
        _STEPS,
        Needs.VLLM,
    ),
    Mutation(
        "probe-that-an-idle-engine-keeps",
        "connector/scheduler_half.py",
        "            or (self.remote is not None and self.remote.has_rehearsals)\n",
        "",
        "short answers never teach anything about a tier",
        _STEPS,
        Needs.VLLM,
    ),
    Mutation(
        "mapped-memory-learnt-from-a-socket",
        "cache/background_probes.py",
        "            places = major_places([part]) - self._costs.trusted\n",
        "            places = major_places([part])\n",
        "memory that is mapped looks as slow as a socket",
        _COSTS,
    ),
    Mutation(
        "probes-without-end",
        "cache/background_probes.py",
        "        if not is_urgent and now < heard_at + _EVERY_S:\n",
        "        if False:\n",
        "a daemon is kept busy with a probe beside every request",
        _COSTS,
    ),
    Mutation(
        "memory-of-this-host-judged-by-busy-loads",
        "cache/cost_model.py",
        "        if places <= self.trusted:\n",
        "        if False:\n",
        "a busy engine computes what lies in memory, and gets busier",
        _COSTS,
    ),
    Mutation(
        "tier-that-hangs-trusted",
        "cache/cost_model.py",
        "        if has_hung:\n",
        "        if False:\n",
        "the next requests wait for a tier that hangs, too",
        _COSTS,
    ),
    Mutation(
        "prefill-never-measured",
        "cache/cost_model.py",
        "            if not self._computes_on_cpu and 0 < self._blind <= ENOUGH:\n",
        "            if False:\n",
        "an engine whose prompts all hit a slow tier never finds out that computing is faster",
        _COSTS,
    ),
)
