"""All mutations, by what they break."""

from __future__ import annotations

from tools.mutants.of_daemon import DAEMON
from tools.mutants.of_engine import ENGINE
from tools.mutants.of_keys_and_copies import KEYS_AND_COPIES

MUTATIONS = (*KEYS_AND_COPIES, *ENGINE, *DAEMON)
