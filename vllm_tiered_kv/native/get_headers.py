"""Reads and writes the headers of most reads: a `get` of a few blocks, and the reply with them.

`wire/codec.py` defines these messages and handles all of their forms. For a daemon under load its
checks, field by field, take longer than the rest of such a request.
"""

from __future__ import annotations

from vllm_tiered_kv.native._cpu import MAX_REPLY_BLOCKS, pack_get_reply, read_get

__all__ = ["MAX_REPLY_BLOCKS", "pack_get_reply", "read_get"]
