"""Namespaces share a daemon and nothing else: every verb is tried on what belongs to another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.raw_client import KEY_BYTES, NAMESPACE, Attached, RawClient, attach, block, key
from vllm_tiered_kv.core.store import Durability, PutResult, announced_namespace
from vllm_tiered_kv.wire import messages as wire

OTHER = bytes(reversed(range(32)))
NEAR = NAMESPACE[:15] + b"\xff" + NAMESPACE[16:]
LAST = NAMESPACE[:31] + b"\xff"
# What an engine says of a namespace that begins alike.
SHORT = announced_namespace(NAMESPACE)
MINE = {key(n): block(n) for n in range(4)}


def assert_sees_nothing(stranger: RawClient) -> None:
    keys = list(MINE)
    assert stranger.tiers(keys) == [0] * 4
    assert sum(stranger.match(keys).tiers) == 0
    assert sum(stranger.match(keys, pin_ms=1000).tiers) == 0
    assert stranger.get(keys) == {}
    assert stranger.get(keys, stream=True) == {}


@pytest.mark.parametrize("namespace", [OTHER, LAST], ids=["other", "last"])
@pytest.mark.parametrize("tier", ["memory", "ssd", "backing"])
def test_tiers_do_not_serve_other_namespaces(
    start: StartDaemon, connect: Connect, folder: Path, tier: str, namespace: bytes
) -> None:
    lower = {
        "memory": [],
        "ssd": ["--ssd", str(folder / "ssd"), "--ssd-space", "64MiB"],
        "backing": [
            "--backing", f"file://{folder / 'shared'}", "--backing-ttl", "1d",
            "--backing-timeout", "30s",
        ],
    }[tier]  # fmt: skip
    (folder / "shared").mkdir()
    daemon = start("--memory", "16MiB", *lower)
    connect(daemon.endpoint).put(MINE)
    if tier != "memory":
        connect(daemon.endpoint).ask(wire.Flush())
        assert daemon.terminate() == 0
        daemon.restart()  # its memory is empty, and what is below answers
    stranger = connect(daemon.endpoint, namespace=namespace)
    assert_sees_nothing(stranger)
    owner = connect(daemon.endpoint)
    assert owner.get(list(MINE)) == MINE
    assert_sees_nothing(stranger)  # also after a hit has brought them back to memory


@pytest.mark.parametrize("namespace", [NEAR, LAST, SHORT], ids=["near", "last", "short"])
def test_writes_do_not_affect_other_namespaces(
    start: StartDaemon, connect: Connect, folder: Path, namespace: bytes
) -> None:
    daemon = start("--memory", "16MiB", "--ssd", str(folder / "ssd"), "--ssd-space", "64MiB")
    owner = connect(daemon.endpoint)
    owner.put(MINE, Durability.DISK)
    stranger = connect(daemon.endpoint, namespace=namespace)
    assert stranger.ask(wire.Delete(KEY_BYTES, list(MINE))).count == 0
    theirs = {name: block(100 + n) for n, name in enumerate(MINE)}
    assert stranger.put(theirs) == [PutResult.STORED] * 4
    assert owner.get(list(MINE)) == MINE
    assert stranger.get(list(MINE)) == theirs
    assert stranger.ask(wire.Delete(KEY_BYTES, list(MINE))).count == 4
    assert owner.get(list(MINE)) == MINE


def test_leases_are_limited_to_own_namespace(start: StartDaemon, connect: Connect) -> None:
    """All processes map the same memory, but get offsets of their own namespace only."""
    daemon = start("--memory", "16MiB")
    connect(daemon.endpoint).put(MINE)
    with _Attachment(daemon.ipc_path) as attached:
        stranger = connect(daemon.ipc, namespace=OTHER, arena=attached.token)
        assert sum(stranger.match(list(MINE)).tiers) == 0
        assert not any(stranger.lend(list(MINE)).leases)
        borrowed = stranger.borrow(list(MINE))
        assert (borrowed.count, borrowed.lent, borrowed.lease) == (0, 0, 0)
        # Room for a key of the same name is room of its own.
        reserved = stranger.reserve(dict.fromkeys(MINE, 4096))
        assert all(reserved.leases)
        assert connect(daemon.endpoint).get(list(MINE)) == MINE
        stranger.release(list(reserved.leases))
        with _Attachment(daemon.ipc_path) as own:
            owner = connect(daemon.ipc, arena=own.token)
            assert all(owner.lend(list(MINE)).leases)
            assert owner.borrow(list(MINE)).lent == 4


class _Attachment:
    def __init__(self, path: Path) -> None:
        self._attached: Attached = attach(path)

    def __enter__(self) -> Attached:
        return self._attached

    def __exit__(self, *error: object) -> None:
        self._attached.close()
