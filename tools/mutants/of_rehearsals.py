"""Faults planted where tiers are measured that nobody uses yet."""

from __future__ import annotations

from tools.mutants.mutation import Mutation, Needs

_LOADER = ("tests/unit/test_remote_loader.py",)
_ECONOMICS = ("tests/unit/test_load_economics.py", "tests/unit/test_speed_estimates.py")
_STEPS = (
    "tests/engine/test_load_or_recompute.py::test_rehearsals_wait_for_steps_without_prefills",
)

REHEARSALS = (
    Mutation(
        "rehearsal-behind-a-load-counts",
        "connector/remote_loader.py",
        "            self._rehearsing.disturb()\n",
        "            pass\n",
        "a tier looks slow because it was busy",
        _LOADER,
    ),
    Mutation(
        "rehearsal-of-nothing-counts",
        "connector/remote_loader.py",
        "                if not all(found):\n                    run.disturb()\n",
        "",
        "a daemon that has forgotten everything looks fast",
        _LOADER,
    ),
    Mutation(
        "rehearsal-without-an-end",
        "connector/remote_loader.py",
        " and now < self._begun_at + _REHEARSED_S",
        "",
        "a slow daemon is kept busy for nobody",
        _LOADER,
    ),
    Mutation(
        "rehearsal-beside-a-prefill",
        "connector/remote_tier.py",
        "        if is_quiet or time.monotonic() > self._rehearse_until:\n",
        "        if True:\n",
        "prefills are launched late",
        _STEPS,
        Needs.VLLM,
    ),
    Mutation(
        "rehearsal-that-an-idle-engine-keeps",
        "connector/scheduler_half.py",
        "            or (self.remote is not None and self.remote.has_rehearsals)\n",
        "",
        "short answers never teach anything about a tier",
        _STEPS,
        Needs.VLLM,
    ),
    Mutation(
        "mapped-memory-learnt-from-a-socket",
        "cache/load_economics.py",
        "            places = major_sources([part]) - self._trusted\n",
        "            places = major_sources([part])\n",
        "memory that is mapped looks as slow as a socket",
        _ECONOMICS,
    ),
    Mutation(
        "rehearsals-without-end",
        "cache/rehearsals.py",
        " and self._hurried[place] < _MOST_HURRIED",
        "",
        "a daemon is kept busy for nobody with every request",
        _ECONOMICS,
    ),
    Mutation(
        "memory-of-this-host-judged-by-busy-loads",
        "cache/load_economics.py",
        "        if sources <= self._trusted:\n",
        "        if False:\n",
        "a busy engine computes what lies in memory, and gets busier",
        _ECONOMICS,
    ),
    Mutation(
        "tier-judged-by-what-it-was",
        "cache/speed_estimates.py",
        "        if self._worse > _CHANGED:\n",
        "        if False:\n",
        "a tier that got slow is loaded from again",
        _ECONOMICS,
    ),
)
