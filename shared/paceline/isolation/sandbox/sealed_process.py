"""A program in the sandbox that stays: it is given requests and answers them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from paceline.errors import UnavailableError
from paceline.isolation.sandbox.pipes import ReadPipe, WritePipe
from paceline.isolation.sandbox.zygote import HEAD

_KEPT_ERRORS = 4096  # bytes of what it has printed, the last ones
_PRINTED_BYTES, _PAUSE_S = 256 << 10, 1.0  # after so much, nothing more is read for a while


@dataclass(frozen=True, slots=True)
class Forked:
    """A child as the warm process has made it."""

    pidfd: int
    end: asyncio.Future[int]  # its exit code, or minus the signal that has ended it


def kill(pidfd: int) -> None:
    """Kill a process, unless it has ended."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


class SealedProcess:
    """Requests go to its standard input; its answers stay in their pipe until `receive`."""

    def __init__(self, forked: Forked, fds: tuple[int, ...]) -> None:
        given, out, err, status = fds
        self._fds = [forked.pidfd, status]  # it fails if nobody could read its status
        self._end = forked.end
        self._printed = _Printed(err)
        self._stdin = WritePipe(given)
        self._answers = ReadPipe(out, lambda data: None, lambda: None)
        self._answers.pause_reading()

    @classmethod
    def adopt(cls, forked: Forked, fds: tuple[int, ...], source: bytes) -> SealedProcess:
        """Take over a child that waits for its program, and our ends of its pipes.

        Raises:
            OSError: it has ended already.
        """
        program, *rest = fds
        process = cls(forked, tuple(rest))
        try:
            os.write(program, HEAD.pack(len(source)) + source)
        except BaseException:
            process.close()
            raise
        finally:
            os.close(program)
        return process

    def receive(self, on_data: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """Hand over what it answers, from the first byte on; `on_end` is called once."""
        self._answers.hand_to(on_data, on_end)
        self._answers.resume_reading()

    def pause(self) -> None:
        """Leave what it answers in its pipe."""
        self._answers.pause_reading()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._answers.resume_reading()

    def write(self, data: bytes) -> None:
        """Send a request; nothing happens if it has ended."""
        self._stdin.write(data)

    async def exit_text(self) -> str:
        """How it has ended, and the last line that it has printed."""
        try:
            code = await asyncio.shield(self._end)
        except UnavailableError as error:  # the warm process has ended, and this one with it
            return error.message
        return f"exit code {code}" + (f", {last}" if (last := self._printed.last()) else "")

    async def kill(self) -> None:
        """Kill it and close the pipes."""
        self.close()

    def close(self) -> None:
        """As `kill`, at once."""
        if self._fds:
            kill(self._fds[0])
        while self._fds:
            os.close(self._fds.pop())
        self._stdin.close()
        self._answers.close()
        self._printed.close()


class _Printed:
    """Keeps the end of what was printed; who prints much has to wait."""

    def __init__(self, fd: int) -> None:
        self._kept = bytearray()
        self._left = _PRINTED_BYTES
        self._pipe = ReadPipe(fd, self._keep, lambda: None)
        self.close = self._pipe.close

    def _keep(self, data: bytes) -> None:
        self._kept += data
        del self._kept[:-_KEPT_ERRORS]
        self._left -= len(data)
        if self._left < 0:
            self._pipe.pause_reading()
            asyncio.get_running_loop().call_later(_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._left = _PRINTED_BYTES
        self._pipe.resume_reading()

    def last(self) -> str:
        lines = self._kept.decode(errors="replace").rstrip().splitlines()
        return lines[-1] if lines else ""
