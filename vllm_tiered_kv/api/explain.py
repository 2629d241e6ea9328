"""Asks a running server where the tokens of a prompt come from, and says it in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_tiered_kv.api.openai_server import OpenAIServer
from vllm_tiered_kv.api.prompt_file import Prompt
from vllm_tiered_kv.errors import ReplayError
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import MissCause

_SOURCES = {
    "gpu": "from the GPU's prefix cache",
    "cpu": "from the CPU tier",
    "memory": "from the memory of a daemon",
    "ssd": "from the SSD of a daemon",
    "backing": "from the backing store of a daemon",
}
_CAUSES = {
    MissCause.NEVER_STORED: "never stored, as far as the engine remembers",
    MissCause.OTHER_ADAPTER: "never stored, but held with another LoRA adapter, or without one",
    MissCause.EVICTED: "evicted from the CPU tier",
    MissCause.DROPPED: "dropped when they were to be stored",
    MissCause.PENDING: "being stored, or computed by another request",
    MissCause.INCOMPLETE: "held, but not the recurrent state or the window to continue them",
    MissCause.LOOKUP_TIMEOUT: "no daemon answered in time (remote_lookup_timeout)",
    MissCause.UNAVAILABLE: "no daemon could be reached",
    MissCause.POLICY: "held, but computing is expected to be faster (load_policy)",
    MissCause.CONTROL: "the request forbids to load them",
    MissCause.VERIFICATION: "held, and computed to be compared (verify_fraction)",
    MissCause.LOAD_FAILED: "their load failed; see the server's log",
    MissCause.ADAPTER_REPLACED: "another LoRA adapter took the place of the request's",
    MissCause.OTHER_CONNECTOR: "another connector loads them",
    MissCause.PARTIAL_BLOCK: "behind the last whole block",
}
_NO_ACCOUNT = (
    "{url} answered without an account of the prompt: is TieredKVConnector its only connector, and "
    "is the model cached? Its log says why if not"
)


@dataclass(frozen=True)
class Explanation:
    """The account of one prompt, and what a larger CPU tier would have saved all requests since the
    server started."""

    account: Mapping[str, Any]
    saved_by_capacity: Mapping[str, float]
    """The share of all computed tokens, by the multiple of the CPU tier's capacity; empty if the
    server has no metrics."""

    def lines(self) -> list[str]:
        account = self.account
        lines = [f"{account['prompt_tokens']} prompt tokens"]
        lines += [_row(account[name], text) for name, text in _SOURCES.items() if account.get(name)]
        lines += [_row(miss["tokens"], f"computed: {_why(miss)}") for miss in account["missed"]]
        saved = [
            f"with {capacity} the CPU tier {share:.1%} fewer tokens computed"
            for capacity, share in self.saved_by_capacity.items()
        ]
        if saved:
            lines.append(f"all requests since the server started: {', '.join(saved)}")
        return lines

    def as_json(self) -> dict[str, Any]:
        return {**self.account, "saved_by_capacity": dict(self.saved_by_capacity)}


def explain(
    server: OpenAIServer, prompt: Prompt, model: str | None, salt: str | None
) -> Explanation:
    """Sends the prompt for one token. The tiers do not store it; vLLM's own cache does."""
    controls = {"explain": True, "store": False}
    reply = server.one_token(prompt, server.choose_model(model), controls, salt)
    account = _account_in(reply)
    if account is None:
        raise ReplayError(_NO_ACCOUNT.format(url=server.url))
    return Explanation(account, _saved_by_capacity(server))


def _account_in(reply: Any) -> Mapping[str, Any] | None:
    for name in ("kv_transfer_params", "tiered_kv", "explain"):
        reply = reply.get(name) if isinstance(reply, Mapping) else None
    if not isinstance(reply, Mapping) or not isinstance(reply.get("missed"), list):
        return None
    numbers = [reply.get("prompt_tokens"), *(reply.get(source, 0) for source in _SOURCES)]
    for miss in reply["missed"]:
        if not isinstance(miss, Mapping) or not isinstance(miss.get("cause"), str):
            return None
        numbers += [miss.get("tokens"), miss.get("seconds_ago", 0)]
    return reply if all(isinstance(number, (int, float)) for number in numbers) else None


def _saved_by_capacity(server: OpenAIServer) -> dict[str, float]:
    computed = server.counter_by(names.COMPUTED_TOKENS, "cause")
    would_hit = server.counter_by(names.WOULD_HIT_TOKENS, "capacity")
    total = sum(computed.values())
    return {capacity: hit / total for capacity, hit in would_hit.items()} if total else {}


def _row(tokens: int, text: str) -> str:
    return f"{tokens:8}  {text}"


def _why(miss: Mapping[str, Any]) -> str:
    try:
        why = _CAUSES[MissCause(miss["cause"])]
    except ValueError:  # of a newer server
        why = str(miss["cause"])
    if miss.get("cause") == MissCause.EVICTED.value and miss.get("tier") == "remote":
        why += ", and lost by a daemon that had them,"
    if "reason" in miss:
        why += f" ({miss['reason']})"
    if "seconds_ago" in miss:
        why += f" {miss['seconds_ago']:.0f} s ago"
    return why
