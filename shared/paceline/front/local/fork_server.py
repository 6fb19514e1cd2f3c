"""Starts Python modules as forks of a process that has imported what they need.

A worker that imports torch itself spends four seconds of processor time before its first line.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from paceline.errors import UnavailableError
from paceline.front.local.fork_server_process import LONGEST_COMMAND, MAX_PACKET
from paceline.platform.telemetry.logs import Log

log = Log("fork-server")

SHARED = "PACELINE_FORK_SERVER"
"""Environment variable: the socket at which a fork server serves all platforms of a machine."""
NAME = "forks"
"""Name of its socket, in the folder with the state files of the processes that it starts."""
PRELOADED = (
    "paceline_trainer.service",
    "paceline_rollout.service",
    "paceline_rollout.engines.torch.engine",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)
"""Slow imports of trainers and rollout workers with the torch engine."""
READY_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 10.0
DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
UNKNOWN_CODE = 255  # of a process that ended after its fork server, which alone could tell


def is_useful() -> bool:
    """Whether this machine can fork such processes, and gains by it.

    A CUDA or ROCm driver does not survive a fork, and beside loading a model on a GPU the imports
    do not count.
    """
    if sys.platform != "linux" or any(map(os.path.exists, DRIVERS)):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an old kernel, or a container that may not
        return False
    return True


class ForkServer:
    """A process with the modules imported; its forks outlive it and this object."""

    def __init__(
        self, control: socket.socket, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        """`process`: the server itself, if it is to end with this object."""
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}
        self.ready = False  # it has done its imports, once
        self._lost = False
        self._control, self._process = control, process

    @classmethod
    def launch(
        cls, modules: Sequence[str], *, path: str, output: Path, environment: Mapping[str, str]
    ) -> ForkServer:
        """Start one, without waiting for its imports; `output` is a file for what it prints.

        It ends with this process or object; until then others may use it at the socket `path`.
        """
        Path(path).unlink(missing_ok=True)  # that of a predecessor
        owner = os.getpid()
        process = launch_shared(
            modules, path=path, output=output, environment=environment, owner=owner
        )
        server = cls.connect(path)
        server._process = process
        return server

    @classmethod
    def connect(cls, path: str) -> ForkServer:
        """Use the one that serves at this socket.

        Raises:
            UnavailableError: none does.
        """
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with _short(path) as address:
                control.connect(address)
        except OSError as error:
            control.close()
            raise UnavailableError(f"no fork server at {path}: {error}") from error
        return cls(control)

    @property
    def lost(self) -> bool:
        """Whether it has ended; what it has forked goes on."""
        return self._lost

    def start(
        self, command: Sequence[str], *, output: IO[bytes], environment: Mapping[str, str]
    ) -> ForkedProcess:
        """Fork a process that runs `[python, "-P", "-m", module, *arguments]` in a session.

        `environment`: all its variables.

        Raises:
            UnavailableError: the fork server has ended, does not answer, or cannot make a process
                as it would be with this interpreter and environment; or the command is long or
                another one.
        """
        if list(command[1:3]) != ["-P", "-m"]:
            raise UnavailableError(f"it runs modules, not {' '.join(command[:3])}")
        if (length := len("\0".join(command).encode())) >= LONGEST_COMMAND:
            raise UnavailableError(f"a command of {length} bytes: at most {LONGEST_COMMAND}")
        content = {"command": list(command), "environment": dict(environment)}
        request = json.dumps({**content, "folder": os.getcwd()}).encode()
        if len(request) > MAX_PACKET:
            raise UnavailableError(f"a request of {len(request)} bytes: at most {MAX_PACKET}")
        with self._lock, self._lost_if_it_fails():
            if not self.ready:
                self._receive(READY_TIMEOUT_S)
            socket.send_fds(self._control, [request], [output.fileno()])
            while True:
                answer = self._receive(ANSWER_TIMEOUT_S)
                if pid := answer.get("pid"):
                    self._codes.pop(pid, None)  # of an older process with this number
                    return ForkedProcess(self, pid)
                if why := answer.get("refused"):
                    raise UnavailableError(f"the fork server is another: {why}")

    def code_of(self, pid: int) -> int | None:
        """The exit code of a fork, as of `Popen`; None if it has not ended, or cannot be known."""
        # A start that waits for an answer keeps nobody else waiting.
        if self._lock.acquire(blocking=False):
            try:
                with suppress(UnavailableError, BlockingIOError), self._lost_if_it_fails():
                    while not self._lost:
                        self._receive(0.0)
            finally:
                self._lock.release()
        return self._codes.pop(pid, None)

    def close(self) -> None:
        """End it."""
        self._lost = True
        self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @contextmanager
    def _lost_if_it_fails(self) -> Generator[None]:
        if self._lost:
            raise UnavailableError("the fork server has ended")
        try:
            yield
        except BlockingIOError:
            raise
        except (OSError, EOFError, ValueError) as error:
            self.close()
            log.warning("ended", error=error)
            raise UnavailableError(f"the fork server does not answer: {error}") from error

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        self._control.settimeout(timeout_s)
        packet = self._control.recv(MAX_PACKET)
        if not packet:
            raise EOFError("it has ended")
        answer = json.loads(packet)
        self.ready = True
        if "ended" in answer:
            self._codes[answer["ended"]] = answer["code"]
        return answer


def launch_shared(
    modules: Sequence[str],
    *,
    path: str,
    output: Path,
    environment: Mapping[str, str],
    owner: int,
) -> subprocess.Popen[bytes]:
    """Start a fork server at this socket; it ends with the process `owner`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        with _short(path) as address:
            listener.bind(address)
        os.chmod(path, 0o600)
        listener.listen(128)
        return _launched(modules, listener, output, environment, owner)


@contextmanager
def _short(path: str) -> Generator[str]:
    """The same socket by another name: an address has at most 107 bytes."""
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


def _launched(
    modules: Sequence[str],
    control: socket.socket,
    output: Path,
    environment: Mapping[str, str],
    owner: int = 0,
) -> subprocess.Popen[bytes]:
    name = "paceline.front.local.fork_server_process"
    with output.open("ab") as out:
        return subprocess.Popen(
            # The last argument makes room for the command lines of the forks.
            [sys.executable, "-P", "-m", name, str(owner), *modules, "-" * LONGEST_COMMAND],
            stdin=control.fileno(),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=0o077,
            env=dict(environment),
        )


class ForkedProcess:
    """A process that a fork server has started; used like `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None
        self._seen: psutil.Process | None = None
        with suppress(psutil.NoSuchProcess):
            self._seen = psutil.Process(pid)

    def poll(self) -> int | None:
        """Its exit code, negative: the signal that ended it; None while it runs."""
        if self._code is None:
            self._code = self._server.code_of(self.pid)
        if self._code is None and self._server.lost and not self._runs():
            self._code = UNKNOWN_CODE
        return self._code

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self._seen is not None:
            with suppress(psutil.NoSuchProcess):  # nor is another one with its number
                self._seen.kill()

    def _runs(self) -> bool:
        try:
            return (
                self._seen is not None
                and self._seen.is_running()
                and self._seen.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return False
