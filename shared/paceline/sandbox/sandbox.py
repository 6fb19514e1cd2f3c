"""Runs programs from a service, each with limits, through a warm process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from paceline.errors import UnavailableError
from paceline.plugins.programs import ProgramEnding, ProgramLimits, ProgramOutcome
from paceline.sandbox.zygote import HEAD, MAX_PACKET

ZYGOTE = Path(__file__).with_name("zygote.py")
START_S = 30.0
REPLY_S = 10.0
_READ_BYTES = 64 << 10  # at a time
_KEPT_ERRORS = 4096  # bytes of standard error, the last ones
_ENVIRONMENT = {"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}


class Sandbox:
    """A warm process and the programs that run in its children; restarted when it has ended."""

    def __init__(self) -> None:
        self._starting = asyncio.Lock()
        self._warm: _Warm | None = None

    async def run(
        self, source: str, *, stdin: bytes = b"", limits: ProgramLimits
    ) -> ProgramOutcome:
        """Run a program to its end; callers bound how many run at a time.

        Raises:
            UnavailableError: this machine cannot contain programs, or the warm process has ended.
        """
        warm = await self._started()
        with ExitStack() as stack:
            child = await warm.fork(limits, stack)
            return await child.finish(source.encode(), stdin)

    async def close(self) -> None:
        """Kill the warm process, and with it all programs."""
        if self._warm is not None:
            await self._warm.close()
            self._warm = None

    async def _started(self) -> _Warm:
        async with self._starting:
            if self._warm is not None and self._warm.ended:
                await self.close()
            if self._warm is None:
                self._warm = await _Warm.start()
            return self._warm


class _Warm:
    """The warm process, and who waits for what it says."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.ended = False
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._forking = asyncio.Lock()
        self._reply: asyncio.Future[tuple[dict[str, Any], list[int]]] | None = None
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._loop.add_reader(control, self._receive)

    @classmethod
    async def start(cls) -> _Warm:
        """Start one; raises `UnavailableError` if it cannot contain programs here."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        root = str(ZYGOTE.parents[2])
        with theirs:
            # From the main thread: the process dies with the thread that has started it.
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(ZYGOTE), root],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_ENVIRONMENT,
                start_new_session=True,
            )
        warm = cls(process, ours)
        try:
            await warm._next(START_S)
        except (UnavailableError, TimeoutError):
            why = await warm.close()
            raise UnavailableError(f"sandbox: cannot start: {why}") from None
        return warm

    async def fork(self, limits: ProgramLimits, stack: ExitStack) -> _RunningProgram:
        """A child that waits for its program; `stack` closes its descriptors and ends it."""
        async with self._forking:
            theirs, ours = zip(*(_pipe(inwards) for inwards in (True, False, False)), strict=True)
            for fd in ours:
                stack.callback(os.close, fd)
            asked = {
                "memory_bytes": limits.memory_bytes,
                "cpu_s": limits.cpu_s,
                "output_bytes": limits.output_bytes,
                "open_files": limits.open_files,
            }
            try:
                socket.send_fds(self._control, [json.dumps(asked).encode()], list(theirs))
            except OSError as error:
                raise UnavailableError(f"sandbox: {error}") from None
            finally:
                for fd in theirs:
                    os.close(fd)
            answer, fds = await self._next(REPLY_S)
        if "pid" not in answer or not fds:
            raise UnavailableError(f"sandbox: {answer.get('error', 'no child')}")
        stack.callback(os.close, fds[0])
        stack.callback(_kill, fds[0])
        pid = int(answer["pid"])
        end = self._ends.setdefault(pid, self._loop.create_future())
        stack.callback(self._ends.pop, pid, None)
        return _RunningProgram(fds[0], ours, end, limits)

    async def close(self) -> str:
        """Kill it; returns the last line that it has written."""
        self._end("the sandbox is closed")
        self._process.kill()
        _, errors = await asyncio.to_thread(self._process.communicate)
        lines = errors.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    async def _next(self, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        """The next answer that is not the end of a child."""
        if self.ended:
            raise UnavailableError("sandbox: its process has ended")
        self._reply = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._reply
        finally:
            self._reply = None

    def _receive(self) -> None:
        try:
            packet, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET, 1)
        except BlockingIOError:
            return
        except OSError:
            packet, fds = b"", []
        if not packet:
            self._end("its process has ended")
            return
        message: dict[str, Any] = json.loads(packet)
        if "ended" in message:
            end = self._ends.setdefault(message["ended"], self._loop.create_future())
            if not end.done():
                end.set_result(int(message["status"]))
        elif self._reply is not None and not self._reply.done():
            self._reply.set_result((message, list(fds)))

    def _end(self, why: str) -> None:
        if self.ended:
            return
        self.ended = True
        self._loop.remove_reader(self._control)
        self._control.close()
        error = UnavailableError(f"sandbox: {why}")
        for future in (self._reply, *self._ends.values()):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting for it


class _RunningProgram:
    """A program in the making: what it is given, and what it writes."""

    def __init__(
        self, pidfd: int, fds: tuple[int, ...], end: asyncio.Future[int], limits: ProgramLimits
    ) -> None:
        self._pidfd = pidfd
        self._given, self._out, self._err = fds
        self._end = end
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._open = {self._out, self._err}
        self._stdout, self._stderr = bytearray(), bytearray()
        self._too_much = False

    async def finish(self, source: bytes, stdin: bytes) -> ProgramOutcome:
        """Hand over the program, and wait until it has ended or is killed."""
        started = time.monotonic()
        self._to_send = memoryview(HEAD.pack(len(source), len(stdin)) + source + stdin)
        self._loop.add_writer(self._given, self._send)
        for fd in self._open:
            self._loop.add_reader(fd, self._read, fd)
        timed_out = False
        try:
            async with asyncio.timeout(self._limits.time_s):
                await self._over.wait()
                await asyncio.shield(self._end)
        except TimeoutError:
            timed_out = True
        finally:
            self._stop()
            _kill(self._pidfd)
        # Killed, it ends at once; the exit code tells crashes from ends.
        status = await asyncio.wait_for(asyncio.shield(self._end), REPLY_S)
        ending = ProgramEnding.EXITED if status >= 0 else ProgramEnding.KILLED
        if self._too_much:
            ending = ProgramEnding.OUTPUT
        elif timed_out:
            ending = ProgramEnding.TIMEOUT
        seconds = time.monotonic() - started
        return ProgramOutcome(
            ending, abs(status), bytes(self._stdout), bytes(self._stderr), seconds
        )

    def _send(self) -> None:
        try:
            self._to_send = self._to_send[os.write(self._given, self._to_send[:_READ_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:  # it has ended without reading
            self._to_send = self._to_send[:0]
        if not self._to_send:
            self._loop.remove_writer(self._given)

    def _read(self, fd: int) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if fd == self._err:
            self._stderr = (self._stderr + data)[-_KEPT_ERRORS:]
        else:
            self._stdout += data[: self._limits.output_bytes + 1 - len(self._stdout)]
        self._too_much = self._too_much or len(self._stdout) > self._limits.output_bytes
        if self._too_much:
            self._over.set()
            _kill(self._pidfd)
        if not data:
            self._loop.remove_reader(fd)
            self._open.discard(fd)
            if not self._open:
                self._over.set()

    def _stop(self) -> None:
        self._loop.remove_writer(self._given)
        for fd in self._open:
            self._loop.remove_reader(fd)


def _kill(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _pipe(inwards: bool) -> tuple[int, int]:
    """A pipe, as the child's end and ours, which does not block."""
    read, write = os.pipe2(os.O_CLOEXEC)
    theirs, ours = (read, write) if inwards else (write, read)
    os.set_blocking(ours, False)
    return theirs, ours
