"""The commands for running daemons: `tiered-kv status`, `top`, `ls`, `rm` and `flush`."""

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
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.remote.address import ServerAddress
from vllm_tiered_kv.remote.inquiry import Inquiry, NoAnswerError

_STATUS = """\
Shows what daemons hold and have done since they started: how full their tiers are, hits, requests
and bytes, what waits to be written, errors, and the largest namespaces.
"""

_STATUS_EXAMPLES = """\
exit status:
  0  all answer     1  a daemon does not

examples:
  tiered-kv status tcp://127.0.0.1:9527
  tiered-kv status ipc:///run/kv/kv.sock --json | jq '.[].stats.errors'
      every fact and counter of the daemon
"""

_LS = """\
Lists the namespaces that daemons hold, the largest first: their bytes and blocks in memory and on
the SSD, and the model of the last engine that wrote to them, or the name of another client. A
namespace is everything that makes blocks of two engines incompatible; quotas and the engine's log
name it alike. A daemon tells its 100 largest.
"""

_LS_EXAMPLES = """\
exit status:
  0  all answer     1  a daemon does not

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

_RM = """\
Removes namespaces from daemons: all blocks that their memory and SSD hold of them, and the pins of
these blocks. NAME is the start of a namespace as `tiered-kv ls` shows it, or a model's name, which
may stand for several. It shows what it found and asks before it removes anything.

Engines may go on: to them the blocks are misses, and blocks that they are reading stay until they
are done. What they store meanwhile stays. A backing store keeps its blocks, since other daemons use
them too: a model whose blocks lie there is found again.
"""

_RM_EXAMPLES = """\
exit status:
  0  removed     1  not all of it, or nothing: no such namespace, no answer, refused, not confirmed

examples:
  tiered-kv rm Qwen/Qwen3-8B tcp://127.0.0.1:9527
  tiered-kv rm 3f9a21 tcp://cache1:9527 tcp://cache2:9527 --yes
      of all daemons of an engine, which spreads its blocks over them
  tiered-kv rm 3f9a21 ipc:///run/kv/kv.sock --yes --json | jq .removed_blocks
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
_SLOW_S = 600.0  # to wait for what writes to disks
_MIN_DIGITS = 4  # of a namespace's name, so that a typing error does not name one
_CLEAR = "\033[H\033[J"  # home, and erase what is below
_ALTERNATE, _NORMAL = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"


def add_daemon_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands, "status", _status, "show what daemons hold and do", _STATUS, _STATUS_EXAMPLES
    )
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")

    parser = _add(commands, "ls", _list, "list the namespaces of daemons", _LS, _LS_EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")

    parser = _add(
        commands,
        "rm",
        _remove,
        "remove namespaces from daemons",
        _RM,
        _RM_EXAMPLES,
        takes_name=True,
    )
    parser.set_defaults(timeout=_SLOW_S)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print one JSON object; needs --yes")

    parser = _add(commands, "top", _top, "watch a daemon", _TOP, _TOP_EXAMPLES, nargs=None)
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=arguments.seconds,
        default=2.0,
        help="between two looks (%(default)s)",
    )
    parser.add_argument("--count", metavar="N", type=arguments.positive, help="end after N looks")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each look")

    parser = _add(
        commands, "flush", _flush, "write what daemons hold to their disks", _FLUSH, _FLUSH_EXAMPLES
    )
    parser.set_defaults(timeout=_SLOW_S)
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    help: str,
    description: str,
    epilog: str,
    nargs: str | None = "+",
    takes_name: bool = False,
) -> argparse.ArgumentParser:
    parser = arguments.add_command(commands, name, run, help, description, epilog)
    if takes_name:
        parser.add_argument("name", metavar="NAME", help="start of a namespace, or a model's name")
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


def _status(given: argparse.Namespace) -> int:
    curve = arguments.curve_keys(given)
    looks = []
    failed = False
    for address in given.address:
        try:
            with Inquiry(address, given.timeout, curve) as daemon:
                info, stats = daemon.info(), daemon.stats()
        except NoAnswerError as error:
            print(f"tiered-kv: {error}", file=sys.stderr)
            failed = True
            continue
        looks.append({"address": str(address), "info": info, "stats": stats})
        if not given.json:
            print("\n".join(frame(str(address), info, {}, stats, None)), end="\n\n")
    if given.json:
        print(json.dumps(looks, indent=1))
    return 1 if failed else 0


def _list(given: argparse.Namespace) -> int:
    curve = arguments.curve_keys(given)
    found = []
    failed = False
    for address in given.address:
        try:
            with Inquiry(address, given.timeout, curve) as daemon:
                info = daemon.info()
        except NoAnswerError as error:
            print(f"tiered-kv: {error}", file=sys.stderr)
            failed = True
            continue
        found.append(_as_json(str(address), info))
        if not given.json:
            if len(given.address) > 1:
                print(f"{address}:")
            print("\n".join(namespace_lines(info)))
    if given.json:
        print(json.dumps(found, indent=1))
    return 1 if failed else 0


def _as_json(address: str, info: Mapping[str, Any]) -> dict[str, Any]:
    rows = info.get("by_namespace", {})
    namespaces = [{"namespace": name, **row} for name, row in rows.items()]
    return {"address": address, "namespaces": namespaces}


def _remove(given: argparse.Namespace) -> int:
    if given.json and not given.yes:
        raise ConfigError("--json", "give --yes too: it cannot ask and print JSON alone")
    curve = arguments.curve_keys(given)
    found: dict[ServerAddress, dict[str, Any]] = {}
    notes = []
    for address in given.address:
        with Inquiry(address, min(given.timeout, 5.0), curve) as daemon:
            info = daemon.info()
        found[address] = namespaces_named(given.name, info.get("by_namespace", {}))
        if Tier.BACKING.value in info.get("tiers", {}):
            notes.append(f"{address}: what its backing store holds of them stays there")
    if not any(found.values()):
        print(
            f"tiered-kv: no namespace is named {given.name!r}; `tiered-kv ls` lists them",
            file=sys.stderr,
        )
        return 1
    if not given.json:
        for address, rows in found.items():
            print("\n".join((f"{address}:", *namespace_lines({"by_namespace": rows}))))
        print(*(f"{note}\n" for note in notes), sep="", end="")
    if not (given.yes or _is_confirmed()):
        print("tiered-kv: nothing was removed", file=sys.stderr)
        return 1
    removed, errors = 0, []
    for address, rows in found.items():
        try:
            with Inquiry(address, given.timeout, curve) as daemon:
                for name in rows:
                    blocks = daemon.delete_namespace(bytes.fromhex(name))
                    removed += blocks
                    if not given.json:
                        print(f"{address}: {name}, {blocks:,} blocks removed", flush=True)
        except NoAnswerError as error:
            errors.append(str(error))
    names = sorted({name for rows in found.values() for name in rows})
    if given.json:
        facts = {"removed_blocks": removed, "namespaces": names, "notes": notes, "errors": errors}
        print(json.dumps(facts, indent=1))
    else:
        print(f"{removed:,} blocks of {len(names)} namespaces are removed")
        for line in errors:
            print(f"tiered-kv: {line}", file=sys.stderr)
    return 1 if errors else 0


def namespaces_named(name: str, rows: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a model with this name, or else the one whose name begins like this."""
    of_model = {key: row for key, row in rows.items() if row.get("model") == name}
    if of_model or len(name) < _MIN_DIGITS:
        return of_model
    started = {key: row for key, row in rows.items() if key.startswith(name.lower())}
    if len(started) > 1:
        names = ", ".join(started)
        raise ConfigError("NAME", f"{name!r} begins {len(started)} namespaces; choose one: {names}")
    return started


def _is_confirmed() -> bool:
    try:
        return input("Remove them? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print(file=sys.stderr)
        return False


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
    results = []
    for address in given.address:
        error = ""
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
            except NoAnswerError as failure:
                error = str(failure)
                print(f"tiered-kv: {error}", file=sys.stderr)
            seconds = round(time.monotonic() - began, 1)
        results.append({"address": str(address), "seconds": seconds, "error": error})
        if not (error or given.json):
            print(f"{address}: everything is written ({seconds} s)")
    if given.json:
        print(json.dumps(results, indent=1))
    return 1 if any(result["error"] for result in results) else 0


def _print_pending(address: str, daemon: Inquiry) -> None:
    try:
        pending = daemon.stats().get("pending_write_blocks", {})
    except NoAnswerError:
        return
    left = ", ".join(f"{blocks} blocks to {tier}" for tier, blocks in pending.items() if blocks)
    print(f"{address}: {left or 'waiting for a sync'}", file=sys.stderr, flush=True)
