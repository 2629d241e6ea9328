"""Time to the first token of a very long document, by the tier that serves it; and many of them.

    python -m benchmarks.throughput.documents --out result.json

First one document of about 100,000 tokens: computed, from the GPU, from the CPU tier, from a
daemon's memory (by a second engine, which has no copy), and from its SSD after the daemon has been
restarted. Then documents are added one by one and all of them asked again after each: the tiers are
sized so that the GPU has room for two of them, the CPU tier for three, the daemon's memory for
four.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.engine_process import EngineProcess, EngineSpec
from benchmarks.throughput.engine_pool import EnginePool, run_table
from benchmarks.throughput.engines import GLM_9B, TINY, Prompts, engine_spec, with_daemon
from benchmarks.throughput.record import Record
from tests.daemon.daemon_process import DaemonProcess

ON_GPU, IN_CPU_TIER, IN_DAEMON = 2.2, 3.3, 4.4  # documents
_ON_SSD = 1.2  # of all there are
_SMALLEST_SSD = 64 << 20
_OF_FREE_DISK = 0.9
_STOP_S = 300.0
_DAEMON = "documents"


@dataclass(frozen=True)
class Sizes:
    long_tokens: int = 100_000
    document_tokens: int = 48_000
    documents: int = 6
    repetitions: int = 3
    """Each with documents of its own."""
    attach_s: int = 8
    """For the engines to map and pin the daemon's memory, in the background."""


SIZES = Sizes()
TINY_SIZES = Sizes(long_tokens=3000, document_tokens=1400, documents=6, repetitions=1, attach_s=1)


def specs(pool: EnginePool, sizes: Sizes) -> list[EngineSpec]:
    shape = TINY if pool.tiny else GLM_9B
    token_bytes = 1024 if pool.tiny else shape.token_bytes
    one = max(sizes.document_tokens, int(sizes.long_tokens / ON_GPU)) * token_bytes
    daemon = _daemon(pool, sizes, one, token_bytes)
    return [
        engine_spec(
            shape,
            system,
            with_daemon(daemon.ipc, int(IN_CPU_TIER * one)),
            gpu_cache=True,
            kv_bytes=int(_kv_tokens(sizes, shape.max_model_len) * token_bytes),
        )
        for system in ("first", "second")
    ]


def _daemon(pool: EnginePool, sizes: Sizes, one: int, token_bytes: int) -> DaemonProcess:
    folder = pool.folder("ssd")
    tokens = sizes.documents * sizes.document_tokens + sizes.long_tokens
    wanted = max(int(tokens * token_bytes * _ON_SSD), _SMALLEST_SSD)
    space = min(wanted, int(shutil.disk_usage(folder).free * _OF_FREE_DISK))
    return pool.daemon(
        _DAEMON,
        *("--memory", str(int(IN_DAEMON * one))),
        *("--ssd", str(folder), "--ssd-space", str(space)),
    )


def measure(pool: EnginePool, record: Record, sizes: Sizes) -> None:
    wanted = specs(pool, sizes)
    engines = pool.engines(wanted, record)
    if len(engines) < len(wanted):
        return
    daemon = pool.daemon(_DAEMON)
    record.note("daemon", _described(daemon))
    first, second = (engines[spec.name] for spec in wanted)
    fresh = Prompts((TINY if pool.tiny else GLM_9B).vocabulary, seed=5)
    for engine in (first, second):
        _warm_up(engine, fresh, sizes)
    time.sleep(sizes.attach_s)
    for _ in range(sizes.repetitions):
        if not record.over:
            _one_document(daemon, first, second, fresh, record, sizes)
            _many_documents(first, fresh, record, sizes)


def _described(daemon: DaemonProcess) -> str:
    options = dict(zip(daemon.arguments[::2], daemon.arguments[1::2], strict=True))
    memory, ssd = (int(options[name]) / 1e9 for name in ("--memory", "--ssd-space"))
    return f"The daemon has {memory:.3g} GB of memory and {ssd:.3g} GB of SSD."


def _kv_tokens(sizes: Sizes, longest: int) -> float:
    return max(ON_GPU * sizes.document_tokens, longest + 512)


def _one_document(
    daemon: DaemonProcess,
    first: EngineProcess,
    second: EngineProcess,
    fresh: Prompts,
    record: Record,
    sizes: Sizes,
) -> None:
    document = fresh.distinct(1, sizes.long_tokens)
    _ask(first, document, record, {"what": "cold"})
    _ask(first, document, record, {"what": "GPU"})
    first.forget_device()
    _ask(first, document, record, {"what": "CPU tier"})
    _ask(second, document, record, {"what": "daemon memory"})
    begin = time.monotonic()
    daemon.terminate(_STOP_S)
    record.note("daemon_stop_s", round(time.monotonic() - begin, 2))
    begin = time.monotonic()
    daemon.restart()
    record.note("daemon_start_s", round(time.monotonic() - begin, 2))
    second.forget_device()
    for engine in (first, second):  # they find out that it was restarted, and attach anew
        _warm_up(engine, fresh, sizes)
    time.sleep(sizes.attach_s)
    _ask(second, document, record, {"what": "daemon SSD after a restart"})


def _many_documents(engine: EngineProcess, fresh: Prompts, record: Record, sizes: Sizes) -> None:
    documents: list[list[int]] = []
    for row in range(1, sizes.documents + 1):
        documents += fresh.distinct(1, sizes.document_tokens)
        for number, document in enumerate(documents, start=1):
            if record.over:
                return
            _ask(engine, [document], record, {"row": row, "document": number})


def _ask(
    engine: EngineProcess, prompts: list[list[int]], record: Record, labels: dict[str, Any]
) -> None:
    before = engine.loaded()
    asked = engine.ask(prompts)
    record.add(asked.seconds, **labels)
    engine.settle()
    loaded = {tier: count - before.get(tier, 0) for tier, count in engine.loaded().items()}
    record.loaded_blocks(labels, loaded)


def _warm_up(engine: EngineProcess, fresh: Prompts, sizes: Sizes) -> None:
    for _ in range(2):
        engine.ask(fresh.distinct(1, sizes.document_tokens // 16))
        engine.settle()


def main() -> None:
    run_table("documents", measure, SIZES, TINY_SIZES, __doc__)


if __name__ == "__main__":
    main()
