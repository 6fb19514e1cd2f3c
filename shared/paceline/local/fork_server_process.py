"""The process of a fork server: `python -P -m paceline.local.fork_server_process MODULE… PADDING`.

Standard input is the control socket; messages are JSON, one per packet:

    from it  {"ready": true} after its imports
    to it    {"command": […], "environment": {…}} with the descriptor of an output file
    from it  {"pid": …} of the fork, and {"ended": pid, "code": …} when one has ended

It ends with the control socket; its forks do not.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

LONGEST_COMMAND = 1024
MAX_PACKET = 1 << 16
_ARG_START, _ARG_END = 47, 48  # fields of /proc/self/stat, from 0


def main() -> None:
    """Import the modules and serve; in a fork this runs its command."""
    control = socket.socket(fileno=os.dup(0))
    _to_null()
    for module in sys.argv[1:-1]:
        importlib.import_module(module)
    if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        sys.exit("an import has started a thread, which a fork would not have")
    gc.collect()
    gc.freeze()  # else each fork would walk, and so copy, all that was imported
    server = os.getpid()
    request = _serve(control)  # returns in each fork too
    if request is None:
        os._exit(0)  # to take apart what was imported takes a second
    _run(request, server)


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """None when nobody is left to serve; in a fork, what it is to run."""
    forks: dict[int, int] = {}  # pid by pidfd
    poll = select.poll()
    poll.register(control, select.POLLIN)
    try:
        _send(control, {"ready": True})
        while True:
            for descriptor, _ in poll.poll():
                if descriptor in forks:
                    pid = forks.pop(descriptor)
                    poll.unregister(descriptor)
                    os.close(descriptor)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    _send(control, {"ended": pid, "code": code})
                    continue
                packet, descriptors, _, _ = socket.recv_fds(control, MAX_PACKET, 1)
                if not packet:
                    return None
                (output,) = descriptors
                waits, prepared = os.pipe()
                pid = os.fork()
                if pid == 0:
                    control.detach()  # closed by number, as all that a new process would not have
                    os.dup2(output, 1)
                    os.dup2(output, 2)
                    return json.loads(packet)
                os.close(output)
                os.close(prepared)
                os.read(waits, 1)  # until the fork can be told by its session and command line
                os.close(waits)
                pidfd = os.pidfd_open(pid)
                forks[pidfd] = pid
                poll.register(pidfd, select.POLLIN)
                _send(control, {"pid": pid})
    except ConnectionError:
        return None


def _run(request: dict[str, Any], server: int) -> None:
    """Run the command as if this process had been started with it."""
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
    os.environ.update(request["environment"])
    _reseed()
    importlib.invalidate_caches()
    module = command[command.index("-m") + 1]
    sys.argv = command[command.index("-m") + 1 :]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


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


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.send(json.dumps(message).encode())


if __name__ == "__main__":
    main()
