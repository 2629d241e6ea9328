"""Keys and the movement of bytes: `core/` and `device/`."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

_KEY = ("tests/unit/test_key.py",)
_DEVICE = ("tests/unit/test_device.py",)

KEYS = (
    Mutation(
        "key-without-namespace",
        "core/key.py",
        r'b"tiered-kv root\0" + namespace + canonical(scope)',
        r'b"tiered-kv root\0" + canonical(scope)',
        "blocks of another model, dtype or layout are served",
        _KEY,
    ),
    Mutation(
        "key-without-scope",
        "core/key.py",
        r'b"tiered-kv root\0" + namespace + canonical(scope)',
        r'b"tiered-kv root\0" + namespace',
        "tenants, adapters and epochs share blocks",
        _KEY,
    ),
    Mutation(
        "key-without-prefix",
        "core/key.py",
        'hashlib.sha256(parent + struct.pack("<I", len(extra))',
        'hashlib.sha256(struct.pack("<I", len(extra))',
        "a block is served behind another prefix than its own",
        _KEY,
    ),
    Mutation(
        "key-extra-without-length",
        "core/key.py",
        'struct.pack("<I", len(extra)) + extra + body',
        "extra + body",
        "bytes of an image pass for tokens",
        _KEY,
    ),
    Mutation(
        "canonical-without-length",
        "core/key.py",
        'out += tag + struct.pack("<I", len(body)) + body',
        "out += tag + body",
        "two different scopes give the same key",
        _KEY,
    ),
    Mutation(
        "fingerprint-without-format-version",
        "core/key.py",
        "text = json.dumps(asdict(self), sort_keys=True",
        'text = json.dumps({**asdict(self), "format_version": 0}, sort_keys=True',
        "blocks of an older format are misread",
        _KEY,
    ),
    Mutation(
        "store-key-without-rank",
        "core/store.py",
        "StoreKey(namespace[:NAMESPACE_BYTES] + key + rank.encode())",
        "StoreKey(namespace[:NAMESPACE_BYTES] + key)",
        "one rank gets the shard of another",
        (*_KEY, "tests/unit/test_remote_worker.py"),
    ),
)

_SHARED = ("tests/unit/test_replica_arena.py",)

COPIES = (
    Mutation(
        "memory-of-an-impostor",
        "device/replica_arena.py",
        "os.fstat(fd).st_size == nbytes and os.pread(fd, _TOKEN_BYTES, 0) == offer.token",
        "os.fstat(fd).st_size == nbytes",
        "ranks take the memory of some other process for their own",
        _SHARED,
    ),
    Mutation(
        "replicas-that-do-not-agree",
        "device/replica_arena.py",
        "if all(replicas.gather(fd is not None)):",
        "if fd is not None and replicas.gather(True):",
        "a rank believes in blocks that another one stored elsewhere",
        _SHARED,
    ),
    Mutation(
        "cpu-store-reported-before-it-is-copied",
        "device/cpu_copier.py",
        """            native.gather(
                self._layouts[transfer.group_id],
                transfer.block_ids,
                self._arena.region,
                self._offsets(transfer),
                self._threads,
            )
""",
        """            arguments = (
                self._layouts[transfer.group_id],
                transfer.block_ids,
                self._arena.region,
                self._offsets(transfer),
                self._threads,
            )
            threading.Timer(0.5, native.gather, arguments).start()
""",
        "a slot is readable before it holds the block",
        _DEVICE,
    ),
    Mutation(
        "cpu-failed-store-counts-as-stored",
        "device/cpu_copier.py",
        "self._stores_done.append(StoreDone(job_id, 0, DropReason.COPY_FAILED))",
        "self._stores_done.append(StoreDone(job_id, len(transfer)))",
        "a slot that was never written is served",
        _DEVICE,
    ),
    Mutation(
        "cpu-failed-load-counts-as-loaded",
        "device/cpu_copier.py",
        "error = str(failure)",
        "error = None",
        "a request goes on with blocks that hold anything",
        _DEVICE,
    ),
    Mutation(
        "cpu-close-does-not-wait",
        "device/cpu_copier.py",
        "            self._thread.join()\n",
        "",
        "a copy writes to memory that was given back",
        _DEVICE,
    ),
    Mutation(
        "fence-forgets-an-earlier-read",
        "cache/write_fence.py",
        "self._newest >= oldest else None",
        "self._newest in self._open else None",
        "a rank's block is overwritten while it is still being read",
        ("tests/unit/test_write_fence.py",),
    ),
    Mutation(
        "arena-usable-before-it-is-pinned",
        "device/pinning.py",
        """        pin(self._region.address + start, length)
        self._pinned.append(self._region.address + start)
        self.ready_bytes = start + length  # published last: readers only ever see pinned bytes
""",
        """        self.ready_bytes = start + length
        pin(self._region.address + start, length)
        self._pinned.append(self._region.address + start)
""",
        "the GPU copies to memory that is not registered",
        _DEVICE,
    ),
    Mutation(
        "arena-pages-left-to-the-driver",
        "device/pinning.py",
        "        self._populate(start, start + length)\n",
        "",
        "the driver provides pages while every other thread's calls wait for it",
        _DEVICE,
    ),
    Mutation(
        "arena-part-left-pinned",
        "device/pinning.py",
        "while self._pinned and self._unpin is not None:",
        "if self._pinned and self._unpin is not None:",
        "pinned memory leaks with every start and stop",
        _DEVICE,
    ),
    Mutation(
        "generation-not-compared",
        "device/shared_arena.py",
        "return bool(np.array_equal(self._generations[offsets // PAGE], generations))",
        "return True",
        "bytes that changed while they were copied are used",
        ("tests/unit/test_leased_blocks.py::test_blocks_that_changed_are_not_used",),
    ),
    Mutation(
        "arena-view-beyond-its-end",
        "device/shared_arena.py",
        "if not 0 <= offset <= offset + nbytes <= self.capacity_bytes:",
        "if not 0 <= offset <= offset + nbytes:",
        "a block that reaches past the memory is cut short in silence",
        ("tests/unit/test_shared_arena.py",),
    ),
    Mutation(
        "arena-may-shrink",
        "device/shared_arena.py",
        "elif fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:",
        "elif fcntl.fcntl(fd, fcntl.F_GET_SEALS) < 0:",
        "a process is killed by SIGBUS when another one truncates the memory",
        ("tests/remote/test_attachment.py::test_memory_that_could_shrink_is_not_mapped",),
    ),
)
