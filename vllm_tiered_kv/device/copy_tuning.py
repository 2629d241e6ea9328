"""Finds the fastest copy strategy for loads with a measurement of a few milliseconds at start.

The result is saved in a file by device and block shape, so that the next start does not measure
again. If the file cannot be read or written, the start measures again; it never fails.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_FORMAT = 1
FEW_BYTES = 4 << 20
MANY_BYTES = 128 << 20
"""Sizes of the small and the large load that are measured."""


@dataclass(frozen=True)
class CopyPlan:
    """The names of the copy strategies for small and for large loads."""

    few: str
    many: str

    def choose(self, nbytes: int) -> str:
        return self.few if nbytes <= math.isqrt(FEW_BYTES * MANY_BYTES) else self.many


def tuned_plan(
    signature: str,
    strategies: Sequence[str],
    measure: Callable[[str, int], float] | None,
    file: Path | None,
) -> CopyPlan:
    """Returns the plan saved for this signature, or measures and saves a new one.

    `measure(strategy, nbytes)` returns the bytes per second of a load of that size. Without it, the
    first strategy is used for small loads and the last for large ones. `signature` contains
    everything the result depends on.
    """
    saved = _read(file)
    plan = _saved_plan(saved.get(signature), strategies)
    if plan is not None:
        return plan
    if measure is None or len(strategies) == 1:
        return CopyPlan(strategies[0], strategies[-1])
    speeds = {
        size: {strategy: measure(strategy, nbytes) for strategy in strategies}
        for size, nbytes in (("few", FEW_BYTES), ("many", MANY_BYTES))
    }
    plan = CopyPlan(*(max(speeds[size], key=speeds[size].__getitem__) for size in ("few", "many")))
    logger.info(
        "copy strategy of loads: %s for few blocks, %s for many (measured: %s)",
        plan.few,
        plan.many,
        ", ".join(f"{name} {speed / 1e9:.1f} GB/s" for name, speed in speeds["many"].items()),
    )
    saved[signature] = {"few": plan.few, "many": plan.many, "bytes_per_second": speeds}
    _write(file, saved)
    return plan


def _saved_plan(entry: object, strategies: Sequence[str]) -> CopyPlan | None:
    if not isinstance(entry, Mapping):
        return None
    few, many = entry.get("few"), entry.get("many")
    return CopyPlan(str(few), str(many)) if few in strategies and many in strategies else None


def _read(file: Path | None) -> dict[str, object]:
    if file is None:
        return {}
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        return {}
    plans = content.get("plans")
    return dict(plans) if isinstance(plans, dict) else {}


def _write(file: Path | None, plans: dict[str, object]) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with os.fdopen(handle, "w") as draft:
                json.dump({"format": _FORMAT, "plans": plans}, draft, indent=1)
            os.replace(name, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        logger.info("could not save the copy measurement; the next start repeats it: %s", error)
