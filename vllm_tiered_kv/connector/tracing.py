"""OpenTelemetry spans of requests, if vLLM traces.

vLLM builds its own span of a request in the front end's process, where no connector can add
attributes. But it passes the request's trace context to the scheduler, and traces from the engine's
process too. So the account of a request is a span of its own in the same trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_tiered_kv.connector.scheduler.account import Account

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

SPAN = "tiered_kv"
_NS = 1_000_000_000

TraceAccount = Callable[["Request", Account], None]


def account_tracer(vllm_config: VllmConfig) -> TraceAccount | None:
    """What adds the account of a finished request to its trace; None if vLLM does not trace."""
    if vllm_config.observability_config.otlp_traces_endpoint is None:
        return None
    try:
        from vllm.tracing import extract_trace_context, instrument_manual
    except ImportError:
        return None  # a release of vLLM that cannot trace from the engine's process

    def trace(request: Request, account: Account) -> None:
        if request.trace_headers:
            instrument_manual(
                SPAN,
                start_time=int(request.arrival_time * _NS),
                end_time=time.time_ns(),
                attributes=_attributes(account),
                context=extract_trace_context(request.trace_headers),
            )

    return trace


def _attributes(account: Account) -> dict[str, int]:
    attributes = {f"{SPAN}.prompt_tokens": account.prompt_tokens, f"{SPAN}.gpu": account.gpu}
    for tier, tokens in account.loaded.items():
        attributes[f"{SPAN}.{tier.value}"] = tokens
    attributes[f"{SPAN}.computed"] = account.computed
    for miss in account.missed:
        name = f"{SPAN}.computed.{miss.cause.value}"
        attributes[name] = attributes.get(name, 0) + miss.tokens
    return attributes
