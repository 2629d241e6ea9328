"""Opens the tiers the options ask for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from vllm_tiered_kv.device.arena import memory_limit
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.option_values import format_size
from vllm_tiered_kv.server.backing import BackingFolder
from vllm_tiered_kv.server.options import ServerOptions, may_have_quota, quota_of
from vllm_tiered_kv.server.tiered_store import TieredStore
from vllm_tiered_kv.stores.ssd.store import SsdStore

logger = logging.getLogger(__name__)

_TELL_EVERY_S = 10.0


def open_tiers(options: ServerOptions, recorder: Recorder) -> TieredStore:
    _require_memory(options)
    ssd = _open_ssd(options) if options.ssd else None
    try:
        backing = _open_backing(options) if options.backing else None
    except BaseException:
        if ssd is not None:
            ssd.close()
        raise
    try:
        return TieredStore(
            options.memory,
            ssd,
            backing,
            recorder,
            options.eviction.value,
            options.huge_pages,
            options.workers,
            options.write_queue or None,
            options.prefault,
            float(options.backing_timeout),
            partial(may_have_quota, options.memory_quota),
            partial(quota_of, options.memory_quota),
        )
    except BaseException:
        for store in (ssd, backing):
            if store is not None:
                store.close()
        raise


def _require_memory(options: ServerOptions) -> None:
    """The kernel lends more than there is, and ends the daemon when blocks come."""
    limit = memory_limit()
    if options.memory > limit:
        raise ConfigError(
            "memory",
            f"{format_size(options.memory)} is more than the machine or container has "
            f"({limit / 2**30:.1f}GiB); choose less",
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
        lines.append(f"backing: {options.backing}")
    return lines


def _open_ssd(options: ServerOptions) -> SsdStore:
    try:
        with _telling(f"ssd: {options.ssd} is not open yet"):
            return SsdStore(
                Path(options.ssd),
                options.ssd_space,
                eviction=options.ssd_eviction.value,
                fsync=options.ssd_fsync,
                progress=lambda line: logger.info("ssd: %s", line),
                has_quota=partial(may_have_quota, options.ssd_quota),
                quota_of=partial(quota_of, options.ssd_quota),
            )
    except OSError as error:
        raise ConfigError("ssd", f"{options.ssd}: {error.strerror or error}") from error


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """Now and then, for as long as it takes: a disk may be slow, or hang."""
    has_ended = threading.Event()

    def tell() -> None:
        begin = time.monotonic()
        while not has_ended.wait(_TELL_EVERY_S):
            waited_s = time.monotonic() - begin
            logger.warning("%s after %.0f s; the start waits for it", what, waited_s)

    threading.Thread(target=tell, name="tiered-kv-opening-ssd", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


def _open_backing(options: ServerOptions) -> BackingFolder:
    assert options.backing_folder is not None
    try:
        backing = BackingFolder(
            options.backing_folder,
            options.backing_space,
            options.backing_ttl,
            float(options.backing_timeout),
        )
    except OSError as error:
        raise ConfigError("backing", f"{options.backing}: {error.strerror or error}") from error
    if not backing.is_open:
        logger.warning(
            "backing: %s has not answered for %g s; it counts as absent until it does",
            options.backing_folder,
            options.backing_timeout,
        )
    return backing
