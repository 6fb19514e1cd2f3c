"""Runs programs from a service, each with limits, through a warm process."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UnavailableError
from paceline.isolation.sandbox.sealed_process import Forked, SealedProcess, kill
from paceline.isolation.sandbox.zygote import HEAD, LANDLOCK, MAX_PACKET, NAMESPACES, command
from paceline.platform.telemetry.logs import Log
from paceline.plugins.programs import ProgramEnding, ProgramLimits, ProgramOutcome

START_S = 30.0
REPLY_S = 10.0
log = Log(__name__)
_READ_BYTES = 64 << 10  # at a time
_READY = 0  # the number of the answer that says that it is
_FULL_S = 0.001  # until a full socket is tried again
_KEPT_ERRORS = 4096  # bytes of standard error, the last ones
_ENVIRONMENT = {"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}


class Sandbox:
    """A warm process and the programs that run in its children; restarted when it has ended."""

    def __init__(self, *preload: str, lowest: int = LANDLOCK, highest: int = NAMESPACES) -> None:
        """`preload`: modules of ours that programs of `start` would import, as `module@folder`.

        `lowest` and `highest`: levels by which programs may be held.
        """
        self._preload = preload
        self._lowest, self._highest = lowest, highest
        self._starting = asyncio.Lock()
        self._warm: _Warm | None = None
        self._found: int | None = None

    async def run(
        self, source: str, *, stdin: bytes = b"", limits: ProgramLimits
    ) -> ProgramOutcome:
        """Run a program to its end; callers bound how many run at a time.

        Raises:
            UnavailableError: this machine cannot contain programs, or the warm process has ended.
        """
        warm = await self._started(limits)
        with ExitStack() as stack:
            forked, ours = await warm.fork(limits, ())
            stack.callback(os.close, forked.pidfd)
            stack.callback(kill, forked.pidfd)
            for fd in ours:
                stack.callback(os.close, fd)
            return await _RunningProgram(forked, ours, limits).finish(source.encode(), stdin)

    async def start(
        self, source: str, *, readable: Sequence[Path], limits: ProgramLimits
    ) -> SealedProcess:
        """Start a program that stays, and may read these folders; `limits.time_s` does not hold.

        Raises:
            UnavailableError: as `run`.
        """
        warm = await self._started(limits)
        forked, ours = await warm.fork(limits, [str(path) for path in readable])
        try:
            return SealedProcess.adopt(forked, ours, source.encode())
        except OSError as error:
            raise UnavailableError(f"sandbox: a program could not be started: {error}") from None

    async def level(self) -> Level:
        """What holds programs here.

        Raises:
            UnavailableError: nothing does, or less than is asked for.
        """
        return (await self._started(ProgramLimits())).level

    def load(self) -> dict[str, float]:
        """The level for the roster, once there was a program; 0 if programs cannot be held."""
        return {} if self._found is None else {"sandbox_level": float(self._found)}

    async def close(self) -> None:
        """Kill the warm process, and with it all programs."""
        if self._warm is not None:
            await self._warm.close()
            self._warm = None

    async def _started(self, limits: ProgramLimits) -> _Warm:
        async with self._starting:
            if self._warm is not None and self._warm.ended:
                await self.close()
            if self._warm is None:
                self._found = 0
                self._warm = await _Warm.start(command(self._highest, self._preload))
                self._found = self._warm.level.number
                log.info("sandbox", level=self._found, why=self._warm.level.why)
            level = self._warm.level
            needed = NAMESPACES if limits.processes or limits.scratch_bytes else self._lowest
            if level.number < needed:
                raise UnavailableError(
                    f"sandbox: level {needed} is needed, here it is {level.number}: {level.why}"
                )
            return self._warm


@dataclass(frozen=True, slots=True)
class Level:
    """What holds programs."""

    number: int  # 2: Landlock, seccomp and limits; 3: namespaces too
    why: str  # it is no higher one


class _Warm:
    """The warm process, and who waits for what it says."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.ended = False
        self.level = Level(0, "it has not started")
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Forked]] = {}
        self._ends: dict[int, asyncio.Future[int]] = {}  # of programs, by pid
        self._loop.add_reader(control, self._receive)

    @classmethod
    async def start(cls, arguments: Sequence[str]) -> _Warm:
        """Start one; raises `UnavailableError` if it cannot contain programs here."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            # From the main thread: the process dies with the thread that has started it.
            process = subprocess.Popen(
                arguments,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_ENVIRONMENT,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise UnavailableError(f"sandbox: cannot start: {error}") from None
        finally:
            theirs.close()
        warm = cls(process, ours)
        try:
            await warm._answer(_READY, START_S)
        except (UnavailableError, TimeoutError):
            why = await warm.close()
            raise UnavailableError(f"sandbox: cannot start: {why}") from None
        except BaseException:
            warm.kill("its start was cancelled")
            raise
        return warm

    async def fork(
        self, limits: ProgramLimits, readable: Sequence[str]
    ) -> tuple[Forked, tuple[int, ...]]:
        """A child that waits for its program, and our ends of its pipes, which do not block."""
        inwards = (True, True, False, False, False)
        number = next(self._numbers)
        asked = {"id": number, "readable": list(readable), **asdict(limits)}
        theirs: list[int] = []
        ours: list[int] = []
        with ExitStack() as own, ExitStack() as given:
            for each in inwards:
                their, our = _pipe(each)
                given.callback(os.close, their)
                own.callback(os.close, our)
                theirs.append(their)
                ours.append(our)
            try:
                await self._send(json.dumps(asked).encode(), theirs)
                forked = await self._answer(number, REPLY_S)
            except TimeoutError:
                raise UnavailableError(f"sandbox: no child within {REPLY_S:g} s") from None
            own.pop_all()
        return forked, tuple(ours)

    def kill(self, why: str) -> None:
        """Kill it, and with it all programs; whoever waits for them hears why."""
        self._end(why)
        self._process.kill()

    async def close(self) -> str:
        """Kill it; returns the last line that it has written."""
        self.kill("it is closed")
        _, errors = await asyncio.to_thread(self._process.communicate)
        lines = errors.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    async def _send(self, packet: bytes, fds: list[int]) -> None:
        while not self.ended:
            try:
                socket.send_fds(self._control, [packet], fds)
            except BlockingIOError:
                await asyncio.sleep(_FULL_S)
            except OSError as error:
                raise UnavailableError(f"sandbox: {error}") from None
            else:
                return

    async def _answer(self, number: int, timeout_s: float) -> Forked:
        """The answer with this number; one that nobody waits for any more is undone."""
        if self.ended:
            raise UnavailableError("sandbox: its process has ended")
        answer = self._answers[number] = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except BaseException:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                _undo(answer.result().pidfd)  # it came just before this was given up
            raise
        finally:
            del self._answers[number]

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
            end = self._ends.pop(message["ended"], None)
            if end is not None and not end.done():
                end.set_result(int(message["status"]))
        else:
            self._answered(message, fds)

    def _answered(self, message: dict[str, Any], fds: list[int]) -> None:
        answer = self._answers.get(message["id"])
        if answer is None or answer.done():
            for pidfd in fds:
                _undo(pidfd)
        elif "error" in message:
            answer.set_exception(UnavailableError(f"sandbox: {message['error']}"))
        elif message["id"] == _READY:
            self.level = Level(int(message["level"]), str(message["why"]))
            answer.set_result(Forked(-1, self._loop.create_future()))
        else:
            end = self._ends[message["pid"]] = self._loop.create_future()
            answer.set_result(Forked(fds[0], end))

    def _end(self, why: str) -> None:
        if self.ended:
            return
        self.ended = True
        self._loop.remove_reader(self._control)
        self._control.close()
        for future in (*self._answers.values(), *self._ends.values()):
            if not future.done():
                future.set_exception(UnavailableError(f"sandbox: {why}"))
                future.exception()  # nobody may be waiting for it


def _undo(pidfd: int) -> None:
    """Kill a child that nobody waits for; -1 is none."""
    if pidfd >= 0:
        kill(pidfd)
        os.close(pidfd)


class _RunningProgram:
    """A program in the making: what it is given, and what it writes."""

    def __init__(self, forked: Forked, fds: tuple[int, ...], limits: ProgramLimits) -> None:
        self._pidfd, self._end = forked.pidfd, forked.end
        self._source, self._given, self._out, self._err, self._status = fds
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._to_send: dict[int, memoryview] = {}
        self._read = {fd: bytearray() for fd in (self._out, self._err, self._status)}
        self._open = set(self._read)
        self._too_much = False

    async def finish(self, source: bytes, stdin: bytes) -> ProgramOutcome:
        """Hand over the program, and wait until it has ended or is killed.

        Raises:
            UnavailableError: it was not sealed, or its seals left no room for it.
        """
        started = time.monotonic()
        for fd, data in ((self._source, HEAD.pack(len(source)) + source), (self._given, stdin)):
            self._to_send[fd] = memoryview(data)
            self._loop.add_writer(fd, self._on_writable, fd)
        for fd in self._open:
            self._loop.add_reader(fd, self._on_readable, fd)
        timed_out = False
        try:
            async with asyncio.timeout(self._limits.time_s):
                await self._over.wait()
                await asyncio.shield(self._end)
        except TimeoutError:
            timed_out = True
        finally:
            self._stop()
            kill(self._pidfd)
        seconds = time.monotonic() - started
        # Killed, it ends at once; the exit code tells crashes from ends.
        code = await asyncio.wait_for(asyncio.shield(self._end), REPLY_S)
        stdout, stderr = bytes(self._read[self._out]), bytes(self._read[self._err])
        if not self._read[self._status] and not timed_out:
            last = stderr.decode(errors="replace").rstrip().rpartition("\n")[2]
            raise UnavailableError(f"sandbox: no program could be started: {last or code}")
        ending = ProgramEnding.EXITED if code >= 0 else ProgramEnding.KILLED
        if self._too_much:
            ending = ProgramEnding.OUTPUT
        elif timed_out:
            ending = ProgramEnding.TIMEOUT
        return ProgramOutcome(ending, abs(code), stdout, stderr, seconds)

    def _on_writable(self, fd: int) -> None:
        left = self._to_send[fd]
        try:
            left = left[os.write(fd, left[:_READ_BYTES]) :] if left else left
        except BlockingIOError:
            return
        except OSError:  # it reads no more
            left = left[:0]
        self._to_send[fd] = left
        if not left:
            self._loop.remove_writer(fd)
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, fd, inheritable=False)  # so that the reader sees the end
            os.close(null)

    def _on_readable(self, fd: int) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        found = self._read[fd]
        if fd == self._err:
            found += data
            del found[:-_KEPT_ERRORS]
        else:
            found += data[: self._limits.output_bytes + 1 - len(found)]
        if fd == self._out and len(found) > self._limits.output_bytes:
            self._too_much = True
            self._over.set()
            kill(self._pidfd)
        if not data:
            self._loop.remove_reader(fd)
            self._open.discard(fd)
            if not self._open:
                self._over.set()

    def _stop(self) -> None:
        for fd, left in self._to_send.items():
            if left:
                self._loop.remove_writer(fd)
        for fd in self._open:
            self._loop.remove_reader(fd)


def _pipe(inwards: bool) -> tuple[int, int]:
    """A pipe, as the child's end and ours, which does not block."""
    read, write = os.pipe2(os.O_CLOEXEC)
    theirs, ours = (read, write) if inwards else (write, read)
    os.set_blocking(ours, False)
    return theirs, ours
