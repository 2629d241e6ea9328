"""Stands in for a model server in tests of `tiered-kv up`: `/health`, a log, and faults on demand.

What it does wrong is the name of its model. It tells what it sees, so that tests know the order.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from types import FrameType


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--host", "--kv-transfer-config"):
        parser.add_argument(flag)
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    print("started with", json.loads(given.kv_transfer_config)["kv_connector"])
    daemon = os.environ.get("DAEMON_HEALTH")

    def daemon_lives() -> bool:
        assert daemon is not None
        with urllib.request.urlopen(daemon, timeout=10) as answer:
            return bool(answer.status == 200)

    if daemon is not None:
        print("daemon at start:", daemon_lives())

    def stop(number: int, frame: FrameType | None) -> None:
        if daemon is not None:
            print("daemon at stop:", daemon_lives())
        print("stopped by", signal.Signals(number).name)
        os._exit(0)

    deaf = given.model == "deaf"
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else stop)
    if deaf:  # and its child too
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("child", child.pid)
    if given.model == "failing":
        print("no weights here", file=sys.stderr)
        sys.exit(3)
    asked = 0

    def talk() -> None:
        while True:
            print("." * 1000)

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal asked
            asked += 1
            ready = given.model != "never" and asked > 2
            if asked == 3:
                print("loading\rloaded")
            self.send_response(200 if ready else 503)
            self.end_headers()
            if given.model == "dying" and ready:
                threading.Timer(0.3, lambda: os._exit(7)).start()
            if given.model == "unusual" and ready:
                threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGRTMIN + 1)).start()
            if given.model == "talking" and ready:
                threading.Thread(target=talk, daemon=True).start()

        def log_message(self, *args: object) -> None:
            pass

    http.server.ThreadingHTTPServer((given.host, given.port), Page).serve_forever()


if __name__ == "__main__":
    main()
