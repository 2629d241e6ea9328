"""The daemon: `server/`."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

_LINK = ("tests/daemon/test_link_calls.py",)
_LEASES = ("tests/daemon/test_shared_memory.py",)
_TIERS = ("tests/daemon/test_tiers.py",)
_VERBS = ("tests/daemon/test_verbs.py",)

SERVER = (
    Mutation(
        "session-without-namespace",
        "server/sessions.py",
        "        prefix = self.namespace[:NAMESPACE_BYTES]\n",
        "        prefix = bytes(NAMESPACE_BYTES)\n",
        "engines of different models get each other's blocks",
        _VERBS,
    ),
    Mutation(
        "reader-may-write",
        "server/handlers.py",
        "        session.require_writer()\n        session.require_lengths(request.lengths)\n",
        "        session.require_lengths(request.lengths)\n",
        "a client that may only read poisons the cache",
        ("tests/daemon/test_security.py",),
    ),
    Mutation(
        "reader-may-delete",
        "server/handlers.py",
        "        call.session.require_writer()\n"
        "        keys = call.session.keys(request.width, request.keys)\n"
        "        self._pins.release(keys)\n",
        "        keys = call.session.keys(request.width, request.keys)\n"
        "        self._pins.release(keys)\n",
        "a client that may only read empties the cache",
        ("tests/daemon/test_security.py",),
    ),
    Mutation(
        "lease-of-a-living-process-taken-back",
        "server/leases.py",
        "return self.is_disconnected and self.is_dead",
        "return self.is_disconnected",
        "a slot is reused while a process still copies from it",
        _LEASES,
    ),
    Mutation(
        "lease-without-limit",
        "server/leases.py",
        "return nbytes <= self.room_bytes",
        "return True",
        "one engine takes all of a daemon's memory",
        _LEASES,
    ),
    Mutation(
        "loan-without-limit",
        "server/leases.py",
        "return max(0, min(self.room_bytes, self._most_loaned - self._loaned))",
        "return self.room_bytes",
        "requests that wait leave no room for those that copy",
        ("tests/daemon/test_loans.py",),
    ),
    Mutation(
        "unsent-reply-of-the-link-kept",
        "server/link_calls.py",
        "        if lost is not None:\n            lost()\n",
        "",
        "a process that does not read its replies keeps what they lent",
        _LINK,
    ),
    Mutation(
        "link-answers-anything",
        "server/link_calls.py",
        "if not isinstance(request, (Borrow, Release)):",
        "if False:",
        "blocks are deleted, or sent, over a way that was made for neither",
        _LINK,
    ),
    Mutation(
        "link-outlives-its-session",
        "server/sessions.py",
        "                del self._by_attachment[attachment]\n",
        "                pass\n",
        "a process is answered in a session that it has left",
        _LINK,
    ),
    Mutation(
        "lease-of-a-dead-process-kept",
        "server/leases.py",
        "        count = self.release(attachment, list(attachment.leases))\n",
        "        count = 0\n",
        "every engine that is killed takes memory with it",
        _LEASES,
    ),
    Mutation(
        "reply-let-go-while-it-is-sent",
        "server/outbox.py",
        "while line.in_zmq and line.in_zmq[0][0]() is None:",
        "while line.in_zmq:",
        "a block is overwritten while zmq sends it",
        ("tests/daemon/test_outbox.py",),
    ),
    Mutation(
        "replies-without-limit",
        "server/outbox.py",
        "        if not fits and not must:\n",
        "        if not fits and not must and nbytes < 0:\n",
        "a client that does not read pins all of the memory",
        (
            "tests/daemon/test_hostile_clients.py::test_a_client_that_never_reads_pins_little_and_not_forever",
        ),
    ),
    Mutation(
        "unwritten-block-evicted",
        "server/lower_tiers.py",
        "return self._hand_to(tier, key) is not Handed.TAKEN",
        "return True",
        "a block leaves memory before any disk has it",
        ("tests/daemon/test_way_down.py",),
    ),
    Mutation(
        "on-disk-acknowledged-from-memory",
        "server/lower_tiers.py",
        "        if durability is not Durability.DISK:\n",
        "        if durability:\n",
        "a block acknowledged as on disk is gone after a crash",
        _TIERS,
    ),
    Mutation(
        "refused-blocks-forgotten-at-flush",
        "server/lower_tiers.py",
        "            self._refused[tier][key] = None\n",
        "            pass\n",
        "what a full queue refused is lost at shutdown",
        ("tests/daemon/test_under_load.py::test_a_full_write_queue_loses_nothing_at_flush",),
    ),
    Mutation(
        "deleted-block-written-behind",
        "server/lower_tiers.py",
        "            self._behind[tier].discard(keys)\n            store.delete(keys)\n",
        "            store.delete(keys)\n",
        "a deleted block comes back from the SSD",
        ("tests/daemon/test_way_down.py",),
    ),
    Mutation(
        "written-block-stays-pinned",
        "server/write_behind.py",
        "        self._memory.let_go([waiting.block for waiting in batch])\n",
        "",
        "memory fills with blocks that cannot leave",
        (*_TIERS, "tests/daemon/test_way_down.py"),
    ),
    Mutation(
        "damaged-block-promoted",
        "server/tiered_store.py",
        "if not good:\n",
        "if not slot:\n",
        "a block that the SSD lost is served as whatever the slot held",
        ("tests/daemon/test_way_down.py",),
    ),
    Mutation(
        "slots-of-a-failed-read-stay-reserved",
        "server/tiered_store.py",
        "            for slot in slots:\n                self.memory.abort(slot)\n",
        "            pass\n",
        "a tier that fails takes the memory with it",
        ("tests/daemon/test_way_up.py",),
    ),
    Mutation(
        "hits-wait-for-the-tier-below",
        "server/tiered_store.py",
        "        elsewhere = set(missing)\n",
        "        elsewhere = set(keys) if missing else set()\n        missing = list(elsewhere)\n",
        "a shared file system that hangs takes the SSD with it",
        ("tests/daemon/test_way_up.py",),
    ),
    Mutation(
        "damaged-block-not-sought-below",
        "server/tiered_store.py",
        "                    missing.append(slot.key)\n",
        "                    pass\n",
        "a block that a slower tier has whole is recomputed",
        ("tests/daemon/test_way_up.py",),
    ),
    Mutation(
        "pins-without-limit",
        "server/pins.py",
        "return self._bytes + nbytes <= self._most_bytes",
        "return True",
        "one client keeps all of the memory from the others",
        _VERBS,
    ),
    Mutation(
        "pins-for-ever",
        "server/pins.py",
        "if until <= now]",
        "if until < 0]",
        "a client that forgets to unpin keeps memory for ever",
        _VERBS,
    ),
)
