"""A forwarder that corrupts the bytes it sends."""

from __future__ import annotations

import asyncio
import contextlib

_CLEAN_BYTES = 64 << 10  # of every connection: requests and headers
_BLOCK_BYTES = 256 << 10


class Forwarder:
    """Forwards connections to a port of the same host, and flips a bit in every block it sends."""

    def __init__(self, *, host: str, port: int) -> None:
        self._host = host
        self._port = port

    async def start(self) -> str:
        """Start listening; returns the endpoint."""
        server = await asyncio.start_server(self._forward, self._host, 0)
        return f"http://{self._host}:{server.sockets[0].getsockname()[1]}"

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to = await asyncio.open_connection(self._host, self._port)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(_copy(reader, to, damage=False), _copy(there, writer, damage=True))
        to.close()
        writer.close()


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, damage: bool
) -> None:
    passed = 0
    while data := bytearray(await reader.read(_BLOCK_BYTES)):
        passed += len(data)
        if damage and passed > _CLEAN_BYTES:
            data[-1] ^= 1
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
