"""The status page in a real browser, beside a real daemon. Chromium starts once for all tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.chromium import Chromium, require_chromium
from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import blocks, key
from tests.daemon.test_http_pages import TOKEN, address_of_this_host, token_file
from tests.patience import eventually
from tests.ports import free_port

HOSTILE = '<img src=x onerror="window.hacked=1">\'</script><script>window.hacked=1</script>'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    require_chromium()
    with Chromium(tmp_path_factory.mktemp("chromium")) as one:
        yield one


@pytest.fixture
def page(browser: Chromium) -> Iterator[Chromium]:
    """Fails the test if a script failed or the page was refused anything."""
    browser.screen(1280, 900)
    browser.color_scheme("light")
    browser.log()
    yield browser
    wrong = [entry for entry in browser.log() if entry["source"] != "network"]
    browser.open("about:blank")
    assert not wrong


def start_with_page(start: StartDaemon, *more: str) -> DaemonProcess:
    return start("--memory", "16MiB", "--http", f"127.0.0.1:{free_port()}", *more)


def test_values_and_charts_follow_puts_and_gets(
    page: Chromium, start: StartDaemon, connect: Connect, tmp_path: Path
) -> None:
    ssd = ("--ssd", str(tmp_path / "ssd"), "--ssd-space", "32MiB")
    daemon = start_with_page(start, *ssd)
    page.open(f"{daemon.http}/")
    eventually(lambda: "healthy" in page.text("header"))
    assert daemon.endpoint in page.text("h1")
    assert "no block was asked for" in page.text("#tiles")
    assert "nothing was stored" in page.text("#namespaces")
    fits = "svg => Math.abs(svg.viewBox.baseVal.width - svg.clientWidth) < 1"
    assert page.run(f"return [...document.querySelectorAll('svg')].every({fits})")

    client = connect(daemon.endpoint, client="Qwen/Qwen3-8B")
    client.put(blocks(3))
    client.get([key(n) for n in range(4)])
    eventually(lambda: "75 %" in page.text("#tiles"))
    assert re.search(r"3 of 4 blocks", page.text("#tiles"))
    assert "Qwen/Qwen3-8B" in page.text("#namespaces")
    assert "Qwen/Qwen3-8B" in page.text("#clients")
    assert "12 KiB of 16 MiB" in page.text("#tiers")
    assert "of 32 MiB" in page.text("#tiers")
    tiers = page.run("return [...document.querySelectorAll('.tier > span')].map(s => s.innerText)")
    assert tiers == ["memory", "ssd"]
    charts = page.run("return [...document.querySelectorAll('#charts h2')].map(h => h.innerText)")
    assert len(charts) == 6
    eventually(lambda: "memory 75 %" in page.text("#charts"))  # of the hit rate
    lines = page.run("return document.querySelectorAll('#charts polygon, #charts polyline').length")
    assert lines >= 12
    page.run(
        "const chart = document.querySelectorAll('#charts svg')[1];"
        "const left = chart.getBoundingClientRect().left + chart.clientWidth - 10;"
        "chart.dispatchEvent(new PointerEvent('pointermove', { clientX: left }));"
    )
    assert re.search(r"Blocks · \d\d:\d\d:\d\d", page.text("#charts"))
    shown = page.run("return performance.getEntriesByType('resource').map(one => one.name)")
    assert shown
    assert all(name.startswith(daemon.http) for name in shown)
    assert page.log() == []


def test_page_opened_late_shows_the_past(page: Chromium, start: StartDaemon) -> None:
    daemon = start_with_page(start)
    page.open(f"{daemon.http}/")
    points = "return document.querySelector('#charts polyline')?.points.numberOfItems ?? 0"
    eventually(lambda: page.run(points) >= 3)
    page.open("about:blank")
    page.open(f"{daemon.http}/")
    eventually(lambda: page.text("header"))
    assert page.run(points) >= 3


def test_names_chosen_by_clients_are_shown_as_text(
    page: Chromium, start: StartDaemon, connect: Connect
) -> None:
    daemon = start_with_page(start)
    client = connect(daemon.endpoint, client=HOSTILE)
    client.put(blocks(1))
    page.open(f"{daemon.http}/")
    eventually(lambda: HOSTILE in page.text("#clients"))
    assert HOSTILE in page.text("#namespaces")
    assert page.run("return [window.hacked ?? null, document.images.length]") == [None, 0]


def test_policy_refuses_markup_and_other_hosts(page: Chromium, start: StartDaemon) -> None:
    daemon = start_with_page(start)
    page.open(f"{daemon.http}/")
    script = "try { document.body.innerHTML = '<b>' } catch (error) { return error.name }"
    assert page.run(script) == "TypeError"
    other = f"http://127.0.0.2:{free_port()}/"
    script = "return fetch(arguments[0]).then(() => 'sent', () => 'refused')"
    assert page.run(script, other) == "refused"
    refused = [entry["message"] for entry in page.log() if "Content Security" in entry["message"]]
    assert any(other in message for message in refused)


def test_page_is_readable_on_a_phone_and_in_the_dark(
    page: Chromium, start: StartDaemon, connect: Connect
) -> None:
    daemon = start_with_page(start)
    name = "an-organisation-with-a-long-name/and-a-model-with-a-longer-name-instruct-awq"
    connect(daemon.endpoint, client=name).put(blocks(1))
    page.screen(390, 844, is_mobile=True)
    page.open(f"{daemon.http}/")
    eventually(lambda: name in page.text("#clients"))
    assert page.run("return [document.documentElement.scrollWidth, innerWidth]") == [390, 390]

    luminance = (
        "const part = getComputedStyle(document.querySelector(arguments[0]))[arguments[1]];"
        "const [r, g, b] = part.match(/[0-9.]+/g).map(n => (n / 255) ** 2.2);"
        "return 0.2126 * r + 0.7152 * g + 0.0722 * b;"
    )
    for scheme, is_dark in (("light", False), ("dark", True)):
        page.color_scheme(scheme)
        back = page.run(luminance, ".card", "backgroundColor")
        assert (back < 0.1) == is_dark
        for text in ("h1", "small", ".legend", "#health", "#clients th"):
            front = page.run(luminance, text, "color")
            contrast = (max(front, back) + 0.05) / (min(front, back) + 0.05)
            assert contrast > 4.5, (scheme, text)


def test_token_is_asked_for_and_kept_out_of_the_address(
    page: Chromium, start: StartDaemon, folder: Path
) -> None:
    daemon = start_with_page(start, "--http-token", str(token_file(folder)))

    def enter(token: str) -> None:
        page.run(
            "document.querySelector('#token').value = arguments[0];"
            "document.querySelector('#login button').click();",
            token,
        )

    page.open(f"{daemon.http}/")
    eventually(lambda: "asks for its token" in page.text("#login"))
    assert page.text("main") == page.text("#refused") == page.text("#notice") == ""
    enter("short")
    assert "16 to 256 characters" in page.text("#refused")
    enter("0" * 32)
    eventually(lambda: "not the daemon's token" in page.text("#refused"))
    assert page.text("main") == ""
    enter(TOKEN)
    eventually(lambda: "healthy" in page.text("header"))
    assert page.text("#login") == ""
    page.open(f"{daemon.http}/")  # the tab remembers it
    eventually(lambda: "healthy" in page.text("header"))
    where = "return [location.href, document.cookie, localStorage.length].join()"
    assert page.run(where) == f"{daemon.http}/,,0"


def test_page_says_that_the_status_stays_on_the_host_of_the_daemon(
    page: Chromium, start: StartDaemon
) -> None:
    daemon = start("--memory", "16MiB", "--http", "0.0.0.0:0", "--http-open")
    page.open(f"http://{address_of_this_host()}:{daemon.http.rpartition(':')[2]}/")
    eventually(lambda: "for others it needs http_token" in page.text("#notice"))
    assert page.text("main") == ""


def test_answer_that_the_page_cannot_show_is_said_and_not_the_last(
    page: Chromium, start: StartDaemon
) -> None:
    """As after an upgrade of the daemon: a page that stood still would look healthy."""
    daemon = start_with_page(start)
    page.open(f"{daemon.http}/")
    eventually(lambda: "healthy" in page.text("header"))
    page.run("window.real = fetch; window.fetch = async () => new Response('{\"info\": {}}')")
    eventually(lambda: "reload it" in page.text("#notice"))
    page.run("window.fetch = window.real")
    eventually(lambda: page.text("#notice") == "")


def test_daemon_that_is_gone_is_said_to_be(
    page: Chromium, start: StartDaemon, connect: Connect
) -> None:
    daemon = start_with_page(start)
    connect(daemon.endpoint, client="first").put(blocks(1))
    page.open(f"{daemon.http}/")
    eventually(lambda: "first" in page.text("#clients"))
    daemon.kill()
    eventually(lambda: re.search(r"Not reachable since \d\d:\d\d:\d\d", page.text("#notice")))
    assert "first" in page.text("#clients")  # as it was
    assert "healthy" not in page.text("header")
    daemon.restart()
    eventually(lambda: page.text("#notice") == "")
    assert page.run("return state.first") == 0  # all samples of the new process
    connect(daemon.endpoint, client="second").put(blocks(1))
    eventually(lambda: "second" in page.text("#clients"))
    assert "first" not in page.text("#clients")
