"""Chat with a server whose cache outlives it: the engine restarts, the daemon answers.

    make chat            (or: .venv/bin/python examples/chat.py)

1. `tiered-kv up` starts a cache daemon, and a second one starts a vLLM server that uses it.
2. A question about a long text: the prompt is computed, and its blocks go to the daemon.
3. The server is stopped and started again: nothing is left of its GPU cache and CPU tier.
4. The same question: the prompt comes from the daemon.

On a terminal you may then ask questions of your own; the processes end with you. The exit status is
0 only if the second answer took its prompt from the daemon, and has the same words.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from smollm2 import cache_folder, ensure_model

from vllm_tiered_kv.api.bench import Asker, sources_between
from vllm_tiered_kv.api.openai_server import OpenAIServer

TEXT = Path(__file__).with_name("long_text.txt")
QUESTION = "What is the name of the ferry, and what colour is it?"
ANSWER_TOKENS = 24
START_S = 900.0
TIMEOUT_S = 600.0
COUNTED_S = 20.0
NAME = "chat"


class ChatError(Exception):
    """The example could not run as described."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Up:
    """A `tiered-kv up`: its own lines go to the terminal, logs of its processes to a file."""

    def __init__(self, file: Path, log: Path) -> None:
        self._log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm_tiered_kv.api.cli", "up", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C reaches this program, which stops both in order
            )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._show, daemon=True)
        self._reader.start()

    def _show(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            print(f"  {line.rstrip()}", flush=True)
            if "all is ready" in line:
                self._ready.set()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self._ready.wait(0.2):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ChatError(f"it did not start; its log: {self._log}")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        self._reader.join()


@contextlib.contextmanager
def running(file: Path, log: Path) -> Iterator[None]:
    up = Up(file, log)
    try:
        up.wait_until_ready()
        yield
    finally:
        up.stop()


@dataclass(frozen=True)
class Answer:
    text: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    sources: dict[str, int]  # computed, gpu, cpu, remote -> prompt tokens

    def line(self) -> str:
        where = ", ".join(f"{count} {source}" for source, count in self.sources.items())
        return (
            f"first token after {self.ttft_s:.2f} s; {self.prompt_tokens} prompt tokens, "
            f"{self.cached_tokens} cached ({where})"
        )


def ask(server: OpenAIServer, question: str) -> Answer:
    """Prints the answer as it comes. vLLM counts where the prompt was from."""
    content = f"{TEXT.read_text(encoding='utf-8').strip()}\n\n{question}"
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    before = server.samples() or []
    usage: dict[str, Any] = {}
    began, ttft, text = time.perf_counter(), 0.0, ""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    print("  ", end="")
    with opener.open(request, timeout=TIMEOUT_S) as response:
        for raw in response:
            line = raw.decode().strip()
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and not text:
                    ttft = time.perf_counter() - began
                text += piece
                print(piece.replace("\n", " "), end="", flush=True)
    print()
    details = usage.get("prompt_tokens_details") or {}
    cached = int(details.get("cached_tokens") or 0)
    return Answer(text, ttft, usage["prompt_tokens"], cached, counted(server, before, cached))


def counted(server: OpenAIServer, before: Any, cached: int) -> dict[str, int]:
    """The connector's counters come a moment after the answer."""
    deadline = time.monotonic() + COUNTED_S
    while True:
        sources = sources_between(before, server.samples() or [])
        sources.pop("external_kv_transfer", None)
        tiers = sum(count for source, count in sources.items() if source != "computed")
        if (sources and tiers >= cached) or time.monotonic() > deadline:
            return sources
        time.sleep(0.2)


def write_files(folder: Path, model: Path) -> tuple[Path, Path, str, str]:
    """The deployments of daemon and engine, in two files so that one can restart without the other;
    the addresses of the daemon's page and of the server."""
    import torch

    page, port = f"127.0.0.1:{free_port()}", free_port()
    address = f"ipc://{folder}/kv.sock"
    daemon = {"daemon": {"memory": "1GiB", "listen": [address], "http": page}}
    args: dict[str, Any] = {
        "served_model_name": NAME,
        "max_model_len": 4096,
        "enforce_eager": True,  # starts sooner
        "enable_prompt_tokens_details": True,
    }
    if not torch.cuda.is_available():
        args |= {"dtype": "float32", "block_size": 32}
    engine = {
        "servers": [
            {
                "model": str(model),
                "name": NAME,
                "port": port,
                "args": args,
                # On any machine, however fast it computes so small a model.
                "cache": {"cpu_memory": "512MiB", "remote": address, "load_policy": "always"},
                "env": {"VLLM_CPU_KVCACHE_SPACE": 1, "VLLM_NO_USAGE_STATS": 1, "HF_HUB_OFFLINE": 1},
            }
        ]
    }
    files = folder / "daemon.yml", folder / "engine.yml"
    for file, content in zip(files, (daemon, engine), strict=True):
        file.write_text(yaml.safe_dump(content, sort_keys=False))
    return *files, f"http://{page}", f"http://127.0.0.1:{port}"


def run(folder: Path, model: Path, log: Path) -> int:
    daemon_file, engine_file, page, url = write_files(folder, model)
    server = OpenAIServer(url, TIMEOUT_S)
    text = TEXT.read_text(encoding="utf-8")
    print(f"1. a daemon; logs of all processes: {log}")
    with running(daemon_file, log):
        print("2. a server that uses it (about a minute on two cores)")
        began = time.monotonic()
        with running(engine_file, log):
            started_s = time.monotonic() - began
            print(f"   the daemon's page: {page}/, the server: {url}/v1")
            print(f"3. a text of {len(text.split())} words, and: {QUESTION}")
            computed = ask(server, QUESTION)
            print(f"   {computed.line()}")
            Asker(server, NAME, "").wait_until_stored()
        print(f"4. the server has ended; starting it again takes about {started_s:.0f} s")
        with running(engine_file, log):
            print(f"5. the same text: {QUESTION}")
            loaded = ask(server, QUESTION)
            print(f"   {loaded.line()}")
            faster = computed.ttft_s / loaded.ttft_s if loaded.ttft_s else 0.0
            print(f"   the first token came {faster:.1f} times as fast")
            if sys.stdin.isatty():
                converse(server)
    return judge(computed, loaded)


def converse(server: OpenAIServer) -> None:
    print("6. ask about the text yourself; an empty line ends it")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while question := input("> ").strip():
            print(f"   {ask(server, question).line()}")


def judge(computed: Answer, loaded: Answer) -> int:
    from_daemon = loaded.sources.get("remote", 0)
    complaints = []
    if computed.cached_tokens:
        complaints.append(f"{computed.cached_tokens} tokens of the first prompt were cached")
    if not from_daemon:
        complaints.append("nothing came from the daemon")
    if computed.text != loaded.text:
        complaints.append("the answers differ")
    for complaint in complaints:
        print(f"FAILED  {complaint}")
    if not complaints:
        print(
            f"After the restart {from_daemon} tokens came from the daemon, and the answer is equal."
        )
    return 1 if complaints else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="another model folder (default: SmolLM2-135M)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stops both
    log = cache_folder() / "chat.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    folder = Path(tempfile.mkdtemp(prefix="kv-"))
    try:
        return run(folder, options.model or ensure_model(), log)
    except (ChatError, OSError) as error:
        print(f"FAILED  {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
