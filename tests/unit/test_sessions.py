"""Which blocks are private to a session, against a model that keeps every use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv.connector.scheduler.sessions import SessionName, Sessions
from vllm_tiered_kv.core.key import BlockKey


def chain(path: str) -> list[BlockKey]:
    """A key for each prefix of the path."""
    return [BlockKey(path[: n + 1].encode()) for n in range(len(path))]


def named(name: str) -> SessionName:
    return (None, name)


def test_ended_session_returns_only_blocks_that_no_other_used() -> None:
    sessions = Sessions(1000)
    sessions.record(named("a"), [chain("syshello")])
    sessions.record(named("a"), [chain("syshello, and more")])
    sessions.record(named("b"), [chain("syshi")])
    assert sessions.end(named("a")) == chain("syshello, and more")[4:]
    assert sessions.end(named("b")) == chain("syshi")


def test_block_used_outside_of_sessions_is_not_private() -> None:
    sessions = Sessions(1000)
    sessions.record(named("a"), [chain("abcd")])
    sessions.used([chain("abx")])
    assert sessions.end(named("a")) == chain("abcd")[2:]


def test_sessions_of_another_salt_are_other_sessions() -> None:
    sessions = Sessions(1000)
    sessions.record(("salt", "a"), [chain("abcd")])
    assert sessions.end(("other", "a")) == []
    assert sessions.end(("salt", "a")) == chain("abcd")


def test_sessions_beyond_the_limit_are_forgotten_oldest_first() -> None:
    sessions = Sessions(10)
    sessions.record(named("a"), [chain("aaaa")])
    sessions.record(named("b"), [chain("bbbb")])
    sessions.record(named("a"), [chain("aaaaa")])
    sessions.record(named("c"), [chain("cccc")])
    assert sessions.end(named("b")) == []
    assert len(sessions.end(named("a"))) == 5
    assert len(sessions.end(named("c"))) == 4
    assert not sessions._users
    assert not sessions._num_blocks


paths = st.text("ab", min_size=1, max_size=5)
steps = st.tuples(st.sampled_from(["use", "end", "x", "y", "z"]), paths)


@given(st.lists(steps, max_size=30))
def test_private_blocks_are_those_of_a_model(script: list[tuple[str, str]]) -> None:
    sessions = Sessions(10_000)
    used: dict[str, dict[BlockKey, None]] = {}
    outside: set[BlockKey] = set()
    for act, path in script:
        if act == "use":
            sessions.used([chain(path)])
            # Only uses of blocks that a session has are remembered.
            outside |= {key for key in chain(path) if any(key in keys for keys in used.values())}
        elif act == "end":
            name = "xyz"[len(path) % 3]
            mine = used.pop(name, {})
            others = {key for keys in used.values() for key in keys}
            assert sessions.end(named(name)) == [
                key for key in mine if key not in others and key not in outside
            ]
            outside &= others
        else:
            used.setdefault(act, {}).update(dict.fromkeys(chain(path)))
            sessions.record(named(act), [chain(path)])
