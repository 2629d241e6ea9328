"""One request being served, and how it is answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.net.sessions import Peer, Session
from vllm_tiered_kv.stores.memory import PinnedSlot
from vllm_tiered_kv.wire.messages import ErrorReply, Reply, encode_reply


class Replies(Protocol):
    """The way back to clients: `Outbox`."""

    def send(
        self,
        peer: Peer,
        header: bytes,
        payload: Sequence[PinnedSlot] = (),
        lost: Callable[[], None] | None = None,
    ) -> None:
        """Takes over the claimed blocks; `lost` is called if it was never sent."""

    def let_go(self, peer: Peer, blocks: Sequence[PinnedSlot]) -> None:
        """Claimed blocks that are not sent after all."""


class Call:
    """Answered exactly once, or streamed and then answered once. On the reactor's thread."""

    __slots__ = (
        "_on_end", "_reactor", "_recorder", "_replies", "is_over", "op", "request_id", "session"
    )  # fmt: skip

    def __init__(
        self,
        session: Session,
        request_id: int,
        op: str,
        replies: Replies,
        reactor: Reactor,
        recorder: Recorder,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_end` is called when it is answered, or nobody is left to hear the answer."""
        self.session = session
        self.request_id = request_id
        self.op = op
        self.is_over = False
        self._replies = replies
        self._reactor = reactor
        self._recorder = recorder
        self._on_end = on_end
        session.under_way += 1

    def reply(
        self,
        reply: Reply,
        payload: Sequence[PinnedSlot] = (),
        lost: Callable[[], None] | None = None,
    ) -> None:
        """The last word. Takes over the claimed blocks; `lost` is called if it was never sent."""
        if not self.is_over:
            self.is_over = True
            self.session.under_way -= 1
            self._on_end()
            self.part(reply, payload, lost)

    def part(
        self,
        reply: Reply,
        payload: Sequence[PinnedSlot] = (),
        lost: Callable[[], None] | None = None,
    ) -> None:
        """One message of a stream."""
        if self.session.is_open:
            header = encode_reply(self.request_id, reply)
            self._replies.send(self.session.peer, header, payload, lost)
        else:
            self._replies.let_go(self.session.peer, payload)
            if lost is not None:
                lost()

    def fail(self, error: ProtocolError) -> None:
        self._recorder.add(names.ERRORS, 1, error.code.value)
        self.reply(ErrorReply(error.code, error.message, self.op))

    def fail_internally(self) -> None:
        self.fail(ProtocolError(ErrorCode.INTERNAL, "the daemon failed; its log says why"))

    def later(self, answer: Callable[[], Reply]) -> None:
        """Answers from any thread."""

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

        self._reactor.hand_over(on_loop)
