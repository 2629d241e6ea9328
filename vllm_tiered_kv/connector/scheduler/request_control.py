"""What a client can ask of the cache for one request.

vLLM passes the field `kv_transfer_params` of a request on to its connector. The keys of this
connector are in one object there, `tiered_kv`; all other keys belong to other connectors:

    {"prompt": …, "kv_transfer_params": {"tiered_kv": {"store": false}}}

`docs/requests.md` is generated from here. vLLM gives a connector no way to refuse a request. So an
unknown key or a wrong value is ignored, logged once, counted, and named in the response.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.options import Kind, boolean, seconds

logger = logging.getLogger(__name__)

SECTION = "tiered_kv"
MAX_HOLD_S = 3600.0
MAX_SESSION_NAME = 256

_TIERS = (Tier.CPU, Tier.REMOTE)
_MAX_KEYS = 32
_MAX_SHOWN = 80  # characters of a client's value in a log line
_MAX_LOGGED = 100


def _parse_tiers(key: str, value: object) -> tuple[Tier, ...]:
    given = [value] if isinstance(value, str) else value
    known = {tier.value: tier for tier in _TIERS}
    is_list = isinstance(given, list) and given
    if not is_list or not all(isinstance(one, str) and one in known for one in given):  # type: ignore[attr-defined]
        raise ConfigError(key, f'expected a list of "cpu" and "remote", got {value!r}')
    return tuple(tier for tier in _TIERS if tier.value in given)  # type: ignore[operator]


def _parse_tokens(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(key, f"expected a number of tokens, got {value!r}")
    return value


def _parse_flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(key, f"expected true or false, got {value!r}")
    return value


def _parse_session(key: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_SESSION_NAME:
        raise ConfigError(key, f"expected a text of 1 to {MAX_SESSION_NAME} characters")
    return value


def _tokens(help: str) -> Any:
    kind = Kind(_parse_tokens, lambda value: "", "N", "tokens")
    return field(default=None, metadata={"kind": kind, "help": help})


@dataclass(frozen=True)
class RequestControl:
    """What one request asks of the cache, validated. `ControlReader` builds it when the request
    arrives; the planners read it."""

    store: bool = boolean(
        True,
        "`false`: no block of this request is stored in any tier: not while it runs, not later, "
        "and not at a daemon. Blocks that another request with the same tokens stores are its own.",
    )
    load: bool = boolean(
        True,
        "`false`: nothing is loaded for this request, and no daemon is asked. What the GPU's own "
        "cache lacks is computed. (vLLM has its own switch for the GPU's cache, "
        "`skip_reading_prefix_cache`.)",
    )
    tiers: tuple[Tier, ...] = field(
        default=_TIERS,
        metadata={
            "kind": Kind(
                _parse_tiers,
                lambda value: ", ".join(tier.value for tier in value),
                "TIERS",
                "list of `cpu` and `remote`",
            ),
            "help": "Where blocks of this request may be loaded from, and whether they are sent to "
            "daemons: not with `cpu` alone. With `remote` alone they still pass through the CPU "
            "tier, from which they are sent.",
        },
    )
    max_load_tokens: int | None = _tokens(
        "Loads at most this many tokens after those that the GPU has, in whole blocks; the rest "
        "is computed."
    )
    max_store_tokens: int | None = _tokens(
        "Stores only the blocks within the first N tokens of the request, its answer included."
    )
    pin_seconds: float = seconds(
        0.0,
        "Keeps the blocks of this request in the CPU tier, and at daemons, until N seconds "
        "after its end. Not exceeding `pin_share` of the tier, head first.",
        low=0,
        high=MAX_HOLD_S,
    )
    session: str = field(
        default="",
        metadata={
            "kind": Kind(_parse_session, str, "TEXT", "text"),
            "help": "The conversation that this request belongs to, for `session_ended`. Names of "
            "requests with another `cache_salt` are other sessions.",
        },
    )
    session_ended: bool = boolean(
        False,
        "The session ends with this request: its blocks that no other request has used are the "
        "first to be evicted from the CPU tier, and their pins end.",
    )
    tool_pending: float = seconds(
        0.0,
        "The session continues after a tool call of about N seconds: keeps its blocks for "
        "twice as long, like `pin_seconds`. Shortly before it continues, daemons read what they "
        "have on disk into their memory, and the CPU tier fetches from daemons what it has lost.",
        low=0,
        high=MAX_HOLD_S / 2,
    )
    compute_once: bool | None = field(
        default=None,
        metadata={
            "kind": Kind(_parse_flag, lambda value: "", "true|false", "boolean"),
            "help": "Whether this request waits while another one computes a prefix that both "
            "share; without it the engine's option `compute_once` decides.",
        },
    )
    explain: bool = boolean(
        False,
        "The response says where the prompt's tokens came from, and why the others were computed; "
        "see misses.md.",
    )

    @property
    def store_limit(self) -> int | None:
        """The number of tokens at the beginning of the request whose blocks may be stored."""
        return self.max_store_tokens if self.store else 0

    def load_end(self, computed: int, alignment: int) -> int | None:
        """Where a load must end if `computed` tokens need none, in tokens; None: anywhere."""
        if not self.load:
            return computed
        if self.max_load_tokens is None:
            return None
        end = computed + self.max_load_tokens
        return max(computed, end - end % alignment)

    def may_use(self, tier: Tier) -> bool:
        return tier in self.tiers

    @property
    def sends_blocks(self) -> bool:
        """Whether daemons get what this request computes."""
        return self.store and self.max_store_tokens is None and self.may_use(Tier.REMOTE)

    @property
    def hold_seconds(self) -> float:
        """How long the request's blocks are kept after its end."""
        return max(self.pin_seconds, 2 * self.tool_pending)


NO_CONTROL = RequestControl()
_FIELDS = {option.name: option for option in fields(RequestControl)}
EXPLAIN = "explain"
"""The key of a request's account in its response."""
IGNORED = "ignored"
"""The label of `request_controls` for requests with a key that is ignored."""


def parse_control(params: object) -> tuple[RequestControl, list[str]]:
    """Returns what a request asks for, and what is wrong with it. Accepts any value: it is what a
    client has sent."""
    if not isinstance(params, Mapping):
        return NO_CONTROL, []
    section = params.get(SECTION)
    if section is None:
        return NO_CONTROL, list(_misspelt_sections(params))
    if not isinstance(section, Mapping):
        return NO_CONTROL, [f"{SECTION}: expected an object, got {_shown(repr(section))}"]
    values: dict[str, Any] = {}
    problems = [f"more than {_MAX_KEYS} keys"] if len(section) > _MAX_KEYS else []
    for name, value in islice(section.items(), _MAX_KEYS):
        option = _FIELDS.get(name)
        if option is None:
            problems.append(f"{_shown(repr(name))}: unknown key; {_hint(name)}")
            continue
        try:
            values[name] = option.metadata["kind"].parse(name, value)
        except ConfigError as error:
            problems.append(_shown(str(error), 2 * _MAX_SHOWN))
    if values.get("session_ended") and not values.get("session"):
        problems.append("session_ended: needs session")
        del values["session_ended"]
    return RequestControl(**values), problems


class ControlReader:
    """Reads the controls of each new request, counts them, and logs what it ignores. The scheduler
    half calls it, in the scheduler's thread."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._logged: set[str] = set()

    def read(self, params: object) -> tuple[RequestControl, list[str]]:
        control, problems = parse_control(params)
        if control is not NO_CONTROL:
            for name, option in _FIELDS.items():
                if getattr(control, name) != option.default:
                    self._recorder.add(names.REQUEST_CONTROLS, 1, name)
        if problems:
            self._recorder.add(names.REQUEST_CONTROLS, 1, IGNORED)
            self._log(problems)
        return control, problems

    def _log(self, problems: Collection[str]) -> None:
        for problem in problems:
            is_new = problem not in self._logged and len(self._logged) < _MAX_LOGGED
            level = logging.WARNING if is_new else logging.DEBUG
            if is_new:
                self._logged.add(problem)
            logger.log(level, "ignored in a request's kv_transfer_params: %s", problem)


def _hint(name: object) -> str:
    close = difflib.get_close_matches(str(name)[:_MAX_SHOWN].lower(), _FIELDS, n=1, cutoff=0.4)
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(_FIELDS)}"


def _misspelt_sections(params: Mapping[Any, Any]) -> Collection[str]:
    """Keys that are almost our own. Other connectors' keys are no mistakes."""
    some = [key for key in islice(params, _MAX_KEYS) if isinstance(key, str) and len(key) < 16]
    close = difflib.get_close_matches(SECTION, some, n=1, cutoff=0.8) if some else ()
    return [f"{_shown(repr(key))}: unknown key; did you mean {SECTION}?" for key in close]


def _shown(value: str, length: int = _MAX_SHOWN) -> str:
    return value if len(value) <= length else value[: length - 1] + "…"
