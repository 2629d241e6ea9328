"""Which way in is fastest on this machine: a measurement of a few milliseconds at start.

It is remembered in a file, by device and by the shape of the blocks, so that the next start needs
none. A file that cannot be read or written costs the measurement, never the start.
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
"""Sizes of the two loads that are measured."""


@dataclass(frozen=True)
class CopyPlan:
    """Names of the ways to take for loads of few and of many bytes."""

    few: str
    many: str

    def choose(self, nbytes: int) -> str:
        return self.few if nbytes <= math.isqrt(FEW_BYTES * MANY_BYTES) else self.many


def tuned_plan(
    signature: str,
    ways: Sequence[str],
    measure: Callable[[str, int], float] | None,
    file: Path | None,
) -> CopyPlan:
    """The plan remembered for this signature, or a new one.

    `measure` tells the bytes per second of a way for a load of so many bytes; where it may not,
    the last of the ways is taken for many and the first for few. `signature` names everything the
    result depends on.
    """
    remembered = _read(file)
    plan = _plan_in(remembered.get(signature), ways)
    if plan is not None:
        return plan
    if measure is None or len(ways) == 1:
        return CopyPlan(ways[0], ways[-1])
    speeds = {
        size: {way: measure(way, nbytes) for way in ways}
        for size, nbytes in (("few", FEW_BYTES), ("many", MANY_BYTES))
    }
    plan = CopyPlan(*(max(speeds[size], key=speeds[size].__getitem__) for size in ("few", "many")))
    logger.info(
        "loads: %s for few blocks, %s for many (%s)",
        plan.few,
        plan.many,
        ", ".join(f"{way} {speed / 1e9:.1f} GB/s" for way, speed in speeds["many"].items()),
    )
    remembered[signature] = {"few": plan.few, "many": plan.many, "bytes_per_second": speeds}
    _write(file, remembered)
    return plan


def _plan_in(entry: object, ways: Sequence[str]) -> CopyPlan | None:
    if not isinstance(entry, Mapping):
        return None
    few, many = entry.get("few"), entry.get("many")
    return CopyPlan(str(few), str(many)) if few in ways and many in ways else None


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
        logger.info("the copy measurement is not remembered: %s", error)
