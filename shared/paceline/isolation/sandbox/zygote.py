"""The warm process: forks a sealed child per program, and tells how each has ended.

Started by `command`, with the control socket as standard input and an empty environment. It never
reads a program: what one child could read, a later one could find in the memory that it inherits.
Messages are JSON, one per packet:

    to it    {"id": …, "readable": […]} with the fields of `ProgramLimits`, and the child's
             descriptors: it reads its program and its input, and writes its output, its errors, and
             a byte once it is sealed and has its program; of files it may read those of Python and
             of the folders in `readable`
    from it  {"id": 0, "level": …, "why": …} when it is ready, with the level that holds and why it
             is no higher one; then {"id": …, "pid": …} with the child's pidfd, or
             {"id": …, "error": …}, and {"ended": pid, "status": …} when a child has ended
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from paceline.isolation.sandbox import landlock, namespaces, seal, seccomp
from paceline.isolation.sandbox.places import interpreter, read_by_python
from paceline.platform.program import importing

HEAD = struct.Struct(">I")  # bytes of the program
MAX_PACKET = 4096
NUM_FDS = 5
SOURCE, STATUS = 3, 4  # descriptors of a child, after the standard ones
LANDLOCK, NAMESPACES = 2, 3  # levels
MAX_THREADS = 256  # of a child; one with more is killed when it is next looked at
LOOK_S = 0.25
_WRITABLE = (Path("/dev/null"),)
_HELD = "held"
PRELOADED = (
    *("array", "ast", "base64", "bisect", "calendar", "collections", "copy", "csv", "datetime"),
    *("decimal", "enum", "fractions", "functools", "hashlib", "heapq", "inspect", "itertools"),
    *("math", "operator", "queue", "random", "re", "statistics", "string", "textwrap", "typing"),
    *("asyncio", "unittest", "dataclasses", "sqlite3", "threading", "zoneinfo", "tempfile"),
)


@dataclass(slots=True)
class Holds:
    """What holds the children, made once for all of them where that is possible."""

    pid: int  # of the warm process
    level: int
    why: str  # it is no higher one
    as_root: bool
    readable: list[Path]  # by every child
    rules: int  # of a child that may read nothing more
    filters: dict[tuple[bool, bool], bytes] = field(default_factory=dict[tuple[bool, bool], bytes])

    @classmethod
    def find(cls, highest: int) -> Holds:
        """Become nobody if possible, and find out the level."""
        may_more, readable = _be_nobody(), read_by_python()
        why = "" if highest < NAMESPACES else _refusal(readable, as_root=may_more)
        level = min(highest, LANDLOCK if why else NAMESPACES)
        as_root = may_more and level == NAMESPACES
        if not as_root:
            seal.drop_capabilities()
        rules = landlock.ruleset(readable=readable, writable=_WRITABLE)
        return cls(os.getpid(), level, why, as_root, readable, rules)

    def filter(self, *, files: bool, processes: bool) -> bytes:
        """The filter of system calls of such children."""
        if (files, processes) not in self.filters:
            scoped = landlock.abi() >= landlock.SCOPES_ABI
            self.filters[files, processes] = seccomp.compiled(
                signals_are_scoped=scoped, files=files, processes=processes
            )
        return self.filters[files, processes]


def command(highest: int, preload: Sequence[str]) -> list[str]:
    """The command of a warm process that holds children by a level up to the highest.

    `preload`: modules that it imports once for all children, as `module@folder`.
    """
    root = str(Path(__file__).parents[3])
    start = f"import sys; sys.path.insert(0, {root!r}); from {__name__} import main; main()"
    return [sys.executable, "-I", "-B", "-c", start, root, str(highest), *preload]


def main() -> None:
    """Serve until the control socket is closed."""
    root, highest, *preload = sys.argv[1:]
    seal.first_to_die()  # before it is hidden, as that makes its files in /proc those of root
    seal.hide()
    control = socket.socket(fileno=os.dup(0))
    _to_null(0)
    seal.die_with_parent()
    holds = Holds.find(int(highest))
    seal.die_with_parent()  # becoming nobody undoes it
    holds.filter(files=False, processes=False)
    with importing():
        for each in preload:
            module, _, folder = each.partition("@")
            sys.path.insert(0, folder)
            __import__(module)
            sys.path.remove(folder)
        sys.path.remove(root)
        for name in PRELOADED:
            __import__(name)
    _send(control, {"id": 0, "level": holds.level, "why": holds.why})
    _serve(control, holds)


def _serve(control: socket.socket, holds: Holds) -> None:
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, _wake)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    alive = set[int]()
    looked = 0.0
    while True:
        for fd, _ in poll.poll(LOOK_S * 1000 if alive else None):
            if fd == woken:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
                _report_ended(control, alive)
                continue
            packet, fds, _, _ = socket.recv_fds(control, MAX_PACKET, NUM_FDS)
            if not packet:
                return
            _start(control, json.loads(packet), fds, holds, alive)
        if time.monotonic() - looked >= LOOK_S:
            looked = time.monotonic()
            _end_crowds(alive)


def _end_crowds(alive: set[int]) -> None:
    """Kill children with more threads than they may have; no limit of Linux counts them alone."""
    for pid in alive:
        with contextlib.suppress(OSError, ValueError, IndexError):
            # What follows the name, which is in brackets, begins with the third field.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[17]) > MAX_THREADS:
                os.kill(pid, signal.SIGKILL)


def _wake(number: int, frame: object) -> None:
    """Let the descriptor of `set_wakeup_fd` be written, which a default action would not."""


def _report_ended(control: socket.socket, alive: set[int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            alive.discard(found[0])
            _send(control, {"ended": found[0], "status": os.waitstatus_to_exitcode(found[1])})


def _start(
    control: socket.socket,
    limits: dict[str, Any],
    fds: list[int],
    holds: Holds,
    alive: set[int],
) -> None:
    files, processes = limits["scratch_bytes"] > 0, limits["processes"] > 0
    calls = holds.filter(files=files, processes=processes)
    try:
        pid = os.fork()
    except OSError as error:
        _send(control, {"id": limits["id"], "error": f"fork: {error}"})
    else:
        if not pid:
            _child(control, limits, fds, holds, calls)
        alive.add(pid)
        pidfd = os.pidfd_open(pid)
        answer = {"id": limits["id"], "pid": pid}
        socket.send_fds(control, [json.dumps(answer).encode()], [pidfd])
        os.close(pidfd)
    finally:
        for fd in fds:
            os.close(fd)


def _child(
    control: socket.socket, limits: dict[str, Any], fds: list[int], holds: Holds, calls: bytes
) -> None:
    """Seal this process, read the program and run it. Never returns."""
    code = 127
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        seal.die_with_parent(holds.pid)
        os.setsid()
        control.detach()
        rules = _confine(fds, limits, holds)
        own_user = holds.level == NAMESPACES
        seal.apply(seal.Seals(rules, calls), limits, own_user=own_user)
        code = _run()
    except BaseException:  # the supervisor boundary of a program, not of this loop
        traceback.print_exc(file=open(2, "w", closefd=False))  # noqa: SIM115
        code = 1
    finally:
        os._exit(code)


def _confine(fds: list[int], limits: dict[str, Any], holds: Holds) -> int:
    """Arrange descriptors and namespaces; returns the descriptor of Landlock's rules."""
    scratch_bytes, processes = limits["scratch_bytes"], limits["processes"] > 0
    readable = [*holds.readable, *map(Path, limits["readable"])]
    if processes:
        readable += _executables()
    rules = holds.rules
    if limits["readable"] or scratch_bytes or processes:
        rules = landlock.ruleset(readable=readable, writable=_WRITABLE)
    rules = _arrange(fds, rules)
    if holds.level < NAMESPACES:
        return rules
    namespaces.isolate(
        [*readable, *_WRITABLE],
        scratch_bytes=scratch_bytes,
        processes=processes,
        as_root=holds.as_root,
    )
    if scratch_bytes:
        landlock.allow_changes(rules, namespaces.SCRATCH)
    if processes:
        namespaces.run_as_init()
    return rules


def _refusal(readable: list[Path], *, as_root: bool) -> str:
    """Why a child cannot have namespaces of its own here; empty if it can."""
    read, write = os.pipe()
    if pid := os.fork():
        os.close(write)
        with os.fdopen(read) as said:
            found = said.read()
        _, status = os.waitpid(pid, 0)
        return "" if found == _HELD else found or f"exit status {status}"
    try:
        shown = [*readable, *_WRITABLE]
        namespaces.isolate(shown, scratch_bytes=1 << 16, processes=True, as_root=as_root)
        os.close(os.open(namespaces.SCRATCH / "file", os.O_CREAT | os.O_WRONLY))
        if os.fork():
            os.wait()
            os.write(write, _HELD.encode())
    except (OSError, StopIteration, KeyError) as error:
        os.write(write, (str(error) or repr(error)).encode())
    finally:
        os._exit(0)


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
    except BaseException:  # the supervisor boundary of a program
        traceback.print_exc()
        code = 1
    # As the interpreter does at its end, which is never reached here.
    cast(Any, threading)._shutdown()
    cast(Any, atexit)._run_exitfuncs()
    for stream in (sys.stdout, own, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    return code & 0xFF


def _be_nobody() -> bool:
    """As root, become nobody if the interpreter can be read then.

    A root that may not become others, or not kill them then, stays what it is. Returns whether it
    has stayed root and could still make namespaces.
    """
    needed = (seal.CAP_KILL, seal.CAP_SETGID, seal.CAP_SETUID)
    if os.getuid() != 0 or not seal.has_capabilities(*needed):
        return False
    if all(_is_open(path) for path in interpreter()):
        with contextlib.suppress(OSError):  # the namespace has no such user
            seal.be_nobody()
            return False
    return seal.has_capabilities(seal.CAP_SYS_ADMIN)


def _is_open(path: Path) -> bool:
    """Whether others may enter a folder and all above it."""
    return all(each.stat().st_mode & 0o5 == 0o5 for each in (path, *path.parents))


def _executables() -> list[Path]:
    """Of programs that may start others: the usual ones, and Python."""
    library = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
    found = [Path("/bin"), Path("/usr/bin"), Path(sys.prefix, "pyvenv.cfg"), Path(*library)]
    found.append(Path(sys.executable))
    while found[-1].is_symlink():
        found.append(found[-1].parent / found[-1].readlink())
    return found


def _to_null(fd: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, fd)
    os.close(null)


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.send(json.dumps(message).encode())
