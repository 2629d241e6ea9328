"""How long the scheduler's question may wait for a daemon's answer.

A daemon on the same host answers within one or two milliseconds. Telling vLLM "not known yet" costs
more than that where nothing else is to be done: an empty step, and vLLM sleeps a millisecond after
each. So a lone request waits for its answer where it was asked for. Not long, as another one may
arrive meanwhile; once in a step, however many requests wait; and never while a request runs, is
loaded, or was admitted to the step: then there is something better to do.
"""

from __future__ import annotations

from vllm_tiered_kv.connector.ahead_policy import AheadPolicy
from vllm_tiered_kv.connector.remote_lookup import RemoteLookup

_WAIT_S = 0.003


class IdleWait:
    def __init__(self, ahead: AheadPolicy, steps_alone: bool) -> None:
        """`steps_alone`: neither does another engine wait for this one's steps, as with data
        parallelism, nor are several of them under way, as in a pipeline."""
        self._ahead = ahead
        self._steps_alone = steps_alone
        self._is_over = False

    def step_planned(self) -> None:
        self._is_over = False

    def end(self) -> None:
        """The step has something to do."""
        self._is_over = True

    def spend_on(self, request_id: str, lookup: RemoteLookup) -> bool:
        """Waits for an answer if that keeps nobody waiting; says whether it did."""
        if self._is_over or not self._steps_alone or not self._ahead.is_alone(request_id):
            return False
        self._is_over = True
        lookup.wait(_WAIT_S)
        return True
