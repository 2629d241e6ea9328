"""Says whether a model would be cached, and how much memory its KV cache takes: `tiered-kv model`.

`VERDICTS` is the one place here that says which kinds of layers are cached. It repeats what
`connector/support.py` decides with a running engine; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_tiered_kv.api.arguments import columns
from vllm_tiered_kv.api.model_shape import LayerGroup, LayerKind, ModelShape
from vllm_tiered_kv.options import format_size


@dataclass(frozen=True)
class Verdict:
    """Whether a kind of layer is cached, and the class with which vLLM describes it."""

    is_cached: bool
    spec: str  # of vLLM's kv_cache_interface; empty if no class stands for the kind
    why: str = ""  # what a user should know: the reason of a no, the condition of a yes


VERDICTS = {
    LayerKind.FULL: Verdict(True, "FullAttentionSpec"),
    LayerKind.WINDOW: Verdict(True, "SlidingWindowSpec"),
    LayerKind.MLA: Verdict(True, "MLAAttentionSpec"),
    LayerKind.INDEXER: Verdict(True, "MLAAttentionSpec"),
    LayerKind.CHUNKED: Verdict(True, "ChunkedLocalAttentionSpec"),
    LayerKind.RECURRENT: Verdict(
        True,
        "MambaSpec",
        "recurrent state is cached with vLLM's prefix caching (--enable-prefix-caching); with "
        "speculative decoding only that of Mamba 2 and GDN",
    ),
    LayerKind.LATENT_WINDOW: Verdict(True, "SlidingWindowMLASpec"),
    LayerKind.REPLAYED_WINDOW: Verdict(
        False,
        "",
        "sliding windows that vLLM recomputes after each hit (DeepSeek-V4.1) are not supported so "
        "far",
    ),
    LayerKind.DRAFT: Verdict(
        True, "", "a draft model is cached together with the model that it drafts for"
    ),
    LayerKind.CROSS: Verdict(
        False, "CrossAttentionSpec", "vLLM starts no encoder-decoder with a KV connector"
    ),
    LayerKind.ENCODER: Verdict(
        False, "EncoderOnlyAttentionSpec", "an encoder has no KV cache to keep"
    ),
    LayerKind.DIFFUSION: Verdict(False, "", "diffusion does not compute tokens in order"),
}


@dataclass(frozen=True)
class ModelCheck:
    """The answer of `tiered-kv model` for one model and one set of vLLM's settings."""

    shape: ModelShape
    block_size: int
    ranks: int
    memory: int

    @property
    def reasons(self) -> list[str]:
        """Why the model is not cached; empty if it is."""
        return [VERDICTS[kind].why for kind in self.shape.kinds if not VERDICTS[kind].is_cached]

    @property
    def is_cached(self) -> bool:
        return not self.reasons

    @property
    def rank_token_bytes(self) -> int:
        return sum(group.layers * group.layer_bytes for group in self._per_token())

    @property
    def token_bytes(self) -> int:
        """What the tiers store for a token: the bytes of all ranks, replicas once."""
        return sum(self._stored(group) for group in self._per_token())

    @property
    def snapshot_bytes(self) -> int:
        """The recurrent state of all layers and ranks at one position; 0 without such layers."""
        return sum(self._stored(group) for group in self.shape.groups if _is_state(group))

    @property
    def tokens(self) -> int | None:
        """Tokens whose KV fits into the memory, in whole blocks; None if nothing is cached."""
        if not self.is_cached or not self.token_bytes:
            return None
        return self.memory // (self.token_bytes * self.block_size) * self.block_size

    def notes(self) -> list[str]:
        shape = self.shape
        notes = [VERDICTS[kind].why for kind in shape.kinds if VERDICTS[kind].is_cached]
        notes += shape.notes
        if shape.draft_layers:
            notes.append(
                f"the checkpoint has {shape.draft_layers} layer(s) for speculative decoding (MTP); "
                "a server that uses them caches their KV too, which is not counted here"
            )
        if self.ranks > 1 and any(group.is_replicated for group in shape.groups):
            notes.append("all ranks hold the same latent KV; the tiers store it once per host")
        if self.snapshot_bytes:
            notes.append("recurrent state is counted per snapshot, not in the bytes of a token")
        return [note for note in notes if note]

    def lines(self) -> list[str]:
        shape = self.shape
        name = shape.architecture or shape.model_type
        lines = [f"{name}, {shape.layers} layers" if shape.layers else name]
        lines[0] += f", KV cache in {shape.kv_cache_dtype}" if shape.groups else ""
        if self.ranks > 1:
            lines[0] += f", {self.ranks} tensor-parallel ranks"
        if not self.is_cached:
            lines.append(f"cached: no, because {'; '.join(self.reasons)}")
        else:
            lines.append(
                "cached: yes" if shape.is_known else "cached: probably, a guess (see below)"
            )
        if shape.groups:
            lines += ["", *self._table()]
        if self.tokens is not None:
            lines += [
                "",
                f"{format_size(self.memory)} hold {self.tokens:,} tokens "
                f"(blocks of {self.block_size} tokens, {kib(self.token_bytes * self.block_size)} "
                "KiB each)",
            ]
        lines += [f"note: {note}" for note in self.notes()]
        lines += [f"guess: {guess}" for guess in shape.guesses]
        return lines

    def _table(self) -> list[str]:
        rows = [("", "layers", "KiB/rank", "KiB in all", "")]
        for group in self.shape.groups:
            window = f" of {group.window:,} tokens" if group.window else ""
            rows.append(
                (
                    f"{group.kind.value}{window}",
                    f"{group.layers}",
                    kib(group.layers * group.layer_bytes),
                    kib(self._stored(group)),
                    "per snapshot" if _is_state(group) else "per token",
                )
            )
        if self.token_bytes:
            rank, stored = kib(self.rank_token_bytes), kib(self.token_bytes)
            rows.append(("in all", "", rank, stored, "per token"))
        return columns(rows)

    def as_json(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "architecture": shape.architecture,
            "model_type": shape.model_type,
            "layers": shape.layers,
            "dtype": shape.dtype,
            "kv_cache_dtype": shape.kv_cache_dtype,
            "tensor_parallel": self.ranks,
            "block_size": self.block_size,
            "cached": self.is_cached,
            "known_architecture": shape.is_known,
            "reasons": self.reasons,
            "groups": [
                {
                    "kind": group.kind.name.lower(),
                    "layers": group.layers,
                    "window": group.window,
                    "per": "snapshot" if _is_state(group) else "token",
                    "rank_bytes": group.layers * group.layer_bytes,
                    "stored_bytes": self._stored(group),
                }
                for group in shape.groups
            ],
            "rank_bytes_per_token": self.rank_token_bytes,
            "stored_bytes_per_token": self.token_bytes,
            "stored_bytes_per_snapshot": self.snapshot_bytes,
            "memory": self.memory,
            "tokens": self.tokens,
            "notes": self.notes(),
            "guesses": list(shape.guesses),
        }

    def _per_token(self) -> list[LayerGroup]:
        return [group for group in self.shape.groups if not _is_state(group)]

    def _stored(self, group: LayerGroup) -> int:
        return group.layers * group.layer_bytes * (1 if group.is_replicated else self.ranks)


def _is_state(group: LayerGroup) -> bool:
    return group.kind is LayerKind.RECURRENT


def kib(nbytes: int) -> str:
    """KiB with up to two decimals, such as 68.62 or 1,024."""
    return f"{nbytes / 1024:,.2f}".rstrip("0").rstrip(".")
