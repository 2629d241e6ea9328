"""The sizes in docs/scaling.md: bytes of a token by model, and the arithmetic of its examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.model_table import NAMED
from vllm_tiered_kv.api.model_check import ModelCheck
from vllm_tiered_kv.api.model_shape import read_shape

KIB, MIB, GIB, TIB = (1 << shift for shift in (10, 20, 30, 40))
BLOCK_TOKENS = 16
SHOWN = (
    "Qwen3-8B",
    "Llama-3.1-70B",
    "Qwen3-235B-A22B",
    "GLM-4.6",
    "gpt-oss-120b",
    "DeepSeek-V3, R1",
    "Kimi-K2",
)
"""Models without snapshots, whose bytes are tokens times a number."""
DAY_S = 86_400


def token_bytes(name: str) -> int:
    """Bytes of a token with a KV cache in bfloat16, as `tiered-kv model` computes them."""
    (model,) = (model for model in NAMED if model.name == name)
    check = ModelCheck(read_shape(model.config), block_size=BLOCK_TOKENS, ranks=1, memory=0)
    assert check.token_bytes, name
    assert not check.snapshot_bytes, name
    return int(check.token_bytes)


def table(rows: Sequence[Sequence[str]]) -> str:
    header, *body = rows
    lines = [header, ["---"] * len(header), *body]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def sizes_table() -> str:
    rows: list[list[str]] = [
        ["model", "a token", "a block of 16", "a chat of 8,000", "an agent of 120,000", "in 1 TiB"]
    ]
    for name in SHOWN:
        size = token_bytes(name)
        rows.append(
            [
                name,
                f"{size / KIB:,.0f} KiB",
                f"{size * BLOCK_TOKENS / MIB:,.1f} MiB",
                f"{size * 8_000 / GIB:,.2f} GiB",
                f"{size * 120_000 / GIB:,.1f} GiB",
                f"{TIB / size / 1e6:,.1f} million tokens",
            ]
        )
    return table(rows)


PREFILL_RATES = (5_000, 10_000, 20_000, 40_000)
"""Tokens per second that an engine computes of one prompt."""


def break_even_table() -> str:
    rows: list[list[str]] = [["model", *(f"{rate:,} tokens/s" for rate in PREFILL_RATES)]]
    for name in SHOWN:
        size = token_bytes(name)
        rows.append([name, *(f"{size * rate / 1e9:,.1f} GB/s" for rate in PREFILL_RATES)])
    return table(rows)


@dataclass(frozen=True)
class Example:
    """A fleet and its traffic; everything else follows."""

    title: str
    model: str
    hosts: int
    requests_per_s: float  # of the whole fleet
    prompt_tokens: int
    answer_tokens: int
    cached: float  # share of the prompt tokens that some tier holds, GPUs included
    from_daemons: float  # share of the prompt tokens that daemons send
    memory_bytes: int  # of a daemon
    ssd_bytes: int  # of a daemon
    kv_bytes: float = 2.0  # of a number in the KV cache: 1 for fp8

    @property
    def token_bytes(self) -> float:
        return token_bytes(self.model) * self.kv_bytes / 2

    @property
    def new_bytes_per_s(self) -> float:
        """What the fleet computes, and so puts."""
        tokens = self.prompt_tokens * (1 - self.cached) + self.answer_tokens
        return self.requests_per_s * tokens * self.token_bytes

    @property
    def loaded_bytes_per_s(self) -> float:
        tokens = self.prompt_tokens * self.from_daemons
        return self.requests_per_s * tokens * self.token_bytes

    @property
    def network_bytes_per_s(self) -> float:
        """Of one host, out and in together, if any daemon may hold any block."""
        elsewhere = 1 - 1 / self.hosts
        return 2 * elsewhere * (self.new_bytes_per_s + self.loaded_bytes_per_s) / self.hosts

    def kept_s(self, bytes_per_daemon: int) -> float:
        """How long a block that nobody uses stays."""
        return self.hosts * bytes_per_daemon / self.new_bytes_per_s

    @property
    def drive_writes_per_day(self) -> float:
        return self.new_bytes_per_s / self.hosts * DAY_S / self.ssd_bytes


EXAMPLES = (
    Example(
        "one box: 8 GPUs, chats",
        "Llama-3.1-70B",
        hosts=1,
        requests_per_s=0.5,
        prompt_tokens=8_000,
        answer_tokens=350,
        cached=0.6,
        from_daemons=0.4,
        memory_bytes=512 * GIB,
        ssd_bytes=15_360 * 10**9,
        kv_bytes=1.0,
    ),
    Example(
        "64 hosts, agents",
        "DeepSeek-V3, R1",
        hosts=64,
        requests_per_s=64.0,
        prompt_tokens=120_000,
        answer_tokens=500,
        cached=0.95,
        from_daemons=0.5,
        memory_bytes=1 * TIB,
        ssd_bytes=15_360 * 10**9,
    ),
    Example(
        "300 nodes, chats and agents",
        "Qwen3-235B-A22B",
        hosts=300,
        requests_per_s=600.0,
        prompt_tokens=20_000,
        answer_tokens=400,
        cached=0.7,
        from_daemons=0.5,
        memory_bytes=1 * TIB,
        ssd_bytes=30_720 * 10**9,
        kv_bytes=1.0,
    ),
)


def duration(seconds: float) -> str:
    if seconds < 2 * 3600:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h"


def examples_table() -> str:
    def row(label: str, *cells: str) -> list[str]:
        return [label, *cells]

    each = EXAMPLES
    rows = [
        row("", *(e.title for e in each)),
        row(
            "model, KV cache", *(f"{e.model}, {'fp8' if e.kv_bytes == 1 else 'bf16'}" for e in each)
        ),
        row("given: requests a second", *(f"{e.requests_per_s:g}" for e in each)),
        row(
            "given: tokens of a prompt + answer",
            *(f"{e.prompt_tokens:,} + {e.answer_tokens:,}" for e in each),
        ),
        row(
            "given: of a prompt, found in some tier; sent by daemons",
            *(f"{e.cached:.0%}; {e.from_daemons:.0%}" for e in each),
        ),
        row(
            "given: memory + SSD of a daemon",
            *(f"{e.memory_bytes / TIB:g} TiB + {e.ssd_bytes / 1e12:g} TB" for e in each),
        ),
        row("a token", *(f"{e.token_bytes / KIB:,.0f} KiB" for e in each)),
        row("a prompt", *(f"{e.prompt_tokens * e.token_bytes / GIB:,.2f} GiB" for e in each)),
        row(
            "new blocks of a host",
            *(f"{e.new_bytes_per_s / e.hosts / 1e9:,.2f} GB/s" for e in each),
        ),
        row(
            "loaded by a host",
            *(f"{e.loaded_bytes_per_s / e.hosts / 1e9:,.2f} GB/s" for e in each),
        ),
        row(
            "network of a host, both ways",
            *(f"{e.network_bytes_per_s * 8 / 1e9:,.0f} Gbit/s" for e in each),
        ),
        row("an unused block stays in memory", *(duration(e.kept_s(e.memory_bytes)) for e in each)),
        row("… and on the SSD", *(duration(e.kept_s(e.ssd_bytes)) for e in each)),
        row("drive writes per day", *(f"{e.drive_writes_per_day:,.1f}" for e in each)),
    ]
    return table(rows)
