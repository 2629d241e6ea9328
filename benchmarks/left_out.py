"""Leaves parts of storing out, to see what each of them costs. What is stored then is worthless."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

PARTS = ("", "copies", "stores")
"""Nothing is left out; the copies; and the planning."""


@contextlib.contextmanager
def left_out(part: str, connector: Any) -> Iterator[None]:
    """`connector` is the scheduler's; its worker lives in the same process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    copier = get_kv_transfer_group().worker_half._copier
    planner = connector.scheduler_half.stores
    changes: list[tuple[Any, str, Callable[..., Any]]] = []
    if part == "copies":
        changes.append((copier, "store", _only_say_so(copier)))
    elif part == "stores":
        changes += [
            (planner, "store_running", lambda *args: None),
            (planner, "store_finished", lambda *args: None),
        ]
    elif part:
        raise ValueError(f"{part!r} is none of {PARTS}")
    for owner, name, replacement in changes:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, _ in changes:
            delattr(owner, name)  # the class's own is there again


def _only_say_so(copier: Any) -> Callable[..., None]:
    from vllm_tiered_kv.device.copier import StoreDone
    from vllm_tiered_kv.device.cuda_copier import _OpenStore

    def store(job_id: int, transfer: Any) -> None:
        copier._stores.append(_OpenStore(StoreDone(job_id, len(transfer), None), None, 0))

    return store
