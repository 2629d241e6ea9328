"""How fast this machine copies between device and pinned host memory: the limit of any load.

One large copy, by torch, in a process of its own, so that nothing of it stays on the device.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

_REPETITIONS = 20


def measure(nbytes: int) -> dict[str, float] | None:
    """Median GB/s in both directions and the milliseconds so many bytes take; None without GPU."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.pinned_copy", str(nbytes)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] | None = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure_here(nbytes: int) -> dict[str, float] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def milliseconds(target: torch.Tensor, source: torch.Tensor) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    milliseconds(device, host)
    loads = [milliseconds(device, host) for _ in range(_REPETITIONS)]
    stores = [milliseconds(host, device) for _ in range(_REPETITIONS)]
    load, store = statistics.median(loads), statistics.median(stores)
    return {
        "bytes": nbytes,
        "to_device_ms": round(load, 3),
        "to_device_gbs": round(nbytes / load / 1e6, 2),
        "to_host_gbs": round(nbytes / store / 1e6, 2),
    }


if __name__ == "__main__":
    print(json.dumps(_measure_here(int(sys.argv[1]))))
