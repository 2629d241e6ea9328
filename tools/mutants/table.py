"""All mutations, by the room they break."""

from __future__ import annotations

from tools.mutants.of_api import API
from tools.mutants.of_cache import CACHE
from tools.mutants.of_connector import CONNECTOR
from tools.mutants.of_early_loads import EARLY_LOADS
from tools.mutants.of_identity import IDENTITY
from tools.mutants.of_keys_and_copies import COPIES, KEYS
from tools.mutants.of_probes import PROBES
from tools.mutants.of_remote import REMOTE
from tools.mutants.of_request_keys import REQUEST_KEYS
from tools.mutants.of_server import SERVER
from tools.mutants.of_stores import STORES
from tools.mutants.of_tails import TAILS
from tools.mutants.of_windows_and_comparisons import WINDOWS_AND_COMPARISONS

MUTATIONS = (
    *KEYS,
    *CACHE,
    *COPIES,
    *STORES,
    *REMOTE,
    *SERVER,
    *CONNECTOR,
    *REQUEST_KEYS,
    *IDENTITY,
    *EARLY_LOADS,
    *PROBES,
    *TAILS,
    *WINDOWS_AND_COMPARISONS,
    *API,
)
