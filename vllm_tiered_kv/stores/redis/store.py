"""A BlockStore in Redis (`redis://`, `rediss://`): one server or a cluster.

A block is the value of one key: its header and payload, as `block_format.py` defines them. What the
payload has beyond 8 MiB follows in further keys of the same slot. `docs/stores.md` describes keys
and values for other programs. Every read is verified; a damaged or incomplete block is a miss, is
counted and is deleted. Redis itself limits the memory and evicts.

Errors become results of a call, not exceptions, except that `delete` raises if a block may remain.
"""

from __future__ import annotations

import binascii
import logging
from collections.abc import Callable, Sequence
from functools import partial

from vllm_tiered_kv.core.store import (
    BlockFacts,
    PutResult,
    StoreKey,
    StoreUsage,
)
from vllm_tiered_kv.errors import ConfigError, NotDeletedError
from vllm_tiered_kv.native.cpu import HostRegion, xxh3_64
from vllm_tiered_kv.options import redacted
from vllm_tiered_kv.stores.block_format import (
    HEADER_BYTES,
    VERSION,
    BlockHeader,
    decode_header,
    encode_header,
)
from vllm_tiered_kv.stores.network_store import (
    Event,
    NetworkStore,
    NewBlock,
    count_leading,
)
from vllm_tiered_kv.stores.redis.nodes import SLOTS, Nodes, Request
from vllm_tiered_kv.stores.redis.resp import Reply, ReplyError, RespConnection, encode, encode_set
from vllm_tiered_kv.stores.redis.settings import RedisSettings, parse_settings
from vllm_tiered_kv.stores.registry import BackingOptions

logger = logging.getLogger(__name__)

PART_BYTES = 8 << 20
"""How much of a payload one key holds. It is part of the format: all versions must agree on it."""

_PARTS_LIVE_LONGER_S = 60  # so that a block never expires in parts
RIGHTS = "+get +getex +getrange +strlen +exists +set +expire +unlink +info +dbsize +cluster|slots"


def check(options: BackingOptions) -> None:
    parse_settings(options)


def open_store(options: BackingOptions, on_unanswered: Callable[[], None]) -> RedisStore:
    store = RedisStore(parse_settings(options), on_unanswered)
    try:
        store.require_access()
    except ConfigError as error:
        store.close()
        text = str(error).removeprefix("backing: ")
        raise ConfigError("backing", f"{redacted(options.url)}: {text}") from None
    return store


class RedisStore(NetworkStore):
    """A BlockStore in Redis. Thread-safe. The daemon owns one as its backing tier and calls it on
    executors; no call takes longer than its deadline, except to resolve the name of a host."""

    def __init__(self, settings: RedisSettings, on_unanswered: Callable[[], None]) -> None:
        """Connects with the first call."""
        super().__init__(settings.timeout_s)
        self.settings = settings
        self.nodes = Nodes(settings, on_unanswered)
        self._prefix = f"{settings.prefix}:{VERSION}:".encode()

    def require_access(self) -> None:
        """Raises ConfigError if a server answers but does not let this client work. A server that
        does not answer is no error: the store uses it once it does."""
        deadline = self._deadline()
        self.nodes.refresh(deadline)
        if self.nodes.refusal:
            raise ConfigError("backing", self.nodes.refusal)
        if not self.nodes.is_known:
            return
        if len(self.settings.addresses) > 1 and not self.nodes.is_cluster:
            raise ConfigError("backing", "names several servers, but they are not a cluster")
        key = StoreKey(b"probe")
        name = self._name(key)
        probes = [
            self._request(key, encode(b"GETRANGE", name, b"0", b"0")),
            self._request(key, encode(b"GETEX", name)),
            self._request(key, _read_length(name)),
            self._request(key, encode(b"SET", name, b"", b"NX", b"PX", b"1000")),
            self._request(key, encode(b"EXPIRE", name, b"1")),
            self._request(key, encode(b"UNLINK", name)),
        ]
        self.nodes.exchange(probes, deadline)
        for probe in probes:
            code = "" if probe.error is None else probe.error.code
            if code in ("NOPERM", "NOAUTH", "READONLY", "MOVED", "ERR"):
                user = self.settings.username or "default"
                raise ConfigError(
                    "backing",
                    f"{probe.error} (the user {user!r} needs the rights ~{self.settings.prefix}:* "
                    f"{RIGHTS}, on a primary of Redis 6.2 or later)",
                )

    # ---- lookups --------------------------------------------------------------------------------

    def match(self, keys: Sequence[StoreKey]) -> int:
        deadline = self._deadline()
        return count_leading(keys, lambda some: self._contains(some, deadline))

    def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        """Sees neither damage nor whether a single value is a block at all; a get does. Redis
        counts it as a use."""
        deadline = self._deadline()
        here = self._contains(keys, deadline)
        self._refresh_usage(deadline)
        return here

    def _contains(self, keys: Sequence[StoreKey], deadline: float) -> list[bool]:
        lookups = [self._request(key, _read_length(self._name(key))) for key in keys]
        self._exchange(lookups, deadline)
        lengths = [reply if isinstance(reply := r.reply, int) else 0 for r in lookups]
        here = [nbytes >= HEADER_BYTES for nbytes in lengths]
        long = [n for n, nbytes in enumerate(lengths) if nbytes >= HEADER_BYTES + PART_BYTES]
        if long:  # there may be further parts
            known = self._look_up([keys[n] for n in long], deadline)
            for n, (facts, _) in zip(long, known, strict=True):
                here[n] = facts is not None
        return here

    def describe(self, keys: Sequence[StoreKey]) -> list[BlockFacts | None]:
        """Reads headers only: a block whose payload is damaged is still described."""
        deadline = self._deadline()
        facts = [facts for facts, _ in self._look_up(keys, deadline)]
        self._refresh_usage(deadline)
        return facts

    def _look_up(
        self, keys: Sequence[StoreKey], deadline: float
    ) -> list[tuple[BlockFacts | None, bool]]:
        """The facts of each block, if all parts of it are there; and whether Redis has answered.
        Deletes damage."""
        last = b"%d" % (HEADER_BYTES - 1)
        heads = [
            self._request(key, encode(b"GETRANGE", self._name(key), b"0", last)) for key in keys
        ]
        self._exchange(heads, deadline)
        headers = [
            decode_header(head.reply, key) if isinstance(head.reply, bytes) else None
            for key, head in zip(keys, heads, strict=True)
        ]
        parts: dict[int, Request] = {}
        for n, (key, header) in enumerate(zip(keys, headers, strict=True)):
            if header is not None and (names := self._part_names(key, header.payload_bytes)):
                parts[n] = self._request(key, encode(b"EXISTS", *names))
        self._exchange(list(parts.values()), deadline)
        found: list[tuple[BlockFacts | None, bool]] = []
        damaged: dict[StoreKey, int] = {}  # key -> bytes of its payload, as far as known
        for n, (key, head, header) in enumerate(zip(keys, heads, headers, strict=True)):
            part = parts.get(n)
            is_answered = _is_usable(head) and (part is None or _is_usable(part))
            payload_bytes = 0 if header is None else header.payload_bytes
            lacks_parts = part is not None and part.reply != _parts_of(payload_bytes) - 1
            if is_answered and (lacks_parts or (header is None and head.reply != b"")):
                damaged[key] = payload_bytes
            is_whole = is_answered and header is not None and key not in damaged
            found.append((header.facts if header and is_whole else None, is_answered))
        self._remove_damaged(damaged, deadline)
        return found

    # ---- bytes ----------------------------------------------------------------------------------

    def get(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[bool]:
        deadline = self._deadline()
        command, *options = (b"GET",) if not self.settings.ttl_s else (b"GETEX", b"EX")
        reads: list[_Read] = []
        requests: list[Request] = []
        for key, buffer in zip(keys, into, strict=True):
            read = _Read(key, buffer.cast("B"))
            reads.append(read)
            for part, name in enumerate((self._name(key), *self._part_names(key, buffer.nbytes))):
                ttl = [self._ttl(part)] if options else []
                request = self._request(key, encode(command, name, *options, *ttl))
                request.receive = partial(read.receive, part)
                request.nbytes += min(buffer.nbytes, PART_BYTES)
                requests.append(request)
        self._exchange(requests, deadline)
        failed = sum(1 for r in requests if r.error is not None and r.error.code != "WRONGTYPE")
        self._count(Event.READ_ERROR, failed)
        damaged = {read.key: len(read.into) for read in reads if read.is_damaged}
        self._remove_damaged(damaged, deadline)
        self._refresh_usage(deadline)
        return [read.is_whole for read in reads]

    def _known(self, keys: Sequence[StoreKey], deadline: float) -> list[bool | None]:
        """Also sets the time to live of present blocks anew."""
        known: list[bool | None] = []
        renewals: list[Request] = []
        for key, (facts, is_answered) in zip(keys, self._look_up(keys, deadline), strict=True):
            known.append(facts is not None if is_answered else None)
            if facts is not None and self.settings.ttl_s:
                names = [self._name(key), *self._part_names(key, facts.nbytes)]
                renewals += [
                    self._request(key, encode(b"EXPIRE", name, self._ttl(part)))
                    for part, name in enumerate(names)
                ]
        self._exchange(renewals, deadline)
        return known

    def _write_new(self, blocks: Sequence[NewBlock], deadline: float) -> list[PutResult]:
        parts = [
            [
                self._write(key, part, name, block.payload[part * PART_BYTES :][:PART_BYTES])
                for part, name in enumerate(self._part_names(key, len(block.payload)), 1)
            ]
            for block in blocks
            for key in (block.header.key,)
        ]
        # The first key makes a block visible, so it is written when all others are there.
        self._exchange([part for written in parts for part in written], deadline)
        results = [PutResult.FAILED] * len(blocks)
        heads: dict[int, Request] = {}
        for n, block in enumerate(blocks):
            if failed := [part for part in parts[n] if part.reply != b"OK"]:
                results[n] = self._refused(failed[0])
                continue
            key, first = block.header.key, block.payload[:PART_BYTES]
            heads[n] = self._write(
                key, 0, self._name(key), first, encode_header(block.header), b"NX"
            )
        self._exchange(list(heads.values()), deadline)
        for n, head in heads.items():
            if not head.is_answered or head.error is not None:
                results[n] = self._refused(head)
            else:
                results[n] = PutResult.STORED if head.reply == b"OK" else PutResult.PRESENT
        self._refresh_usage(deadline)
        return results

    def _write(
        self,
        key: StoreKey,
        part: int,
        name: bytes,
        content: memoryview,
        before: bytes = b"",
        *options: bytes,
    ) -> Request:
        if self.settings.ttl_s:
            options = (*options, b"EX", self._ttl(part))
        request = self._request(key)
        request.pieces = encode_set(name, [before, content], *options)
        request.nbytes += len(content)
        return request

    def _refused(self, write: Request) -> PutResult:
        if write.error is not None and write.error.code == "OOM":
            self._count(Event.NO_SPACE)
            return PutResult.DROPPED
        self._count(Event.WRITE_ERROR)
        return PutResult.FAILED

    def delete(self, keys: Sequence[StoreKey]) -> int:
        if self._closed:
            return 0
        deadline = self._deadline()
        known = self._look_up(keys, deadline)
        heads = [self._request(key, encode(b"UNLINK", self._name(key))) for key in keys]
        parts = [
            self._request(key, encode(b"UNLINK", *names))
            for key, (facts, _) in zip(keys, known, strict=True)
            if facts is not None and (names := self._part_names(key, facts.nbytes))
        ]
        self._exchange([*heads, *parts], deadline)
        failed = [request for request in (*heads, *parts) if not _is_usable(request)]
        if failed:
            reason = failed[0].error or "no answer in time"
            raise NotDeletedError(len(failed), f"Redis: {reason}")
        return sum(1 for head in heads if head.reply == 1)

    def _remove_damaged(self, damaged: dict[StoreKey, int], deadline: float) -> None:
        self._count(Event.DAMAGED, len(damaged))
        self._exchange(
            [
                self._request(
                    key, encode(b"UNLINK", self._name(key), *self._part_names(key, nbytes))
                )
                for key, nbytes in damaged.items()
            ],
            deadline,
        )

    # ---- the rest -------------------------------------------------------------------------------

    def use_memory(self, memory: HostRegion) -> None:
        """No-op: sockets read into any memory."""

    def usage(self) -> StoreUsage:
        """Keys and memory of the servers, with those of other programs that use them."""
        return self._ask_usage(self._deadline())

    def _refresh_usage(self, deadline: float) -> None:
        if self._is_usage_due():
            self._ask_usage(deadline)

    def _ask_usage(self, deadline: float) -> StoreUsage:
        blocks = used = capacity = 0
        is_limited = True
        for node in self.nodes.masters:
            keys = self.nodes.ask(node, encode(b"DBSIZE"), deadline)
            memory = self.nodes.ask(node, encode(b"INFO", b"memory"), deadline)
            blocks += keys if isinstance(keys, int) else 0
            facts = _info(memory) if isinstance(memory, bytes) else {}
            used += facts.get("used_memory", 0)
            limit = facts.get("maxmemory", 0)
            capacity += limit
            is_limited = is_limited and limit > 0
        self._usage = StoreUsage(blocks, used, capacity if is_limited else 0)
        return self._usage

    @property
    def is_absent(self) -> bool:
        return self.nodes.is_absent

    def close(self) -> None:
        """Afterwards every lookup is a miss and every put is dropped."""
        self._closed = True
        self.nodes.close()

    # ---- requests -------------------------------------------------------------------------------

    def _name(self, key: StoreKey) -> bytes:
        """The braces are Redis's hash tag: all keys of a block are in one slot."""
        return self._prefix + b"{%b}" % binascii.hexlify(key)

    def _part_names(self, key: StoreKey, payload_bytes: int) -> list[bytes]:
        """The keys after the first one."""
        if payload_bytes <= PART_BYTES:
            return []
        name = self._name(key)
        return [b"%b:%d" % (name, part) for part in range(1, _parts_of(payload_bytes))]

    def _ttl(self, part: int) -> bytes:
        return b"%d" % (self.settings.ttl_s + (_PARTS_LIVE_LONGER_S if part else 0))

    @staticmethod
    def _request(key: StoreKey, command: bytes = b"") -> Request:
        return Request(binascii.crc_hqx(binascii.hexlify(key), 0) % SLOTS, [command])

    def _exchange(self, requests: Sequence[Request], deadline: float) -> None:
        if not requests or self._closed:
            return
        self.nodes.exchange(requests, deadline)
        errors = [r.error for r in requests if r.error is not None and r.error.code != "WRONGTYPE"]
        if errors:
            self._log_error(errors[0])

    def _log_error(self, error: ReplyError) -> None:
        """At most once a minute; the counters have every block."""
        if self._log_interval.is_due():
            logger.warning("Redis replies an error: %s (logged at most once a minute)", error)


class _Read:
    """Receives the parts of one block, straight into its buffer."""

    def __init__(self, key: StoreKey, into: memoryview) -> None:
        self.key = key
        self.into = into
        self.is_whole = False
        self.is_damaged = False
        self._header: BlockHeader | None = None  # once the first part is received
        self._left = _parts_of(len(into))

    def receive(self, part: int, connection: RespConnection) -> Reply:
        nbytes = connection.bulk_length()
        if isinstance(nbytes, ReplyError):
            if nbytes.code == "WRONGTYPE":
                self.is_damaged = True
            return nbytes
        if nbytes is None:
            self.is_damaged = self.is_damaged or (part > 0 and self._header is not None)
            return None
        if part == 0:
            self._header = None
            self._left = _parts_of(len(self.into))
            head = memoryview(bytearray(min(nbytes, HEADER_BYTES)))
            connection.read_into(head)
            nbytes -= len(head)
            header = decode_header(bytes(head), self.key)
            if header is None or nbytes != min(header.payload_bytes, PART_BYTES):
                self.is_damaged = True
            elif header.payload_bytes == len(self.into):  # otherwise a plain miss
                self._header = header
        if self._header is None:
            connection.skip_value(nbytes)
            return None
        into = self.into[part * PART_BYTES :][:PART_BYTES]
        if nbytes != len(into):
            self.is_damaged = True
            connection.skip_value(nbytes)
            return None
        connection.read_into(into)
        connection.end_value()
        self._left -= 1
        if self._left == 0:
            self.is_whole = xxh3_64(self.into) == self._header.payload_checksum
            self.is_damaged = self.is_damaged or not self.is_whole
        return None


def _read_length(name: bytes) -> bytes:
    """`STRLEN name`; lookups send thousands, and this is faster than `encode`."""
    return b"*2\r\n$6\r\nSTRLEN\r\n$%d\r\n%b\r\n" % (len(name), name)


def _parts_of(payload_bytes: int) -> int:
    return max(1, -(-payload_bytes // PART_BYTES))


def _is_usable(request: Request) -> bool:
    """Whether the server answered with something else than an error of its own."""
    error = request.error
    return request.is_answered and (error is None or error.code == "WRONGTYPE")


def _info(text: bytes) -> dict[str, int]:
    """The numbers in a reply to INFO."""
    pairs = (line.partition(":") for line in text.decode(errors="replace").split("\r\n"))
    return {name: int(value) for name, _, value in pairs if value.isdigit()}
