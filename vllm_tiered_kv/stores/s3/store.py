"""A BlockStore in a bucket of an S3 service (`s3://`): AWS, or one of the many that speak S3.

A block is one object: its header and payload, as `block_format.py` defines them. `docs/stores.md`
describes names and content for other programs. Every read is verified; a damaged block is a miss,
is counted and is deleted. The bucket has no limit of its own; its lifecycle rules delete.

Errors become results of a call, not exceptions, except that `delete` raises if a block may remain.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import obstore

from vllm_tiered_kv.core.breaker import BreakerState
from vllm_tiered_kv.core.store import (
    BlockFacts,
    PutResult,
    StoreKey,
    StoreUsage,
)
from vllm_tiered_kv.errors import ConfigError, NotDeletedError
from vllm_tiered_kv.native.cpu import HostRegion, copy_and_hash
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
from vllm_tiered_kv.stores.registry import BackingOptions
from vllm_tiered_kv.stores.s3.client import LOOKUPS, Failure, S3Client
from vllm_tiered_kv.stores.s3.settings import S3Settings, parse_settings

logger = logging.getLogger(__name__)

RIGHTS = "s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket"

_ABSENT = 404
_NO_SUCH_RANGE = 416  # an object without content
_PRESENT = 412  # not 409: that write met another one or a delete, and either may have won


def check(options: BackingOptions) -> None:
    parse_settings(options)


def open_store(options: BackingOptions, on_unanswered: Callable[[], None]) -> S3Store:
    store = S3Store(parse_settings(options), on_unanswered)
    store.require_access()
    return store


class S3Store(NetworkStore):
    """A BlockStore in a bucket. Thread-safe. The daemon owns one as its backing tier and calls it
    on executors; no call takes longer than its deadline."""

    def __init__(self, settings: S3Settings, on_unanswered: Callable[[], None]) -> None:
        """Connects with the first call. Raises ConfigError if the library refuses the settings."""
        super().__init__(settings.timeout_s)
        self.settings = settings
        self.client = S3Client(settings, on_unanswered)
        self._bucket = self.client.bucket
        self._prefix = f"{settings.prefix}/{VERSION}/"

    def require_access(self) -> None:
        """Raises ConfigError if the service answers but does not let this client work. A service
        that does not answer is no error: the store uses it once it does."""

        async def use(name: str) -> None:
            await obstore.put_async(self._bucket, name, b"", use_multipart=False)
            await obstore.delete_async(self._bucket, name)
            # Without the right to list, a miss is refused instead.
            with contextlib.suppress(FileNotFoundError):
                await obstore.get_async(self._bucket, name)

        [failure] = self.client.each(use, [f"{self._prefix}probe"], self._deadline())
        if failure is not None and (failure.is_refusal or not failure.is_unanswered):
            raise ConfigError(
                "backing",
                f"s3://{self.settings.bucket}: {failure.reason} (the credentials in the "
                f"environment need the rights {RIGHTS})",
            )

    # ---- lookups --------------------------------------------------------------------------------

    def match(self, keys: Sequence[StoreKey]) -> int:
        deadline = self._deadline()
        return count_leading(keys, lambda some: self._contains(some, deadline))

    def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        """Does not see damage; a get does."""
        return self._contains(keys, self._deadline())

    def _contains(self, keys: Sequence[StoreKey], deadline: float) -> list[bool]:
        async def size(key: StoreKey) -> int:
            return (await obstore.head_async(self._bucket, self._name(key)))["size"]

        sizes = [] if self._closed else self.client.each(size, keys, deadline, LOOKUPS)
        here = [not isinstance(one, Failure) and one >= HEADER_BYTES for one in sizes]
        return here or [False] * len(keys)

    def describe(self, keys: Sequence[StoreKey]) -> list[BlockFacts | None]:
        """Reads headers only: a block whose payload is damaged is still described."""
        return [facts for facts, _ in self._look_up(keys, self._deadline())]

    def _look_up(
        self, keys: Sequence[StoreKey], deadline: float
    ) -> list[tuple[BlockFacts | None, bool]]:
        """The facts of each block, and whether the service has answered. Deletes damage."""

        async def head(key: StoreKey) -> BlockHeader | None:
            name = self._name(key)
            found = await obstore.get_async(
                self._bucket, name, options={"range": (0, HEADER_BYTES)}
            )
            header = decode_header(bytes(await found.bytes_async()), key)
            is_whole = header is not None and header.file_bytes == found.meta["size"]
            return header if is_whole else None

        if self._closed:
            return [(None, False)] * len(keys)
        facts: list[tuple[BlockFacts | None, bool]] = []
        damaged: list[StoreKey] = []
        for key, header in zip(keys, self.client.each(head, keys, deadline, LOOKUPS), strict=True):
            if isinstance(header, BlockHeader):
                facts.append((header.facts, True))
            elif header is None or header.status == _NO_SUCH_RANGE:
                damaged.append(key)
                facts.append((None, True))
            else:
                facts.append((None, header.status == _ABSENT))
        self._remove_damaged(damaged, deadline)
        return facts

    # ---- bytes ----------------------------------------------------------------------------------

    def get(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[bool]:
        if self._closed:
            return [False] * len(keys)
        deadline = self._deadline()

        async def read(job: tuple[StoreKey, memoryview]) -> bool | None:
            """Whether the block is whole; None if the object has another length."""
            key, buffer = job
            found = await obstore.get_async(self._bucket, self._name(key))
            if found.meta["size"] != HEADER_BYTES + len(buffer):
                return None
            content = memoryview(await found.bytes_async())
            header = decode_header(bytes(content[:HEADER_BYTES]), key)
            if header is None or header.payload_bytes != len(buffer):
                return False
            return copy_and_hash([buffer], [content[HEADER_BYTES:]]) == [header.payload_checksum]

        jobs = [(key, buffer.cast("B")) for key, buffer in zip(keys, into, strict=True)]
        results = self.client.each(read, jobs, deadline)
        failed = [one for one in results if isinstance(one, Failure) and one.status != _ABSENT]
        self._fail(Event.READ_ERROR, failed)
        by_key = dict(zip(keys, results, strict=True))
        self._remove_damaged([key for key, one in by_key.items() if one is False], deadline)
        self._look_up([key for key, one in by_key.items() if one is None], deadline)
        return [one is True for one in results]

    def _known(self, keys: Sequence[StoreKey], deadline: float) -> list[bool | None]:
        return [
            facts is not None if is_answered else None
            for facts, is_answered in self._look_up(keys, deadline)
        ]

    def _write_new(self, blocks: Sequence[NewBlock], deadline: float) -> list[PutResult]:
        async def write(block: NewBlock) -> None:
            # A copy, as a cancelled request may still be on its way for a moment.
            content = b"".join((encode_header(block.header), block.payload))
            name = self._name(block.header.key)
            await obstore.put_async(self._bucket, name, content, mode="create", use_multipart=False)

        results: list[PutResult] = []
        failed: list[Failure] = []
        for failure in self.client.each(write, blocks, deadline):
            if failure is None:
                results.append(PutResult.STORED)
            elif failure.status == _PRESENT:
                results.append(PutResult.PRESENT)
            else:
                results.append(PutResult.FAILED)
                failed.append(failure)
        self._fail(Event.WRITE_ERROR, failed)
        return results

    def delete(self, keys: Sequence[StoreKey]) -> int:
        if self._closed:
            return 0
        deadline = self._deadline()
        unique = list(dict.fromkeys(keys))
        here = self._contains(unique, deadline)
        failed = self._remove(unique, deadline)
        if failed:
            raise NotDeletedError(len(failed), f"S3: {failed[0].reason}")
        return sum(here)

    def _remove(self, keys: Sequence[StoreKey], deadline: float) -> list[Failure]:
        async def remove(key: StoreKey) -> None:
            await obstore.delete_async(self._bucket, self._name(key))

        removed = self.client.each(remove, keys, deadline, LOOKUPS)
        return [one for one in removed if one is not None and one.status != _ABSENT]

    def _remove_damaged(self, damaged: Sequence[StoreKey], deadline: float) -> None:
        if damaged:
            self._count(Event.DAMAGED, len(damaged))
            self._remove(damaged, deadline)

    # ---- the rest -------------------------------------------------------------------------------

    def use_memory(self, memory: HostRegion) -> None:
        """No-op: payloads are copied into any memory."""

    def usage(self) -> StoreUsage:
        """Unknown: the service tells it only with a request for each thousand blocks."""
        return self.known_usage()

    @property
    def is_absent(self) -> bool:
        return self.client.breaker.state is not BreakerState.CLOSED

    def close(self) -> None:
        """Afterwards every lookup is a miss and every put is dropped."""
        self._closed = True

    def _name(self, key: StoreKey) -> str:
        return self._prefix + key.hex()

    def _fail(self, event: Event, failures: Sequence[Failure]) -> None:
        """Counts blocks; logs a reason at most once a minute."""
        self._count(event, len(failures))
        answered = [one for one in failures if one.status]
        if answered and self._log_interval.is_due():
            logger.warning("S3: %s (logged at most once a minute)", answered[0].reason)
