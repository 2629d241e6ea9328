"""The pages for monitors: what they hold, and who may read them from where."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.raw_client import RawClient, block, key, wire
from tests.daemon.test_cli import run
from tests.patience import eventually
from vllm_tiered_kv import __version__
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.remote.address import engine_name
from vllm_tiered_kv.server.net.http import HttpServer, parse_address, read_token

TOKEN = "0123456789abcdef0123456789abcdef"


def fetch(url: str, token: str | None = None, scheme: str = "Bearer") -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"{scheme} {token}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=30
        ) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples(text: str) -> dict[str, float]:
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in text.splitlines())
        if not name.startswith("#")
    }


def token_file(folder: Path, text: str = TOKEN + "\n") -> Path:
    path = folder / "token"
    path.write_text(text)
    return path


def test_page_has_histograms_of_requests_and_of_the_ssd(
    start: StartDaemon, connect: Connect, tmp_path: Path
) -> None:
    ssd = ("--ssd", str(tmp_path / "ssd"), "--ssd-space", "16MiB")
    daemon = start("--memory", "64MiB", "--http", "127.0.0.1:0", *ssd)
    client = connect(daemon.endpoint)
    client.put({key(n): block(n) for n in range(3)})
    client.get([key(0)])
    client.ask(wire.Flush())
    status, text = fetch(f"{daemon.http}/metrics")
    found = samples(text)
    assert status == 200
    prefix = "tiered_kv_server_request_seconds"
    for op in ("put", "get", "flush"):
        buckets = [
            value
            for name, value in found.items()
            if name.startswith(f'{prefix}_bucket{{op="{op}",le=')
        ]
        assert buckets == sorted(buckets)
        assert buckets[-1] == found[f'{prefix}_count{{op="{op}"}}'] == 1
        assert 0 < found[f'{prefix}_sum{{op="{op}"}}'] < 60
    assert f'{prefix}_bucket{{op="put",le="+Inf"}} 1' in text.splitlines()
    assert text.count(f"# TYPE {prefix} histogram") == 1
    assert found["tiered_kv_server_ssd_write_seconds_count"] > 0
    assert found["tiered_kv_server_ssd_read_seconds_count"] == 0


def test_page_tells_version_start_health_and_bytes_by_namespace(
    start: StartDaemon,
) -> None:
    daemon = start("--memory", "64MiB", "--http", "127.0.0.1:0")
    with RawClient(daemon.endpoint) as client:
        client.hello(client=engine_name('Qwen/"8B"\nforged 1'))
        client.put({key(n): block(n) for n in range(3)})
        found = samples(fetch(f"{daemon.http}/metrics")[1])
    assert found[f'tiered_kv_server_build_info{{version="{__version__}"}}'] == 1
    assert found["tiered_kv_server_up"] == 1
    assert found["tiered_kv_server_start_time_seconds"] > 1.7e9
    (name,) = (name for name in found if "namespace_bytes" in name)
    assert r'model="Qwen/\"8B\"\nforged 1"' in name
    assert 'tier="memory"' in name
    assert found[name] == found['tiered_kv_server_used_bytes{tier="memory"}']
    assert "forged" not in {line.split()[0] for line in found}


def test_metrics_with_token_require_it(start: StartDaemon, folder: Path) -> None:
    daemon = start(
        *("--memory", "16MiB", "--http", "127.0.0.1:0", "--http-token", str(token_file(folder)))
    )
    page = f"{daemon.http}/metrics"
    assert fetch(page, TOKEN)[0] == 200
    assert fetch(page, TOKEN, "bearer")[0] == 200
    for wrong in (None, "", TOKEN[:-1], TOKEN + "0", "\xe4" * 32):
        status, text = fetch(page, wrong)
        assert status == 401
        assert "Authorization: Bearer" in text
        assert "tiered_kv_server" not in text
    assert fetch(page, TOKEN, "Basic")[0] == 401
    assert fetch(f"{daemon.http}/healthz") == (200, "ok\n")


@pytest.mark.parametrize(
    ("options", "metrics", "facts"),
    [("open", 200, 403), ("token", 401, 401), ("open token", 200, 401)],
)
def test_other_hosts_get_open_metrics_and_the_status_only_with_the_token(
    start: StartDaemon, folder: Path, options: str, metrics: int, facts: int
) -> None:
    more = ["--http-open"] if "open" in options else []
    more += ["--http-token", str(token_file(folder))] if "token" in options else []
    daemon = start("--memory", "16MiB", "--http", "0.0.0.0:0", *more)
    port = int(daemon.http.rpartition(":")[2])
    page = f"http://{address_of_this_host()}:{port}"
    assert fetch(f"{page}/healthz")[0] == 200
    assert fetch(f"{page}/metrics")[0] == metrics
    status, text = fetch(f"{page}/status.json")
    assert status == facts
    assert "http_token" in text
    assert fetch(f"{page}/metrics", TOKEN)[0] == 200
    if "token" in options:
        assert fetch(f"{page}/status.json", TOKEN)[0] == 200
    else:  # as after `kubectl port-forward`
        assert fetch(f"http://localhost:{port}/status.json")[0] == 200


def address_of_this_host() -> str:
    """One that is not loopback, as other hosts have; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no network")
        return str(probe.getsockname()[0])


def test_pages_are_served_over_ipv6(start: StartDaemon) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this system has no IPv6")
    daemon = start("--memory", "16MiB", "--http", "[::1]:0")
    eventually(lambda: fetch(f"{daemon.http}/healthz")[0] == 200)


def test_options_that_expose_the_page_by_mistake_are_refused(folder: Path) -> None:
    done = run("--http", "0.0.0.0:0", "--listen", f"ipc://{folder}/kv.sock")
    assert done.returncode == 2, done
    assert re.search(r"http_token .* or http_open", done.stderr)
    for address in ("0.0.0.0:0", "[::]:0", "192.0.2.1:9528", "cache1:9528"):
        with pytest.raises(ConfigError, match=r"http_token .* or http_open"):
            parse_address(address, may_be_remote=False)
    for address in ("::1:9528", "0.0.0.0", ":9528"):
        with pytest.raises(ConfigError, match="is neither like"):
            parse_address(address, may_be_remote=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(str(folder / "none"))
    for text in ("", "short", f"{TOKEN} {TOKEN}", "ä" * 40):
        with pytest.raises(ConfigError, match="openssl rand"):
            read_token(str(token_file(folder, text)))


def test_server_starts_without_looking_for_the_name_of_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python's own server asks the resolver, which may hold up the start of a daemon."""
    monkeypatch.setattr(socket, "getfqdn", lambda name: pytest.fail("asked the resolver"))
    server = HttpServer("127.0.0.1:0", lambda: "metrics\n", lambda: None)
    assert fetch(f"http://{server.address}/metrics") == (200, "metrics\n")
    server.close()
