"""Two real engines with sliding windows, one after the other, and a daemon between them.

Apart from the other real engines with windows: there is room for one in a process.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.oracle import COUNT
from tests.engine.real_engine import real_engine
from tests.engine.window_oracle import PROMPTS, found_by_vllm, model_folder, needed_blocks
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics import names

pytestmark = pytest.mark.engine


@pytest.mark.slow
def test_another_engine_finds_what_the_first_one_stored(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "gemma3")
    with (
        tempfile.TemporaryDirectory(prefix="kv-") as place,
        DaemonProcess(Path(place), "--memory", "64MiB") as daemon,
    ):
        options = {"cpu_memory": "64MiB", "remote": daemon.ipc, "remote_lookup_timeout": 30}
        with real_engine(folder, options) as first:
            expected = found_by_vllm(first)
            # Nobody steps after the last output: what goes on to the daemon is there by then.
            assert not first.half.has_pending_push_work()
            sent = first.total(names.STORED_BLOCKS, Tier.REMOTE.value)
            assert sent == first.total(names.STORED_BLOCKS, Tier.CPU.value) > 0
            first.assert_at_rest()
        with real_engine(folder, options) as second:
            for ids, right in zip(PROMPTS, expected, strict=True):
                (answer,) = second.ask([ids], COUNT)
                assert answer == right
            remote = second.total(names.LOADED_BLOCKS, Tier.REMOTE.value)
            assert remote == sum(needed_blocks(second, right.cached) for right in expected)
            second.settle()
            second.assert_at_rest()
