"""Places that hold blocks: `stores/`."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

_CONTRACT = "tests/stores/test_contract.py::TestContract::"
_WRONG_CHECKSUM = (_CONTRACT + "test_a_wrong_checksum_fails_and_keeps_nothing",)
_MEMORY_STORE = ("tests/stores/test_memory_store.py",)
_NAMESPACES = ("tests/stores/test_namespaces.py",)
_POWER_LOSS = ("tests/stores/test_ssd_power_loss.py",)
_DAMAGE = ("tests/stores/test_ssd_damage.py",)
_DIR = ("tests/stores/test_shared_dir.py",)
_DIR_FAULTS = ("tests/stores/test_shared_dir_faults.py",)
_DIR_GC = ("tests/stores/test_shared_dir_gc.py",)

STORES = (
    Mutation(
        "memory-checksum-not-compared",
        "stores/memory.py",
        "                if wanted is None or wanted == found:\n",
        "                if wanted is None or found >= 0:\n",
        "bytes that changed on the way are kept and served",
        _WRONG_CHECKSUM,
    ),
    Mutation(
        "memory-block-of-another-length",
        "stores/memory.py",
        "fits = block is not None and block.nbytes == buffer.nbytes",
        "fits = block is not None",
        "a reader gets a part of a block, or an exception",
        (_CONTRACT + "test_a_buffer_of_another_length_is_a_miss",),
    ),
    Mutation(
        "namespaces-share-no-slabs",
        "stores/slab_owner.py",
        "return namespace if has_quota(namespace) else SHARED",
        "return namespace",
        "forty blocks of as many namespaces drive out all that a large one has",
        _NAMESPACES,
    ),
    Mutation(
        "ssd-class-from-before-a-wait",
        "stores/ssd/block_table.py",
        "            size_class = self.size_class(item.key, nbytes)  # another after a wait\n",
        "            size_class = self.size_class(item.key, nbytes) if _ == 0 else size_class\n",
        "a block is written over the slots of another length",
        _NAMESPACES,
    ),
    Mutation(
        "memory-generation-even-while-written",
        "device/shared_arena.py",
        "(before + 1 + before % 2) & _LAST_GENERATION",
        "(before + 1) & _LAST_GENERATION",
        "who copies out of a slot takes half a block for a whole one",
        _MEMORY_STORE,
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
        "memory-generations-not-renewed-at-commit",
        "stores/memory.py",
        "            generations = self.arena.next_generations(slots[n].offset for n in whole)\n",
        "            generations = [self.arena.generation(slots[n].offset) for n in whole]\n",
        "a readable block looks as if it were being written",
        _MEMORY_STORE,
    ),
    Mutation(
        "memory-dropped-parents-forgotten-in-runs",
        "stores/memory.py",
        "        if not self._dropped.keys().isdisjoint(parent for _, parent, _ in blocks):\n"
        "            return\n",
        "",
        "blocks that nobody can find push out those that can be found",
        _MEMORY_STORE,
    ),
    Mutation(
        "memory-half-reserved-messages-keep-their-slots",
        "stores/memory.py",
        "with self._lock, self.giving_back(slots):  # or nobody would know of them\n",
        "with self._lock:\n",
        "slots that nobody fills or frees, and blocks that are always about to come",
        _MEMORY_STORE,
    ),
    Mutation(
        "memory-readable-before-it-is-copied",
        "stores/memory.py",
        "            checksums = copy_and_hash(",
        "            for slot in slots:\n"
        "                if not isinstance(slot, PutResult):\n"
        "                    self._readable[slot.key] = slot\n"
        "            checksums = copy_and_hash(",
        "a reader sees a block that is half there",
        _MEMORY_STORE,
    ),
    Mutation(
        "memory-deleted-while-written-comes-back",
        "stores/memory.py",
        "                self._index.remove(key)  # also what is still being written\n",
        "                if self._index.lookup(key) is Lookup.HIT:\n"
        "                    self._index.remove(key)\n",
        "a deleted block appears when its writer is done",
        _MEMORY_STORE,
    ),
    Mutation(
        "memory-failed-copy-keeps-its-slots",
        "stores/memory.py",
        "                if not isinstance(slot, PutResult):\n"
        "                    self.abort(slot)\n            raise\n",
        "                pass\n            raise\n",
        "memory is lost with every failed put",
        _MEMORY_STORE,
    ),
    Mutation(
        "memory-tail-of-a-dropped-head",
        "stores/memory.py",
        "                    and parent in self._dropped\n",
        "                    and parent in ()\n",
        "blocks that can never be found push out others",
        _MEMORY_STORE,
    ),
    Mutation(
        "ssd-checksum-of-a-read-not-compared",
        "stores/ssd/store.py",
        "read.good = moved.checksum == read.wanted.payload_checksum",
        "read.good = True",
        "bits that the disk flipped are served",
        _DAMAGE,
    ),
    Mutation(
        "ssd-checksum-of-a-put-not-compared",
        "stores/ssd/store.py",
        "if moved.refused:",
        "if moved.checksum < 0:",
        "bytes that changed on the way are kept under a good checksum",
        _WRONG_CHECKSUM,
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
        "ssd-bad-block-stays",
        "stores/ssd/store.py",
        "elif read.ended and self._table.forget(read.slot, read.record):",
        "elif read.record:",
        "a damaged block is read again and again",
        _DAMAGE,
    ),
    Mutation(
        "ssd-forgets-what-it-never-read",
        "stores/ssd/store.py",
        "elif read.ended and self._table.forget(read.slot, read.record):",
        "elif self._table.forget(read.slot, read.record):",
        "good blocks are lost when a read is given up",
        ("tests/stores/test_ssd_batches.py",),
    ),
    Mutation(
        "batch-left-while-others-read",
        "stores/io_threads.py",
        "            while self._left:\n                self._ended.wait()\n",
        "            pass\n",
        "a late read writes into memory that belongs to another block by then",
        ("tests/stores/test_io_threads.py",),
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
        "ssd-new-journal-not-synced",
        "stores/ssd/journal.py",
        "            disk.sync(fd)\n            disk.rename",
        "            disk.rename",
        "a power loss while the journal is rewritten loses all of it",
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
        "ssd-blocks-behind-the-end-of-the-data",
        "stores/ssd/recovery.py",
        "return puts[possible & present]",
        "return puts[possible]",
        "recovery offers blocks that are not there",
        _DAMAGE,
    ),
    Mutation(
        "ssd-first-record-of-a-slot-wins",
        "stores/ssd/recovery.py",
        'rows = _last_of_each(contents.records["slot"])',
        'rows = np.unique(contents.records["slot"], return_index=True)[1]',
        "after a restart a slot is taken for a block that left it",
        _POWER_LOSS,
    ),
    Mutation(
        "dir-checksum-not-compared",
        "stores/shared_dir/block_file.py",
        "if xxh3_64(into) != header.payload_checksum:",
        "if xxh3_64(into) < 0:",
        "bits that a file system flipped are served",
        _DIR,
    ),
    Mutation(
        "dir-file-of-another-key",
        "stores/shared_dir/block_file.py",
        "header is None or header.key != key or header.file_bytes != file_bytes",
        "header is None or header.file_bytes != file_bytes",
        "a renamed or copied file is served as another block",
        _DIR,
    ),
    Mutation(
        "dir-header-checksum-not-compared",
        "stores/shared_dir/format.py",
        "if _CHECKSUM.unpack_from(data, _FIELDS.size)[0] != xxh3_64(fields):",
        "if _CHECKSUM.unpack_from(data, _FIELDS.size)[0] < 0:",
        "a damaged header is believed",
        _DIR,
    ),
    Mutation(
        "dir-file-not-synced",
        "stores/shared_dir/publication.py",
        "            if sync:\n                self._ops.fsync(fd)\n",
        "",
        "a block acknowledged as on disk is empty after a power loss",
        _DIR_FAULTS,
    ),
    Mutation(
        "dir-name-not-synced",
        "stores/shared_dir/publication.py",
        "            if sync:\n                self._sync_name(key, temp, path)\n",
        "",
        "a block acknowledged as on disk is gone after a power loss",
        _DIR_FAULTS,
    ),
    Mutation(
        "dir-lossy-block-counts-as-on-disk",
        "stores/shared_dir/store.py",
        "        if self._durable.knows(key, synced):\n",
        "        if synced:\n",
        "a block acknowledged as on disk is one that a power loss had emptied",
        _DIR_FAULTS,
    ),
    Mutation(
        "dir-published-before-it-is-written",
        "stores/shared_dir/publication.py",
        "            synced = self._write(fd, header, payload, sync)\n"
        "            outcome = self._give_name(temp, path)\n",
        "            outcome = self._give_name(temp, path)\n"
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
        "dir-capacity-ignored",
        "stores/shared_dir/gc.py",
        "if settings.capacity_bytes and report.scanned_bytes > settings.capacity_bytes:",
        "if settings.capacity_bytes and report.scanned_bytes > 2 * settings.capacity_bytes:",
        "the folder outgrows the room it was given",
        _DIR_GC,
    ),
)
