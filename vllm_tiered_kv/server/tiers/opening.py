"""Opens the tiers that the options configure."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.device.arena import memory_limit
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.options import format_size, redacted
from vllm_tiered_kv.server.options import ServerOptions, quota_of
from vllm_tiered_kv.server.tiers.backing import BackingTier
from vllm_tiered_kv.server.tiers.fills import Watch
from vllm_tiered_kv.server.tiers.store_executor import StoreExecutor, StoreHungError
from vllm_tiered_kv.server.tiers.tiered_store import TieredStore, TierSettings
from vllm_tiered_kv.stores.ssd.store import SsdStore

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 10.0


def open_tiers(
    options: ServerOptions,
    recorder: Recorder,
    on_deleted: Callable[[Sequence[StoreKey]], None],
    watch: Watch,
) -> TieredStore:
    """`on_deleted` and `watch` as for `TieredStore`."""
    _require_memory(options)
    where = options.backing_options
    backing = None if where is None else BackingTier(where, recorder)
    ssd = _open_ssd(options) if options.ssd else None
    try:
        store = TieredStore(
            options.memory,
            ssd,
            backing,
            recorder,
            TierSettings(
                eviction=options.eviction.value,
                huge_pages=options.huge_pages,
                prefault=options.prefault,
                workers=options.workers,
                write_queue_bytes=options.write_queue or None,
                backing_timeout_s=float(options.backing_timeout),
                quota_of=partial(quota_of, options.memory_quota),
            ),
            on_deleted,
            watch,
        )
    except BaseException:
        if ssd is not None:
            ssd.close()
        raise
    try:
        if backing is not None and store.backing_executor is not None:
            backing.use_memory(store.memory.arena.region)
            _open_backing(options, backing, store.backing_executor)
    except BaseException:
        store.close()
        raise
    return store


def _require_memory(options: ServerOptions) -> None:
    """Linux overcommits memory; without this check the daemon would be OOM-killed later."""
    limit = memory_limit()
    if options.memory > limit:
        raise ConfigError(
            "memory",
            f"{format_size(options.memory)} is more than the machine or container has "
            f"({limit / 2**30:.1f}GiB); use less",
        )


def describe(options: ServerOptions, store: TieredStore) -> list[str]:
    """A line for each tier, for the log."""
    lines = [f"memory: {format_size(options.memory)}, eviction {options.eviction.value}"]
    usages = store.usages()
    if "ssd" in usages:
        lines.append(
            f"ssd: {format_size(options.ssd_space)} in {options.ssd}, {usages['ssd'].blocks} blocks"
        )
    if options.backing:
        lines.append(f"backing: {redacted(options.backing)}")
    return lines


def _open_ssd(options: ServerOptions) -> SsdStore:
    try:
        with _logging_progress(f"ssd: {options.ssd} is not open yet"):
            return SsdStore(
                Path(options.ssd),
                options.ssd_space,
                eviction=options.ssd_eviction.value,
                fsync=options.ssd_fsync,
                progress=lambda line: logger.info("ssd: %s", line),
                quota_of=partial(quota_of, options.ssd_quota),
            )
    except OSError as error:
        raise ConfigError("ssd", f"{options.ssd}: {error.strerror or error}") from error


@contextmanager
def _logging_progress(what: str) -> Iterator[None]:
    """Logs regularly while the body runs: a disk may be slow, or hang."""
    has_ended = threading.Event()

    def log_progress() -> None:
        begin = time.monotonic()
        while not has_ended.wait(_PROGRESS_INTERVAL_S):
            waited_s = time.monotonic() - begin
            logger.warning("%s after %.0f s; the daemon waits for it to start", what, waited_s)

    threading.Thread(target=log_progress, name="tiered-kv-opening-ssd", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


def _open_backing(options: ServerOptions, backing: BackingTier, executor: StoreExecutor) -> None:
    """Returns when the store is open or the timeout has passed; a late store is used once it
    answers."""
    is_late = threading.Event()

    def open_store() -> None:
        try:
            backing.open()
        except Exception:
            if not is_late.is_set():
                raise
            backing.open_with_retries()
        if is_late.is_set() and backing.is_open:
            logger.warning("backing: %s answers; using it from now on", backing.name)

    try:
        executor.call(open_store)
    except StoreHungError:
        is_late.set()
        logger.warning(
            "backing: %s has not answered for %g s; it counts as absent until it does",
            backing.name,
            options.backing_timeout,
        )
    except OSError as error:
        raise ConfigError("backing", f"{backing.name}: {error.strerror or error}") from error
