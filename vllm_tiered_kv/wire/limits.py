"""Limits of a message. Both sides enforce them; a daemon may announce lower ones in hello."""

from __future__ import annotations

from vllm_tiered_kv.core.store import MAX_KEY_BYTES, NAMESPACE_BYTES

PROTOCOL_VERSION = 1

MAX_HEADER_BYTES = 4 << 20
MAX_KEYS = 65536  # in one message
MAX_FRAMES = 1024  # payload frames of one message
MAX_BLOCK_BYTES = 1 << 30
MAX_MESSAGE_BYTES = 1 << 30  # sum of all payload frames
MAX_TEXT = 256  # characters
MAX_ERROR_TEXT = 1024  # characters; the sender truncates longer texts
MAX_WIRE_KEY_BYTES = MAX_KEY_BYTES - NAMESPACE_BYTES  # the namespace is bound by hello
MAX_BLOCK_LENGTHS = 64  # distinct block lengths of one client
MAX_SUFFIXES = 1024  # in one match
MAX_LOOKUPS = 1 << 20  # keys times suffixes in one match
MAX_CLAIM_KEYS = 8192  # in one claim
MAX_CLAIM_MS = 60_000
MAX_TTL_MS = 7 * 24 * 3600 * 1000
MAX_CAPABILITIES = 64
MAX_UINT64 = (1 << 64) - 1

# Limits on the structure of a header. Long lists are packed into one bin, so a valid header has few
# values. The limits keep a hostile header from creating a Python object for each of its bytes.
MAX_HEADER_VALUES = 8192
MAX_TREE_DEPTH = 4  # nesting of maps and lists in info and stats
MAX_HEADER_DEPTH = 1 + MAX_TREE_DEPTH
