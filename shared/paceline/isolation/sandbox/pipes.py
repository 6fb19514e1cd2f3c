"""Pipes that a loop only watches, so that whoever has opened them closes them, and once.

`connect_read_pipe` and `connect_write_pipe` take a file object instead. asyncio closes that file.
uvloop hands its descriptor to libuv, which closes it, and then closes the file too: the number may
be that of another thread's file or socket by then.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

_READ_BYTES = 64 << 10  # at a time


class ReadPipe(asyncio.ReadTransport):
    """The end of a pipe that is read, which belongs to this object from now on."""

    def __init__(
        self, fd: int, on_data: Callable[[bytes], None], on_end: Callable[[], None]
    ) -> None:
        """`fd` does not block. `on_end` is called once, also if the pipe is closed here."""
        super().__init__()
        self._fd = fd
        self._on_data, self._on_end = on_data, on_end
        self._loop = asyncio.get_running_loop()
        self._reading = False
        self.resume_reading()

    def hand_to(self, on_data: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """Hand what arrives from now on to others; `on_end` is called at once if it is closed."""
        self._on_data, self._on_end = on_data, on_end
        if self._fd < 0:
            on_end()

    def is_closing(self) -> bool:
        """Whether nothing is read any more."""
        return self._fd < 0

    def is_reading(self) -> bool:
        """Whether what arrives is read."""
        return self._reading

    def pause_reading(self) -> None:
        """Leave what arrives in the pipe."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def resume_reading(self) -> None:
        """Read what arrives; nothing happens once it is closed."""
        if not self._reading and self._fd >= 0:
            self._reading = True
            self._loop.add_reader(self._fd, self._on_readable)

    def close(self) -> None:
        """Close it; nothing happens the second time."""
        if self._fd >= 0:
            self.pause_reading()
            fd, self._fd = self._fd, -1
            os.close(fd)
            self._on_end()

    def _on_readable(self) -> None:
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._on_data(data)
        else:
            self.close()


class WritePipe:
    """The end of a pipe that is written to, which belongs to this object from now on."""

    def __init__(self, fd: int) -> None:
        """`fd` does not block."""
        self._fd = fd
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()

    def write(self, data: bytes) -> None:
        """Send bytes as the reader takes them; nothing happens if nobody reads any more."""
        if self._fd < 0:
            return
        waiting = bool(self._unsent)
        self._unsent += data
        if not waiting:
            self._send()
            if self._unsent:
                self._loop.add_writer(self._fd, self._on_writable)

    def close(self) -> None:
        """Close it, whatever is unsent; nothing happens the second time."""
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            self._unsent.clear()
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _on_writable(self) -> None:
        self._send()
        if not self._unsent and self._fd >= 0:
            self._loop.remove_writer(self._fd)

    def _send(self) -> None:
        try:
            num_sent = os.write(self._fd, self._unsent)
        except BlockingIOError:
            return
        except OSError:  # nobody reads any more
            self.close()
        else:
            del self._unsent[:num_sent]
