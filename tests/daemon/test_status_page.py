"""The status page and its facts, as a daemon serves them."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.raw_client import NAMESPACE, attach, block, blocks, key, push_out
from tests.daemon.test_http_pages import TOKEN, fetch, token_file
from tests.patience import eventually
from vllm_tiered_kv.core.store import key_prefix
from vllm_tiered_kv.remote.address import engine_name

HTTP = ("--http", "127.0.0.1:0")
MIB = 1 << 20


def ask(method: str, url: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request(method, f"/{path}", headers=headers)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def facts_of(url: str, query: str = "") -> dict[str, Any]:
    status, text = fetch(f"{url}/status.json{query}")
    assert status == 200, text
    return json.loads(text)  # type: ignore[no-any-return]


def test_facts_are_those_of_status_with_history_and_clients(
    start: StartDaemon, connect: Connect
) -> None:
    daemon = start("--memory", "64MiB", *HTTP)
    engine = engine_name("Qwen/Qwen3-8B")
    client = connect(daemon.endpoint, client=engine)
    client.put(blocks(3))
    client.get([key(0), key(9)])
    stats = client.stats()
    facts = facts_of(daemon.http)
    assert facts["problem"] is None
    assert facts["problems"] == []
    assert facts["started"] <= facts["time"]
    assert facts["stats"]["hit_blocks"] == stats["hit_blocks"] == {"memory": 1}
    assert set(facts["stats"]) == set(stats)
    assert facts["info"]["endpoints"] == daemon.endpoints
    (row,) = facts["info"]["by_namespace"].values()
    assert (row["model"], row["memory_blocks"]) == ("Qwen/Qwen3-8B", 3)
    assert facts["clients"]["left_out"] == 0
    (row,) = facts["clients"]["rows"]
    assert (row["client"], row["transport"], row["pid"]) == (engine, "tcp", 0)
    assert (row["sessions"], row["in_flight"], row["read_only"]) == (1, 0, False)
    history = facts["history"]
    now = dict(zip(history["columns"], history["now"], strict=True))
    assert (now["hit_memory"], now["missed"], now["stored"]) == (1, 1, 3)
    assert now["used_memory"] == facts["stats"]["used_bytes"]["memory"]
    assert 0 < now["read_p50"] <= now["read_p99"] < 60
    assert history["first"] == 0
    assert len(history["rows"][0]) == len(history["columns"])


def test_history_is_sampled_without_viewers(start: StartDaemon) -> None:
    daemon = start("--memory", "16MiB", *HTTP)
    eventually(lambda: len(facts_of(daemon.http)["history"]["rows"]) >= 2)
    first, second = facts_of(daemon.http)["history"]["rows"][:2]
    assert 4 < second[0] - first[0] < 60
    rest = facts_of(daemon.http, "?after=0")["history"]
    assert (rest["first"], rest["rows"][0]) == (1, second)


def test_clients_are_listed_by_name_and_process(start: StartDaemon, connect: Connect) -> None:
    daemon = start("--memory", "16MiB", *HTTP)
    attached = attach(daemon.ipc_path)
    engine = connect(daemon.ipc, client="engine", arena=attached.token)
    for endpoint in (daemon.endpoint, daemon.endpoint, daemon.ipc):
        connect(endpoint, client="engine")
    engine.put(blocks(1))
    engine.lend([key(0)])
    clients = facts_of(daemon.http)["clients"]["rows"]
    rows = {(row["transport"], row["pid"] > 0): row for row in clients}
    assert set(rows) == {("ipc", True), ("ipc", False), ("tcp", False)}
    assert rows["tcp", False]["sessions"] == 2
    assert rows["ipc", True]["leased_bytes"] > 0
    attached.close()


def test_many_clients_shows_the_latest(start: StartDaemon, connect: Connect) -> None:
    daemon = start("--memory", "16MiB", *HTTP)
    many = [connect(daemon.endpoint, client=f"client {number}") for number in range(101)]
    clients = facts_of(daemon.http)["clients"]
    assert (len(clients["rows"]), clients["left_out"]) == (100, 1)
    many[0].stats()
    assert "client 0" in {row["client"] for row in facts_of(daemon.http)["clients"]["rows"]}


def test_evicted_blocks_are_counted_by_namespace_and_tier(
    start: StartDaemon, connect: Connect, tmp_path: Path
) -> None:
    ssd = ("--ssd", str(tmp_path / "ssd"), "--ssd-space", "16MiB")
    daemon = start("--memory", "1MiB", *ssd, *HTTP)
    client = connect(daemon.endpoint)
    push_out(client, 0)
    facts = facts_of(daemon.http)
    name = key_prefix(NAMESPACE).hex()
    evicted = facts["evicted_by_namespace"]
    assert set(evicted) == {"memory", "ssd"}
    assert evicted["memory"] == {name: facts["stats"]["evicted_blocks"]["memory"]}
    assert evicted["memory"][name] > 100


def test_warnings_are_shown_without_secrets(start: StartDaemon) -> None:
    pytest.importorskip("redis")
    backing = ("--backing", "redis://user:swordfish@127.0.0.1:1", "--backing-timeout", "1s")
    daemon = start("--memory", "16MiB", *HTTP, *backing)
    facts = eventually(lambda: (found := facts_of(daemon.http))["problems"] and found)
    assert any("127.0.0.1:1" in problem["text"] for problem in facts["problems"])
    assert "swordfish" not in json.dumps(facts)


def test_document_is_for_all_and_facts_for_those_with_the_token(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    daemon = start("--memory", "16MiB", *HTTP, "--http-token", str(token_file(folder)))
    connect(daemon.endpoint, client="a client's name").put({key(0): block(0)})
    status, document = fetch(f"{daemon.http}/")
    assert status == 200
    assert "client's name" not in document
    assert daemon.endpoint not in document
    for wrong in (None, TOKEN[:-1], TOKEN + "0"):
        status, text = fetch(f"{daemon.http}/status.json", wrong)
        assert status == 401
        assert "client's name" not in text
    assert fetch(f"{daemon.http}/status.json?token={TOKEN}")[0] == 401
    status, text = fetch(f"{daemon.http}/status.json?after=-1", TOKEN)
    assert status == 200
    assert "client's name" in text


def test_other_names_of_the_host_are_refused_where_no_token_is_asked_for(
    start: StartDaemon, folder: Path
) -> None:
    """A web site may have its name resolve to 127.0.0.1, and then read answers in a browser."""
    token = ("--http-token", str(token_file(folder)))
    options = {(): (403, 403), ("--http-open",): (200, 403), token: (401, 401)}
    for more, statuses in options.items():
        daemon = start("--memory", "16MiB", *HTTP, *more)
        for page, status in zip(("metrics", "status.json"), statuses, strict=True):
            assert ask("GET", f"{daemon.http}/{page}", Host="attacker.example")[0] == status
        assert ask("GET", f"{daemon.http}/healthz", Host="attacker.example")[0] == 200
        if not more:
            for name in ("localhost", "LOCALHOST:9528", "127.0.0.1", "[::1]:9528"):
                assert ask("GET", f"{daemon.http}/metrics", Host=name)[0] == 200
            for name in ("127.0.0.1.attacker.example", "", "[", "localhost.attacker.example:9528"):
                assert ask("GET", f"{daemon.http}/metrics", Host=name)[0] == 403


def test_pages_are_read_only_and_wrong_requests_get_a_sentence(start: StartDaemon) -> None:
    daemon = start("--memory", "16MiB", *HTTP)
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(method, f"{daemon.http}/status.json")[0] == 501
    status, headers, body = ask("HEAD", f"{daemon.http}/")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) == len(ask("GET", f"{daemon.http}/")[2])
    status, _, body = ask("GET", f"{daemon.http}/status.json?after=now")
    assert (status, body[:5]) == (400, b"after")
    status, _, body = ask("GET", f"{daemon.http}/none")
    assert status == 404
    assert b"/metrics /healthz / /status.json" in body


@pytest.mark.parametrize("path", ["", "status.json", "metrics", "healthz", "none"])
def test_every_page_tells_browsers_to_run_and_keep_nothing(start: StartDaemon, path: str) -> None:
    daemon = start("--memory", "16MiB", *HTTP)
    _, headers, _ = ask("GET", f"{daemon.http}/{path}")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert ("script-src" in headers["Content-Security-Policy"]) == (path == "")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers
