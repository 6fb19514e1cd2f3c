"""A proxy to a store that cuts the connection at a chosen request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

_CHUNK = 1 << 20


class Wire:
    """Proxies clients of the socket `path` to the store at `upstream`.

    After a call of `cut`, the connection is closed at a request: either before the store receives
    it, or after the store has executed it but before the reply is delivered.
    """

    def __init__(self, *, upstream: Path, path: Path) -> None:
        self._upstream = upstream
        self._path = path
        self._pattern = b""
        self._skip = 0
        self._done = False
        self._told: Callable[[], None] | None = None
        self.num_cuts = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    def cut(
        self,
        pattern: bytes = b"EVALSHA",
        *,
        done: bool,
        skip: int = 0,
        told: Callable[[], None] | None = None,
    ) -> None:
        """Close the connection at a request that contains `pattern`, after skipping `skip` of them.

        `done`: only after the store has executed it. `told` is called before the client notices.
        """
        self._pattern, self._done, self._skip, self._told = pattern, done, skip, told

    def mend(self) -> None:
        """Cancel a pending cut."""
        self._pattern = b""

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_unix_server(self._serve, self._path, limit=_CHUNK)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        store_reader, store_writer = await asyncio.open_unix_connection(self._upstream)
        replies = asyncio.create_task(_copy(store_reader, writer))
        try:
            while data := await reader.read(_CHUNK):
                if self._is_cut(data):
                    replies.cancel()
                    await asyncio.gather(replies, return_exceptions=True)
                    if self._done:
                        store_writer.write(data)
                        await store_reader.read(_CHUNK)
                    if self._told is not None:
                        self._told()
                    return
                store_writer.write(data)
        except asyncio.CancelledError:  # which asyncio would log: the wire has been closed
            return
        finally:
            replies.cancel()
            writer.close()
            store_writer.close()
            self._open.discard(task)

    def _is_cut(self, data: bytes) -> bool:
        if not self._pattern or self._pattern not in data:
            return False
        if self._skip:
            self._skip -= 1
            return False
        self._pattern = b""
        self.num_cuts += 1
        return True


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    writer.close()
