"""What the commands of `tiered-kv` share: the look of help and tables, and types of arguments."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_tiered_kv.api.openai_server import OpenAIServer
from vllm_tiered_kv.errors import ConfigError, ReplayError
from vllm_tiered_kv.options import parse_size
from vllm_tiered_kv.remote.address import ServerAddress
from vllm_tiered_kv.remote.curve import CurveKeys

_MAX_SECONDS = 7 * 86400


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks of descriptions; every command of `tiered-kv` uses it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    help: str,
    description: str,
    epilog: str,
) -> argparse.ArgumentParser:
    """`run` returns the exit status."""
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=epilog,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def size(text: str) -> int:
    try:
        return parse_size("size", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from None


def not_negative(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return number


def seconds(text: str) -> float:
    number = not_negative(text)
    if not 0 < number <= _MAX_SECONDS:
        raise argparse.ArgumentTypeError(
            f"expected more than 0 and at most {_MAX_SECONDS} seconds, got {text!r}"
        )
    return number


def daemon_address(text: str) -> ServerAddress:
    try:
        return ServerAddress.parse(text, "address")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from None


def add_keys(parser: argparse.ArgumentParser) -> None:
    """The options of a client of a daemon that requires keys, named as those of the engine."""
    parser.add_argument("--remote-key", metavar="FILE", help="secret key file of this client")
    parser.add_argument("--remote-server-key", metavar="FILE", help="public key file of the daemon")


def curve_keys(given: argparse.Namespace) -> CurveKeys | None:
    """Raises ConfigError if a file cannot be used, or one of the two is missing."""
    if bool(given.remote_key) != bool(given.remote_server_key):
        raise ConfigError("--remote-key", "give both --remote-key and --remote-server-key")
    if not given.remote_key:
        return None
    return CurveKeys.load(given.remote_key, given.remote_server_key)


def add_server(parser: argparse.ArgumentParser, timeout_of: str = "per request") -> None:
    """The options of a command that asks an OpenAI-compatible server."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (%(default)s)")
    parser.add_argument("--model", metavar="NAME", help="needed if the server serves several")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=seconds,
        default=600.0,
        help=f"{timeout_of} (%(default)s)",
    )
    parser.add_argument("--api-key-file", metavar="FILE", type=Path, help="sent as bearer token")


def open_server(given: argparse.Namespace, url: str | None = None) -> OpenAIServer:
    """The server of these options; `url`: another one with the same key."""
    return OpenAIServer(
        given.url if url is None else url, given.timeout, _read_key(given.api_key_file)
    )


def _read_key(path: Path | None) -> str | None:
    """The API key of a file, for a server that wants one."""
    if path is None:
        return None
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error if isinstance(error, OSError) else f"{path} is not plain text"
        raise ReplayError(f"the API key cannot be read: {why}") from None
    if not key.isprintable() or not key:  # http.client would show the key in its error message
        raise ReplayError(f"{path} must contain one line with an API key and nothing else")
    return key


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table: the first and the last column to the left, numbers to the right."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if n in (0, len(row) - 1) else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
