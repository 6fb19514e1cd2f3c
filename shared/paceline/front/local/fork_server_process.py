"""A fork server: `python -P -m paceline.front.local.fork_server_process OWNER MODULE… PADDING`.

Standard input is the control socket, or listens for several; messages are JSON, one per packet:

    from it  {"ready": true} after its imports
    to it    {"command": […], "environment": {…}, "folder": …} with the descriptor of an output file
    from it  {"pid": …} of the fork or {"refused": why}, and {"ended": pid, "code": …} when one has
             ended

It ends with the control socket or, if it listens, with the process OWNER; its forks do not.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.platform.program import importing, leaving

LONGEST_COMMAND = 1024
MAX_PACKET = 1 << 17
_UCRED = struct.Struct("3i")  # process, user, group
_ARG_START, _ARG_END = 47, 48  # fields of /proc/self/stat, from 0
# Variables that are read when Python starts or a module is imported: a fork cannot change them.
_READ_EARLY = ("PYTHON", "LD_", "OMP_", "MKL_", "TORCH", "HF_", "TRANSFORMERS_", "GRPC_")


def main() -> None:
    """Import the modules and serve; in a fork this runs its command."""
    control = socket.socket(fileno=os.dup(0))
    _to_null()
    before = dict(os.environ)
    with importing():  # else each fork would walk, and so copy, all that was imported
        for module in sys.argv[2:-1]:
            importlib.import_module(module)
    if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        sys.exit("an import has started a thread, which a fork would not have")
    server = os.getpid()
    request = _Forks(control, int(sys.argv[1]), before).serve()  # returns in each fork too
    if request is None:
        os._exit(0)  # to take apart what was imported takes a second
    _prepare(request, server, before)
    with leaving():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


class _Forks:
    """Answers everybody who is connected, until nobody can be any more."""

    def __init__(self, control: socket.socket, owner: int, environment: Mapping[str, str]) -> None:
        """`owner`: id of the process that a listening one ends with.

        `environment`: of this process when it started.
        """
        self._environment = environment
        self._connections: dict[int, socket.socket] = {}
        self._forks: dict[int, tuple[int, socket.socket]] = {}  # pid and who asked, by pidfd
        self._poll = select.poll()
        self._listener: socket.socket | None = None
        self._owner = -1
        if control.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            control.setblocking(False)
            self._listener = control
            try:
                self._owner = os.pidfd_open(owner)
            except ProcessLookupError:
                sys.exit("the process that this one is for has ended")
            self._poll.register(control, select.POLLIN)
            self._poll.register(self._owner, select.POLLIN)
        else:
            self._connect(control)

    def serve(self) -> dict[str, Any] | None:
        """None when nobody is left to serve; in a fork, what it is to run."""
        while self._connections or self._listener is not None:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._owner:
                    return None
                if descriptor in self._forks:
                    self._ended(descriptor)
                elif self._listener is not None and descriptor == self._listener.fileno():
                    with suppress(BlockingIOError):  # who asked has gone
                        self._accept(self._listener.accept()[0])
                elif (connection := self._connections.get(descriptor)) is not None:
                    request = self._answer(connection)
                    if request is not None:
                        return request
        return None

    def _accept(self, connection: socket.socket) -> None:
        """Serve processes of this user that can be seen from here, so none of another container.

        Containers may have a volume with the socket in common.
        """
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, user, _ = _UCRED.unpack(credentials)
        if pid == 0 or user != os.geteuid():
            connection.close()
        else:
            self._connect(connection)

    def _connect(self, connection: socket.socket) -> None:
        self._connections[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)
        self._send(connection, {"ready": True})

    def _answer(self, connection: socket.socket) -> dict[str, Any] | None:
        """Fork for a request; returns it in the fork only."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(
                connection, MAX_PACKET, 1, socket.MSG_DONTWAIT
            )
        except BlockingIOError:  # the descriptor was that of another connection meanwhile
            return None
        except ConnectionError:
            packet, descriptors = b"", []
        if not packet:
            self._drop(connection)
            return None
        (output,) = descriptors
        request: dict[str, Any] = json.loads(packet)
        if why := self._refusal(request):
            os.close(output)
            self._send(connection, {"refused": why})
            return None
        waits, prepared = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(output, 1)
            os.dup2(output, 2)
            # Closed by number, as all that a new process would not have.
            for handle in (*self._connections.values(), *filter(None, (self._listener,))):
                handle.detach()
            return request
        os.close(output)
        os.close(prepared)
        os.read(waits, 1)  # until the fork can be told by its session and command line
        os.close(waits)
        pidfd = os.pidfd_open(pid)
        self._forks[pidfd] = pid, connection
        self._poll.register(pidfd, select.POLLIN)
        if not self._send(connection, {"pid": pid}):
            os.kill(pid, signal.SIGKILL)  # nobody knows of it
        return None

    def _refusal(self, request: dict[str, Any]) -> str:
        if request["command"][0] != sys.executable:
            return f"it runs {sys.executable}"
        for name in sorted({*self._environment, *request["environment"]}):
            # A fork that asks has what imports have set, as the one that it asks for will.
            alike = self._environment.get(name), os.environ.get(name)
            differs = request["environment"].get(name) not in alike
            if differs and name.startswith(_READ_EARLY):
                return f"it was started with another {name}"
        return ""

    def _ended(self, pidfd: int) -> None:
        pid, connection = self._forks.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if connection.fileno() >= 0:
            self._send(connection, {"ended": pid, "code": code})

    def _send(self, connection: socket.socket, message: dict[str, Any]) -> bool:
        try:
            connection.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)
        except (ConnectionError, BlockingIOError):  # gone, or has read nothing for long
            self._drop(connection)
            return False
        return True

    def _drop(self, connection: socket.socket) -> None:
        if self._connections.pop(connection.fileno(), None) is not None:
            self._poll.unregister(connection)
            connection.close()


def _prepare(request: dict[str, Any], server: int, before: Mapping[str, str]) -> None:
    """Make this process as if it had been started with the command."""
    command: list[str] = request["command"]
    os.setsid()
    _show(command)
    # Who gives up waiting for an answer kills the server, and then all with this command line.
    if os.getppid() != server:
        os._exit(1)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # the one of this listing
                os.close(int(name))
    os.chdir(request["folder"])
    of_imports = {name: value for name, value in os.environ.items() if name not in before}
    os.environ.clear()
    os.environ.update({**of_imports, **request["environment"]})
    _reseed()
    importlib.invalidate_caches()
    sys.argv = command[command.index("-m") + 1 :]


def _show(command: list[str]) -> None:
    """Make it the command line of this process, by which it is found again."""
    words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(words[field - 2]) for field in (_ARG_START, _ARG_END))
    line = b"".join(word.encode() + b"\0" for word in command)
    # A last byte that is not 0 would make the kernel take the environment for more of it.
    ctypes.memmove(start, line[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _reseed() -> None:
    """Forks draw different numbers, as processes do."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(int.from_bytes(os.urandom(4), "big"))


def _to_null() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


if __name__ == "__main__":
    main()
