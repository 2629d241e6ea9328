"""What `tiered-kv status`, `ls` and `top` show of a daemon, as lines of text.

Facts and statistics come from the daemon as plain values; a daemon of another version may lack some
or send others, which are then left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_tiered_kv.api.arguments import columns

_BAR = 30
_NAMESPACES = 10  # in one look
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def namespace_lines(info: Mapping[str, Any], max_rows: int | None = None) -> list[str]:
    """A table of namespaces, largest first."""
    rows = _mapping(info, "by_namespace")
    if not rows:
        return ["no namespaces: nothing was stored"]
    tiers = [
        tier
        for tier in ("memory", "ssd")
        if any(f"{tier}_bytes" in row for row in rows.values() if isinstance(row, Mapping))
    ]
    table = [
        ["namespace", *(f"{tier}{part}" for tier in tiers for part in ("", " blocks")), "model"]
    ]
    for name, row in list(rows.items())[:max_rows]:
        model = _escaped(row.get("model", "")) or "not seen since the daemon started"
        cells = [
            cell
            for tier in tiers
            for cell in (size(row.get(f"{tier}_bytes", 0)), f"{row.get(f'{tier}_blocks', 0):,}")
        ]
        table.append([str(name), *cells, model])
    lines = columns(table)
    if max_rows is not None and len(rows) > max_rows:
        lines.append(f"and {len(rows) - max_rows} more")
    return lines


def frame(
    address: str,
    info: Mapping[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    passed_s: float | None,
) -> list[str]:
    """One look at a daemon: what it holds, and what it did between two statistics: per second, or
    in all without `passed_s`."""
    rates = _Rates(before, after, passed_s)
    lines = [f"{address}  {info.get('server', '')}", ""]
    capacity = _mapping(after, "capacity_bytes")
    used = _mapping(after, "used_bytes")
    for tier, nbytes in capacity.items():
        lines.append(f"{tier:8} {_bar(used.get(tier, 0), nbytes)}")
    hits, misses = rates.sum("hit_blocks"), rates.sum("missed_blocks")
    share = f"{hits / (hits + misses):.1%}" if hits + misses else "no request"
    lines += [
        "",
        f"hits     {share:>10}   blocks found {rates.shown(hits)}, not found {rates.shown(misses)}",
        f"bytes    {rates.shown(rates.sum('received_bytes'), size)} in, "
        f"{rates.shown(rates.sum('sent_bytes'), size)} out",
        f"requests {_by_label(rates, 'requests')}",
        f"puts     {_by_label(rates, 'put_blocks')}",
        f"clients  {after.get('sessions', 0)} sessions of the last day, "
        f"{after.get('attached_processes', 0)} processes map the memory, "
        f"{size(after.get('leased_bytes', 0))} leased",
    ]
    waiting = ", ".join(
        f"{size(nbytes)} to {tier}"
        for tier, nbytes in _mapping(after, "pending_write_bytes").items()
        if nbytes
    )
    lines.append(f"waiting  {waiting or 'nothing to be written'}")
    lines.append(f"evicted  {_by_label(rates, 'evicted_blocks')}")
    wrong = [
        f"{what} {_by_label(rates, name)}"
        for name, what in (
            ("errors", "errors"),
            ("damaged_blocks", "damaged"),
            ("failed_writes", "not written"),
            ("not_written_blocks", "queue full"),
        )
        if rates.sum(name)
    ]
    if after.get("backing_absent"):
        wrong.append("the backing store does not answer")
    lines.append(f"wrong    {'; '.join(wrong) or 'nothing'}")
    silent = info.get("silent_processes") or ()
    lines += [f"silent   {_escaped(process)}" for process in silent]
    return [*lines, "", *namespace_lines(info, _NAMESPACES)]


class _Rates:
    """Increases between two statistics, per second if a time is given. A counter that fell is that
    of a daemon which has restarted: it counts from 0."""

    def __init__(
        self, before: Mapping[str, Any], after: Mapping[str, Any], passed_s: float | None
    ) -> None:
        self._before, self._after = before, after
        self._passed_s = None if passed_s is None else max(passed_s, 1e-9)

    def by_label(self, name: str) -> dict[str, float]:
        before, after = _mapping(self._before, name), _mapping(self._after, name)
        return {label: self._rate(before.get(label, 0), now) for label, now in after.items()}

    def sum(self, name: str) -> float:
        now = self._after.get(name, 0)
        if isinstance(now, Mapping):
            return sum(self.by_label(name).values())
        return self._rate(self._before.get(name, 0), now)

    def _rate(self, before: float, now: float) -> float:
        change = now - before if now >= before else now
        return change if self._passed_s is None else change / self._passed_s

    def shown(self, rate: float, text_of: Callable[[float], str] | None = None) -> str:
        if self._passed_s is None:
            return (text_of or "{:,.0f}".format)(rate)
        return f"{(text_of or _number)(rate)}/s"


def _by_label(rates: _Rates, name: str) -> str:
    shown = sorted(rates.by_label(name).items(), key=lambda item: -item[1])
    return ", ".join(f"{label} {rates.shown(rate)}" for label, rate in shown if rate) or "none"


def _bar(used: int, capacity: int) -> str:
    if not capacity:
        return f"{size(used)}, no limit"
    share = min(1.0, used / capacity)
    filled = round(share * _BAR)
    return f"[{'#' * filled}{'.' * (_BAR - filled)}] {share:6.1%}  {size(used)} of {size(capacity)}"


def _escaped(text: object) -> str:
    """As in the daemon's log: a client's name may contain line breaks."""
    return repr(str(text))[1:-1]


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def size(nbytes: float) -> str:
    """With one decimal, such as 1.5 GiB."""
    for unit, factor in _UNITS:
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"


def _mapping(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = facts.get(name)
    return value if isinstance(value, Mapping) else {}
