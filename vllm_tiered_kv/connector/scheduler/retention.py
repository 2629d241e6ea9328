"""Keeps blocks that requests have pinned, and lets those of ended sessions go first.

Pins are bounded twice: they end with time, and all of them together take at most `pin_share` of the
CPU tier. Blocks beyond that stay unpinned, tails before heads. A daemon limits its pins itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier
from vllm_tiered_kv.connector.scheduler.prefetch import Prefetch
from vllm_tiered_kv.connector.scheduler.remote_lookups import ChainPart
from vllm_tiered_kv.connector.scheduler.request_state import RequestState
from vllm_tiered_kv.connector.scheduler.sessions import SessionName, Sessions
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Lookup, Tier
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import DropReason

_CPU = Tier.CPU.value
_MAX_PUT_WAIT_S = 1.0  # how long the pin at the daemons waits for the puts of a request

PinAtDaemons = Callable[[Sequence[ChainPart], float], None]


class Retention:
    """What requests ask to keep or to drop (`RequestControl`). The scheduler half calls it, in the
    scheduler's thread."""

    def __init__(
        self,
        tier: CpuTier,
        pins: Pins,
        pin_at_daemons: PinAtDaemons | None,
        prefetch: Prefetch | None = None,
    ) -> None:
        """`pin_at_daemons`: pins blocks for so many seconds, without waiting for an answer.
        `prefetch` is told when sessions pause and continue."""
        self._groups = tier.groups
        self._alignment = tier.alignment
        self._ledger = tier.ledger
        self._recorder = tier.recorder
        self._pins = pins
        self._pin_at_daemons = pin_at_daemons
        self._prefetch = prefetch
        smallest = min(group.block_bytes for group in tier.groups)
        self._sessions = Sessions(2 * tier.index.geometry.capacity_bytes // smallest)
        # Pins at the daemons, to be sent when the blocks have arrived there.
        self._unsent: list[tuple[float, list[ChainPart], float]] = []

    def admitted(self, state: RequestState) -> None:
        """vLLM has admitted the request."""
        control = state.control
        if not (control.session or control.pin_seconds or len(self._sessions)):
            return
        state.keys.extend(state.request, state.request.num_tokens)
        if control.session:
            self._sessions.record(_session_of(state), state.keys.of_group)
            if self._prefetch is not None:
                self._prefetch.returned(_session_of(state))
        else:
            self._sessions.used(state.keys.of_group)
        if control.pin_seconds:
            self._hold(state, control.pin_seconds, is_final=False)

    def finished(self, state: RequestState) -> None:
        """The request has ended, and its last stores are planned."""
        control = state.control
        if state.closed is DropReason.RESET or not (control.session or control.hold_seconds):
            return
        state.keys.extend(state.request, state.request.num_tokens)
        if control.session:
            name = _session_of(state)
            self._sessions.record(name, state.keys.of_group)
            if control.session_ended:
                private = self._sessions.end(name)
                self._pins.let_go(private)
                self._recorder.add(names.ENDED_BLOCKS, len(private), _CPU)
                return
        if control.hold_seconds:
            held = self._hold(state, control.hold_seconds)
            if self._pin_at_daemons is not None and control.may_use(Tier.REMOTE):
                now = time.monotonic()
                self._unsent.append((now + _MAX_PUT_WAIT_S, held, now + control.hold_seconds))
                if control.tool_pending and self._prefetch is not None:
                    session = _session_of(state) if control.session else None
                    into_cpu = control.may_use(Tier.CPU)
                    self._prefetch.expect(session, held, control.tool_pending, into_cpu)

    def step(self) -> None:
        """Before the stores of a step are planned: ends the pins whose time is over."""
        self._pins.expire(self._ledger.has_open_stores)
        self._send_pins()

    def outputs_received(self) -> None:
        """The reports of a step were processed. An idle engine takes no step after the last put."""
        if self._unsent and not (self._ledger.has_open_stores or self._ledger.has_open_puts):
            self._send_pins(is_idle=True)

    def reset(self) -> None:
        """The tier was cleared, and all keys have changed."""
        self._pins.clear()
        self._sessions.clear()
        self._unsent.clear()
        if self._prefetch is not None:
            self._prefetch.reset()

    def record(self) -> None:
        self._recorder.set(names.PINNED_BYTES, self._pins.nbytes, _CPU)

    def _hold(self, state: RequestState, hold_s: float, is_final: bool = True) -> list[ChainPart]:
        """Pins what the next request with this prefix needs; returns it, per group."""
        num_tokens = min(
            len(keys) * group.block_size
            for group, keys in zip(self._groups, state.keys.of_group, strict=True)
        )
        num_tokens -= num_tokens % self._alignment
        held = []
        for group, keys in zip(self._groups, state.keys.of_group, strict=True):
            needed = group.needed(0, num_tokens)
            held.append((list(keys[: needed.stop]), max(0, needed.start)))
        if state.control.may_use(Tier.CPU):
            until = time.monotonic() + hold_s
            for keys, first in held:
                refused = self._pins.pin(keys[first:], until)
                if is_final:
                    self._recorder.add(names.UNPINNED_BLOCKS, refused, _CPU)
        return held

    def _send_pins(self, is_idle: bool = False) -> None:
        now = time.monotonic()
        while self._unsent and (is_idle or self._unsent[0][0] <= now):
            _, keys, until = self._unsent.pop(0)
            if self._pin_at_daemons is not None and until > now:
                self._pin_at_daemons(keys, until - now)


def _session_of(state: RequestState) -> SessionName:
    return state.request.cache_salt, state.control.session


class Pins:
    """Pins of the CPU tier by key, each with its end, and marks on blocks of ended sessions. Blocks
    that are still being written are pinned or marked when they are committed. The ledger tells of
    these; otherwise `Retention` alone calls it."""

    def __init__(self, groups: Sequence[Group], index: BlockIndex, share: float) -> None:
        """`share`: of the tier, for all pins together."""
        self._index = index
        geometry = index.geometry
        self._bytes_of = [geometry.slot_bytes[group.size_class] for group in groups]
        self._max_bytes = int(geometry.capacity_bytes * share)
        self.nbytes = 0  # pinned, or to be pinned
        self._until: dict[BlockKey, float] = {}
        self._slots: dict[BlockKey, int] = {}  # those of them that are in the tier
        self._next_end = math.inf
        self._ended: set[BlockKey] = set()  # of ended sessions, still being written

    def pin(self, keys: Sequence[BlockKey], until: float) -> int:
        """Returns how many blocks are beyond the limit; they are the last ones."""
        refused = 0
        for position, key in enumerate(keys):
            nbytes = self._bytes_of[key[-1]]
            if key in self._until:
                self._until[key] = max(self._until[key], until)
            elif self.nbytes + nbytes <= self._max_bytes:
                self._until[key] = until
                self.nbytes += nbytes
            else:
                refused = len(keys) - position
                keys = keys[:position]
                break
        self._next_end = min(self._next_end, until)
        self._pin_readable(keys)
        return refused

    def let_go(self, private: Sequence[BlockKey]) -> None:
        """Nobody is expected to use these blocks again."""
        self.release(private)
        self._index.mark_dead(private)
        self._ended.update(key for key in private if self._index.lookup(key) is Lookup.PENDING)

    def committed(self, slots: Sequence[int]) -> None:
        """The blocks in these slots have just become readable in the tier."""
        if not (self._until or self._ended):
            return
        keys = [BlockKey(key) for key, _ in self._index.blocks_in(slots)]
        self._pin_readable([key for key in keys if key in self._until])
        ended = [key for key in keys if key in self._ended]
        if ended:
            self._index.mark_dead(ended)
            self._ended.difference_update(ended)

    def release(self, keys: Iterable[BlockKey]) -> None:
        ended = [key for key in keys if self._until.pop(key, None) is not None]
        self.nbytes -= sum(self._bytes_of[key[-1]] for key in ended)
        self._index.unpin([self._slots.pop(key) for key in ended if key in self._slots])

    def expire(self, has_open_stores: bool) -> None:
        """Ends the pins whose time is over."""
        if not has_open_stores:
            self._ended.clear()  # the rest was not stored
        now = time.monotonic()
        if now < self._next_end:
            return
        self.release([key for key, until in self._until.items() if until <= now])
        self._next_end = min(self._until.values(), default=math.inf)

    def clear(self) -> None:
        self.release(tuple(self._until))
        self._ended.clear()

    def _pin_readable(self, keys: Sequence[BlockKey]) -> None:
        readable = self._index.are_readable(keys)
        for key, is_readable in zip(keys, readable, strict=True):
            slot = self._slots.get(key)
            if not is_readable or slot == self._index.slot_of(key):
                continue
            if slot is not None:  # the block was removed and stored again
                self._index.unpin([slot])
            (self._slots[key],) = self._index.pin([key])
