"""The command `tiered-kv verify`: is every block of a daemon's SSD folder intact?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vllm_tiered_kv.api import arguments
from vllm_tiered_kv.stores.ssd.verify import describe, verify

_VERIFY = """\
Reads every block of an SSD folder that no daemon uses, and checks it. Changes nothing.
"""

_EXAMPLES = """\
exit status:
  0  all is sound     1  something is damaged     2  the folder is in use, or is none of a daemon

examples:
  tiered-kv verify /mnt/nvme/kv
"""


def add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = arguments.add_command(
        commands, "verify", _verify, "check every block of an SSD folder", _VERIFY, _EXAMPLES
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the daemon's option ssd")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _verify(given: argparse.Namespace) -> int:
    report = verify(given.folder, arguments.print_progress)
    if given.json:
        facts = {
            "sound": report.is_sound,
            "good_blocks": report.good_blocks,
            "good_bytes": report.good_bytes,
            "report": describe(report),
        }
        print(json.dumps(facts, indent=1))
    else:
        print("\n".join(describe(report)))
    return 0 if report.is_sound else 1
