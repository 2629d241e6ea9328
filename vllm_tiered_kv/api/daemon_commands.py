"""The commands that ask running daemons: `tiered-kv ls`, `tiered-kv top` and `tiered-kv flush`."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm_tiered_kv.api import arguments
from vllm_tiered_kv.api.daemon_view import frame, namespace_lines
from vllm_tiered_kv.remote.inquiry import Inquiry, NoAnswerError

_LS = """\
Lists the namespaces that daemons hold, the largest first: their bytes and blocks in memory and on
the SSD, and the name of the last client that wrote to them (an engine announces its model). A
namespace is everything that makes blocks of two engines incompatible; quotas and the engine's log
name it alike. A daemon tells its 100 largest.
"""

_LS_EXAMPLES = """\
examples:
  tiered-kv ls tcp://127.0.0.1:9527
  tiered-kv ls ipc:///run/kv/kv.sock --json | jq '.[].namespaces[] | select(.model | test("Qwen"))'
"""

_TOP = """\
Shows what a daemon does, and renews it until Ctrl-C: how full its tiers are, hits, requests and
bytes per second, what waits to be written, errors, and the largest namespaces.
"""

_TOP_EXAMPLES = """\
examples:
  tiered-kv top tcp://127.0.0.1:9527
  tiered-kv top tcp://127.0.0.1:9527 --interval 10 --count 1
      one look, over ten seconds, for a script or a log
"""

_FLUSH = """\
Waits until everything that daemons hold in memory is also in their slower tiers, as far as it finds
room there. Nothing is removed. Use it before a planned restart that must not wait long.
"""

_FLUSH_EXAMPLES = """\
exit status:
  0  everything is written     1  a daemon does not answer, or could not write everything

examples:
  tiered-kv flush tcp://127.0.0.1:9527 && systemctl restart tiered-kv
"""

_PROGRESS_S = 1.0
_CLEAR = "\033[H\033[J"  # home, and erase what is below
_ALTERNATE, _NORMAL = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"


def add_daemon_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "ls", _list, "list the namespaces of daemons", _LS, _LS_EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")

    parser = _add(commands, "top", _top, "watch a daemon", _TOP, _TOP_EXAMPLES, nargs=None)
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=arguments.seconds,
        default=2.0,
        help="between two looks (%(default)s)",
    )
    parser.add_argument(
        "--count", metavar="N", type=arguments.positive, help="end after so many looks"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for each look")

    parser = _add(
        commands, "flush", _flush, "write what daemons hold to their disks", _FLUSH, _FLUSH_EXAMPLES
    )
    parser.set_defaults(timeout=600.0)


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    help: str,
    description: str,
    epilog: str,
    nargs: str | None = "+",
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=epilog,
        formatter_class=arguments.HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "address",
        metavar="ADDRESS",
        type=arguments.daemon_address,
        nargs=nargs,
        help="of a daemon, such as tcp://127.0.0.1:9527 or ipc:///run/kv/kv.sock",
    )
    arguments.add_keys(parser)
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=arguments.seconds,
        default=5.0,
        help="how long to wait for an answer (%(default)s)",
    )
    return parser


def _list(given: argparse.Namespace) -> int:
    curve = arguments.curve_keys(given)
    found = []
    for address in given.address:
        with Inquiry(address, given.timeout, curve) as daemon:
            found.append((str(address), daemon.info()))
    if given.json:
        print(json.dumps([_as_json(address, info) for address, info in found], indent=1))
        return 0
    for address, info in found:
        if len(found) > 1:
            print(f"{address}:")
        print("\n".join(namespace_lines(info)))
    return 0


def _as_json(address: str, info: Mapping[str, Any]) -> dict[str, Any]:
    rows = info.get("by_namespace", {})
    namespaces = [
        {"namespace": name, "model": row.get("client", ""), **_without_client(row)}
        for name, row in rows.items()
    ]
    return {"address": address, "namespaces": namespaces}


def _without_client(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "client"}


def _top(given: argparse.Namespace) -> int:
    live = sys.stdout.isatty() and not given.json
    with Inquiry(given.address, given.timeout, arguments.curve_keys(given)) as daemon:
        if live:
            print(_ALTERNATE, end="")
        try:
            for before, after, passed_s, info in _looks(daemon, given.interval, given.count):
                if given.json:
                    line = {"seconds": round(passed_s, 3), "info": info, "stats": after}
                    print(json.dumps(line), flush=True)
                    continue
                text = "\n".join(frame(str(given.address), info, before, after, passed_s))
                print(f"{_CLEAR}{text}" if live else f"{text}\n", flush=True)
        except KeyboardInterrupt:
            pass  # how one ends it
        finally:
            if live:
                print(_NORMAL, end="", flush=True)
    return 0


def _looks(
    daemon: Inquiry, interval_s: float, count: int | None
) -> Iterator[tuple[dict[str, Any], dict[str, Any], float, dict[str, Any]]]:
    """Statistics before and after an interval, its length, and facts. A daemon that does not answer
    is an error at first and is waited for later: it may be restarting."""
    before, began = daemon.stats(), time.monotonic()
    done = 0
    while count is None or done < count:
        time.sleep(interval_s)
        try:
            after, info = daemon.stats(), daemon.info()
        except NoAnswerError as error:
            if count is not None:
                raise
            print(f"tiered-kv: {error}; asking again", file=sys.stderr, flush=True)
            continue
        now = time.monotonic()
        yield before, after, now - began, info
        before, began = after, now
        done += 1


def _flush(given: argparse.Namespace) -> int:
    curve = arguments.curve_keys(given)
    failed = False
    for address in given.address:
        with (
            Inquiry(address, given.timeout, curve) as daemon,
            Inquiry(address, min(given.timeout, 5.0), curve) as watched,
            concurrent.futures.ThreadPoolExecutor(1) as thread,
        ):
            flushed = thread.submit(daemon.flush)
            began = time.monotonic()
            try:
                while not concurrent.futures.wait([flushed], _PROGRESS_S).done:
                    _print_pending(str(address), watched)
                flushed.result()
            except KeyboardInterrupt:
                daemon.interrupt()
                raise
            except NoAnswerError as error:
                print(f"tiered-kv: {error}", file=sys.stderr)
                failed = True
            else:
                print(f"{address}: everything is written ({time.monotonic() - began:.1f} s)")
    return 1 if failed else 0


def _print_pending(address: str, daemon: Inquiry) -> None:
    try:
        pending = daemon.stats().get("pending_write_blocks", {})
    except NoAnswerError:
        return
    left = ", ".join(f"{blocks} blocks to {tier}" for tier, blocks in pending.items() if blocks)
    print(f"{address}: {left or 'waiting for a sync'}", file=sys.stderr, flush=True)
