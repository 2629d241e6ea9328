"""Options of the engine and of the daemon: how each kind is written, checked, shown and documented.

An options class is a frozen dataclass whose fields are made by the functions below (`size`,
`choice`, `integer`, …). `parse_options` turns raw values into its fields; a bad value raises a
ConfigError that names the source of the value and says what is valid.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_tiered_kv.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "m": 1000**2,
    "mb": 1000**2,
    "g": 1000**3,
    "gb": 1000**3,
    "t": 1000**4,
    "tb": 1000**4,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_MAX_BYTES = 1 << 60  # more than any machine has; no sum of some of them overflows 64 bits


def parse_size(key: str, value: object) -> int:
    """Bytes of 1073741824, "20GiB", "1.5 TB" or "512MiB"."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(key, f'expected a size such as "20GiB", got {value!r}')
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        unit = _UNITS.get(match.group(2).lower()) if match else None
        if match is None or unit is None:
            raise ConfigError(key, f'{value!r} is not a size; write it like "20GiB" or "500MB"')
        size = int(float(match.group(1)) * unit)
    if size <= 0:
        raise ConfigError(key, f"a size must be positive, got {value!r}")
    if size > _MAX_BYTES:
        raise ConfigError(key, f"a size may be {_MAX_BYTES >> 40}TiB at most, got {value!r}")
    return size


def format_size(nbytes: int) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes >= _UNITS[unit.lower()] and nbytes % (_UNITS[unit.lower()] // 1024) == 0:
            scaled = nbytes / _UNITS[unit.lower()]
            return f"{scaled:g}{unit}"
    return f"{nbytes}B"


_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_MAX_SECONDS = 3650 * 86400  # ten times as long can still be waited for


@dataclass(frozen=True)
class Kind:
    """How the values of an option are parsed, shown, named in `--help` and described in docs."""

    parse: Callable[[str, Any], Any]
    show: Callable[[Any], str]
    metavar: str
    description: str
    is_list: bool = False  # its flag may be repeated


def _option(default: Any, kind: Kind, help: str) -> Any:
    metadata = {"kind": kind, "help": help}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def size(default: int, help: str, zero: bool = False) -> Any:
    """Bytes. With `zero` 0 is a value of its own, which `help` explains."""

    def parse(source: str, value: Any) -> int:
        return 0 if zero and value in (0, "0") and value is not False else parse_size(source, value)

    def show(value: int) -> str:
        return format_size(value) if value else "0"

    return _option(default, Kind(parse, show, "SIZE", "size, like `20GiB`"), help)


def choice(default: enum.Enum, help: str) -> Any:
    choices = [str(one.value) for one in type(default)]
    description = " \\| ".join(f"`{one}`" for one in choices)
    return _option(
        default,
        Kind(
            lambda source, value: _parse_choice(source, value, type(default)),
            lambda value: str(value.value),
            "|".join(choices),
            description,
        ),
        help,
    )


def boolean(default: bool, help: str) -> Any:
    return _option(
        default, Kind(_parse_bool, lambda value: str(value).lower(), "true|false", "boolean"), help
    )


def integer(default: int, help: str, low: int, high: int) -> Any:
    return _option(
        default,
        Kind(
            lambda source, value: _parse_int(source, value, low, high),
            str,
            "N",
            f"integer {low} … {high}",
        ),
        help,
    )


def seconds(default: float, help: str, low: float, high: float) -> Any:
    return _option(
        default,
        Kind(
            lambda source, value: parse_number(source, value, low, high, " seconds"),
            str,
            "SECONDS",
            f"seconds {low} … {high}",
        ),
        help,
    )


def share(default: float, help: str) -> Any:
    return _option(
        default,
        Kind(lambda source, value: parse_number(source, value, 0, 1), str, "SHARE", "number 0 … 1"),
        help,
    )


def duration(default: int, help: str, low: int = 0) -> Any:
    """Whole seconds, also written as "30s", "12h" or "7d"."""
    return _option(
        default,
        Kind(
            lambda source, value: parse_duration(source, value, low),
            lambda value: f"{value}s" if value else "0",
            "TIME",
            "duration, like `30s`, `12h` or `7d`",
        ),
        help,
    )


def text(default: str, help: str) -> Any:
    return _option(default, Kind(_parse_text, str, "TEXT", "text"), help)


def switchable_text(default: str, help: str) -> Any:
    """Text for which YAML's bare `off` may stand, which is a boolean there."""
    return _option(
        default,
        Kind(
            lambda source, value: "off" if value is False else _parse_text(source, value),
            str,
            "TEXT",
            "text",
        ),
        help,
    )


def path(default: str, help: str) -> Any:
    return _option(
        default,
        Kind(
            lambda source, value: os.path.expanduser(_parse_text(source, value)),  # as shells do
            str,
            "PATH",
            "path",
        ),
        help,
    )


def addresses(default: tuple[str, ...], help: str) -> Any:
    """Addresses of servers: one, a list, or several in one string, separated by commas."""

    def show(value: tuple[str, ...]) -> str:
        return " ".join(map(redacted, value))

    return _option(default, Kind(_parse_addresses, show, "ADDRESS", "address or list"), help)


def texts(default: list[str], help: str, metavar: str) -> Any:
    return _option(
        default,
        Kind(_parse_texts, ", ".join, metavar, "list; the flag may be repeated", is_list=True),
        help,
    )


def quotas(default: dict[str, int], help: str) -> Any:
    """Hex prefix of a namespace -> bytes; the empty prefix stands for all others."""
    return _option(
        default,
        Kind(
            _parse_quotas,
            lambda value: str(value) if value else "",
            "[PREFIX=]SIZE",
            "size, or map of prefix to size; the flag may be repeated",
            is_list=True,
        ),
        help,
    )


def mapping(default: dict[str, Any] | None, help: str) -> Any:
    """Options of another program, which checks them: names and values."""
    return _option(default, Kind(_parse_mapping, lambda value: "", "MAP", "map"), help)


def mappings(help: str) -> Any:
    return _option([], Kind(_parse_mappings, lambda value: "", "LIST", "list of maps"), help)


def words(default: list[str], help: str) -> Any:
    """A command, as a list or as a shell would split it."""
    return _option(default, Kind(_parse_words, shlex.join, "COMMAND", "words, or a list"), help)


def parse_options(cls: type[Any], raw: Iterable[tuple[str, str, Any]]) -> dict[str, Any]:
    """Values of the fields of `cls` from (option, source, raw value); the last one wins."""
    options = {option.name: option for option in dataclasses.fields(cls)}
    found: dict[str, tuple[str, Any]] = {}
    for name, source, value in raw:
        if name not in options:
            close = difflib.get_close_matches(name.lower(), options, n=1, cutoff=0.4)
            known = f"known options: {', '.join(options)}"
            hint = f'did you mean "{close[0]}"?' if close else known
            raise ConfigError(source, f"unknown option; {hint}")
        found[name] = source, value
    return {
        name: options[name].metadata["kind"].parse(source, value)
        for name, (source, value) in found.items()
    }


def default_of(option: dataclasses.Field[Any]) -> Any:
    if option.default is not dataclasses.MISSING:
        return option.default
    assert option.default_factory is not dataclasses.MISSING
    return option.default_factory()


def show_default(option: dataclasses.Field[Any]) -> str:
    """The default as it is shown in help and docs; empty if there is none."""
    return str(option.metadata["kind"].show(default_of(option)))


def _parse_choice(key: str, value: object, choices: type[enum.Enum]) -> enum.Enum:
    try:
        return choices(value)
    except ValueError:
        allowed = [str(choice.value) for choice in choices]
        close = difflib.get_close_matches(str(value).lower(), allowed, n=1)
        hint = f'; did you mean "{close[0]}"?' if close else ""
        listed = ", ".join(f'"{text}"' for text in allowed)
        raise ConfigError(key, f"{value!r} is not one of {listed}{hint}") from None


def _parse_bool(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if isinstance(value, str) and text in ("1", "true", "yes", "on"):
        return True
    if isinstance(value, str) and text in ("0", "false", "no", "off"):
        return False
    raise ConfigError(key, f"expected true or false, got {value!r}")


def _parse_int(key: str, value: object, low: int, high: int) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,30}\s*", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(key, f"expected a whole number, got {value!r}")
    if not low <= value <= high:
        raise ConfigError(key, f"expected a number from {low} to {high}, got {value}")
    return value


def parse_number(key: str, value: object, low: float, high: float, unit: str = "") -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        raise ConfigError(key, f"expected a number{unit and f' of{unit}'}, got {value!r}") from None
    if not low <= number <= high:
        raise ConfigError(key, f"expected {low:g} to {high:g}{unit}, got {value!r}")
    return number


def _parse_addresses(key: str, value: object) -> tuple[str, ...]:
    """`remote.address` says what each may look like."""
    parts = re.split(r",(?=\s*(?:[a-z]+://|$))", value) if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(p, str) for p in parts):
        raise ConfigError(key, f'expected an address such as "tcp://host:9527", got {value!r}')
    return tuple(stripped for part in parts if (stripped := part.strip(", \t\n")))


def redacted(url: str) -> str:
    """The URL without its password, for logs and errors. Rather hides too much, as a password may
    have characters that should have been encoded."""
    return re.sub(r"(?<=://)([^/?#@:]*):.*@", r"\1:***@", url)


def _parse_text(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(key, f"expected text, got {value!r}")
    return value


def _parse_texts(key: str, value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [_parse_text(key, one) for one in values]


def _parse_mapping(key: str, value: object) -> dict[str, Any]:
    if value is None:  # YAML, where nothing follows the colon
        return {}
    if not isinstance(value, dict):
        raise ConfigError(key, f"expected a map of names to values, got {value!r}")
    for name in value:
        if not isinstance(name, str):  # YAML reads 012345 as 5349, and `on` as true
            raise ConfigError(key, f"{name!r} is not a name to YAML; write it in quotes")
    return dict(value)


def _parse_mappings(key: str, value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ConfigError(key, f'expected a list, each entry after a "- ", got {value!r}')
    return [_parse_mapping(f"{key}[{place}]", one) for place, one in enumerate(value)]


def _parse_words(key: str, value: Any) -> list[str]:
    try:
        words = shlex.split(value) if isinstance(value, str) else _parse_texts(key, value)
    except ValueError as error:  # a quote that is not closed
        raise ConfigError(key, f"{error} in {value!r}") from None
    return words


def parse_duration(key: str, value: Any, low: int) -> int:
    """Seconds of 30, "30s", "12h" or "7d"."""
    match = re.fullmatch(r"\s*([0-9]{1,30})\s*([a-z]*)\s*", str(value))
    unit = _SECONDS.get(match.group(2)) if match else None
    if match is None or unit is None:
        raise ConfigError(key, f'{value!r} is not a duration; write it like "30s", "12h" or "7d"')
    seconds = int(match.group(1)) * unit
    if seconds < low:
        raise ConfigError(key, f"must be at least {low} s, got {value!r}")
    if seconds > _MAX_SECONDS:
        raise ConfigError(key, f"must be at most {_MAX_SECONDS // 86400}d, got {value!r}")
    return seconds


def _parse_quotas(key: str, value: Any) -> dict[str, int]:
    """From "4GiB", "ab12=4GiB", a list of these, or a map with "default" for everyone else."""
    entries: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):  # YAML reads 012345 as 5349
                raise ConfigError(key, f"{name!r} is a number to YAML; write prefixes in quotes")
        entries = [("" if name == "default" else name, size) for name, size in value.items()]
    else:
        for one in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            prefix, separator, size = str(one).rpartition("=")
            entries.append((prefix, size if separator else one))
    quotas: dict[str, int] = {}
    for prefix, size in entries:
        if not re.fullmatch(r"[0-9a-fA-F]*", prefix):
            raise ConfigError(key, f"{prefix!r} is not the start of a namespace in hex")
        quotas[prefix.lower()] = parse_size(key, size)
    return quotas


def read_yaml(path: str | Path, source: str = "--config") -> Mapping[str, Any]:
    """The content of a file that maps options to values; ConfigError for `source` otherwise."""
    import yaml  # slow to import, and rarely needed

    try:
        text = Path(path).read_text()
        content = yaml.safe_load(text)
        tree = yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(source, f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}," if mark else ""
        what = getattr(error, "problem", None) or error
        raise ConfigError(source, f"{path}{where} is not YAML: {what}") from error
    for name in _repeated_keys(tree):  # YAML would silently use the last one
        raise ConfigError(name, f"is given more than once in {path}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(source, f"{path} must map options to values")
    return content


def _repeated_keys(tree: Any) -> Iterator[str]:
    """Keys given twice in one map, of a composed YAML document."""
    waiting, seen = [tree], set()
    while waiting:
        node = waiting.pop()
        content = getattr(node, "value", None)
        if not isinstance(content, list) or id(node) in seen:  # an alias may lead back
            continue
        seen.add(id(node))
        entries = [entry for entry in content if isinstance(entry, tuple)]
        names = [key.value for key, _ in entries if isinstance(key.value, str)]
        yield from (name for place, name in enumerate(names) if name in names[:place])
        waiting += [value for _, value in entries]
        waiting += [entry for entry in content if not isinstance(entry, tuple)]
