"""A TCP link of limited bandwidth in front of a daemon, for machines whose disk is too fast."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

_PIECE = 64 << 10


class SlowLink:
    """Relays to `host:port`; what comes back from there is paced, over all connections together."""

    def __init__(self, endpoint: str, bytes_per_s: float) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.endpoint = ""

    def __enter__(self) -> SlowLink:
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result()
        self.endpoint = f"tcp://127.0.0.1:{started.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            self._relay(reader, far_writer, paced=False),
            self._relay(far_reader, writer, paced=True),
        )

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, paced: bool
    ) -> None:
        try:
            while data := await reader.read(_PIECE):
                if paced:
                    now = self._loop.time()
                    self._free_at = max(now, self._free_at) + len(data) / self._bytes_per_s
                    # Sleeps are coarse: small debts are left to add up.
                    if self._free_at - now > 0.002:
                        await asyncio.sleep(self._free_at - now)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
