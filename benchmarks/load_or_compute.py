"""TTFT with a tier that is slower than the model: load all of it, what pays, or nothing.

    python -m benchmarks.load_or_compute --out result.json                7B shape on a GPU
    python -m benchmarks.load_or_compute --tiny --out result.json         the same code on a laptop
    python -m benchmarks.load_or_compute --link 1.6GB --out result.json   over a link of that speed
    python -m benchmarks.load_or_compute --place memory --out result.json  in its memory

The prompts lie on the SSD of a daemon, whose memory holds but one of them, or in its memory. They
are more than the CPU tier of an engine holds, and each engine asks for them in turn: it never finds
one there. That all of them are there is seen to before: the engine that loads everything has to
find each whole. Engines: vLLM alone, and ours with `load_policy` always, auto and never, side by
side, taking turns. `auto` starts without any knowledge of the disk or of prefills; its first rounds
are counted. All engines have decoded a few tokens before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.engine_configs import Scale
from benchmarks.engine_process import EngineGroup, EngineSpec, say
from benchmarks.result_files import describe_environment, save, spread
from tests.daemon.daemon_process import DaemonProcess
from tests.models import QWEN2_7B
from vllm_tiered_kv.options import parse_size
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.store import RemoteStore

_PIECE = 64 << 10


class SlowLink:
    """Relays to `host:port`; what comes back from there is paced, over all connections together."""

    def __init__(self, endpoint: str, bytes_per_s: float) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.endpoint = ""

    def __enter__(self) -> SlowLink:
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result()
        self.endpoint = f"tcp://127.0.0.1:{started.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            self._relay(reader, far_writer, paced=False),
            self._relay(far_reader, writer, paced=True),
        )

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, paced: bool
    ) -> None:
        try:
            while data := await reader.read(_PIECE):
                if paced:
                    now = self._loop.time()
                    self._free_at = max(now, self._free_at) + len(data) / self._bytes_per_s
                    # Sleeps are coarse: small debts are left to add up.
                    if self._free_at - now > 0.002:
                        await asyncio.sleep(self._free_at - now)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


MODES = ("vllm", "always", "auto", "never")
GOAL = 1.05
LARGEST_BLOCK = 128  # tokens; by default on a CPU, 16 on a GPU
_FILLS = 12
_WARM_UP_TOKENS = 24


def spec(mode: str, scale: Scale, remote: str) -> EngineSpec:
    extra = {
        "cpu_memory": scale.tier_bytes,
        "remote": remote,
        "remote_lookup_timeout": 5,
        "remote_load_timeout": 60,
        "load_policy": mode,
    }
    ours = {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "vllm_tiered_kv.connector.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return EngineSpec(
        name=mode,
        model=scale.model,
        transfer=None if mode == "vllm" else ours,
        options={
            "kv_cache_memory_bytes": scale.device_bytes,
            "max_model_len": scale.prompt_tokens + 64,
            "disable_log_stats": False,
        },
    )


@contextlib.contextmanager
def daemon(folder: Path, scale: Scale, prompts: int, place: str, link: str | None) -> Iterator[str]:
    """Where a daemon with a slow tier is reached."""
    all_of_them = str(max(1 << 30, 2 * prompts * scale.prompt_bytes))
    arguments = ["--memory", all_of_them]
    if place == "ssd":
        arguments = ["--memory", str(max(64 << 20, 5 * scale.prompt_bytes // 4))]
        arguments += ["--ssd", str(folder / "ssd"), "--ssd-space", all_of_them]
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(DaemonProcess(folder, *arguments)).endpoint
        if link is not None:
            speed = parse_size("link", link)
            endpoint = stack.enter_context(SlowLink(endpoint, speed)).endpoint
        yield endpoint


def fill(group: EngineGroup, prompts: list[list[int]], remote: str) -> list[int]:
    """Has the daemon hold all prompts; how often each was stored.

    Nobody waits for blocks to be stored, so a slow disk drops some of a prompt: it is stored again
    until another engine finds all of it.
    """
    times = [0] * len(prompts)
    missing = list(range(len(prompts)))
    identity = EngineIdentity(bytes(32), (4096,), "any", "benchmark")
    with contextlib.closing(RemoteStore(remote, identity)) as store:
        for _ in range(_FILLS):
            for number in missing:
                group.running["never"].ask([prompts[number]])
                group.running["never"].forget_device()
                store.flush()
                times[number] += 1
            missing = [number for number in missing if not _is_whole(group, prompts[number])]
            say(f"{len(prompts) - len(missing)} of {len(prompts)} prompts are there")
            if not missing:
                return times
    raise SystemExit(
        f"prompts {missing} are not on the daemon after {_FILLS} attempts: is its disk full?"
    )


def _is_whole(group: EngineGroup, prompt: list[int]) -> bool:
    (found,) = group.running["always"].ask([prompt]).cached
    group.running["always"].forget_device()
    # The last block is never loaded whole: at least one token is computed.
    return len(prompt) - found <= LARGEST_BLOCK


def measure(
    group: EngineGroup, prompts: list[list[int]], rounds: int, deadline: float
) -> Iterator[dict[str, Any]]:
    """Each engine a prompt of its own in a round: what one has read may be in memory after it."""
    apart = len(prompts) // len(MODES)
    for number in range(rounds):
        names = [name for name in MODES if name in group.running]
        for place in range(len(names)):
            if time.monotonic() > deadline:
                return
            mode = names[(place + number) % len(names)]
            prompt = prompts[(number + apart * MODES.index(mode)) % len(prompts)]
            with group.drop_failed():
                engine = group.running[mode]
                engine.forget_device()
                asked = engine.ask([prompt])
                yield {
                    "round": number,
                    "mode": mode,
                    "ms": round(asked.seconds * 1000, 3),
                    "waited_ms": [round(seconds * 1000, 3) for seconds in asked.waited_s],
                    "loaded_tokens": asked.cached[0],
                    "first_token": asked.tokens[0][0],
                    "prompt": prompts.index(prompt),
                    "estimates": engine.estimates(len(prompt)) if mode == "auto" else {},
                }


def derive(samples: list[dict[str, Any]]) -> dict[str, Any]:
    times = {mode: [s["ms"] for s in samples if s["mode"] == mode] for mode in MODES}
    times = {mode: values for mode, values in times.items() if values}
    found: dict[str, Any] = {"ms": {mode: spread(values) for mode, values in times.items()}}
    if "vllm" not in times:
        return found
    alone = statistics.median(times["vllm"])
    found["ratio_to_vllm"] = {
        mode: round(statistics.median(values) / alone, 4) for mode, values in times.items()
    }
    loaded = {m: [s["loaded_tokens"] for s in samples if s["mode"] == m] for m in times}
    found["loaded_tokens"] = {mode: statistics.median(some) for mode, some in loaded.items()}
    found["worst_ratio"] = {mode: round(max(v) / alone, 4) for mode, v in times.items()}
    firsts = {(s["prompt"], s["first_token"]) for s in samples}
    found["same_first_token"] = len(firsts) == len({prompt for prompt, _ in firsts})
    if "auto" in times:
        found["goal"] = f"P10: auto never above {GOAL} of vllm"
        found["reached"] = found["worst_ratio"]["auto"] <= GOAL
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, without GPU")
    parser.add_argument("--tokens", type=int, default=0, help="length of a prompt")
    parser.add_argument("--prompts", type=int, default=8, help="how many different ones")
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--place", choices=("ssd", "memory"), default="ssd", help="of the daemon")
    parser.add_argument("--link", help="limit what comes from the daemon, such as 1.6GB a second")
    parser.add_argument("--folder", type=Path, help="where the SSD tier goes")
    parser.add_argument("--budget", type=float, default=500.0, help="seconds in all")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget
    tokens = args.tokens or (960 if args.tiny else 10_240)
    model = {} if args.tiny else QWEN2_7B
    one = Scale(model, tokens, 1, 0, 0).prompt_bytes
    scale = Scale(model, tokens, 1, 7 * one // 2, (256 << 20) if args.tiny else (2 << 30))
    rng = random.Random(0)
    vocabulary = 900 if args.tiny else 150_000
    prompts = [[rng.randrange(100, vocabulary) for _ in range(tokens)] for _ in range(args.prompts)]
    report: dict[str, Any] = {
        "environment": describe_environment(),
        "prompt_tokens": tokens,
        "prompt_bytes": one,
        "place": args.place,
        "link": args.link,
    }
    samples: list[dict[str, Any]] = []
    raw: dict[str, Any] = {"samples": samples}
    with (
        tempfile.TemporaryDirectory(prefix="kv-", dir=args.folder) as folder,
        daemon(Path(folder), scale, len(prompts), args.place, args.link) as remote,
        EngineGroup(lambda mode: spec(mode, scale, remote), Path(folder)) as group,
    ):
        for number in range(1, len(MODES) + 1):
            # The first alone: it fills vLLM's compile cache. A small machine takes them singly.
            if number == 1 or number == len(MODES) or args.tiny:
                group.start(MODES[:number])
        raw["engines"] = group.described
        if not {"never", "always"} <= set(group.running):
            raise SystemExit("the engines that fill the daemon and look into it did not start")
        say("filling the daemon")
        raw["times_stored"] = fill(group, prompts, remote)
        # vLLM's CPU kernels for decoding in bfloat16 are not there on every processor.
        for engine in group.running.values() if not args.tiny else ():
            engine.ask([[100, 101, 102]], max_tokens=_WARM_UP_TOKENS)
        for sample in measure(group, prompts, args.rounds, deadline):
            samples.append(sample)
            say(f"{sample['round']:3} {sample['mode']:7} {sample['ms']:9.1f} ms")
            if sample["mode"] == MODES[-1]:
                save(args.out, {**report, "derived": derive(samples)}, raw)
        raw["counters"] = {name: e.load_counters() for name, e in group.running.items()}
    report["derived"] = derive(samples)
    save(args.out, report, raw)
    print(json.dumps(report["derived"], indent=1))


if __name__ == "__main__":
    main()
