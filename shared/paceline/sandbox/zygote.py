"""The warm process: forks a sealed child per program, and tells how each has ended.

Started as `python -I -B zygote.py ROOT`, with the control socket as standard input and an empty
environment. It never reads a program: what one child could read, a later one could find in the
memory that it inherits. Messages are JSON, one per packet:

    to it    {"memory_bytes": …, "cpu_s": …, "output_bytes": …, "open_files": …} and three
             descriptors: where the child reads its program, and writes its output and errors
    from it  {"ready": true}, then {"pid": …} with the child's pidfd or {"error": …}, and
             {"ended": pid, "status": …} when a child has ended
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import select
import signal
import socket
import struct
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.sandbox.seal import Seals

HEAD = struct.Struct(">II")  # bytes of the program, and of its standard input
MAX_PACKET = 4096
NOBODY = 65531
PRELOADED = (
    *("array", "ast", "base64", "bisect", "calendar", "collections", "copy", "csv", "datetime"),
    *("decimal", "enum", "fractions", "functools", "hashlib", "heapq", "inspect", "itertools"),
    *("math", "operator", "queue", "random", "re", "statistics", "string", "textwrap", "typing"),
    *("asyncio", "unittest", "dataclasses", "sqlite3", "threading", "zoneinfo", "tempfile"),
)


def main(root: str) -> None:
    """Serve until the control socket is closed."""
    sys.path.insert(0, root)
    from paceline.sandbox import landlock, seal, seccomp

    seal.hide()
    control = socket.socket(fileno=os.dup(0))
    _to_null(0)
    _be_nobody()
    seal.die_with_parent()
    rules = landlock.ruleset(readable=_readable(), writable=[Path("/dev/null")])
    scoped = landlock.abi() >= landlock.SCOPES_ABI
    seals = seal.Seals(rules, seccomp.compiled(signals_are_scoped=scoped))
    sys.path.remove(root)
    for name in PRELOADED:
        __import__(name)
    gc.collect()
    gc.freeze()
    _send(control, {"ready": True})
    _serve(control, seals)


def _serve(control: socket.socket, seals: Seals) -> None:
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, _wake)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == woken:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
                _report_ended(control)
                continue
            packet, fds, _, _ = socket.recv_fds(control, MAX_PACKET, 3)
            if not packet:
                return
            _start(control, json.loads(packet), fds, seals)


def _wake(number: int, frame: object) -> None:
    """Let the descriptor of `set_wakeup_fd` be written, which a default action would not."""


def _report_ended(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            _send(control, {"ended": found[0], "status": os.waitstatus_to_exitcode(found[1])})


def _start(control: socket.socket, limits: dict[str, Any], fds: list[int], seals: Seals) -> None:
    try:
        pid = os.fork()
    except OSError as error:
        _send(control, {"error": f"fork: {error}"})
    else:
        if not pid:
            _child(control, limits, fds, seals)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(control, [json.dumps({"pid": pid}).encode()], [pidfd])
        os.close(pidfd)
    finally:
        for fd in fds:
            os.close(fd)


def _child(control: socket.socket, limits: dict[str, Any], fds: list[int], seals: Seals) -> None:
    """Seal this process, read the program and run it. Never returns."""
    from paceline.sandbox import seal

    code = 127
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        seal.die_with_parent()
        os.setsid()
        source, out, err = fds
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.dup2(source, 3)
        control.detach()
        _close_others({seals.rules})
        seal.apply(seals, limits)
        code = _run(3)
    except BaseException:  # whatever the program raises ends it, not this loop
        traceback.print_exc(file=open(2, "w", closefd=False))  # noqa: SIM115
        code = 1
    finally:
        os._exit(code)


def _run(fd: int) -> int:
    with os.fdopen(fd, "rb") as request:
        size, size_of_input = HEAD.unpack(request.read(HEAD.size))
        source, given = request.read(size), request.read(size_of_input)
    sys.stdin = io.TextIOWrapper(io.BytesIO(given), encoding="utf-8")
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.argv = ["program.py"]
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    code = 0
    try:
        exec(compile(source, "program.py", "exec"), vars(module))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # what the program raises is its own affair
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code & 0xFF


def _close_others(kept: set[int]) -> None:
    """Close everything but the first four descriptors and those that are kept."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 3 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _be_nobody() -> None:
    """As root, become nobody if the interpreter can be read then; keep no capability anyway."""
    from paceline.sandbox import seal

    if os.getuid() == 0 and all(_is_open(path) for path in _interpreter()):
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    seal.drop_capabilities()


def _is_open(path: Path) -> bool:
    """Whether others may enter a folder and all above it."""
    return all(each.stat().st_mode & 0o5 == 0o5 for each in (path, *path.parents))


def _interpreter() -> list[Path]:
    paths = sysconfig.get_paths()
    found = [Path(paths[name]).resolve() for name in ("stdlib", "purelib")]
    return [path for path in found if path.is_dir()]


def _readable() -> list[Path]:
    system = ("/usr/lib", "/usr/share/zoneinfo", "/lib", "/lib64", "/etc/ld.so.cache")
    devices = ("/etc/localtime", "/dev/zero", "/dev/urandom", "/dev/random")
    return [*_interpreter(), *map(Path, system + devices)]


def _to_null(fd: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, fd)
    os.close(null)


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.send(json.dumps(message).encode())


if __name__ == "__main__":
    main(sys.argv[1])
