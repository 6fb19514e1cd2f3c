"""A TCP relay that can hold, delay and reset the connections through it."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

_PIECE = 1 << 16
_CLOSING_S = 0.1
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close sends RST


class Relay:
    """Listens on a loopback port in a separate thread until `close`.

    `target` returns the destination port of each new connection; None refuses it.
    """

    def __init__(self, target: Callable[[], int | None]) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._delay_s = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="relay", daemon=True)
        self._thread.start()

    def hold(self) -> None:
        """Stop forwarding, without closing connections."""
        self._call(self._open.clear)

    def release(self) -> None:
        """Resume forwarding."""
        self._call(self._open.set)

    def slow(self, delay_s: float) -> None:
        """Delay each chunk by so many seconds; 0: no delay."""
        self._call(lambda: setattr(self, "_delay_s", delay_s))

    def reset(self, share: float, chance: random.Random) -> None:
        """Reset this share of the connections with RST, at least one."""
        self._call(lambda: self._reset(share, chance))

    def close(self) -> None:
        """Stop, and break all connections."""
        self._call(self._loop.stop)
        self._thread.join()

    def _call(self, work: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(work)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._open.set()
        self._loop.run_until_complete(asyncio.start_server(self._accept, sock=self._listener))
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(_CLOSING_S))
        self._loop.close()

    def _reset(self, share: float, chance: random.Random) -> None:
        lines = sorted(self._writers, key=id)
        count = min(len(lines), max(1, round(share * len(lines))))
        for writer in chance.sample(lines, count):
            line = writer.get_extra_info("socket")
            with suppress(OSError):
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = self._target()
        try:
            if port is None:
                raise OSError("nobody is there")
            far = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        self._writers.add(writer)
        there = asyncio.create_task(self._pump(reader, far[1]))
        back = asyncio.create_task(self._pump(far[0], writer))
        try:
            await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            there.cancel()
            back.cancel()
            self._writers.discard(writer)
            writer.close()
            far[1].close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(_PIECE):
                await self._open.wait()
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                writer.write(piece)
                await writer.drain()
