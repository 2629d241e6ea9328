"""Chromium without a screen, driven through chromedriver by the W3C WebDriver protocol.

Both are Debian packages, and chromedriver finds the browser. The protocol is JSON over HTTP, so no
client library is needed.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.patience import eventually

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_TIMEOUT_S = 60.0
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb"),
)


def require_chromium() -> None:
    """Skips the test where there is no Chromium; with REQUIRE_CHROMIUM=1 it fails instead."""
    import pytest

    if shutil.which("chromedriver") and any(map(shutil.which, _BROWSERS)):
        return
    reason = "needs a browser; run apt-get install chromium chromium-driver"
    if os.environ.get("REQUIRE_CHROMIUM") == "1":
        pytest.fail(f"REQUIRE_CHROMIUM=1, but this {reason}")
    pytest.skip(reason)


class WebDriverError(Exception):
    pass


class Chromium:
    """One browser with one tab and an empty profile in `folder`."""

    def __init__(self, folder: Path) -> None:
        log = (folder / "chromedriver.log").open("wb")
        with log:
            self._driver = subprocess.Popen(
                ["chromedriver", "--port=0"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # with the browser, so that both can be ended
            )
        try:
            self._url = f"http://127.0.0.1:{self._port(folder / 'chromedriver.log')}/session"
            options = {"args": [*_FLAGS, f"--user-data-dir={folder / 'profile'}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = self._ask("POST", "", {"capabilities": {"alwaysMatch": wanted}})
            self._url += f"/{session['sessionId']}"
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._end()

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of a function's body."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """What a person sees of an element; empty if it is hidden."""
        found = self.run("return document.querySelector(arguments[0]).innerText", selector)
        shown = self.run("return document.querySelector(arguments[0]).checkVisibility()", selector)
        return str(found) if shown else ""

    def log(self) -> list[dict[str, str]]:
        """What the console has shown since the last call: `source` and `message`."""
        entries: list[dict[str, str]] = self._ask("POST", "/se/log", {"type": "browser"})
        return entries

    def screen(self, width: int, height: int, scale: float = 1.0, is_mobile: bool = False) -> None:
        self._devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=is_mobile,
        )

    def color_scheme(self, name: str) -> None:
        """`light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self._devtools("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path, whole_page: bool = True) -> None:
        shot = self._devtools(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole_page
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def _devtools(self, command: str, **parameters: Any) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _port(self, log: Path) -> str:
        def found() -> re.Match[str] | None:
            assert self._driver.poll() is None, log.read_text()
            return re.search(r"started successfully on port (\d+)", log.read_text())

        match = eventually(found)
        assert match is not None
        return match[1]

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise WebDriverError(json.load(error)["value"]["message"]) from None

    def _end(self) -> None:
        os.killpg(self._driver.pid, signal.SIGKILL)
        self._driver.wait()
