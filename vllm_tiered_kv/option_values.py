"""How the values of options are written: sizes, choices, numbers, addresses.

The connector's options and the daemon's are read alike, and a wrong value is told in one sentence.
"""

from __future__ import annotations

import difflib
import enum
import re
from typing import TypeVar

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
_MOST_BYTES = 1 << 60  # more than any machine has; no sum of some of them overflows 64 bits


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
    if size > _MOST_BYTES:
        raise ConfigError(key, f"a size may be {_MOST_BYTES >> 40}TiB at most, got {value!r}")
    return size


def format_size(nbytes: int) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes >= _UNITS[unit.lower()] and nbytes % (_UNITS[unit.lower()] // 1024) == 0:
            scaled = nbytes / _UNITS[unit.lower()]
            return f"{scaled:g}{unit}"
    return f"{nbytes}B"


_E = TypeVar("_E", bound=enum.Enum)


def parse_choice(key: str, value: object, choices: type[_E]) -> _E:
    try:
        return choices(value)
    except ValueError:
        allowed = [str(choice.value) for choice in choices]
        close = difflib.get_close_matches(str(value).lower(), allowed, n=1)
        hint = f'; did you mean "{close[0]}"?' if close else ""
        listed = ", ".join(f'"{text}"' for text in allowed)
        raise ConfigError(key, f"{value!r} is not one of {listed}{hint}") from None


def parse_bool(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if isinstance(value, str) and text in ("1", "true", "yes", "on"):
        return True
    if isinstance(value, str) and text in ("0", "false", "no", "off"):
        return False
    raise ConfigError(key, f"expected true or false, got {value!r}")


def parse_int(key: str, value: object, low: int, high: int) -> int:
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


def parse_addresses(key: str, value: object) -> tuple[str, ...]:
    """Addresses of daemons: one, a list, or several in one string, separated by commas.

    `remote.address` says what each may look like.
    """
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(p, str) for p in parts):
        raise ConfigError(key, f'expected an address such as "tcp://host:9527", got {value!r}')
    return tuple(part.strip() for part in parts if part.strip())


def parse_text(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(key, f"expected a string, got {value!r}")
    return value
