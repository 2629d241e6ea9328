"""`tiered-kv-server`: runs the daemon, or creates keys. `tiered-kv` looks at a running one."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from vllm_tiered_kv import __version__
from vllm_tiered_kv.errors import (
    ConfigError,
    StoreFormatError,
    StoreLockedError,
    TieredKVError,
)
from vllm_tiered_kv.options import read_yaml, redacted
from vllm_tiered_kv.server.net.descriptors import raise_limit
from vllm_tiered_kv.server.options import ServerOptions, add_flags

logger = logging.getLogger("tiered-kv-server")

EXIT_FAILED = 1
EXIT_USAGE = 2  # restarting does not help

_GC_THRESHOLD = 50_000  # more objects than the messages of one loop turn create

_DESCRIPTION = """\
A cache for KV blocks that any number of vLLM engines share: memory first, then SSD, then a folder
on a shared file system."""

_EXAMPLES = """\
examples:
  tiered-kv-server --memory 20GiB
      memory only, for engines on this host
  tiered-kv-server --memory 20GiB --ssd /mnt/nvme/kv --ssd-space 500GiB
      survives restarts; SSD hits are read into memory
  tiered-kv-server --listen ipc:///run/kv.sock --listen tcp://127.0.0.1:9527
      processes of this user may share the memory instead of copying it
  tiered-kv-server keygen /etc/tiered-kv server
  tiered-kv-server keygen /etc/tiered-kv/clients engine1
  tiered-kv-server --listen tcp://0.0.0.0:9527 --secret-key /etc/tiered-kv/server.key_secret \\
      --clients /etc/tiered-kv/clients
      for other hosts: encrypted, and for known clients only
  tiered-kv-server --config server.yaml --memory 40GiB
      options from a file (memory: 20GiB, listen: [...]); flags win

see also:
  tiered-kv-server keygen --help          creates a key pair
  tiered-kv --help                        looks at daemons that run (status, top, ls), changes what
                                          they hold (rm, flush), checks an SSD folder (verify)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    command = _COMMANDS.get(arguments[0]) if arguments else None
    try:
        return _run(arguments) if command is None else command(arguments[1:])
    except (ConfigError, StoreFormatError, StoreLockedError) as error:
        print(f"tiered-kv-server: {error}", file=sys.stderr)
        return EXIT_USAGE
    except TieredKVError as error:
        print(f"tiered-kv-server: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"tiered-kv-server: {where}{error.strerror or error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tiered-kv-server",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tiered-kv-server {__version__}")
    parser.add_argument("--config", metavar="FILE", help="YAML file with options; flags win")
    parser.add_argument(
        "--check", action="store_true", help="print all options as JSON if they are valid, and end"
    )
    add_flags(parser)
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag_names = [option for option in parser._option_string_actions if option.startswith("--")]
        known = {name: name for name in (*flag_names, *_COMMANDS)}
        known |= {name: f"tiered-kv {name}" for name in _COMMANDS_ELSEWHERE}
        close = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
        hint = f"did you mean {known[close[0]]}?" if close else "--help lists the options"
        raise ConfigError(unknown[0], f"unknown argument; {hint}")
    flags = vars(given)
    file = flags.pop("config")
    only_check = flags.pop("check")
    options = ServerOptions.load(read_yaml(file) if file else None, flags)
    if only_check:
        _check_addresses(options)
        facts = dataclasses.asdict(options) | {"backing": redacted(options.backing)}
        print(json.dumps(facts, indent=1))
        return 0
    logging.basicConfig(
        level=options.log_level.value.upper(),
        format="%(asctime)s %(levelname).1s %(message)s",
        stream=sys.stderr,
    )
    return serve(options)


def _check_addresses(options: ServerOptions) -> None:
    """The rest of what the daemon itself checks before it opens anything."""
    from vllm_tiered_kv.server.net.endpoints import check_endpoint  # zmq loads slowly
    from vllm_tiered_kv.server.net.http import parse_address

    for endpoint in options.listen:
        check_endpoint(endpoint, bool(options.secret_key))
    if options.http != "off":
        parse_address(options.http, bool(options.http_token) or options.http_open)


def serve(options: ServerOptions) -> int:
    from vllm_tiered_kv.server.daemon import Daemon  # keeps --help fast: numpy loads slowly

    started = time.monotonic()
    raise_limit()
    daemon = Daemon.open(options)
    _stop_on_signals(daemon.stop)
    for line in daemon.tier_lines:
        logger.info(line)
    if daemon.http_address is not None:
        address = daemon.http_address
        logger.info("status page on http://%s/, metrics on http://%s/metrics", address, address)
    for endpoint in daemon.endpoints:
        logger.info("listening on %s", endpoint)
    logger.info("ready after %.1f s", time.monotonic() - started)
    _collect_garbage_rarely()
    daemon.run()
    if daemon.all_written:
        what = "everything that found room" if daemon.unwritten else "everything"
        logger.info("stopped; %s is written", what)
        status = 0
    else:
        logger.error("stopped; not everything could be written, and the unwritten blocks are lost")
        status = EXIT_FAILED
    if daemon.has_hung_threads:  # a normal exit of Python would wait for them
        logging.shutdown()
        os._exit(status)
    return status


def _collect_garbage_rarely() -> None:
    """Objects of requests are freed by reference counting. Frequent garbage collection would cost
    5 % of the loop's time and find nothing."""
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


def _stop_on_signals(stop: Callable[[], None]) -> None:
    seen = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            with contextlib.suppress(OSError):
                os.write(2, b"tiered-kv-server: stopped at once; unwritten blocks are lost\n")
            os._exit(EXIT_FAILED)
        seen = True
        stop()

    def hang_up(number: int, frame: FrameType | None) -> None:
        """Unlike a second SIGTERM, repeated SIGHUPs do not stop the daemon at once: closing one
        terminal may send several."""
        stop()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, hang_up)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)


def _keygen(arguments: Sequence[str]) -> int:
    from vllm_tiered_kv.server.net.curve import write_key_pair

    parser = argparse.ArgumentParser(
        prog="tiered-kv-server keygen", description="Creates a CURVE key pair."
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument(
        "name", metavar="NAME", help="name of the daemon or client that owns the keys"
    )
    parser.add_argument("--read-only", action="store_true", help="this client may only read")
    given = parser.parse_args(arguments)
    if Path(given.name).name != given.name or not given.name or given.name.startswith("."):
        raise ConfigError("keygen", f"{given.name!r} cannot be part of a file name")
    public, secret = write_key_pair(given.folder, given.name, given.read_only)
    print(
        f"{secret}  secret: only for {given.name}\n"
        f"{public}  public: for its peers\n\n"
        f"For a daemon:  --secret-key {secret}; its clients need {public.name}.\n"
        f"For a client:  put {public.name} into the daemon's --clients folder; the client needs "
        f"{secret.name}."
    )
    return 0


_COMMANDS = {"keygen": _keygen}
_COMMANDS_ELSEWHERE = ("status", "top", "ls", "rm", "flush", "verify", "doctor")
"""Those of `tiered-kv` that are about daemons."""


if __name__ == "__main__":
    sys.exit(main())
