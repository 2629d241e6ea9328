"""A BlockStore in a Mooncake Store (`mooncake://`): memory of many machines behind one master.

A block is one value: its header and payload, as `block_format.py` defines them. Payloads move
between the caller's buffers and the store nodes without a copy in this process; only headers have
memory of their own. `docs/stores.md` describes keys and values for other programs. Every read is
verified; a damaged block is a miss, is counted and is deleted. The master evicts.

Errors become results of a call, not exceptions, except that `delete` raises if a block may remain.
A call returns when Mooncake's client does, so that nothing touches its buffers afterwards.
"""

from __future__ import annotations

import ctypes
import http.client
import logging
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from vllm_tiered_kv.core.breaker import BreakerState
from vllm_tiered_kv.core.store import (
    BlockFacts,
    PutResult,
    StoreKey,
    StoreUsage,
)
from vllm_tiered_kv.errors import NotDeletedError
from vllm_tiered_kv.native.cpu import HostRegion, copy_bytes, hash_buffers
from vllm_tiered_kv.stores.block_format import (
    HEADER_BYTES,
    VERSION,
    BlockHeader,
    decode_header,
    encode_header,
)
from vllm_tiered_kv.stores.mooncake.client import Code, MooncakeClient
from vllm_tiered_kv.stores.mooncake.settings import MooncakeSettings, parse_settings
from vllm_tiered_kv.stores.network_store import (
    MAX_LOOKUPS,
    WRITE_TIMEOUT_FACTOR,
    Event,
    NetworkStore,
    NewBlock,
    count_leading,
)
from vllm_tiered_kv.stores.registry import BackingOptions

logger = logging.getLogger(__name__)

_BATCH = 32  # blocks of one call to the library; their headers fit one `_HeaderPage`


def check(options: BackingOptions) -> None:
    parse_settings(options)


def open_store(options: BackingOptions, on_unanswered: Callable[[], None]) -> MooncakeStore:
    store = MooncakeStore(parse_settings(options), on_unanswered)
    store.client.connect()  # a master that does not answer is no error: it is used once it does
    return store


class MooncakeStore(NetworkStore):
    """A BlockStore in a Mooncake Store. Thread-safe. The daemon owns one as its backing tier and
    calls it on executors, because a call may take as long as Mooncake's client takes."""

    def __init__(self, settings: MooncakeSettings, on_unanswered: Callable[[], None]) -> None:
        """Connects with the first call."""
        super().__init__(settings.timeout_s)
        self.settings = settings
        self.client = MooncakeClient(settings, on_unanswered)
        self._on_unanswered = on_unanswered
        self._free_pages: list[_HeaderPage] = []
        self._prefix = f"{settings.prefix}:{VERSION}:"

    # ---- lookups --------------------------------------------------------------------------------

    def match(self, keys: Sequence[StoreKey]) -> int:
        return count_leading(keys, self._present)

    def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        """Sees no damage; a get does. The master counts it as a use."""
        here: list[bool] = []
        for start in range(0, len(keys), MAX_LOOKUPS):
            here += map(bool, self._present(keys[start : start + MAX_LOOKUPS]))
        self._refresh_usage()
        return here

    def _present(self, keys: Sequence[StoreKey]) -> list[bool | None]:
        """Whether each key is present; None if the store does not say."""
        names = [self._name(key) for key in keys]
        codes = self._call(lambda library: library.batch_is_exist(names))
        if codes is None:
            return [None] * len(keys)
        return [code == 1 if code >= 0 else None for code in codes]

    def describe(self, keys: Sequence[StoreKey]) -> list[BlockFacts | None]:
        """Reads headers only: a block whose payload is damaged is still described."""
        facts: list[BlockFacts | None] = [None] * len(keys)
        here = list(range(len(keys)))
        if len(keys) > 1:  # one request for all: the library asks for headers one by one
            here = [n for n, is_here in enumerate(self._present(keys)) if is_here]
        for start in range(0, len(here), _BATCH):
            some = here[start : start + _BATCH]
            for n, header in zip(some, self._read_headers([keys[n] for n in some]), strict=True):
                facts[n] = None if header is None else header.facts
        self._refresh_usage()
        return facts

    def _read_headers(self, keys: Sequence[StoreKey]) -> list[BlockHeader | None]:
        """The headers of at most `_BATCH` blocks. Deletes damage."""
        headers: list[BlockHeader | None] = [None] * len(keys)
        with self._header_page() as page:
            parts = [[self._name(key)] for key in keys]
            here, size = [[[0]]] * len(keys), [[[HEADER_BYTES]]] * len(keys)
            where = [page.address + n * HEADER_BYTES for n in range(len(keys))]
            codes = self._call(
                lambda library: [
                    code for ((code,),) in library.get_into_ranges(where, parts, here, here, size)
                ]
            )
            if codes is None:
                return headers
            damaged: list[StoreKey] = []
            for n, (key, code) in enumerate(zip(keys, codes, strict=True)):
                if code == HEADER_BYTES:
                    headers[n] = page.header(n, key)
                if code == Code.TOO_SMALL or (code == HEADER_BYTES and headers[n] is None):
                    damaged.append(key)
        self._remove_damaged(damaged)
        return headers

    # ---- bytes ----------------------------------------------------------------------------------

    def get(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[bool]:
        buffers = [buffer.cast("B") for buffer in into]
        first: dict[StoreKey, int] = {}  # the library takes a key once in a call
        for n, key in enumerate(keys):
            first.setdefault(key, n)
        found = [False] * len(keys)
        wanted = list(first.values())
        for start in range(0, len(wanted), _BATCH):
            some = wanted[start : start + _BATCH]
            read = self._read([keys[n] for n in some], [buffers[n] for n in some])
            for n, is_read in zip(some, read, strict=True):
                found[n] = is_read
        for n, key in enumerate(keys):
            source = first[key]
            if n != source and found[source] and len(buffers[n]) == len(buffers[source]):
                copy_bytes(buffers[n], buffers[source])
                found[n] = True
        self._refresh_usage()
        return found

    def _read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[bool]:
        """Reads at most `_BATCH` different blocks; once more those that their node did not send."""
        end = time.monotonic() + self.settings.timeout_s
        found = [False] * len(keys)
        left = list(range(len(keys)))
        for is_last in (False, True):
            codes, headers = self._read_once([keys[n] for n in left], [into[n] for n in left])
            if codes is None:
                return found
            whole = [n for n, header in zip(left, headers, strict=True) if header is not None]
            checksums = hash_buffers([into[n] for n in whole], threads=0)
            by_position = dict(zip(whole, checksums, strict=True))
            damaged: list[StoreKey] = []
            failed: list[int] = []
            for n, code, header in zip(left, codes, headers, strict=True):
                if header is not None:
                    found[n] = by_position[n] == header.payload_checksum
                if code == HEADER_BYTES + len(into[n]):
                    damaged += [] if found[n] else [keys[n]]
                elif code not in (Code.ABSENT, Code.BUSY):
                    failed.append(n)
            self._remove_damaged(damaged)
            left = self._why_not_sent(failed, keys, into)
            if not left:
                return found
            if is_last or time.monotonic() >= end:
                break
        self._count(Event.READ_ERROR, len(left))
        self._on_unanswered()
        self._log(f"{len(left)} blocks were not sent by their store nodes")
        return found

    def _read_once(
        self, keys: Sequence[StoreKey], into: Sequence[memoryview]
    ) -> tuple[list[int] | None, list[BlockHeader | None]]:
        """The library's codes, and the header of each block that was sent in full length."""
        with self._header_page() as page:
            names = [self._name(key) for key in keys]
            parts = [page.parts(n, buffer) for n, buffer in enumerate(into)]
            where = [[address for address, _ in part] for part in parts]
            sizes = [[nbytes for _, nbytes in part] for part in parts]
            codes = self._call(
                lambda library: library.batch_get_into_multi_buffers(names, where, sizes)
            )
            headers: list[BlockHeader | None] = [None] * len(keys)
            for n, code in enumerate(codes or ()):
                if code == HEADER_BYTES + len(into[n]):
                    header = page.header(n, keys[n])
                    is_whole = header is not None and header.payload_bytes == len(into[n])
                    headers[n] = header if is_whole else None
        return codes, headers

    def _why_not_sent(
        self, failed: Sequence[int], keys: Sequence[StoreKey], into: Sequence[memoryview]
    ) -> list[int]:
        """Which of the blocks that could not be read have the right length, so that their node is
        to blame. Deletes those whose length is not that of any block."""
        if not failed:
            return []
        names = [self._name(keys[n]) for n in failed]
        sizes = self._call(lambda library: [library.get_size(name) for name in names])
        if sizes is None:
            return list(failed)
        others = [
            (keys[n], size)
            for n, size in zip(failed, sizes, strict=True)
            if size >= 0 and size != HEADER_BYTES + len(into[n])
        ]
        if others:  # `_read_headers` deletes those without a header
            headers = self._read_headers([key for key, _ in others])
            self._remove_damaged(
                [
                    key
                    for (key, size), header in zip(others, headers, strict=True)
                    if header is not None and header.file_bytes != size
                ]
            )
        return [
            n for n, size in zip(failed, sizes, strict=True) if size == HEADER_BYTES + len(into[n])
        ]

    def _known(self, keys: Sequence[StoreKey], deadline: float) -> list[bool | None]:
        return self._present(keys)

    def _write_new(self, blocks: Sequence[NewBlock], deadline: float) -> list[PutResult]:
        results: list[PutResult] = []
        for start in range(0, len(blocks), _BATCH):
            results += self._write(blocks[start : start + _BATCH])
        self._refresh_usage()
        return results

    def _write(self, blocks: Sequence[NewBlock]) -> list[PutResult]:
        """Writes at most `_BATCH` blocks."""
        with self._header_page() as page:
            names = [self._name(block.header.key) for block in blocks]
            parts = [page.parts(n, block.payload) for n, block in enumerate(blocks)]
            for n, block in enumerate(blocks):
                page.write(n, encode_header(block.header))
            where = [[address for address, _ in part] for part in parts]
            sizes = [[nbytes for _, nbytes in part] for part in parts]
            codes = self._call(
                lambda library: library.batch_put_from_multi_buffers(
                    names, where, sizes, self.client.replicas
                ),
                WRITE_TIMEOUT_FACTOR,
            )
        return [self._written(code) for code in codes or [int(Code.NO_MASTER)] * len(blocks)]

    def _written(self, code: int) -> PutResult:
        if code == 0:
            return PutResult.STORED
        if code in (Code.PRESENT, Code.BUSY):
            return PutResult.PRESENT
        if code == Code.ABSENT:  # deleted while it was written
            return PutResult.DROPPED
        if code == Code.NO_SPACE:
            self._count(Event.NO_SPACE)
            return PutResult.DROPPED
        self._count(Event.WRITE_ERROR)
        self._log(f"a block was not written, error {code}")
        return PutResult.FAILED

    def delete(self, keys: Sequence[StoreKey]) -> int:
        if self._closed:
            return 0
        codes = self._remove(list(dict.fromkeys(keys)))
        gone = (0, Code.ABSENT, Code.BUSY)  # a block that is being written is not there yet
        failed = [code for code in codes if code not in gone]
        if failed:
            raise NotDeletedError(len(failed), f"Mooncake: error {failed[0]}")
        return codes.count(0)

    def _remove(self, keys: Sequence[StoreKey]) -> list[int]:
        """Also removes blocks that somebody is reading: whoever reads verifies."""
        names = [self._name(key) for key in keys]
        codes = self._call(lambda library: library.batch_remove(names, True))
        return [int(Code.NO_MASTER)] * len(keys) if codes is None else codes

    def _remove_damaged(self, damaged: Sequence[StoreKey]) -> None:
        if damaged:
            self._count(Event.DAMAGED, len(damaged))
            self._remove(damaged)

    # ---- the rest -------------------------------------------------------------------------------

    def use_memory(self, memory: HostRegion) -> None:
        self.client.use_memory(memory)

    def usage(self) -> StoreUsage:
        """Keys and memory of the whole store, as the master's metrics have them; what was known
        before if it does not show them."""
        if self.settings.metrics_port:
            facts = self._ask_metrics()
            if facts:
                self._usage = StoreUsage(
                    facts.get("master_key_count", 0),
                    facts.get("master_allocated_bytes", 0),
                    facts.get("master_total_capacity_bytes", 0),
                )
        return self._usage

    def _ask_metrics(self) -> dict[str, int]:
        connection = http.client.HTTPConnection(
            self.settings.master.host,
            self.settings.metrics_port,
            timeout=min(1.0, self.settings.timeout_s),
        )
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode(errors="replace")
        except (OSError, http.client.HTTPException):
            return {}
        finally:
            connection.close()
        pairs = (line.partition(" ") for line in text.splitlines())
        return {name: int(value) for name, _, value in pairs if value.isdigit()}

    def _refresh_usage(self) -> None:
        if self._is_usage_due() and not self.is_absent:
            self.usage()

    @property
    def is_absent(self) -> bool:
        return self.client.breaker.state is not BreakerState.CLOSED

    def close(self) -> None:
        """Afterwards every lookup is a miss and every put is dropped."""
        if not self._closed:
            self._closed = True
            self.client.close()

    def _call(self, work: Callable[..., list[int]], factor: float = 1.0) -> list[int] | None:
        return self.client.call(work, factor * self.settings.timeout_s)

    @contextmanager
    def _header_page(self) -> Iterator[_HeaderPage]:
        """A page for the headers of a call; it is free again when the call has ended."""
        try:
            page = self._free_pages.pop()
        except IndexError:
            page = _HeaderPage()
            self.client.use_memory(HostRegion(page.address, _BATCH * HEADER_BYTES))
        try:
            yield page
        finally:
            self._free_pages.append(page)

    def _name(self, key: StoreKey) -> str:
        return self._prefix + key.hex()

    def _log(self, what: str) -> None:
        """At most once a minute; the counters have every block."""
        if self._log_interval.is_due():
            logger.warning("Mooncake: %s (logged at most once a minute)", what)


class _HeaderPage:
    """Memory for the headers of the blocks of one call."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _BATCH * HEADER_BYTES)
        self.address = _address(memoryview(self._memory))

    def write(self, n: int, header: bytes) -> None:
        self._memory[n * HEADER_BYTES : (n + 1) * HEADER_BYTES] = header

    def header(self, n: int, key: StoreKey) -> BlockHeader | None:
        """The header that was read, if it is that of this block."""
        return decode_header(self._memory[n * HEADER_BYTES : (n + 1) * HEADER_BYTES], key)

    def parts(self, n: int, payload: memoryview) -> list[tuple[int, int]]:
        """Where the parts of a value are, with their lengths."""
        header = (self.address + n * HEADER_BYTES, HEADER_BYTES)
        return [header, (_address(payload), len(payload))] if len(payload) else [header]


def _address(memory: memoryview) -> int:
    """Of at least one byte."""
    if memory.readonly:
        return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # in a sixth of the time
