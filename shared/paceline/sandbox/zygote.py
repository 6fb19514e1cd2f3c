"""The warm process: forks a sealed child per program, and tells how each has ended.

Started as `python -I -B zygote.py ROOT MODULE@FOLDER...`, with the control socket as standard input
and an empty environment; it imports these modules once for all children. It never reads a program:
what one child could read, a later one could find in the memory that it inherits. Messages are JSON,
one per packet:

    to it    {"id": …, "readable": […]} with the fields of `ProgramLimits`, and the child's
             descriptors: it reads its program and its input, and writes its output, its errors, and
             a byte once it is sealed and has its program; of files it may read those of Python and
             of the folders in `readable`
    from it  {"id": 0} when it is ready, then {"id": …, "pid": …} with the child's pidfd or
             {"id": …, "error": …}, and {"ended": pid, "status": …} when a child has ended
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from paceline.sandbox.seal import Seals

HEAD = struct.Struct(">I")  # bytes of the program
MAX_PACKET = 4096
NUM_FDS = 5
SOURCE, STATUS = 3, 4  # descriptors of a child, after the standard ones
NOBODY = 65531
PRELOADED = (
    *("array", "ast", "base64", "bisect", "calendar", "collections", "copy", "csv", "datetime"),
    *("decimal", "enum", "fractions", "functools", "hashlib", "heapq", "inspect", "itertools"),
    *("math", "operator", "queue", "random", "re", "statistics", "string", "textwrap", "typing"),
    *("asyncio", "unittest", "dataclasses", "sqlite3", "threading", "zoneinfo", "tempfile"),
)


def main(root: str, preload: list[str]) -> None:
    """Serve until the control socket is closed; `preload` has modules with their folders."""
    sys.path.insert(0, root)
    from paceline.sandbox import landlock, seal, seccomp  # also for `_rules`

    _first_to_die()  # before it is hidden, as that makes its files in /proc those of root
    seal.hide()
    control = socket.socket(fileno=os.dup(0))
    _to_null(0)
    _be_nobody()
    seal.die_with_parent()
    rules = _rules([])
    scoped = landlock.abi() >= landlock.SCOPES_ABI
    seals = seal.Seals(rules, seccomp.compiled(signals_are_scoped=scoped))
    for each in preload:
        module, _, folder = each.partition("@")
        sys.path.insert(0, folder)
        __import__(module)
        sys.path.remove(folder)
    sys.path.remove(root)
    for name in PRELOADED:
        __import__(name)
    gc.collect()
    gc.freeze()
    _send(control, {"id": 0})
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
            packet, fds, _, _ = socket.recv_fds(control, MAX_PACKET, NUM_FDS)
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
        _send(control, {"id": limits["id"], "error": f"fork: {error}"})
    else:
        if not pid:
            _child(control, limits, fds, seals)
        pidfd = os.pidfd_open(pid)
        answer = {"id": limits["id"], "pid": pid}
        socket.send_fds(control, [json.dumps(answer).encode()], [pidfd])
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
        control.detach()
        rules = _rules(limits["readable"]) if limits["readable"] else seals.rules
        rules = _arrange(fds, rules)
        seal.apply(seal.Seals(rules, seals.filter), limits)
        code = _run()
    except BaseException:  # whatever the program raises ends it, not this loop
        traceback.print_exc(file=open(2, "w", closefd=False))  # noqa: SIM115
        code = 1
    finally:
        os._exit(code)


def _arrange(fds: list[int], rules: int) -> int:
    """Move a child's descriptors to 0 to 4, and close all others but the rules it returns."""
    import fcntl

    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in (*fds, rules)]
    source, given, out, err, status, rules = above
    for fd, place in ((given, 0), (out, 1), (err, 2), (source, SOURCE), (status, STATUS)):
        os.dup2(fd, place)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > STATUS and int(name) != rules:
            with contextlib.suppress(OSError):
                os.close(int(name))
    return rules


def _run() -> int:
    """Read the program and run it as `python program.py` does."""
    with os.fdopen(SOURCE, "rb") as request:
        source = request.read(HEAD.unpack(request.read(HEAD.size))[0])
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = own = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    os.write(STATUS, b"1")
    os.close(STATUS)
    sys.argv = ["program.py"]
    sys.path_importer_cache.clear()  # folders that were hidden from the warm process
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
    # As the interpreter does at its end, which is never reached here.
    cast(Any, threading)._shutdown()
    cast(Any, atexit)._run_exitfuncs()
    for stream in (sys.stdout, own, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    return code & 0xFF


def _first_to_die() -> None:
    """Let the kernel prefer this process and its children when memory is short."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _be_nobody() -> None:
    """As root, become nobody if the interpreter can be read then; keep no capability anyway.

    A root that may not become others, or not kill them then, stays what it is.
    """
    from paceline.sandbox import seal

    may = seal.has_capabilities(seal.CAP_KILL, seal.CAP_SETGID, seal.CAP_SETUID)
    if os.getuid() == 0 and may and all(_is_open(path) for path in _interpreter()):
        with contextlib.suppress(OSError):  # the namespace has no such user
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


def _rules(more: list[str]) -> int:
    from paceline.sandbox import landlock

    return landlock.ruleset(readable=[*_readable(), *map(Path, more)], writable=[Path("/dev/null")])


def _to_null(fd: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, fd)
    os.close(null)


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.send(json.dumps(message).encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
