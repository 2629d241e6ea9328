"""Daemon, stores and client: `server/`, `stores/`, `remote/`, `api/`."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

_SEVERAL = "tests/remote/test_token_cache_several.py"
_FOUND = "tests/remote/test_token_cache.py"
_TROUBLE = "tests/remote/test_token_cache_trouble.py"
_LEASED = ("tests/unit/test_leased_blocks.py",)
_FAULTS = ("tests/remote/test_faults.py",)
_PLACES = (
    "tests/remote/test_lookup_leases.py::test_check_lookup_invalid_offsets_raise",
    "tests/remote/test_lookup_leases.py::test_check_lookup_valid_offsets_pass",
)
_VERBS = ("tests/daemon/test_verbs.py",)
_FILLS = ("tests/daemon/test_fills.py",)
_LEASES = ("tests/daemon/test_shared_memory.py",)
_TIERS = ("tests/daemon/test_tiers.py",)
_REDIS = ("tests/stores/test_redis.py",)
_CONTRACT = "tests/stores/test_contract.py::TestContract::"
_WRONG_CHECKSUM = (_CONTRACT + "test_put_with_wrong_checksum_fails_and_stores_nothing",)
_MEMORY_STORE = ("tests/stores/test_memory_store.py",)
_DAMAGE = ("tests/stores/test_ssd_damage.py",)
_POWER_LOSS = ("tests/stores/test_ssd_power_loss.py",)
_DIR = ("tests/stores/test_shared_dir.py",)
_DIR_FAULTS = ("tests/stores/test_shared_dir_faults.py",)
_DIR_GC = ("tests/stores/test_shared_dir_gc.py",)

DAEMON = (
    Mutation(
        "up-waits-for-who-reads-its-log",
        "api/supervisor.py",
        "lambda: self._stopping)",
        "lambda: False)",
        "a daemon whose log nobody reads any more never ends, and neither does `tiered-kv up`",
        ("tests/daemon/test_up.py::test_screen_with_unread_log_drops_lines_once_it_stops",),
    ),
    Mutation(
        "token-cache-match-past-a-gap",
        "api/chain_store.py",
        "            if here < stop - start:\n                return Outcome(count, {})\n",
        "",
        "a query is told that memory holds states which nobody has",
        (f"{_SEVERAL}::test_match_ends_where_a_daemon_lost_its_share",),
    ),
    Mutation(
        "token-cache-keys-without-sizes",
        "api/token_keys.py",
        "root_digest(self.namespace, (token_bytes, chunk_tokens))",
        "root_digest(self.namespace)",
        "where a daemon has forgotten a namespace, states of other sizes are found",
        (f"{_FOUND}::test_keys_match_the_reference_in_their_own_namespace",),
    ),
    Mutation(
        "copied-rows-not-rechecked",
        "remote/shm_copy.py",
        "return count if memory.arena.have_generations(offsets, generations) else 0",
        "return count",
        "bytes that changed while they were copied are used",
        (f"{_TROUBLE}::test_blocks_that_change_during_a_copy_are_not_used",),
    ),
    Mutation(
        "leased-memory-of-another-daemon",
        "remote/local_daemon.py",
        "return next((m for m in self._mapped if m.arena_id == arena_id), None)",
        "return next(iter(self._mapped), None)",
        "places in one daemon's memory are read from another's",
        _LEASED,
    ),
    Mutation(
        "memory-unmapped-under-a-copy",
        "remote/shared_memory.py",
        "            has_readers = self._readers > 0\n",
        "            has_readers = False\n",
        "a copy reads memory that is no longer mapped, and the worker dies",
        _LEASED,
    ),
    Mutation(
        "get-checksum-not-compared",
        "remote/transfers.py",
        "arrival.task.found = checksum == arrival.checksum",
        "arrival.task.found = True",
        "bytes that changed on the network are served",
        _FAULTS,
    ),
    Mutation(
        "get-position-unchecked",
        "remote/transfers.py",
        "if position >= len(asked.tasks) or position in asked.seen:",
        "if position in asked.seen:",
        "a strange daemon raises an exception in the engine",
        _FAULTS,
    ),
    Mutation(
        "put-returns-while-the-payload-is-read",
        "remote/connection.py",
        "        if sending:\n            self._end_context(sending)\n",
        "",
        "a slot is reused while zmq still sends it",
        ("tests/remote/test_daemon_trouble.py::test_put_to_a_stopped_daemon_releases_the_payload",),
    ),
    Mutation(
        "reply-to-another-request",
        "remote/connection.py",
        """            if op is None:
                self._abandoned""",
        """            if op is None and not self._in_flight:
                self._abandoned""",
        "a late reply is taken for the answer to another request",
        _FAULTS,
    ),
    Mutation(
        "keys-of-another-namespace",
        "remote/address.py",
        "            and key[:NAMESPACE_BYTES] == self.namespace[:NAMESPACE_BYTES]\n",
        "",
        "an engine asks for, and gets, the block of another model",
        (*_FAULTS, "tests/remote/test_address.py"),
    ),
    Mutation(
        "lookup-lease-outside-the-memory",
        "remote/shared_memory.py",
        "int(offsets.max()) + request.length > capacity or np.any(",
        "np.any(",
        "a worker reads past the mapped memory and dies",
        _PLACES,
    ),
    Mutation(
        "lease-outside-the-memory",
        "remote/shared_memory.py",
        "if lease and (offset % PAGE or nbytes == 0 or offset + nbytes > capacity):",
        "if lease and (offset % PAGE or nbytes == 0):",
        "a worker reads past the mapped memory and dies",
        ("tests/remote/test_leased_places.py",),
    ),
    Mutation(
        "session-without-namespace",
        "server/net/sessions.py",
        "        self.key_prefix = key_prefix(self.namespace)\n",
        "        self.key_prefix = bytes(16)\n",
        "engines of different models get each other's blocks",
        _VERBS,
    ),
    Mutation(
        "flush-does-not-wait-for-copies",
        "server/tiers/tiered_store.py",
        "            self._fills.settle()\n            wait(self._finishing.copy())\n",
        "            wait(self._finishing.copy())\n",
        "a flush is answered before blocks that were received have reached the disk",
        _FILLS,
    ),
    Mutation(
        "lease-of-a-living-process-taken-back",
        "server/shm/leases.py",
        "return self.is_disconnected and self.is_dead",
        "return self.is_disconnected",
        "a slot is reused while a process still copies from it",
        _LEASES,
    ),
    Mutation(
        "lease-of-a-dead-process-kept",
        "server/shm/leases.py",
        "        count = self.release(attachment, list(attachment.leases))\n",
        "        count = 0\n",
        "every engine that is killed takes memory with it",
        _LEASES,
    ),
    Mutation(
        "reply-let-go-while-it-is-sent",
        "server/net/outbox.py",
        "for ticket in self._sender.take_sent():",
        "for ticket in list(self._tickets):",
        "a block is overwritten while zmq sends it",
        ("tests/daemon/test_outbox.py",),
    ),
    Mutation(
        "unwritten-block-evicted",
        "server/tiers/demotion.py",
        "return self._offer_unrecorded(tier, key) is not HandoffResult.TAKEN",
        "return True",
        "a block leaves memory before any disk has it",
        ("tests/daemon/test_demotion.py",),
    ),
    Mutation(
        "on-disk-acknowledged-from-memory",
        "server/tiers/demotion.py",
        "        if durability is not Durability.DISK:\n",
        "        if durability:\n",
        "a block acknowledged as on disk is gone after a crash",
        _TIERS,
    ),
    Mutation(
        "refused-blocks-forgotten-at-flush",
        "server/tiers/demotion.py",
        "            self._unwritten[tier][key] = result\n",
        "            pass\n",
        "what a full queue refused is lost at shutdown",
        ("tests/daemon/test_under_load.py::test_flush_with_full_write_queue_loses_nothing",),
    ),
    Mutation(
        "blocks-a-disk-failed-to-take-forgotten",
        "server/tiers/write_behind.py",
        "on_failed(waiting.block.key, result)",
        "pass",
        "a flush says that all is written where a full disk took nothing",
        ("tests/daemon/test_demotion.py",),
    ),
    Mutation(
        "deleted-block-written-behind",
        "server/tiers/demotion.py",
        "                self._behind[tier].discard(keys)\n",
        "",
        "a deleted block comes back from the SSD",
        ("tests/daemon/test_demotion.py",),
    ),
    Mutation(
        "block-read-back-during-a-delete-stays",
        "server/tiers/tiered_store.py",
        "            is_gone = self._delete_near(keys)  # read back",
        "            is_gone = True  # read back",
        "a block that was deleted everywhere is found in memory",
        ("tests/daemon/test_hung_backing.py",),
    ),
    Mutation(
        "removed-namespace-stays-on-the-ssd",
        "server/tiers/tiered_store.py",
        "                found.update(dict.fromkeys(self.ssd.keys_of(namespace)))\n",
        "                pass\n",
        "blocks of a namespace that was removed are served again",
        ("tests/daemon/test_inquiry.py",),
    ),
    Mutation(
        "damaged-block-promoted",
        "server/tiers/promotion.py",
        "if not is_read:\n",
        "if not slot:\n",
        "a block that the SSD lost is served as whatever the slot held",
        ("tests/daemon/test_demotion.py",),
    ),
    Mutation(
        "what-was-read-may-leave-before-it-is-handed-over",
        "server/tiers/promotion.py",
        "known.checksum, hold=True):\n                    held.append(slot)\n",
        "known.checksum):\n                    pass\n",
        "a load that is larger than the memory fails now and then",
        ("tests/daemon/test_promotion.py",),
    ),
    Mutation(
        "memory-checksum-not-compared",
        "stores/memory.py",
        "                if wanted is None or wanted == found:\n",
        "                if wanted is None or found >= 0:\n",
        "bytes that changed on the way are kept and served",
        _WRONG_CHECKSUM,
    ),
    Mutation(
        "memory-generation-not-renewed-at-commit",
        "stores/memory.py",
        "            generation = self.arena.next_generation(slot.offset)\n"
        "            if not self._index.commit(slot.slot):",
        "            generation = self.arena.generation(slot.offset)\n"
        "            if not self._index.commit(slot.slot):",
        "a readable block looks as if it were being written",
        _MEMORY_STORE,
    ),
    Mutation(
        "memory-readable-before-it-is-copied",
        "stores/memory.py",
        "                    slots += found\n",
        "                    slots += found\n"
        "                    for slot in slots:\n"
        "                        if not isinstance(slot, PutResult):\n"
        "                            self._readable[slot.key] = slot\n",
        "a reader sees a block that is half there",
        _MEMORY_STORE,
    ),
    Mutation(
        "memory-deleted-while-written-comes-back",
        "stores/memory.py",
        "                self._index.remove(key)  # also blocks that are still being written\n",
        "                if self._index.lookup(key) is Lookup.HIT:\n"
        "                    self._index.remove(key)\n",
        "a deleted block appears when its writer is done",
        _MEMORY_STORE,
    ),
    Mutation(
        "ssd-checksum-of-a-read-not-compared",
        "stores/ssd/store.py",
        "if moved.error is None and moved.checksum == read.checksum:",
        "if moved.error is None:",
        "bits that the disk flipped are served",
        _DAMAGE,
    ),
    Mutation(
        "ssd-acknowledged-before-it-is-durable",
        "stores/ssd/store.py",
        "if self._committer.wait(self._committer.barrier()):",
        "if self._committer.barrier() >= 0:",
        "a block that was acknowledged as on disk is lost with the power",
        _POWER_LOSS,
    ),
    Mutation(
        "ssd-data-not-synced",
        "stores/ssd/committer.py",
        "                self._data.sync()\n",
        "                pass\n",
        "after a power loss the index names blocks that were never written",
        _POWER_LOSS,
    ),
    Mutation(
        "ssd-journal-not-synced",
        "stores/ssd/committer.py",
        "            self._journal.sync()\n",
        "",
        "a block that was acknowledged as on disk is lost with the power",
        _POWER_LOSS,
    ),
    Mutation(
        "ssd-folder-not-synced",
        "stores/ssd/journal.py",
        "            disk.sync_folder(folder)\n",
        "",
        "after a power loss the old journal is back",
        _POWER_LOSS,
    ),
    Mutation(
        "ssd-lost-cycle-counts-as-durable",
        "stores/ssd/committer.py",
        "return self._durable >= cycle and cycle not in self._failed",
        "return self._durable >= cycle",
        "a block is acknowledged whose sync failed",
        ("tests/stores/test_ssd_commit.py",),
    ),
    Mutation(
        "ssd-record-checksum-not-compared",
        "stores/ssd/record_format.py",
        'sealed & (array["sequence"] == numbers)',
        'array["sequence"] == numbers',
        "a damaged record names any slot",
        _DAMAGE,
    ),
    Mutation(
        "ssd-journal-without-salt",
        "stores/ssd/journal.py",
        'JournalHeader(store, generation, int.from_bytes(os.urandom(8), "little"))',
        "JournalHeader(store, generation, 0)",
        "records left over from an older journal come alive",
        _DAMAGE,
    ),
    Mutation(
        "dir-checksum-not-compared",
        "stores/shared_dir/block_files.py",
        "if xxh3_64(into) != header.payload_checksum:",
        "if xxh3_64(into) < 0:",
        "bits that a file system flipped are served",
        _DIR,
    ),
    Mutation(
        "block-of-another-key",
        "stores/block_format.py",
        "    if key[:key_bytes] != wanted:\n",
        "    if not key:\n",
        "a file or value that was copied to another name is served as the block of that name",
        _DIR,
    ),
    Mutation(
        "dir-file-not-synced",
        "stores/shared_dir/block_files.py",
        "            if sync:\n                self._ops.fsync(fd)\n",
        "",
        "a block acknowledged as on disk is empty after a power loss",
        _DIR_FAULTS,
    ),
    Mutation(
        "dir-published-before-it-is-written",
        "stores/shared_dir/block_files.py",
        "            synced = self._write(fd, header, payload, sync)\n"
        "            is_new = self._give_name(temp, path)\n",
        "            is_new = self._give_name(temp, path)\n"
        "            synced = self._write(fd, header, payload, sync)\n",
        "a reader on another host sees half a block",
        _DIR_FAULTS,
    ),
    Mutation(
        "dir-no-grace-period",
        "stores/shared_dir/gc.py",
        "elif age_ns >= self._settings.grace_s * 1e9:",
        "elif age_ns >= 0:",
        "a block just published by another host is removed",
        _DIR_GC,
    ),
    Mutation(
        "redis-checksum-not-compared",
        "stores/redis/store.py",
        "self.is_whole = xxh3_64(self.into) == self._header.payload_checksum",
        "self.is_whole = True",
        "a damaged block in Redis is read as if it were whole",
        _REDIS,
    ),
    Mutation(
        "redis-block-without-a-part-found",
        "stores/redis/store.py",
        "lacks_parts = part is not None and part.reply != _parts_of(payload_bytes) - 1",
        "lacks_parts = False",
        "a block of which Redis evicted a part is offered and then fails to load",
        _REDIS,
    ),
)
