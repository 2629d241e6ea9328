"""The engines and daemons of a run: started side by side, used again by the next table.

A start costs more than most measurements, so an engine goes on living for as long as a table asks
for an equal one. An engine that fails is reported and dropped; the others go on without it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.engine_process import EngineFailed, EngineProcess, EngineSpec
from benchmarks.throughput.engines import (
    CHUNK,
    QWEN_3B,
    TINY,
    Shape,
    connector,
    daemon_of,
    engine_spec,
    offloading,
    with_daemon,
    with_tails,
)
from benchmarks.throughput.record import Record
from tests.daemon.daemon_process import DaemonProcess

_STARTS_AT_ONCE = 16
_STARTS_AT_ONCE_TINY = 1


def distinct(specs: Sequence[EngineSpec]) -> list[EngineSpec]:
    """Each engine once, also where two tables ask for it."""
    by_name: dict[str, EngineSpec] = {}
    for spec in specs:
        assert by_name.setdefault(spec.name, spec) == spec, f"two kinds of {spec.name}"
    return list(by_name.values())


class EnginePool:
    """Engines and daemons by name. Tables ask it for those they compare. Context manager: none of
    them outlives it."""

    def __init__(self, tiny: bool) -> None:
        self.tiny = tiny
        self._folder = tempfile.TemporaryDirectory(prefix="kv-")
        self._engines: dict[str, EngineProcess] = {}
        self._daemons: dict[str, DaemonProcess] = {}
        self._compiled: set[str] = set()
        self._expected: Callable[[], Sequence[EngineSpec]] = list

    def __enter__(self) -> EnginePool:
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self._engines):
            self._close(name)
        for daemon in self._daemons.values():
            daemon.end()
        self._folder.cleanup()

    def daemon(self, name: str, *arguments: str) -> DaemonProcess:
        """The daemon of this name, which is started if need be."""
        if name not in self._daemons:
            self._daemons[name] = DaemonProcess(self.folder(name), *arguments).start()
        return self._daemons[name]

    def folder(self, name: str) -> Path:
        """A folder that lives as long as this does."""
        folder = Path(self._folder.name) / name
        folder.mkdir(exist_ok=True)
        return folder

    def expect(self, specs: Callable[[], Sequence[EngineSpec]]) -> None:
        """Says how to make the engines that the next table will ask for. A table that has room
        for them starts them beside its own, which takes hardly longer."""
        self._expected = specs

    def engines(
        self, specs: Sequence[EngineSpec], record: Record, *, room: bool = False
    ) -> dict[str, EngineProcess]:
        """Engines of these specs that are ready, by name; the others are closed.

        `room`: there is room for those that the next table expects.
        """
        wanted = distinct([*specs, *(self._expected() if room else ())])
        self._end_all_but(wanted)
        self._start_missing(wanted, record)
        return self._ready(specs, record)

    def restart(
        self, specs: Sequence[EngineSpec], record: Record, *, room: bool = False
    ) -> dict[str, EngineProcess]:
        """As `engines`, but those that run are killed as kill -9 does, and start anew."""
        for name in self.alive([spec.name for spec in specs]):
            self._engines.pop(name).kill()
        return self.engines(specs, record, room=room)

    def alive(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self._engines]

    @contextlib.contextmanager
    def surviving(self, name: str, record: Record) -> Iterator[None]:
        """An engine that fails inside is lost, and the run goes on."""
        try:
            yield
        except EngineFailed as failure:
            self._lose(name, failure, record)

    def _waves(self, specs: Sequence[EngineSpec]) -> Iterator[list[EngineSpec]]:
        """The first engine of a model fills vLLM's compile cache for the others."""
        first: list[EngineSpec] = []
        rest: list[EngineSpec] = []
        for spec in specs:
            weights = spec.options.get("quantization")
            model = json.dumps([spec.model, weights], sort_keys=True)
            (rest if model in self._compiled else first).append(spec)
            self._compiled.add(model)
        at_once = _STARTS_AT_ONCE_TINY if self.tiny else _STARTS_AT_ONCE
        for wave in (first, rest):
            for start in range(0, len(wave), at_once):
                yield wave[start : start + at_once]

    def _start_missing(self, specs: Sequence[EngineSpec], record: Record) -> None:
        for wave in self._waves([spec for spec in specs if spec.name not in self._engines]):
            record.say(f"starting {', '.join(spec.name for spec in wave)}")
            for spec in wave:
                self._engines[spec.name] = EngineProcess(spec)
            for spec in wave:
                with self.surviving(spec.name, record):
                    self._engines[spec.name].wait_ready()

    def _ready(self, specs: Sequence[EngineSpec], record: Record) -> dict[str, EngineProcess]:
        names = self.alive([spec.name for spec in specs])
        for name in names:
            facts = {fact: v for fact, v in self._engines[name].facts().items() if fact != "pid"}
            started = round(self._engines[name].started_s, 1)
            record.engine(name, {**facts, "started_s": started})
        return {name: self._engines[name] for name in names}

    def _end_all_but(self, specs: Sequence[EngineSpec]) -> None:
        """Also the daemons that none of these talks to."""
        wanted = {spec.name: spec for spec in specs}
        for name, engine in list(self._engines.items()):
            if wanted.get(name) != engine.spec:
                self._close(name)
        used = {daemon_of(spec) for spec in specs}
        for name, daemon in list(self._daemons.items()):
            if daemon.ipc not in used:
                self._daemons.pop(name).end()

    def _close(self, name: str) -> None:
        with contextlib.suppress(EngineFailed):
            self._engines.pop(name).close()

    def _lose(self, name: str, failure: EngineFailed, record: Record) -> None:
        print(failure, file=sys.stderr, flush=True)
        record.engine(name, {"failed": failure.what})
        engine = self._engines.pop(name, None)
        if engine is not None:
            engine.kill()


_GIB = 1 << 30
_MIB = 1 << 20
SMALL_CPU_GIB, SMALL_DAEMON_GIB = 3, 8
_GRAPHS = (1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 384, 512, 768, CHUNK)
"""Sizes of steps that run as CUDA graphs. With 32 sequences vLLM would make none above 64, and the
GPU would wait for the processor that launches kernels: tables would tell how fast that one is."""


def shape_of(pool: EnginePool) -> Shape:
    return TINY if pool.tiny else QWEN_3B


def small_engine(pool: EnginePool, system: str, scheduling: str, gpu_cache: bool) -> EngineSpec:
    """`system`: vllm, hash_only, tiered, yoco (the same, partial tails are reused), daemon (shared
    memory of a daemon behind the tier), daemon_too (a second engine of it), or offloading (vLLM's
    OffloadingConnector)."""
    spec = engine_spec(
        shape_of(pool),
        system,
        _transfer(pool, system),
        gpu_cache=gpu_cache,
        kv_bytes=64 * _MIB if pool.tiny else 5 * _GIB // 4,
        scheduling=scheduling,
    )
    if not pool.tiny:
        spec.options["compilation_config"] = {"cudagraph_capture_sizes": list(_GRAPHS)}
    return spec


def _transfer(pool: EnginePool, system: str) -> dict[str, Any] | None:
    cpu_memory = 64 * _MIB if pool.tiny else SMALL_CPU_GIB * _GIB
    if system == "vllm":
        return None
    if system.startswith("daemon"):
        memory = "256MiB" if pool.tiny else f"{SMALL_DAEMON_GIB}GiB"
        address = pool.daemon("small", "--memory", memory).ipc
        return with_daemon(address, cpu_memory)
    if system == "yoco":
        return with_tails(cpu_memory)
    if system == "offloading":
        return offloading(cpu_memory)
    return connector("hash_only" if system == "hash_only" else "tiered", cpu_memory=cpu_memory)


Sizes = TypeVar("Sizes")


def run_table(
    table: str,
    measure: Callable[[EnginePool, Record, Sizes], None],
    sizes: Sizes,
    tiny: Sizes,
    text: str | None,
) -> None:
    """The `main` of a table. `sizes` and `tiny` are dataclasses of numbers and tuples of them."""
    parser = argparse.ArgumentParser(description=(text or table).splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--tiny", action="store_true", help="small, for a machine without GPU")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop after so long")
    for name, value in dataclasses.asdict(sizes).items():  # type: ignore[call-overload]
        if isinstance(value, str):
            continue
        parser.add_argument(
            "--" + name.replace("_", "-"),
            dest=f"size_{name}",
            type=_numbers if isinstance(value, (tuple, list)) else type(value),
            help=f"[{value}]",
        )
    args = parser.parse_args()
    chosen: Any = tiny if args.tiny else sizes
    given = {
        name.removeprefix("size_"): value
        for name, value in vars(args).items()
        if name.startswith("size_") and value is not None
    }
    record = Record(table, dataclasses.replace(chosen, **given), args.out, args.budget)
    with EnginePool(args.tiny) as pool:
        measure(pool, record, dataclasses.replace(chosen, **given))
    record.save()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
