"""A request in flight, and how it is answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.net.outbox import Outbox
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.net.sessions import Session
from vllm_tiered_kv.stores.memory import PinnedSlot
from vllm_tiered_kv.wire.codec import encode_reply
from vllm_tiered_kv.wire.messages import ErrorReply, Reply


class Call:
    """A request in flight. Handlers answer it exactly once, after any number of streamed parts.
    Used on the reactor's thread, except for `reply_from_thread`."""

    __slots__ = (
        "_on_end", "_outbox", "_reactor", "_recorder", "is_answered", "op", "request_id", "session"
    )  # fmt: skip

    def __init__(
        self,
        session: Session,
        request_id: int,
        op: str,
        outbox: Outbox,
        reactor: Reactor,
        recorder: Recorder,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_end` is called when the request is answered, or its client has gone."""
        self.session = session
        self.request_id = request_id
        self.op = op
        self.is_answered = False
        self._outbox = outbox
        self._reactor = reactor
        self._recorder = recorder
        self._on_end = on_end
        session.in_flight += 1

    def reply(
        self,
        reply: Reply,
        payload: Sequence[PinnedSlot] = (),
        on_unsent: Callable[[], None] | None = None,
    ) -> None:
        """Sends the final reply. Takes over the claimed blocks; calls `on_unsent` if the reply can
        never be sent."""
        if self.is_answered:
            return
        header = self._encode(reply)  # first: if it fails, the request still gets an error
        self.is_answered = True
        self.session.in_flight -= 1
        self._on_end()
        self._send(header, payload, on_unsent)

    def stream_part(self, reply: Reply, payload: Sequence[PinnedSlot]) -> None:
        """Sends one message of a stream."""
        self._send(self._encode(reply), payload, None)

    def _encode(self, reply: Reply) -> bytes:
        """Empty if nobody waits for it."""
        return encode_reply(self.request_id, reply) if self.session.is_open else b""

    def _send(
        self,
        header: bytes,
        payload: Sequence[PinnedSlot],
        on_unsent: Callable[[], None] | None,
    ) -> None:
        if self.session.is_open and header:
            self._outbox.send(self.session.peer, header, payload, on_unsent)
        else:
            self._outbox.release_claimed(self.session.peer, payload)
            if on_unsent is not None:
                on_unsent()

    def fail(self, error: ProtocolError) -> None:
        self._recorder.add(names.ERRORS, 1, error.code.value)
        self.reply(ErrorReply(error.code, error.message, self.op))

    def fail_internally(self) -> None:
        self.fail(ProtocolError(ErrorCode.INTERNAL, "the daemon failed; its log says why"))

    def reply_from_thread(self, answer: Callable[[], Reply]) -> None:
        """Sends the reply that `answer` returns, or its ProtocolError. From any thread."""

        def on_loop() -> None:
            try:
                reply = answer()
            except ProtocolError as error:
                self.fail(error)
                return
            except Exception:
                self.fail_internally()
                raise
            self.reply(reply)

        self._reactor.run_on_loop(on_loop)
