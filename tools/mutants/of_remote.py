"""The client of a daemon, and what it takes for granted: `remote/`."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

_FAULTS = ("tests/remote/test_faults.py",)
_HEALTH = ("tests/remote/test_health.py",)
_PLACES = (
    "tests/remote/test_lookup_leases.py::test_places_are_not_believed_unchecked",
    "tests/remote/test_lookup_leases.py::test_places_that_fit_are_believed",
)

_DESCRIPTORS = ("tests/remote/test_descriptors.py",)

REMOTE = (
    Mutation(
        "idle-connection-tries-for-ever",
        "remote/connection.py",
        "                (zmq.RECONNECT_IVL, _RECONNECT_MS),\n",
        "",
        "minutes after its daemon died, the whole engine stands still",
        ("tests/remote/test_daemon_trouble.py",),
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
        "get-position-twice",
        "remote/transfers.py",
        "if position >= len(asked.tasks) or position in asked.seen:",
        "if position >= len(asked.tasks):",
        "a block is overwritten after it was said to be whole",
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
        "get-length-unchecked",
        "remote/transfers.py",
        "        if payload.nbytes == task.into.nbytes:\n",
        "        if payload.nbytes:\n",
        "a strange daemon raises an exception in the engine",
        _FAULTS,
    ),
    Mutation(
        "put-tail-of-a-dropped-head",
        "remote/transfers.py",
        "            headless |= dropped\n"
        "            headless.update(_descendants(tasks, headless))\n",
        "            pass\n",
        "blocks travel that can never be found",
        _FAULTS,
    ),
    Mutation(
        "put-returns-while-the-payload-is-read",
        "remote/connection.py",
        "        if sending:\n            self._end_context(sending)\n",
        "",
        "a slot is reused while zmq still sends it",
        (
            "tests/remote/test_daemon_trouble.py"
            "::test_after_a_put_to_a_stopped_daemon_the_payload_is_the_callers_again",
        ),
    ),
    Mutation(
        "small-last-frames-copied",
        "remote/zero_copy_send.py",
        "track=True, copy=False, copy_threshold=0)",
        "track=True, copy=None)",
        "a slot is reused while zmq still sends it: what tells of it was copied",
        ("tests/remote/test_zero_copy_send.py",),
    ),
    Mutation(
        "reply-to-another-request",
        "remote/connection.py",
        """            if op is None:
                self._given_up""",
        """            if op is None and not self._under_way:
                self._given_up""",
        "a late reply is taken for the answer to another question",
        _FAULTS,
    ),
    Mutation(
        "reply-of-another-kind",
        "remote/connection.py",
        "if not isinstance(reply, ErrorReply) and reply.op != op:",
        "if not isinstance(reply, ErrorReply) and not reply.op:",
        "a strange daemon raises an exception in the engine",
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
        "match-of-more-than-was-asked",
        "remote/store.py",
        "return RemoteMatch(min(answer.count, asked), by_tier)",
        "return RemoteMatch(answer.count, by_tier)",
        "more tokens are promised to vLLM than there are keys",
        _FAULTS,
    ),
    Mutation(
        "contains-of-another-length",
        "remote/store.py",
        "            if len(tiers) != len(some):\n",
        "            if len(tiers) > len(some) + 1000:\n",
        "a strange daemon raises an exception in the engine",
        _FAULTS,
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
        "lookup-lease-of-more-than-was-asked",
        "remote/shared_memory.py",
        "if reply.count > len(request.keys) or len(reply.offsets) != 8 * blocks:",
        "if len(reply.offsets) != 8 * blocks:",
        "more tokens are promised to vLLM than there are keys",
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
        "late-leases-forgotten",
        "remote/shared_memory.py",
        "            self._release_later(lease for lease in reply.leases if lease)\n",
        "            pass\n",
        "a daemon's memory fills with blocks that nobody gives back",
        ("tests/remote/test_shared_memory.py::test_leases_that_come_too_late_go_back",),
    ),
    Mutation(
        "answer-to-an-interrupted-question-taken",
        "remote/connection.py",
        "        if self._on_late is not None:\n            self._given_up.update",
        "        if False:\n            self._given_up.update",
        "after an interrupt each call gets the places of the one before it",
        ("tests/remote/test_shared_memory.py",),
    ),
    Mutation(
        "forgotten-session-asked-after-an-answer",
        "remote/calls.py",
        "        if connection.answered > answered:\n            raise\n",
        "",
        "blocks that have come are asked for and sent again",
        ("tests/remote/test_faults.py",),
    ),
    Mutation(
        "unconfirmed-release-forgotten",
        "remote/shared_memory.py",
        "        if leases:\n            self._connection.call(Release(leases)",
        "        if leases:\n"
        "            self._unreleased.difference_update(leases)\n"
        "            self._connection.call(Release(leases)",
        "a daemon's memory fills with blocks that nobody gives back",
        (
            "tests/remote/test_shared_memory.py"
            "::test_a_release_that_was_not_confirmed_is_made_again",
        ),
    ),
    Mutation(
        "breaker-never-opens",
        "remote/health.py",
        "if not attempt.probe and not is_absent and self._failures_in_row < self._threshold:",
        "if not attempt.probe and not is_absent:",
        "a dead daemon costs every request its whole deadline",
        _HEALTH,
    ),
    Mutation(
        "daemon-blamed-for-late-questions",
        "remote/calls.py",
        "allowed_s < _FAIR_S):",
        "allowed_s < 0):",
        "a burst of requests gives up a daemon that is well",
        ("tests/remote/test_daemon_trouble.py",),
    ),
    Mutation(
        "shared-memory-asks-when-time-is-over",
        "remote/shared_memory.py",
        "            if allowed_s <= 0:  # which says nothing about the daemon\n",
        "            if False:\n",
        "what nobody waits for is asked of the daemon",
        ("tests/remote/test_lookup_leases.py",),
    ),
    Mutation(
        "breaker-never-closes",
        "remote/health.py",
        "                self._enter(BreakerState.CLOSED)\n",
        "",
        "a daemon that is back is never used again",
        _HEALTH,
    ),
    Mutation(
        "breaker-many-probes",
        "remote/health.py",
        "                self._enter(BreakerState.HALF_OPEN)\n",
        "",
        "every request waits for a dead daemon after each cool-down",
        _HEALTH,
    ),
    Mutation(
        "placement-by-order-of-configuration",
        "remote/placement.py",
        "return xxh3_64(self._encoded[address] + anchor), address",
        "return xxh3_64(bytes([self.addresses.index(address)]) + anchor), address",
        "engines that list daemons differently do not find each other's blocks",
        ("tests/remote/test_placement.py",),
    ),
    Mutation(
        "thread-of-leases-that-dies",
        "remote/local_daemon.py",
        "            except Exception:  # a thread",
        "            except ArithmeticError:  # a thread",
        "what is leased stays with the daemon for the engine's life",
        _DESCRIPTORS,
    ),
    Mutation(
        "connection-that-knows-no-lack",
        "remote/connection.py",
        "            if isinstance(error, zmq.ZMQError):\n",
        "            if False:\n",
        "a lack of descriptors ends threads that nobody starts again",
        _DESCRIPTORS,
    ),
    Mutation(
        "socket-of-the-attachment-unguarded",
        "remote/shared_memory.py",
        "    except OSError as error:  # no descriptors left, for now\n",
        "    except KeyError as error:  # no descriptors left, for now\n",
        "the thread that attaches hears of an error it does not expect",
        _DESCRIPTORS,
    ),
)
