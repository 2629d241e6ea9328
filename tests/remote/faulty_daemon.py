"""A daemon that can misbehave: a ROUTER socket in a thread that keeps blocks in a dictionary.

The real daemon cannot be made to send a wrong id, another's reply or half a stream. `fault` gets
every request first and may return other replies; if it returns None, the daemon answers correctly.
`delay` returns for how many seconds the replies to a request are held back; others may pass them.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import xxhash
import zmq

from vllm_tiered_kv.core.store import PutResult
from vllm_tiered_kv.wire.codec import decode_request, encode_reply
from vllm_tiered_kv.wire.limits import PROTOCOL_VERSION
from vllm_tiered_kv.wire.messages import (
    Contains,
    ContainsReply,
    Delete,
    DeleteReply,
    Flush,
    FlushReply,
    Get,
    GetReply,
    Hello,
    HelloReply,
    Info,
    InfoReply,
    Limits,
    Match,
    MatchReply,
    Put,
    PutReply,
    Reply,
    Request,
    Stats,
    StatsReply,
    put_codes,
)

Frames = list[bytes]
Fault = Callable[["FaultyDaemon", int, Request], "list[Frames] | None"]
Delay = Callable[[Request], float]

_POLL_S = 0.02  # how long it may take to notice `stop`


def framed(request_id: int, reply: Reply, payload: Sequence[bytes] = ()) -> Frames:
    return [encode_reply(request_id, reply), *payload]


def block_reply(
    request_id: int, blocks: dict[int, bytes], more: bool = False, flip: int = 0
) -> Frames:
    """Returns a reply with blocks by position; `flip` is XORed into their checksums."""
    payload = list(blocks.values())
    checksums = [xxhash.xxh3_64_intdigest(block) ^ flip for block in payload]
    reply = GetReply(list(blocks), [len(block) for block in payload], checksums, more)
    return framed(request_id, reply, payload)


class FaultyDaemon:
    def __init__(self, fault: Fault | None = None, limits: Limits | None = None) -> None:
        self.fault = fault
        self.delay: Delay | None = None
        self.limits = limits or Limits()
        self.instance = secrets.token_bytes(16)
        self.blocks: dict[bytes, bytes] = {}
        self.seen: list[Request] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind("tcp://127.0.0.1:*")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> FaultyDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)
        self._context.destroy(linger=0)

    def ops(self) -> list[str]:
        return [request.op for request in self.seen]

    def _run(self) -> None:
        held_back: list[tuple[float, int, Frames]] = []  # heap: by due time, then arrival
        arrivals = itertools.count()
        while not self._stop.is_set():
            while held_back and held_back[0][0] <= time.monotonic():
                self._socket.send_multipart(heapq.heappop(held_back)[2])
            poll_s = _POLL_S
            if held_back:
                poll_s = min(poll_s, max(0.0, held_back[0][0] - time.monotonic()))
            if not self._socket.poll(int(poll_s * 1000)):
                continue
            identity, header, *payload = self._socket.recv_multipart()
            request_id, request = decode_request(header, [len(frame) for frame in payload])
            self.seen.append(request)
            answers = self.fault(self, request_id, request) if self.fault else None
            if answers is None:
                answers = [self.honest(request_id, request, payload)]
            due = time.monotonic() + self.delay(request) if self.delay else 0.0
            for frames in answers:
                heapq.heappush(held_back, (due, next(arrivals), [identity, *frames]))

    def honest(self, request_id: int, request: Request, payload: Sequence[bytes] = ()) -> Frames:
        if isinstance(request, Get):
            return block_reply(
                request_id,
                {n: self.blocks[k] for n, k in enumerate(request.keys) if k in self.blocks},
            )
        return framed(request_id, self._answer(request, payload))

    def _answer(self, request: Request, payload: Sequence[bytes]) -> Reply:
        if isinstance(request, Hello):
            token = secrets.token_bytes(16)
            return HelloReply(PROTOCOL_VERSION, "faulty", [], self.instance, token, self.limits)
        if isinstance(request, Contains):
            return ContainsReply(bytes(key in self.blocks for key in request.keys))
        if isinstance(request, Match):
            count = 0
            for key in request.keys:
                if not all(key + end in self.blocks for end in request.suffixes or [b""]):
                    break
                count += 1
            return MatchReply(count, [count, 0, 0])
        if isinstance(request, Put):
            self.blocks.update(zip(request.keys, payload, strict=True))
            return PutReply(put_codes([PutResult.STORED] * len(payload)))
        if isinstance(request, Delete):
            return DeleteReply(sum(self.blocks.pop(key, None) is not None for key in request.keys))
        if isinstance(request, Flush):
            return FlushReply()
        if isinstance(request, Info):
            return InfoReply({})
        assert isinstance(request, Stats), request
        return StatsReply({})


def forgetful(daemon: FaultyDaemon, request_id: int, request: Request) -> list[Frames] | None:
    """A fault: matches every key, but returns no block."""
    if isinstance(request, Match):
        count = len(request.keys)
        return [framed(request_id, MatchReply(count, [count, 0, 0]))]
    return [framed(request_id, GetReply([], [], []))] if isinstance(request, Get) else None
