"""Makes the picture of the status page in README.md, with a real daemon, traffic and Chromium.

python -m tools.status_picture

The traffic is made up: chats of two models ask for their history and add to it, and most prompts
are to recent chats. It needs chromium and chromium-driver.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import random
import tempfile
import time
from pathlib import Path

from tests.daemon.chromium import Chromium
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import KEY_BYTES, RawClient, attach

TARGET = Path(__file__).parents[1] / "docs" / "images" / "status-page.png"
BLOCK_BYTES = 128 << 10
CHATS = 200
MODELS = ("Qwen/Qwen3-32B", "meta-llama/Llama-3.1-8B-Instruct")
SCREEN = (1160, 836)


class Engine:
    """A client that behaves as an engine: looks up a chat, reads what is there, stores the rest."""

    def __init__(self, endpoint: str, model: str, arena: bytes = b"") -> None:
        self._client = RawClient(endpoint)
        namespace = hashlib.sha256(model.encode()).digest()
        self._client.hello((BLOCK_BYTES,), namespace, client=model, arena=arena)
        self._numbers = itertools.count(CHATS)
        self._chats = list(range(CHATS))  # those asked most come first
        self._lengths = [4] * CHATS  # in blocks
        self._content = random.Random(model).randbytes(BLOCK_BYTES)

    def answer_one(self, rng: random.Random) -> None:
        place = min(CHATS - 1, int(rng.expovariate(1 / 30)))
        if self._lengths[place] > 40 or rng.random() < 0.06:  # it has ended, and another begins
            self._chats[place], self._lengths[place] = next(self._numbers), 4
        self._lengths[place] += 2
        chat, length = self._chats[place], self._lengths[place]
        keys = [hashlib.sha256(f"{chat} {n}".encode()).digest()[:KEY_BYTES] for n in range(length)]
        found = self._client.match(keys[:-2]).count
        if found:
            self._client.get(keys[:found])
        self._client.put(dict.fromkeys(keys[found:], self._content))


def take(folder: Path, seconds: float, out: Path, scheme: str) -> None:
    """Runs the daemon and its traffic in this folder, and saves the picture."""
    ssd = ("--ssd", str(folder / "ssd"), "--ssd-space", "1GiB")
    with DaemonProcess(folder, "--memory", "256MiB", *ssd, "--http", "127.0.0.1:0") as daemon:
        attached = attach(daemon.ipc_path)
        engines = [
            Engine(daemon.endpoint, MODELS[0]),
            Engine(daemon.ipc, MODELS[1], attached.token),
        ]
        rng = random.Random(31)
        with Chromium(folder) as browser:
            browser.screen(*SCREEN)
            browser.color_scheme(scheme)
            browser.open(f"{daemon.http}/")
            begun = time.monotonic()
            while (passed := time.monotonic() - begun) < seconds:
                rng.choice(engines).answer_one(rng)
                time.sleep(0.03 * (1.2 + math.sin(passed / 20)))
            out.parent.mkdir(exist_ok=True)
            browser.screenshot(out, whole_page=False)
        attached.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="of traffic [300]")
    parser.add_argument("--out", type=Path, default=TARGET, help="PNG to write")
    parser.add_argument("--dark", action="store_true", help="in dark colours")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        take(Path(folder), given.seconds, given.out, "dark" if given.dark else "light")
    print(f"{given.out}: {given.out.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
