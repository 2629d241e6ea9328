"""A daemon killed at any instant, and its files damaged: never a wrong byte, nothing lost that was
acknowledged as on disk, and it always starts again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.daemon.crashing_daemon import CrashingDaemon
from vllm_tiered_kv.stores.ssd.record_format import HEADER_COPIES, RECORD_BYTES

AT_ONCE = 2  # daemons; most of the time goes into starting them
HOW_IT_DIES = [
    CrashingDaemon.die_while_writing,
    CrashingDaemon.die_while_stopping,
    CrashingDaemon.die_while_starting,
]

Between = Callable[[CrashingDaemon, random.Random], None]


def live(folder: Path, seed: int, rounds: int, between: Between) -> CrashingDaemon:
    """Kills and restarts one daemon so many times."""
    rng = random.Random(seed)
    path = folder / str(seed)
    path.mkdir()
    crashing = CrashingDaemon(path, seed)
    try:
        for _ in range(rounds):
            die = rng.choices(HOW_IT_DIES, [70, 15, 15])[0]
            if die is not CrashingDaemon.die_while_starting:
                crashing.recover()
            die(crashing)
            between(crashing, rng)
        crashing.recover()
    except Exception as error:
        raise AssertionError(
            f"seed {seed}, kills {crashing.kills}: {error}\n{crashing.logs}"
        ) from error
    finally:
        crashing.end()
    return crashing


def live_all(folder: Path, seeds: range, rounds: int, between: Between) -> Counter[str]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        lives = [pool.submit(live, folder, seed, rounds, between) for seed in seeds]
        ended = [one.result() for one in lives]
    seen = sum((one.kills + one.seen for one in ended), Counter[str]())
    seen["compactions"] = sum(one.compactions for one in ended)
    print(seen)
    return seen


def nothing(crashing: CrashingDaemon, rng: random.Random) -> None:
    pass


BUSY_WITH = (
    "starting",
    "stopping",
    "compactions",
    "evicted_blocks memory",
    "evicted_blocks ssd",
    "promoted_blocks ssd",
    "recovered lasting",
    "recovered passing",
)


def test_daemon_killed_few_times_keeps_promises(folder: Path) -> None:
    seen = live_all(folder, range(2), 4, nothing)
    assert seen["writing"] > 0
    assert seen["recovered lasting"] > 0


@pytest.mark.slow
def test_daemon_killed_at_any_instant_keeps_promises(folder: Path) -> None:
    seen: Counter[str] = Counter()
    for seeds in (range(6), *(range(more, more + 2) for more in range(6, 24, 2))):
        seen += live_all(folder, seeds, 15, nothing)
        if all(seen[busy] for busy in BUSY_WITH):
            break  # on a slow machine daemons do less before they die, and it takes more of them
    assert seen["writing"] > 40
    for busy in BUSY_WITH:
        assert seen[busy] > 0, (busy, seen)


def flip_a_bit(path: Path, rng: random.Random) -> None:
    bit = rng.randrange(8 * path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def flips(crashing: CrashingDaemon, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 5))):
        flip_a_bit(crashing.ssd / rng.choice(("data", "journal")), rng)
        crashing.promises.may_lose += 1


def torn_tail(crashing: CrashingDaemon, rng: random.Random) -> None:
    """A record that was only begun, or what the file system had there before."""
    with (crashing.ssd / "journal").open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 3 * RECORD_BYTES)))


def cut_tail(crashing: CrashingDaemon, rng: random.Random) -> None:
    journal = crashing.ssd / "journal"
    size = journal.stat().st_size
    with journal.open("r+b") as file:
        file.truncate(rng.randrange(min(size, HEADER_COPIES * RECORD_BYTES), size + 1))
    crashing.promises.may_lose_all = True


def deleted(crashing: CrashingDaemon, rng: random.Random) -> None:
    (crashing.ssd / rng.choice(("data", "journal"))).unlink(missing_ok=True)
    crashing.promises.may_lose_all = True


@pytest.mark.slow
def test_daemon_with_damaged_files_serves_no_wrong_block(folder: Path) -> None:
    done: Counter[str] = Counter()

    def damage(crashing: CrashingDaemon, rng: random.Random) -> None:
        kind = rng.choices([flips, torn_tail, cut_tail, deleted, nothing], [40, 15, 10, 10, 25])[0]
        if all((crashing.ssd / name).exists() for name in ("data", "journal")):
            kind(crashing, rng)
            done[kind.__name__] += 1

    seen = live_all(folder, range(100, 104), 15, damage)
    assert seen["writing"] > 20
    for kind in (flips, torn_tail, cut_tail, deleted):
        assert done[kind.__name__] > 0, done
    assert seen["recovered lasting"] > 0
